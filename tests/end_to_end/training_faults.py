"""Answers that no server should give: a table of single faults, and random damage to right answers.

Each release runs both: none may cost more than the rollout that it was given to.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verifiers.testing import Fault
from verifiers.testing.script import Answer, response_body

__all__ = ["FAULTS", "AnswerFault", "Spoiler", "damaged"]

VOCABULARY = 128
"""Number of token ids of the policy that is trained: the code points of ASCII."""

Spoil = Callable[[dict[str, Any], dict[str, Any]], object]


@dataclass(frozen=True, slots=True)
class AnswerFault:
    """One fault of an answer.

    Attributes:
        spoil: given the answer and its first choice, which it changes.
        named: words of the sentence that a failed rollout has; None where the answer can still be used.
    """

    name: str
    spoil: Spoil
    named: str | None


def _set(place: str, value: Any, named: str | None) -> AnswerFault:
    """Return the fault of another value at a place of the first choice, or of the answer where it begins with /."""
    *way, last = [int(part) if part.isdigit() else part for part in place.removeprefix("/").split(".")]

    def spoil(answer: dict[str, Any], choice: dict[str, Any]) -> None:
        owner: Any = answer if place.startswith("/") else choice
        for part in way:
            owner = owner[part]
        owner[last] = copy.deepcopy(value)

    return AnswerFault(f"{place}={value!r:.40}", spoil, named)


def _without(place: str, named: str | None) -> AnswerFault:
    *way, last = place.removeprefix("/").split(".")

    def spoil(answer: dict[str, Any], choice: dict[str, Any]) -> None:
        owner: Any = answer if place.startswith("/") else choice
        for part in way:
            owner = owner[int(part) if part.isdigit() else part]
        del owner[last]

    return AnswerFault(f"no {place}", spoil, named)


LOGPROB, IDS, SPANS = "logprobs.content.0.logprob", "token_ids.0", "weight_versions"
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_NO_CHOICES: tuple[Any, ...] = ([], None, {}, "x")

FAULTS = [
    # log-probs
    *(_set(LOGPROB, value, "among its logprobs") for value in (math.nan, math.inf, -math.inf, -9999.0, 3.0, 0.01)),
    *(_set(LOGPROB, value, "among its logprobs") for value in ("-1.0", None, True, [-1.0])),
    _without(LOGPROB, "logprobs"),
    _set("logprobs", 3, "logprobs"),
    _set("logprobs", None, "without logprobs"),
    _set("logprobs.content", [], "log-probs"),
    _set("logprobs.content.0", "x", "logprobs"),
    _set("logprobs.content", [{"logprob": -1.0}] * 3, "2 token ids but 3 log-probs"),
    # token ids
    *(_set(IDS, value, "among its token_ids") for value in (10**6, VOCABULARY, -1, 2**70, "3", 3.0, True, None)),
    _set("token_ids", "abc", "among its token_ids"),
    _without("token_ids", "without token_ids"),
    *(_set("/prompt_token_ids", value, "prompt_token_ids") for value in (None, [], [VOCABULARY], ["3"], "abc", 3)),
    # versions of the weights
    _without(f"{SPANS}.0.version", "weight_versions"),
    *(_set(f"{SPANS}.0.version", value, "weight_versions") for value in (1.5, None, -1, "-1", True, 2**70)),
    *(_set(f"{SPANS}.0.start", value, "weight_versions") for value in ("0", -1, 2.0, 99)),
    _set(SPANS, [{"version": "0", "start": 0, "end": 2}] * 2, "weight_versions"),
    *(_set(SPANS, value, "weight_versions") for value in (3, ["0"], "0")),
    _set(SPANS, None, None),
    # usage is never needed
    *(_set("/usage", value, None) for value in ("many", None, 3, [1], {"prompt_tokens": "3"})),
    _set("/usage.completion_tokens", math.nan, None),
    _set("/usage.completion_tokens", 1.5, None),
    # what was said
    *(_set("/choices", value, "without a choice") for value in _NO_CHOICES),
    _set("/choices", [None], "no completion"),
    *(_set("message", value, "no completion") for value in ("hi", 3, [1])),
    _set("message", None, "without a choice"),
    *(_set("message.content", value, "no completion") for value in (3, {"text": "x"}, [{"type": "text", "text": 3}])),
    _set("message.content", [{"type": "text", "text": "hi"}], None),
    _set("message.content", "\ud83d", None),
    *(_set("message.tool_calls", value, "no completion") for value in (3, [3], [{"id": "c"}])),
    _set("message.tool_calls", [{**_CALL, "function": {"name": None}}], "no completion"),
    _set("message.tool_calls", [{**_CALL, "id": 7, "function": {"name": "f", "arguments": {"a": 1}}}], None),
    _set("finish_reason", "error", "failed"),
    _set("finish_reason", 3, None),
]  # fmt: skip


# -- random damage ------------------------------------------------------------------------------------------------

_JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 10**6, 2**70, math.nan, math.inf, -math.inf, "", "3", "\ud83d", "\x00", "x" * 5000,
    [], {}, [[]], [None], [1, "1"], {"a": 1}, {"type": "text"}, [{"type": "text", "text": "\udc00"}], "@deep@",
)  # fmt: skip
_BODIES = ("", "null", "[]", "3", '"x"', "{}", "<html>", '{"error": {"message": "\\ud83d"}}', '{"choices": [{"mess')


def _places(value: Any, rng: random.Random) -> Iterator[tuple[Any, Any]]:
    """Yield an owner and a key of it on a random way down."""
    while isinstance(value, (dict, list)) and value:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        yield value, key
        value = value[key]


def damaged(answer: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return an answer with one to three of its values lost, doubled, swapped or replaced."""
    spoiled: dict[str, Any] = copy.deepcopy(dict(answer))
    for _ in range(rng.randint(1, 3)):
        places = list(_places(spoiled, rng))
        if not places:
            break
        owner, key = rng.choice(places)
        kind = rng.random()
        if kind < 0.15:
            del owner[key]
        elif kind < 0.25 and isinstance(owner, list):
            owner.append(owner[key])
        elif kind < 0.3:
            owner[key] = [owner[key]]
        elif kind < 0.4:
            # tool arguments, and ids, as what they stand for
            owner[key] = json.loads(owner[key]) if _is_json(owner[key]) else str(owner[key])
        else:
            owner[key] = copy.deepcopy(rng.choice(_JUNK))
    return spoiled


def _is_json(value: Any) -> bool:
    try:
        json.loads(value)
    except (TypeError, ValueError):
        return False
    return True


class Spoiler:
    """The answers of a fake server of which a share is damaged.

    Args:
        answer: gives the right answer to a request.
        share: of the answers that are damaged.
        seed: decides which, and how.

    Attributes:
        count: damaged answers so far.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], Answer], *, share: float = 0.5, seed: int = 0) -> None:
        self._answer, self._share, self._rng = answer, share, random.Random(seed)
        self._numbers = itertools.count()
        self.count = 0

    def __call__(self, body: dict[str, Any], version: Any = 0) -> Any:
        """Answer a request from weights of a version: with a completion, right or damaged, or a body that is none."""
        said: Any = self._answer(body)
        right = response_body(body, [said], number=next(self._numbers), weight_version=version)
        return Fault(200, body=self.text(right))

    def text(self, right: Mapping[str, Any]) -> str:
        """Return an answer as it is sent."""
        if self._rng.random() >= self._share:
            return json.dumps(right)
        self.count += 1
        if self._rng.random() < 0.05:
            return self._rng.choice(_BODIES)
        return json.dumps(damaged(right, self._rng)).replace('"@deep@"', "[" * 5000 + "]" * 5000)
