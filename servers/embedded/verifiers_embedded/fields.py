"""Reading single fields of a JSON body. What would change the result is obeyed or refused, never ignored."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from verifiers_embedded.errors import ApiError

HARMLESS = frozenset(
    {
        "user",
        "store",
        "metadata",
        "safety_identifier",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "priority",
        "request_id",
        "cache_salt",
    }
)
"""Fields that change nothing about the tokens, whatever they hold."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "logit_bias": ({},),
    "prompt_logprobs": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "return_tokens_as_token_ids": (False,),
    "modalities": (["text"],),
}
"""Fields that are taken where they ask for what is done anyway; any other value is refused."""


def read_fields(
    body: Any, read: Collection[str], neutral: Mapping[str, tuple[Any, ...]] | None = None
) -> dict[str, Any]:
    """The fields of a body that are not null.

    Args:
        body: parsed JSON.
        read: names that the caller reads.
        neutral: more fields like those of `NEUTRAL`.

    Raises:
        ApiError: the body is no object, or has a field that would be ignored.
    """
    if not isinstance(body, dict):
        raise ApiError(f"the request body must be a JSON object, not {kind(body)}")
    fields = {name: value for name, value in body.items() if value is not None}
    allowed = {**NEUTRAL, **(neutral or {})}
    for name, value in fields.items():
        if name not in read and name not in HARMLESS:
            _refuse_unless_neutral(name, value, allowed)
    return fields


def typed(fields: Mapping[str, Any], name: str, expected: type, default: Any) -> Any:
    """A field of one JSON kind: bool, str, dict or list."""
    value = fields.get(name, default)
    if not isinstance(value, expected):
        wanted = {bool: "true or false", str: "a string", dict: "an object", list: "a list"}[expected]
        raise ApiError(f"field {name!r} must be {wanted}, not {short(value)}", param=name)
    return value


def integer(
    fields: Mapping[str, Any], name: str, default: int, least: int | None = None, most: int | None = None
) -> int:
    """A whole number within bounds."""
    value = whole(fields.get(name, default))
    fits = type(value) is int
    if not fits or (least is not None and value < least) or (most is not None and value > most):
        bound = "" if least is None else f" of at least {least}"
        bound += "" if most is None else f" and at most {most}"
        raise ApiError(f"field {name!r} must be a whole number{bound}, not {short(value)}", param=name)
    return int(value)


def whole(value: Any) -> Any:
    """A whole number that was written with a point, as 69.0, without it: JSON Schema calls both integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def number(
    fields: Mapping[str, Any], name: str, default: float, expected: str, fits: Callable[[float], bool]
) -> float:
    """A finite number in a range; `expected` names the range in the refusal."""
    value = fields.get(name, default)
    # The range comes before the conversion: a whole number can be too large for a float.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not fits(value)
        or not math.isfinite(value)
    ):
        raise ApiError(f"field {name!r} must be a number {expected}, not {short(value)}", param=name)
    return float(value)


def short(value: Any) -> str:
    """A value as it can stand in a sentence."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def kind(value: Any) -> str:
    """What JSON calls a value."""
    return {list: "a list", str: "a string", bool: "a boolean"}.get(type(value), type(value).__name__)


def _refuse_unless_neutral(name: str, value: Any, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    if name not in neutral:
        raise ApiError(
            f"field {name!r} is unknown here, and ignoring it could change the result; leave it out",
            param=name,
            code="unsupported_parameter",
        )
    allowed = neutral[name]
    if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed):
        remedy = f"leave it out or give {' or '.join(map(repr, allowed))}" if allowed else "leave it out"
        raise ApiError(
            f"field {name!r} with value {short(value)} is not supported by this server; {remedy}",
            param=name,
            code="unsupported_parameter",
        )
