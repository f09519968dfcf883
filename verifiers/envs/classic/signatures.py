"""Calling overrides that may be sync or async, and written for either generation of the classic API."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from verifiers.types import SamplingArgs

__all__ = [
    "call_rollout",
    "default_step",
    "either_generation",
    "gives_rollout_input",
    "overridden_steps",
    "takes_rollout_input",
    "takes_state_first",
]

F = TypeVar("F", bound=Callable[..., Any])


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
    """Return True where a method is written for the second generation: its first argument is the state."""
    return _takes_state_first(getattr(method, "__func__", method))


@functools.lru_cache(maxsize=512)
def _takes_state_first(function: Callable[..., Any]) -> bool:
    try:
        names = [name for name in inspect.signature(function).parameters if name != "self"]
    except (TypeError, ValueError):
        return False
    return names[:1] == ["state"]


# -- rollout(client, model, prompt, ...) and rollout(input, client, model, ...) -----------------------------------


def call_rollout(
    env: Any, row: Mapping[str, Any], client: Any, model: str, sampling_args: SamplingArgs
) -> Awaitable[Any]:
    """Call `env.rollout` in the generation of the classic API that it is written for.

    Args:
        row: prompt, example_id, task, answer, info.

    Returns:
        What the method returns, to be awaited: (completion, state), or the state.
    """
    if _takes_rollout_input(getattr(type(env), "rollout", env.rollout)):
        by_input: Awaitable[Any] = env.rollout(row, client, model, sampling_args)
        return by_input
    by_columns: Awaitable[Any] = env.rollout(
        client,
        model,
        row["prompt"],
        answer=row["answer"],
        task=row["task"],
        info=row["info"],
        sampling_args=sampling_args,
    )
    return by_columns


def takes_rollout_input(function: F) -> F:
    """Mark a `rollout` that may be called in the second generation's way though its signature does not say so."""
    function.__dict__["takes_rollout_input"] = True
    return function


def gives_rollout_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True for `rollout(input, client, model, ...)`; the first generation gives the client first."""
    return "input" in kwargs or bool(args and isinstance(args[0], Mapping) and "prompt" in args[0])


@functools.lru_cache(maxsize=512)
def _takes_rollout_input(function: Callable[..., Any]) -> bool:
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    input_first = names[:1] in (["input"], ["rollout_input"]) or names[1:2] == ["client"]
    return input_first or bool(getattr(function, "takes_rollout_input", False))


# -- overrides of a method's default ---------------------------------------------------------------------------


def default_step(method: F) -> F:
    """Mark a method as a default step of the rollout loop, which then need not call it."""
    method.__dict__["_is_default_step"] = True
    return method


def overridden_steps(env: Any, names: tuple[str, ...]) -> frozenset[str]:
    """Return the steps that the environment's class, or the environment itself, has methods of its own for."""
    kind: Any = type(env)
    own = _class_overrides(kind, names)
    set_on_env = vars(env).keys() & names
    return own | set_on_env if set_on_env else own


@functools.lru_cache(maxsize=512)
def _class_overrides(kind: Any, names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name for name in names if not getattr(getattr(kind, name), "_is_default_step", False))
