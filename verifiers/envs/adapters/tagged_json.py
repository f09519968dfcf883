"""JSON text that gives back the Python value it was made from, where plain JSON would change it.

Plain JSON turns tuples into lists and the keys of dicts into strings. A scorer that compares with what it put into
an entry then scores a right answer as wrong. Here such values travel as an object with the single key "!", whose
value is [kind, parts]; everything that plain JSON keeps looks as it would in plain JSON.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import fractions
import json
from collections.abc import Callable
from typing import Any

from verifiers.errors import ConfigError

__all__ = ["dumps", "loads"]

_TAG = "!"

_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "bytes": base64.b64decode,
    "complex": complex,
    "date": datetime.date.fromisoformat,
    "datetime": datetime.datetime.fromisoformat,
    "decimal": decimal.Decimal,
    "fraction": fractions.Fraction,
    "time": datetime.time.fromisoformat,
}

_COLLECTIONS: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def dumps(value: Any) -> str:
    """The JSON text of a value.

    Numbers and strings of subclasses (numpy's scalars, enumerations) become plain ones, which compare alike.

    Raises:
        ConfigError: the value holds something that could not be given back as it is.
    """
    return json.dumps(_tagged(value), ensure_ascii=False)


def loads(text: str) -> Any:
    """The value that `dumps` wrote."""
    return json.loads(text, object_hook=_untagged)


def _tagged(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return _plain(value)
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: _tagged(item) for key, item in value.items()}
        return {_TAG: ["dict", [[_tagged(key), _tagged(item)] for key, item in value.items()]]}
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    for kind, collection in _COLLECTIONS.items():
        if type(value) is collection:
            return {_TAG: [kind, [_tagged(item) for item in value]]}
    text = _text_of(value)
    if text is not None:
        return {_TAG: list(text)}
    if callable(getattr(value, "tolist", None)):
        # numpy's arrays and those of its scalars that are no Python numbers
        plain = _tagged(value.tolist())
        return {_TAG: ["ndarray", [str(value.dtype), plain]]} if getattr(value, "shape", ()) else plain
    raise ConfigError(
        f"A value of type {type(value).__name__} cannot be sent to a scoring process: {value!r:.200}; "
        "use numbers, strings, lists, tuples, sets, dicts, dates or arrays."
    )


def _plain(value: Any) -> Any:
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    return None


def _text_of(value: Any) -> tuple[str, str] | None:
    if isinstance(value, bytes):
        return "bytes", base64.b64encode(value).decode()
    # a datetime is a date too, so it is asked about first
    if isinstance(value, datetime.datetime):
        return "datetime", value.isoformat()
    if isinstance(value, datetime.date):
        return "date", value.isoformat()
    if isinstance(value, datetime.time):
        return "time", value.isoformat()
    if isinstance(value, decimal.Decimal):
        return "decimal", str(value)
    if isinstance(value, fractions.Fraction):
        return "fraction", str(value)
    if isinstance(value, complex):
        return "complex", str(value)
    return None


def _untagged(pairs: dict[str, Any]) -> Any:
    if pairs.keys() != {_TAG}:
        return pairs
    kind, parts = pairs[_TAG]
    if kind == "dict":
        return dict(parts)
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](parts)
    if kind == "ndarray":
        import numpy

        return numpy.array(parts[1], dtype=parts[0])
    return _FROM_TEXT[kind](parts)
