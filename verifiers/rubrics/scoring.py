"""Scoring: reward functions called for the rollouts of one group, and what becomes of their values.

A reward function names its arguments and gives a finite float. `async def` runs on the event loop; all plain
functions of a group run in one worker thread, one after the other, for one hop costs as much as many regular
expressions.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import itertools
import math
import os
import reprlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from verifiers.concurrency import (
    DaemonThreads,
    gather_owned,
    is_async_function,
    own_cancels_fail,
    threads_for,
    without_partials,
)
from verifiers.errors import GradingError
from verifiers.types import FailedGrade, RolloutScore, State

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

Reward = float | list[float] | dict[str, float]
"""What a function gives a rollout: one number, one for each turn, or one for each role."""

ARGUMENTS = ("prompt", "completion", "answer", "state", "task", "info")
PLURALS = frozenset(f"{name}s" for name in ARGUMENTS)

LARGEST = 3.4e38
"""The largest reward: training holds advantages in float32."""

MAX_THREADS = min(32, (os.cpu_count() or 1) + 4)
MAX_WAITING_THREADS = 64


# -- one rollout as reward functions see it ----------------------------------------------------------------------


def arguments_of(state: State) -> dict[str, Any]:
    """Return the arguments that a reward function may name, from the state's top or from its `input`."""
    row = state.get("input")
    defaults = {"prompt": [], "completion": [], "answer": "", "task": "default", "info": {}}
    arguments: dict[str, Any] = {"state": state}
    for source in (defaults, row if isinstance(row, Mapping) else {}, state):
        arguments.update({name: source[name] for name in defaults if source.get(name) is not None})
    return arguments


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rollouts' arguments as columns, named as group functions name them."""
    return {f"{name}s": [row[name] for row in rows] for name in ARGUMENTS}


def note_failure(state: State, func: str, error: BaseException) -> None:
    """Note in `state["grading_errors"]` that a reward function failed."""
    failed = FailedGrade(func=func, error=f"{type(error).__name__}: {error}")
    state.setdefault("grading_errors", []).append(failed)


def store_scores(states: Sequence[State], scores: Sequence[RolloutScore], started: float) -> None:
    """Put scores into the states (`reward`, `metrics`, timing since `started`), and all noted failures into both."""
    elapsed_ms = (time.perf_counter() - started) * 1000
    for state, score in zip(states, scores, strict=True):
        take_failures(state, score)
        state["reward"], state["metrics"] = score["reward"], dict(score["metrics"])
        timing = state.get("timing")
        if isinstance(timing, dict):
            # replaced and not added: rubrics that hold others have measured a part of this already
            before_ms = timing.get("scoring_ms", 0.0)
            timing["scoring_ms"] = elapsed_ms
            timing["total_ms"] = timing.get("total_ms", 0.0) + elapsed_ms - before_ms


def take_failures(state: State, score: RolloutScore) -> RolloutScore:
    """Give a score the failures that the state has, and the state those that the score has."""
    noted, found = state.get("grading_errors") or [], score["errors"]
    if noted or found:
        failures = [*noted, *(failed for failed in found if failed not in noted)]
        state["grading_errors"] = failures
        score["errors"] = list(failures)
    return score


# -- calls of reward functions -----------------------------------------------------------------------------------

_REWARDS = "rewards_parts"


def turn_reward(func: F) -> F:
    """Mark a reward function that returns a list: one number for each turn of the policy.

    Its weight applies to each. The numbers take part in credit by turn (`turn_discount` of training) and not in the
    rollout's reward; the metric of its name is their sum.
    """
    setattr(func, _REWARDS, _finite_list)
    return func


def is_turn_reward(func: Callable[..., Any]) -> bool:
    return getattr(func, _REWARDS, None) is _finite_list


def role_reward(func: F) -> F:
    """Mark a reward function that returns a mapping: by role, the reward of what `client.role(name)` said.

    Its weight applies to each. A role's tokens are trained by its reward among those of the group; in the rollout's
    own reward the mean over roles counts. Each is a metric of the function's name and the role's.
    """
    setattr(func, _REWARDS, _finite_dict)
    return func


def for_each_turn(value: Any, state: State) -> Any:
    """Return a reward, a list as one of the answered turns; in its place what is wrong with one of another length."""
    if not isinstance(value, list):
        return value
    # by the dict's own method: the state of a stored run, which has no steps, refuses to be asked
    steps = dict.get(state, "trajectory") or ()
    # environments may keep steps of a kind of their own
    is_told = bool(steps) and all(isinstance(step, dict) for step in steps)
    if not is_told:
        return value
    answered = [is_answered(step) for step in steps]
    if len(value) == sum(answered):
        return value
    if len(value) == len(steps):
        return [*itertools.compress(value, answered)]
    return GradingError(
        f"it returned {len(value)} numbers, and the policy had {sum(answered)} turns; give one for each"
    )


def is_answered(step: dict[str, Any]) -> bool:
    """Return whether a step of a trajectory is a turn of the policy: one whose prompt was too long is none."""
    return getattr(dict.get(step, "response"), "id", None) != "overlong-prompt"


def added_by_turn(one: Sequence[float] | None, other: Sequence[float] | None) -> list[float]:
    """Add the rewards of turns; a shorter list counts as 0 for the rest."""
    return [left + right for left, right in itertools.zip_longest(one or (), other or (), fillvalue=0.0)]


def added_by_role(one: Mapping[str, float] | None, other: Mapping[str, float]) -> dict[str, float]:
    """Add the rewards of roles; one that a side does not name counts as 0 there."""
    return {role: (one or {}).get(role, 0.0) + other.get(role, 0.0) for role in {**(one or {}), **other}}


def one_number(value: Reward) -> float:
    """Return what a rollout shows of a reward: the sum of its turns, the mean of its roles, or itself."""
    if isinstance(value, dict):
        return sum(value.values()) / max(1, len(value))
    return sum(value) if isinstance(value, list) else value


class RewardCall:
    """A reward function with the names of its parameters."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        self._signature = signature = signature_of(func)
        self.is_async = signature.is_async
        self.is_group = not PLURALS.isdisjoint(signature.names)
        self.read: Callable[[Any], Reward] = getattr(func, _REWARDS, finite_float)
        # calls that are made side by side: without `await` a judge's answer blocks its thread for seconds
        self.waits = self.is_async or "judge" in signature.names

    def result(self, values: Mapping[str, Any]) -> Any:
        """Call the function with those of `values` that it names; return its result, or what it raised."""
        try:
            if self._signature.takes_everything:
                return self.func(**values)
            return self.func(**{name: values[name] for name in self._signature.names if name in values})
        except BaseException as error:  # looked at on the event loop, and never lost in a thread
            return error

    async def awaited_results(self, of_calls: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Make calls of the function side by side; return the result of each, or what it raised."""

        async def result(values: Mapping[str, Any]) -> Any:
            if self.is_async:
                return await _settled(self.result(values))
            threads = threads_for("reward function that waits", MAX_WAITING_THREADS)
            return await _settled(await threads.run(functools.partial(self.result, values)))

        return await gather_owned([result(values) for values in of_calls])


class Signature(NamedTuple):
    """A function's parameters by name: all of them, those without a default, whether any other is taken; its kind."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_everything: bool
    is_async: bool


_signatures: WeakKeyDictionary[Callable[..., Any], Signature] = WeakKeyDictionary()


def signature_of(func: Callable[..., Any]) -> Signature:
    """Return a function's signature, read once; an empty one of a builtin that has none."""
    # reading a signature costs more than most reward functions; some callables cannot be kept
    with contextlib.suppress(KeyError, TypeError):
        return _signatures[func]
    try:
        parameters = list(inspect.signature(func).parameters.values())
    except (TypeError, ValueError):
        # some builtins have no signature: the call itself will say what is wrong
        parameters = []
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [item for item in parameters if item.kind in by_name]
    signature = Signature(
        names=tuple(item.name for item in named),
        required=tuple(item.name for item in named if item.default is item.empty),
        takes_everything=any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters),
        is_async=is_async_function(func),
    )
    with contextlib.suppress(TypeError):
        _signatures[func] = signature
    return signature


async def _settled(result: Any) -> Any:
    try:
        with own_cancels_fail():
            return await result if inspect.isawaitable(result) else result
    except (Exception, SystemExit) as error:
        return error


async def reward_values(
    calls: Sequence[RewardCall], states: Sequence[State], objects: Mapping[str, Any], *, parallel: bool = True
) -> list[list[Reward | BaseException]]:
    """Call the reward functions for the rollouts of one group, with `objects` as further arguments.

    Functions of whole groups come after the others, whose notes they may read in the states; without `parallel` each
    function comes after the one before.

    Returns:
        Each function's values, one a rollout, finite; or the error for which there is none.
    """
    rows = [{**arguments_of(state), **objects} for state in states]
    of_group = [{**columns_of(rows), **objects}]
    values_of = {call: of_group if call.is_group else rows for call in calls}
    results: dict[RewardCall, list[Any]] = {}

    async def wait_for(call: RewardCall) -> None:
        results[call] = await call.awaited_results(values_of[call])

    async def run_plain(plain: Sequence[RewardCall]) -> None:
        results.update(await _in_one_thread({call: values_of[call] for call in plain}))

    one_stage = not any(call.waits for call in calls)
    stages = itertools.groupby(
        sorted(calls, key=lambda call: call.is_group),
        lambda call: one_stage or (call.is_group, None if parallel else call.waits and id(call)),
    )
    for stage in [list(of_stage) for _, of_stage in stages] if states else ():
        work = [wait_for(call) for call in stage if call.waits]
        if plain := [call for call in stage if not call.waits]:
            work.append(run_plain(plain))
        await (gather_owned(work) if len(work) > 1 else work[0])
    return [_values(results.get(call, []), len(states), call) for call in calls]


async def _in_one_thread(work: Mapping[RewardCall, Sequence[Mapping[str, Any]]]) -> dict[RewardCall, list[Any]]:
    """Make all calls of plain functions in one worker thread, in order; where this is cancelled, no further one."""
    ended = False

    def run() -> dict[RewardCall, list[Any]]:
        return {
            call: [None if ended else call.result(values) for values in of_call] for call, of_call in work.items()
        }

    threads = threads_for("reward function", MAX_THREADS)
    try:
        results = await (_run_when_free(threads, run) if threads.is_full else threads.run(run))
    finally:
        ended = True
    for call, of_call in results.items():
        if any(inspect.isawaitable(result) for result in of_call):
            results[call] = await gather_owned([_settled(result) for result in of_call])
    return results


def _values(results: list[Any], count: int, call: RewardCall) -> list[Reward | BaseException]:
    """Return a function's values, one a rollout; one error for all where a function of the group gave no list."""
    if call.is_group and results:
        try:
            if isinstance(results[0], BaseException):
                raise results[0]
            if isinstance(results[0], (Mapping, Set, str, bytes)):
                raise GradingError(f"returned {results[0]!r:.100}; give a list, one reward for each rollout in order")
            results = list(results[0])
            if len(results) != count:
                raise GradingError(f"returned {len(results)} rewards for {count} rollouts")
        except BaseException as error:
            return [error] * count
    values: list[Reward | BaseException] = []
    for result in results:
        try:
            values.append(result if isinstance(result, BaseException) else call.read(result))
        except GradingError as error:
            values.append(error)
    return values


# -- the deadline of a group ------------------------------------------------------------------------------------


class _Clock:
    """The deadline of a group's scoring: it stands still while a part of it waits for its turn. Used on its loop."""

    def __init__(self, deadline: asyncio.Timeout) -> None:
        self.loop, self.is_over = asyncio.get_running_loop(), False
        self._deadline, self._waiting, self._left_s = deadline, 0, 0.0

    def stop(self) -> None:
        when = self._deadline.when()
        if when is not None and self._is_running():
            self._left_s = when - self.loop.time()
            self._deadline.reschedule(None)
        self._waiting += 1

    def go_on(self) -> None:
        self._waiting -= 1
        if not self._waiting and self._is_running():
            self._deadline.reschedule(self.loop.time() + self._left_s)

    def _is_running(self) -> bool:
        return not self.is_over and not self._deadline.expired()


_clock: contextvars.ContextVar[_Clock | None] = contextvars.ContextVar("grading_clock", default=None)


@contextlib.asynccontextmanager
async def grading_deadline(timeout_s: float) -> AsyncIterator[asyncio.Timeout]:
    """Bound the scoring of one group in it, as `asyncio.timeout`; time in `waiting_turn` does not count."""
    async with asyncio.timeout(timeout_s) as deadline:
        clock = _Clock(deadline)
        token = _clock.set(clock)
        try:
            yield deadline
        finally:
            clock.is_over = True
            _clock.reset(token)


@contextlib.contextmanager
def waiting_turn() -> Iterator[Callable[[], None]]:
    """Stop the deadline of a scoring that waits in it for a thread or a worker; yield what says that it has one.

    What is yielded may be called in any thread.
    """
    clock = _clock.get()
    if clock is None:
        yield lambda: None
        return
    waits = True

    def begin() -> None:
        nonlocal waits
        if waits:
            waits = False
            clock.go_on()

    def begun() -> None:
        # the loop may have ended
        with contextlib.suppress(RuntimeError):
            clock.loop.call_soon_threadsafe(begin)

    clock.loop.call_soon_threadsafe(clock.stop)
    try:
        yield begun
    finally:
        begun()


async def _run_when_free(threads: DaemonThreads, work: Callable[[], T]) -> T:
    with waiting_turn() as begun:

        def begin() -> T:
            begun()
            return work()

        return await threads.run(begin)


# -- names and numbers -------------------------------------------------------------------------------------------


def is_group_func(func: Callable[..., Any]) -> bool:
    """Return whether a reward function has a parameter for whole groups."""
    return RewardCall(func).is_group


def reward_name(func: Callable[..., Any]) -> str:
    """Return a function's name; of a partial that of the function inside, of other callables that of their class."""
    func = without_partials(func) if isinstance(func, functools.partial) else func
    return getattr(func, "__name__", None) or type(func).__name__


def reward_names(funcs: Sequence[Callable[..., Any]]) -> list[str]:
    """Return the functions' names, which are their metrics' names; those of one name are numbered by their order."""
    names = [reward_name(func) for func in funcs]
    numbers = {name: itertools.count(1) for name, count in Counter(names).items() if count > 1}
    return [f"{name.strip('<>')}_{next(numbers[name])}" if name in numbers else name for name in names]


def _finite_list(value: Any) -> list[float]:
    try:
        return [finite_float(one) for one in value]
    except TypeError:
        raise GradingError(f"returned {value!r:.100}; a turn reward is a list, one number for each turn") from None


def _finite_dict(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise GradingError(f"returned {value!r:.100}; a role reward is a mapping of roles to numbers")
    return {str(role): finite_float(one) for role, one in value.items()}


def finite_float(value: Any) -> float:
    """Return the value as a float; a GradingError where it is not a finite number of float32."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise GradingError(f"returned {reprlib.repr(value)}, not a finite number")
    if abs(number) > LARGEST:
        raise GradingError(f"returned {number:g}, and float32 holds {LARGEST:g} at most")
    return number


def is_finite_number(value: Any) -> bool:
    """Return whether a value is an int or a float that is finite as a float."""
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:
        # a whole number that no float holds
        return False


# -- the same work, asked for at the same time -------------------------------------------------------------------


class SingleFlight:
    """One call for all callers that want the same at the same time; nothing is kept after it ends.

    Where the caller that does the work is cancelled, the next one does it.
    """

    def __init__(self) -> None:
        self._calls: dict[Hashable, asyncio.Future[Any]] = {}

    async def result(self, key: Hashable, work: Callable[[], Awaitable[T]]) -> T:
        """Return what `work()` gives, or gave to another caller with this key on this event loop that still waits."""
        loop = asyncio.get_running_loop()
        place = (id(loop), key)
        while (call := self._calls.get(place)) is not None:
            await asyncio.wait([call])
            if not call.cancelled():
                return call.result()
        call = self._calls[place] = loop.create_future()
        try:
            call.set_result(await work())
        except Exception as error:
            call.set_exception(error)
        finally:
            call.cancel()
            del self._calls[place]
        return call.result()
