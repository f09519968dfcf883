"""Calls of reward functions: by argument names, on the event loop or in a thread, for a finite float."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import os
import reprlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verifiers.concurrency import threads_for
from verifiers.errors import GradingError

__all__ = ["NAMES", "PreparedCall", "finite_float", "reward_name", "reward_names"]

QUICK_S = 0.001
SLOW_S = 0.005
QUICK_CALLS = 3
PLURALS = frozenset({"prompts", "completions", "answers", "states", "tasks", "infos"})
NAMES = PLURALS | {name.removesuffix("s") for name in PLURALS}


class PreparedCall:
    """A reward function with its parameters, read once, and its speed so far.

    A thread hop costs four times as much as the rest of scoring by a typical reward function (a regular expression,
    a comparison), and many times that on a busy machine. A slow function called on the event loop, though, would
    stall every rollout in flight. So a synchronous function starts out in threads, and moves to the loop when three
    calls in a row each took less than 1 ms, measured inside the thread so that the hop does not count. One call on
    the loop of more than 5 ms sends it back for good. Three in a row, not the first three: a first call often pays
    for imports.

    Attributes:
        name: for metrics and messages.
        is_group: the function has a parameter for whole groups (prompts, completions, answers, states, tasks, infos).
        on_loop: the next call stays on the event loop.
    """

    __slots__ = (
        "_is_async",
        "_names",
        "_quick_in_a_row",
        "_stays_in_threads",
        "_takes_everything",
        "func",
        "is_group",
        "name",
        "on_loop",
    )

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        self.name = reward_name(func)
        try:
            parameters = list(inspect.signature(func).parameters.values())
        except (TypeError, ValueError):
            # some builtins have no signature: the call itself will say what is wrong
            parameters = []
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self._names = tuple(item.name for item in parameters if item.kind in by_name)
        self._takes_everything = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters)
        self.is_group = not PLURALS.isdisjoint(self._names)
        self._is_async = _is_async(func)
        self.on_loop = self._is_async
        self._quick_in_a_row = 0
        # without an event loop around it, a synchronous function need not await the judge
        self._stays_in_threads = "judge" in self._names

    @property
    def waits(self) -> bool:
        """Tell whether a call lets other work run meanwhile, so that concurrent calls are worth a task each."""
        return self._is_async or not self.on_loop

    async def __call__(self, values: Mapping[str, Any]) -> Any:
        """Call the function with those of `values` that it names, and return what it returns.

        Raises:
            Exception: what the function raises; asyncio.CancelledError passes.
        """
        if self._takes_everything:
            arguments = dict(values)
        else:
            arguments = {name: values[name] for name in self._names if name in values}
        if self._is_async:
            return await self.func(**arguments)
        if self.on_loop:
            started = time.perf_counter()
            try:
                result = self.func(**arguments)
            finally:
                if time.perf_counter() - started > SLOW_S:
                    self.on_loop, self._stays_in_threads = False, True
        else:
            result = await self._in_thread(arguments)
        return await result if inspect.isawaitable(result) else result

    async def _in_thread(self, arguments: dict[str, Any]) -> Any:
        threads = threads_for("reward function", min(32, (os.cpu_count() or 1) + 4))
        result, error, elapsed_s = await threads.run(functools.partial(_timed, self.func, arguments))
        self._quick_in_a_row = self._quick_in_a_row + 1 if elapsed_s < QUICK_S else 0
        if self._quick_in_a_row >= QUICK_CALLS and not self._stays_in_threads:
            self.on_loop = True
        if error is not None:
            raise error
        return result


def reward_name(func: Callable[..., Any]) -> str:
    """Return a function's name; of a partial that of the function inside, of other callables that of their class."""
    while isinstance(func, functools.partial):
        func = func.func
    return getattr(func, "__name__", None) or type(func).__name__


def reward_names(funcs: Sequence[Callable[..., Any]]) -> list[str]:
    """Return the functions' names, which are their metrics' names; several lambdas are numbered by their order."""
    names = [reward_name(func) for func in funcs]
    if names.count("<lambda>") < 2:
        return names
    numbers = itertools.count(1)
    return [f"lambda_{next(numbers)}" if name == "<lambda>" else name for name in names]


def finite_float(value: Any) -> float:
    """Return the value as a float.

    Raises:
        GradingError: the value is no finite number.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise GradingError(f"returned {reprlib.repr(value)}, not a finite number")
    return number


def _is_async(func: Callable[..., Any]) -> bool:
    while isinstance(func, functools.partial):
        func = func.func
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(getattr(func, "__call__", None))  # noqa: B004


def _timed(func: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Any, BaseException | None, float]:
    started = time.perf_counter()
    try:
        return func(**arguments), None, time.perf_counter() - started
    except BaseException as error:  # raised by the caller, on the event loop
        return None, error, time.perf_counter() - started
