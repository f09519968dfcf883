"""The built-in graders: from a completion and its row to a number between 0 and 1.

All but `json_schema` take time linear in the completion and no more, whatever it holds, so they may run on
the event loop; a schema's patterns may take indefinitely long, so that one runs in a worker.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from verifiers.errors import ConfigError, GradingError
from verifiers_dataserver.tasks import Completion, Row, answer_part


class Scorer(Protocol):
    """A built-in grader; its fields are the options that a configuration may set."""

    in_worker: ClassVar[bool]

    def score(self, completion: Completion, row: Row) -> float:
        """Return the score, 0 to 1. Raises GradingError where what is needed was not sent, or is not in the row."""
        ...


@dataclass(frozen=True)
class _Answer:
    """Base of graders that look at the part `answer_from` of the completion alone; None takes the dataset's."""

    in_worker: ClassVar[bool] = False
    answer_from: str | None = None

    def _answer(self, completion: Completion) -> str:
        return answer_part(completion.text, self.answer_from or "text")


@dataclass(frozen=True)
class Exact(_Answer):
    """A score of 1 where the answer is the row's, but for white space around it."""

    ignore_case: bool = False

    def score(self, completion: Completion, row: Row) -> float:
        given, expected = self._answer(completion), _text(row.answer)
        if self.ignore_case:
            given, expected = given.casefold(), expected.casefold()
        return float(given == expected)


_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?(?:[eE][+-]?\d+)?")


@dataclass(frozen=True)
class NumberOnly(_Answer):
    """A score of 1 where the answer is one number and nothing else, whichever it is."""

    def score(self, completion: Completion, row: Row) -> float:
        answer = self._answer(completion)
        # no number is that long, and a pattern need not find that out
        return float(0 < len(answer) <= 400 and any(map(str.isdigit, answer)) and bool(_NUMBER.fullmatch(answer)))


@dataclass(frozen=True)
class JsonValid(_Answer):
    """A score of 1 where the answer is JSON (RFC 8259)."""

    def score(self, completion: Completion, row: Row) -> float:
        return float(_json(self._answer(completion)) is not None)


@dataclass(frozen=True)
class JsonSchema(_Answer):
    """A score of 1 where the answer is JSON that fits a schema; left out, the row's `info["schema"]` is taken."""

    in_worker: ClassVar[bool] = True
    schema: dict[str, Any] | None = None

    def check(self) -> None:
        """Check the option once, not with every completion. Raises ConfigError."""
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for

        if self.schema is not None:
            try:
                validator_for(self.schema).check_schema(self.schema)
            except SchemaError as error:
                where = ".".join(map(str, ("schema", *error.absolute_path)))
                raise ConfigError(f"{where} is not a JSON schema: {error.message}.") from None

    def score(self, completion: Completion, row: Row) -> float:
        from jsonschema.validators import validator_for
        from referencing import Registry

        schema = self.schema if self.schema is not None else row.info.get("schema")
        if isinstance(schema, str):
            schema = json.loads(schema)
        if not isinstance(schema, Mapping):
            raise GradingError("the row has no info['schema'] and the grader no schema")
        found = _json(self._answer(completion), keep_numbers=True)
        if found is None:
            return 0.0
        # an own registry: references are never fetched
        return float(validator_for(schema)(schema, registry=Registry()).is_valid(found.value))


@dataclass(frozen=True)
class XmlFields:
    """A score of 1 where the completion holds every field once, in order, with a text in it."""

    in_worker: ClassVar[bool] = False
    fields: list[str] = field(default_factory=lambda: ["reasoning", "answer"])

    def __post_init__(self) -> None:
        wrong = [name for name in self.fields if not name.isidentifier()]
        if wrong or not self.fields:
            raise ConfigError(f"fields is {self.fields!r}, but it must name one or more tags of letters and digits")

    def score(self, completion: Completion, row: Row) -> float:
        text, place = completion.text, 0
        for name in self.fields:
            opening, closing = f"<{name}>", f"</{name}>"
            start = text.find(opening, place)
            end = text.find(closing, start)
            if start < 0 or end < 0 or not text[start + len(opening) : end].strip():
                return 0.0
            if text.count(opening) != 1 or text.count(closing) != 1:
                return 0.0
            place = end + len(closing)
        return 1.0


@dataclass(frozen=True)
class Category(_Answer):
    """A score of 1 where the answer names the row's category: case and punctuation around it do not count.

    Args:
        categories: all there are; a row whose answer is none of them cannot be graded. Left out, any answer
            may be right.
    """

    categories: list[str] | None = None

    def score(self, completion: Completion, row: Row) -> float:
        expected = _category(_text(row.answer))
        if self.categories is not None and expected not in map(_category, self.categories):
            raise GradingError("the row's answer is none of the categories")
        answer = self._answer(completion)
        # a category is a word or a few, so an essay is none, and is not worth folding
        return float(len(answer) <= 1000 and _category(answer) == expected)


@dataclass(frozen=True)
class LengthCap:
    """A score of 1 up to a length, then falling in a straight line to 0; often a gate.

    Args:
        max_tokens: the length up to which nothing is taken off, in tokens as the client counted them.
        max_chars: the same in characters; give one of the two.
        zero_at: the length from which on the score is 0; left out, it falls at once.
    """

    in_worker: ClassVar[bool] = False
    max_tokens: int | None = None
    max_chars: int | None = None
    zero_at: int | None = None

    def __post_init__(self) -> None:
        if (self.max_tokens is None) == (self.max_chars is None):
            raise ConfigError("give either max_tokens or max_chars")
        cap = self.max_tokens if self.max_tokens is not None else self.max_chars
        if cap is not None and (cap < 1 or (self.zero_at is not None and self.zero_at <= cap)):
            raise ConfigError(
                f"the cap {cap!r} must be at least 1, and zero_at, where it is given, above the cap, "
                f"not {self.zero_at!r}"
            )

    def score(self, completion: Completion, row: Row) -> float:
        cap, length = self.max_chars, len(completion.text)
        if self.max_tokens is not None:
            if completion.tokens is None:
                raise GradingError("completion_tokens is missing, and max_tokens needs it")
            cap, length = self.max_tokens, completion.tokens
        assert cap is not None
        if length <= cap:
            return 1.0
        return 0.0 if self.zero_at is None else max(0.0, (self.zero_at - length) / (self.zero_at - cap))


@dataclass(frozen=True)
class ReasoningFormat:
    """A score of 1 where the completion begins with <think>, has both tags once, and an answer after </think>."""

    in_worker: ClassVar[bool] = False

    def score(self, completion: Completion, row: Row) -> float:
        text = completion.text.strip()
        once = text.count("<think>") == 1 and text.count("</think>") == 1
        return float(once and text.startswith("<think>") and bool(text.partition("</think>")[2].strip()))


BUILTIN: dict[str, type[Any]] = {
    "category": Category,
    "exact": Exact,
    "json_schema": JsonSchema,
    "json_valid": JsonValid,
    "length_cap": LengthCap,
    "number_only": NumberOnly,
    "reasoning_format": ReasoningFormat,
    "xml_fields": XmlFields,
}
"""By the names that configurations use; "math" and "rubric" are built in too, but not of this kind."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A JSON value, which may be None."""

    value: Any


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _json(text: str, *, keep_numbers: bool = False) -> _Found | None:
    # numbers as text: one of a million digits would take minutes to convert
    ways: dict[str, Any] = {} if keep_numbers else {"parse_int": str, "parse_float": str}
    try:
        return _Found(json.loads(text, parse_constant=_refuse_constant, **ways))
    except (ValueError, RecursionError):
        return None


def _text(answer: Any) -> str:
    return "" if answer is None else str(answer).strip()


def _category(text: str) -> str:
    words = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return words.strip(" \t.,:;!?\"'`*()[]{}<>_-")


@dataclass(frozen=True, slots=True)
class Score:
    """A grader's result for one completion: a score, or the problem, which holds nothing of the row's answer."""

    value: float | None = None
    problem: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
