"""Names that a caller gives, compared with those that exist: a misspelled one is refused, an unknown one logged.

The classic API accepts any keyword and keeps it as an attribute, so that a typo would go unnoticed.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from verifiers.errors import ConfigError

SIMILARITY = 0.82
"""Least `difflib` ratio of a misspelled name: 'wieghts' is at 0.86, the legitimate 'num_few_shot' at 0.8."""

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def nearest_name(name: str, known: Collection[str]) -> str | None:
    """Return the known name that `name` most likely misspells, or None."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=SIMILARITY)
    return matches[0] if matches else None


def check_keywords(owner: str, given: Collection[str], known: Collection[str]) -> None:
    """Refuse keywords that are nearly the name of a known one."""
    for name in given:
        near = None if name in known else nearest_name(name, known)
        if near is not None:
            raise ConfigError(f"{owner} has no parameter {name!r}; did you mean {near!r}?")


def set_extra_keywords(owner: Any, extra: Mapping[str, Any], expected: Collection[str] = ()) -> None:
    """Set the keywords that no constructor of an object's class names as attributes of the object."""
    kind: Any = type(owner)
    known = _constructor_names(kind)
    given = [name for name in extra if name not in expected and not hasattr(kind, name)]
    check_keywords(kind.__name__, given, known)
    for name in given:
        if name not in known:
            warn_once(owner.logger.name, f"{kind.__name__} has no parameter {name!r}: it only becomes an attribute.")
    for name, value in extra.items():
        setattr(owner, name, value)


def ignore_keywords(owner: Any, given: Collection[str], method: Callable[..., Any]) -> None:
    """Log further keywords of a call, which have no effect."""
    name = type(owner).__name__
    check_keywords(name, given, parameter_names(method))
    for keyword in given:
        warn_once(owner.logger.name, f"{name} ignores the unknown argument {keyword!r} of this call.")


@functools.lru_cache(maxsize=512)
def warn_once(logger_name: str, text: str) -> None:
    """Log a warning, the first time that it is given."""
    logging.getLogger(logger_name).warning("%s", text)


def parameter_names(*functions: Callable[..., Any]) -> frozenset[str]:
    """Return the names that can be given as keywords to one of the functions."""
    parameters = [item for function in functions for item in inspect.signature(function).parameters.values()]
    return frozenset(item.name for item in parameters if item.kind in _BY_NAME)


@functools.lru_cache(maxsize=512)
def _constructor_names(kind: type) -> frozenset[str]:
    own = [base.__dict__["__init__"] for base in kind.__mro__[:-1] if "__init__" in base.__dict__]
    return parameter_names(*own) - {"self"}
