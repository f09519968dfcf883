"""Marks for methods of environments: when a rollout stops, and what to tidy up after it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any, TypeVar, overload

__all__ = ["cleanup", "marked_methods", "stop", "teardown"]

F = TypeVar("F", bound=Callable[..., Any])

_MARKS = "_verifiers_marks"
_FUNCTIONS = frozenset({FunctionType, MethodType})


@overload
def stop(func: F, /) -> F: ...
@overload
def stop(*, priority: int = 0) -> Callable[[F], F]: ...
def stop(func: Any = None, /, *, priority: int = 0) -> Any:
    """Mark a method `(self, state) -> bool`, sync or async, that ends a rollout when it returns True.

    Args:
        func: the method, when used bare, `@vf.stop`.
        priority: higher is asked first; methods of one priority in the order of their names.
    """
    return _mark("stop", func, priority)


@overload
def cleanup(func: F, /) -> F: ...
@overload
def cleanup(*, priority: int = 0) -> Callable[[F], F]: ...
def cleanup(func: Any = None, /, *, priority: int = 0) -> Any:
    """Mark a method `(self, state)`, sync or async, that runs after every rollout, also after a failed one.

    Args:
        func: the method, when used bare, `@vf.cleanup`.
        priority: higher runs first; methods of one priority in the order of their names.
    """
    return _mark("cleanup", func, priority)


@overload
def teardown(func: F, /) -> F: ...
@overload
def teardown(*, priority: int = 0) -> Callable[[F], F]: ...
def teardown(func: Any = None, /, *, priority: int = 0) -> Any:
    """Mark a method `(self)`, sync or async, that runs once when the environment is no longer needed.

    Args:
        func: the method, when used bare, `@vf.teardown`.
        priority: higher runs first; methods of one priority in the order of their names.
    """
    return _mark("teardown", func, priority)


def marked_methods(obj: Any, kind: str) -> list[Callable[..., Any]]:
    """The bound methods of an object marked as `kind` ("stop", "cleanup", "teardown").

    A method overridden without the mark is no longer marked. Functions put on the instance count too.

    Returns:
        Highest priority first, then by name.
    """
    cls: Any = type(obj)
    found = dict(_marked_names(cls, kind))
    for name, value in getattr(obj, "__dict__", {}).items():
        # other callables may answer to any attribute (mocks do), and would seem marked
        if type(value) in _FUNCTIONS:
            priority = getattr(value, _MARKS, {}).get(kind)
            if priority is not None:
                found[name] = priority
            else:
                found.pop(name, None)
    return [getattr(obj, name) for name in sorted(found, key=lambda name: (-found[name], name))]


@lru_cache(maxsize=512)
def _marked_names(cls: Any, kind: str) -> tuple[tuple[str, int], ...]:
    # asked before and after every turn of every rollout, hence the cache
    found = []
    for name in dir(cls):
        marks = getattr(getattr(cls, name, None), _MARKS, None)
        if isinstance(marks, dict) and kind in marks:
            found.append((name, marks[kind]))
    return tuple(found)


def _mark(kind: str, func: Any, priority: int) -> Any:
    def marked(method: F) -> F:
        setattr(method, _MARKS, {**getattr(method, _MARKS, {}), kind: priority})
        return method

    return marked if func is None else marked(func)
