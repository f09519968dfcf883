"""Calling overrides that may be sync or async, and written for either generation of the classic API."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from types import CoroutineType
from typing import Any

__all__ = ["AwaitableBool", "either_generation", "maybe_await", "takes_state_first"]


async def maybe_await(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `func` and await the result where it can be awaited. Errors pass through as they are."""
    result = func(*args, **kwargs)
    # the hot path: the general check costs four times as much as these, and is rarely needed
    if type(result) in _PLAIN:
        return result
    if isinstance(result, CoroutineType) or inspect.isawaitable(result):
        return await result
    return result


class AwaitableBool(int):
    """True or False that may also be awaited, for conditions that subclasses ask for in either way."""

    def __await__(self) -> Generator[Any, Any, bool]:
        yield from ()
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))


_PLAIN = frozenset({AwaitableBool, bool, dict, list, str, tuple, type(None)})


def either_generation(
    is_second: Callable[[tuple[Any, ...], dict[str, Any]], bool], second: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a method answer to the second generation's arguments too.

    Args:
        is_second: tells by (args, kwargs), without self, whether a call is of the second generation.
        second: what such a call is handed to, with the same arguments.

    Returns:
        A decorator for the first generation's method, whose signature stays the visible one.
    """

    def decorate(first: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(first)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return (second if is_second(args, kwargs) else first)(self, *args, **kwargs)

        return method

    return decorate


def takes_state_first(method: Callable[..., Any]) -> bool:
    """True where a method is written for the second generation: its first argument, after self, is the state."""
    return _takes_state_first(getattr(method, "__func__", method))


@functools.lru_cache(maxsize=512)
def _takes_state_first(function: Callable[..., Any]) -> bool:
    try:
        names = [name for name in inspect.signature(function).parameters if name != "self"]
    except (TypeError, ValueError):
        return False
    return names[:1] == ["state"]
