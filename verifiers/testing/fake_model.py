"""The endpoint behind `-m fake`: no key, no network, no model.

It knows the rows' answers and gives them to some requests and junk to others, by a coin that depends on the prompt
and on how often it was asked; where a row has no answer, the question takes its place. It calls the tools that it is
offered before it answers, and can play a judge. What it scores says nothing about any policy; it shows that an
environment works.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from verifiers.inference.wire import WireObject, request_body
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.rubrics.judge_rubric import JudgeRubric, LazyOpenAI, question_text

FAKE_MODEL = "fake"
FAKE_URL = "fake:"
_JUNK = "This is an answer of the built-in fake endpoint, and it is meant to be wrong."
_DEEPEST = 8
_FORMATS = {
    "date": "2026-01-02",
    "date-time": "2026-01-02T03:04:05Z",
    "email": "fake@example.org",
    "time": "03:04:05Z",
    "uri": "https://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


class FakeEndpoint:
    """A backend that answers from the rows of an environment, right or wrong by a seeded coin.

    Args:
        groups: the rollouts to come; prompts and answers are taken from the first of each.
        parser_of: the parser of a task's environment; a text is looked for that it reads the right answer from.
    """

    base_url = FAKE_URL
    api_key = "EMPTY"

    def __init__(
        self,
        groups: Iterable[list[RolloutRequest]],
        parser_of: Callable[[str], Any] = lambda task: None,
        seed: int | None = None,
    ) -> None:
        self._seed = seed or 0
        self._parser_of = parser_of
        self._answers: dict[bytes, tuple[str, str]] = {}
        self._lengths: set[int] = set()
        self._asked: Counter[bytes] = Counter()
        for group in groups:
            prompt, answer = group[0].prompt, group[0].answer
            # for a row without an answer the question itself is the likeliest text to pass any check
            known = str(answer) if answer not in (None, "") else question_text(prompt)
            self._answers[_key(prompt)] = known, group[0].task
            if not isinstance(prompt, str):
                self._lengths.add(len(prompt))

    async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        # a module for tests, which nothing else of the package needs
        from verifiers.testing.script import response_body

        body = request_body(arguments)
        answers = [self._answer(body) for _ in range(body.get("n") or 1)]
        return WireObject(response_body(body, answers, model=FAKE_MODEL, token_ids=False))

    async def close(self) -> None: ...

    def _answer(self, body: Mapping[str, Any]) -> str | dict[str, Any]:
        asked = body.get("messages", body.get("prompt"))
        key = self._known(asked)
        number = self._asked[key]
        self._asked[key] += 1
        rng = random.Random(_coin(self._seed, key, f"{number} tools"))
        called = sum(message.get("role") == "tool" for message in body.get("messages") or ())
        if (tool := _wanted_tool(body, called, rng)) is not None:
            arguments = fake_value(tool.get("parameters") or {"type": "object"}, rng)
            return {"tool_calls": [{"id": f"call_{called}", "name": tool["name"], "arguments": arguments}]}
        answer, task = self._answers.get(key, ("", ""))
        # prompts differ in how hard they are, as real ones do
        ease = 0.2 + 0.7 * _coin(self._seed, key, "ease")
        if not answer or _coin(self._seed, key, str(number)) > ease:
            return _JUNK
        write = form_of(answer, self._parser_of(task))
        return answer if write is None else write(answer)

    def _known(self, asked: Any) -> bytes:
        if isinstance(asked, list):
            for length in sorted(self._lengths, reverse=True):
                key = _key(asked[:length])
                if key in self._answers:
                    return key
        return _key(asked)


# -- judges ----------------------------------------------------------------------------------------------------


def play_judges(env: Any, seed: int | None = None) -> int:
    """Answer for the judges of an environment that have no endpoint of their own; return how many there are."""
    # a module for tests, which a fake endpoint alone does not need
    from verifiers.testing.fake_client import FakeClient

    played = 0
    for rubric in rubrics_of(env):
        client = getattr(rubric, "judge_client", None)
        if isinstance(rubric, JudgeRubric) and isinstance(client, LazyOpenAI) and client.base_url is None:
            fake = FakeClient(functools.partial(answer_as_judge, seed=seed or 0), base_url=FAKE_URL)
            rubric.judge_client = rubric.class_objects["judge_client"] = fake
            played += 1
    return played


def answer_as_judge(body: Mapping[str, Any], seed: int = 0) -> str:
    """Return a verdict in the form that a judge's prompt asks for: a ranking, a number of a range, or yes or no."""
    text = str(body["messages"][-1].get("content"))
    rng = random.Random(f"{seed}:{text}")
    if labels := re.findall(r'<response label="(\w+)">', text):
        rng.shuffle(labels)
        return " > ".join(labels)
    if span := re.search(r"(\d+)\s*(?:-|–|to|and)\s*(\d+)", text.rpartition("\n")[2]):
        return str(rng.randint(*sorted(map(int, span.groups()))))
    return rng.choice(("yes", "no"))


def rubrics_of(env: Any) -> Iterator[Any]:
    """Yield the rubrics of an environment, those inside of groups one by one."""
    waiting = [env]
    while waiting:
        one = waiting.pop()
        inner = [*getattr(one, "env_map", {}).values(), *getattr(one, "rubrics", ())]
        waiting += inner or ([one.rubric] if hasattr(one, "rubric") else [])
        if not inner and not hasattr(one, "rubric"):
            yield one


def _in_fields(answer: str, parser: Any) -> str:
    fields = dict.fromkeys(parser.get_fields(), "by the fake endpoint")
    return str(parser.format(**{**fields, parser.answer_field: answer}))


_FORMS: tuple[Callable[..., str], ...] = (
    _in_fields,
    lambda answer, parser: f"\\boxed{{{answer}}}",
    lambda answer, parser: f"<think>\nfake\n</think>\n\n\\boxed{{{answer}}}",
    lambda answer, parser: f"<think>\nfake\n</think>\n\n{answer}",
    lambda answer, parser: f"<think>fake</think> <answer>{answer}</answer>",
    lambda answer, parser: answer,
)


def form_of(answer: str, parser: Any) -> Callable[[str], str] | None:
    """Return what writes a text so that the parser reads it as the answer, as it does with this one; or None."""
    for write in _FORMS:
        try:
            found = parser.parse_answer([{"role": "assistant", "content": write(answer, parser)}])
        except Exception:
            continue  # a parser of the user's own may refuse anything
        if found is not None and str(found).strip() == answer.strip():
            return functools.partial(write, parser=parser)
    return None


def _key(prompt: Any) -> bytes:
    if isinstance(prompt, list):
        prompt = [
            [message.get("role"), message.get("content")] if isinstance(message, Mapping) else message
            for message in prompt
        ]
    return hashlib.blake2b(json.dumps(prompt, default=str).encode(), digest_size=16).digest()


def _coin(seed: int, key: bytes, what: str) -> float:
    digest = hashlib.blake2b(f"{seed}:{what}".encode(), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


# -- calls of tools, made up from their schemas alone ----------------------------------------------------------------


def _wanted_tool(body: Mapping[str, Any], called: int, rng: random.Random) -> Mapping[str, Any] | None:
    """Return the function that an answer to a request calls; None for an answer in words.

    The first answer calls a tool, and later ones, after so many `called`, do now and then. `tool_choice` is honoured.
    """
    functions = [tool["function"] for tool in body.get("tools") or () if isinstance(tool.get("function"), Mapping)]
    choice = body.get("tool_choice")
    if not functions or choice == "none":
        return None
    if isinstance(choice, Mapping):
        named = choice.get("function", choice).get("name")
        return next((function for function in functions if function["name"] == named), None)
    if choice != "required" and called and rng.random() < 0.5 + 0.1 * called:
        return None
    return rng.choice(functions)


def fake_value(schema: Any, rng: random.Random, root: Any = None, depth: int = 0) -> Any:
    """Return a value that a JSON schema accepts; of optional properties, none that are nested deeply.

    `pattern` and the combination of `allOf` are not looked at; `$ref` is looked up in `root`, by default the schema.
    """
    if not isinstance(schema, Mapping):
        return "fake"
    root = schema if root is None else root
    if "$ref" in schema:
        return fake_value(_referred(root, schema["$ref"]), rng, root, depth + 1)
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if schema.get("enum"):
        return rng.choice(schema["enum"])
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            # the last ones are the simplest as a rule: anyOf [thing, null]
            one = schema[key][-1] if depth > _DEEPEST else schema[key][0]
            return fake_value({**{k: v for k, v in schema.items() if k != key}, **one}, rng, root, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, Sequence) and not isinstance(kind, str):
        kind = kind[0]
    if kind == "object":
        properties = schema.get("properties") or {}
        needed = schema.get("required") or ()
        wanted = [name for name in properties if name in needed or depth < 2]
        return {name: fake_value(properties[name], rng, root, depth + 1) for name in wanted}
    if kind == "array":
        items = schema.get("items", {})
        size = max(schema.get("minItems", 0), min(1, schema.get("maxItems", 1)) if depth < _DEEPEST else 0)
        return [fake_value(items, rng, root, depth + 1) for _ in range(size)]
    if kind in ("integer", "number"):
        return _number(schema, kind, rng)
    if kind == "boolean":
        return rng.random() < 0.5
    return None if kind == "null" else _text(schema)


def _referred(root: Any, reference: str) -> Any:
    found = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~"), {}) if isinstance(found, Mapping) else {}
    return found


def _number(schema: Mapping[str, Any], kind: str, rng: random.Random) -> float:
    """Return one of the first ten steps within the schema's bounds."""
    step = schema.get("multipleOf", 1 if kind == "integer" else 1e-3)
    high = schema.get("maximum", schema.get("exclusiveMaximum", math.inf) - step)
    low = schema.get("minimum", schema.get("exclusiveMinimum", min(0, high - 9 * step)) + step)
    first = math.ceil(low / step)
    last = math.floor(min(high / step, first + 9))
    # bounds as close as a step, or closer, may have none between them
    value = rng.randint(first, last) * step if first <= last else low
    return int(value) if kind == "integer" else value


def _text(schema: Mapping[str, Any]) -> str:
    text = _FORMATS.get(schema.get("format", ""), "fake")
    if "minLength" in schema and len(text) < schema["minLength"]:
        text = text.ljust(schema["minLength"], "x")
    return text[: schema.get("maxLength")]
