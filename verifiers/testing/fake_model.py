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
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from verifiers.inference.wire import WireObject, request_body
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.rubrics.judge_rubric import JudgeRubric, LazyOpenAI, question_text
from verifiers.testing.fake_tools import fake_value, wanted_tool

__all__ = ["FAKE_MODEL", "FAKE_URL", "FakeEndpoint", "answer_as_judge", "play_judges"]

FAKE_MODEL = "fake"
FAKE_URL = "fake:"
_JUNK = "This is an answer of the built-in fake endpoint, and it is meant to be wrong."


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
        """Answer a chat or a completion."""
        # a module for tests, which nothing else of the package needs
        from verifiers.testing.script import response_body

        body = request_body(arguments)
        answers = [self._answer(body) for _ in range(body.get("n") or 1)]
        return WireObject(response_body(body, answers, model=FAKE_MODEL, token_ids=False))

    async def close(self) -> None:
        """Do nothing: no connection is open."""

    def _answer(self, body: Mapping[str, Any]) -> str | dict[str, Any]:
        asked = body.get("messages", body.get("prompt"))
        key = self._known(asked)
        number = self._asked[key]
        self._asked[key] += 1

        def coin(what: str) -> float:
            return _coin(self._seed, key, f"{number} {what}")

        called = sum(message.get("role") == "tool" for message in body.get("messages") or ())
        if (tool := wanted_tool(body, called, coin)) is not None:
            arguments = fake_value(tool.get("parameters") or {"type": "object"}, coin)
            return {"tool_calls": [{"id": f"call_{called}", "name": tool["name"], "arguments": arguments}]}
        answer, task = self._answers.get(key, ("", ""))
        # prompts differ in how hard they are, as real ones do
        ease = 0.2 + 0.7 * _coin(self._seed, key, "ease")
        if not answer or _coin(self._seed, key, str(number)) > ease:
            return _JUNK
        return _readable(answer, self._parser_of(task))

    def _known(self, asked: Any) -> bytes:
        """Return the key of the prompt that a conversation began with."""
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
    for rubric in _rubrics_of(env):
        client = getattr(rubric, "judge_client", None)
        if isinstance(rubric, JudgeRubric) and isinstance(client, LazyOpenAI) and client.base_url is None:
            fake = FakeClient(functools.partial(answer_as_judge, seed=seed or 0), base_url=FAKE_URL)
            rubric.judge_client = rubric.class_objects["judge_client"] = fake
            played += 1
    return played


def answer_as_judge(body: Mapping[str, Any], seed: int = 0) -> str:
    """Return a verdict in the form that a judge's prompt asks for: a ranking, a number of a range, or yes or no.

    Args:
        seed: with the prompt it decides the verdict.
    """
    text = str(body["messages"][-1].get("content"))
    rng = random.Random(f"{seed}:{text}")
    if labels := re.findall(r'<response label="(\w+)">', text):
        rng.shuffle(labels)
        return " > ".join(labels)
    if span := re.search(r"(\d+)\s*(?:-|–|to|and)\s*(\d+)", text.rpartition("\n")[2]):
        return str(rng.randint(*sorted(map(int, span.groups()))))
    return rng.choice(("yes", "no"))


def _rubrics_of(env: Any) -> Iterator[Any]:
    """Yield the rubrics of an environment, and those inside of groups."""
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


_FORMS: tuple[Callable[[str, Any], str], ...] = (
    _in_fields,
    lambda answer, _: f"\\boxed{{{answer}}}",
    lambda answer, _: f"<think>\nfake\n</think>\n\n\\boxed{{{answer}}}",
    lambda answer, _: f"<think>\nfake\n</think>\n\n{answer}",
    lambda answer, _: f"<think>fake</think> <answer>{answer}</answer>",
    lambda answer, _: answer,
)


def _readable(answer: str, parser: Any) -> str:
    """Return a text that the parser reads the answer from, or else the answer."""
    for write in _FORMS:
        try:
            text = write(answer, parser)
            found = parser.parse_answer([{"role": "assistant", "content": text}])
        except Exception:
            continue  # a parser of the user's own may refuse anything
        if found is not None and str(found).strip() == answer.strip():
            return text
    return answer


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
