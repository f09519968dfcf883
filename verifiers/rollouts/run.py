"""Run: an environment, the policy that plays it, and the limits that all rollouts of a run share.

Training, evaluation and the classic calls all come here. Every request becomes exactly one `Rollout` with exactly one
outcome, and groups are scored together: a failure of the machinery is never a reward of 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from verifiers.errors import ConfigError, RolloutWorkerError
from verifiers.inference.endpoint import Backend
from verifiers.inference.limiter import Limiter, NoMoreSlotsError
from verifiers.inference.retry import RetryPolicy
from verifiers.inference.token_in import TokenIn
from verifiers.rollouts.activity import RolloutActivity
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.rollouts.rollout import Group, Rollout, RolloutRequest, failure_from
from verifiers.rubrics.scoring import grading_deadline
from verifiers.types import Failure, Outcome, RolloutKey, RolloutScore

__all__ = ["Deadlines", "Run", "relaxed_gc"]

YOUNG_OBJECTS = 50_000
"""Allocations between two young collections while rollouts run: each would walk the rollouts in flight."""


class Deadlines:
    """The deadlines of rollouts, which may all be given up at once.

    Attributes:
        are_dropped: they were given up, and so is every later one.
    """

    def __init__(self) -> None:
        self.are_dropped = False
        self._made: weakref.WeakSet[asyncio.Timeout] = weakref.WeakSet()

    def new(self) -> asyncio.Timeout:
        """Return a timeout, to be entered, that is not over before `start` or `drop` says so."""
        deadline = asyncio.timeout(0.0 if self.are_dropped else None)
        self._made.add(deadline)
        return deadline

    def start(self, deadline: asyncio.Timeout, seconds: float) -> None:
        """Let an entered deadline end so many seconds from now."""
        if not deadline.expired():
            deadline.reschedule(asyncio.get_running_loop().time() + seconds)

    def drop(self) -> None:
        """End all deadlines now."""
        self.are_dropped = True
        for deadline in self._made:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self.start(deadline, 0.0)


@dataclass(slots=True)
class Run:
    """What the rollouts of a run share.

    Attributes:
        env: the environment; its `run_rollouts` and its `rubric` are used.
        model: the policy's name on the server.
        sampling_args: OpenAI sampling arguments, e.g. temperature, max_tokens.
        limiter: what may be in flight at once; share it to bound several runs together.
        rollout_timeout_s: deadline of one rollout from its start, in seconds.
        grading_timeout_s: deadline for scoring one group, in seconds.
        require_tokens: the server must return token ids and log-probs (training).
        policy_version: policy version now on the server.
        token_in: how turns are sent as token ids; None sends messages.
        check_call: of each trained call where tokens are required; see `RolloutClient`.
        vocab_size: number of token ids that the policy has, where that is known.
        on_end: called with every rollout that was played, before it is scored; what it raises ends the run.
        on_rollout: called with every finished, scored rollout, on the event loop.
        activity: counts what waits, runs and is scored.
        workers: give the player of a rollout, where the environment does not play it itself; see `player`.
    """

    env: Any
    backend: Backend
    model: str
    sampling_args: dict[str, Any] = field(default_factory=dict)
    limiter: Limiter = field(default_factory=Limiter)
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    rollout_timeout_s: float = 600.0
    grading_timeout_s: float = 120.0
    require_tokens: bool = False
    policy_version: Callable[[], int] | None = None
    token_in: TokenIn | None = None
    check_call: Callable[[Mapping[str, Any]], None] | None = None
    vocab_size: int | None = None
    on_end: Callable[[Rollout], None] | None = None
    on_rollout: Callable[[Rollout], None] | None = None
    activity: RolloutActivity = field(default_factory=RolloutActivity)
    workers: Any = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    _clients: dict[RolloutKey, RolloutClient] = field(default_factory=dict)

    # -- one rollout ----------------------------------------------------------------------------------------------

    def client(self, request: RolloutRequest) -> RolloutClient:
        """Return the client of a rollout; one that is played a second time continues its trace."""
        client = self._clients.get(request.key)
        if client is not None:
            client.record()
        else:
            client = self._clients[request.key] = RolloutClient(
                self.backend,
                limiter=self.limiter,
                retry=self.retry,
                model=self.model,
                seed=request.seed,
                require_tokens=self.require_tokens,
                policy_version=self.policy_version,
                token_in=self.token_in,
                check_call=self.check_call,
                vocab_size=self.vocab_size,
                group=(request.key.block_id, request.key.example_id),
            )
        return client

    def player(self, env: Any, request: RolloutRequest) -> AbstractAsyncContextManager[Any]:
        """Give what plays a rollout of `env`, by its `play(state)`: the environment, or a worker that has room."""
        return nullcontext(env) if self.workers is None else self.workers.player(env, request, self.limiter)

    # -- groups ---------------------------------------------------------------------------------------------------

    async def play(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Play rollouts to their end by one call of the environment's `run_rollouts`, without scores.

        Raises:
            ConfigError: a mistake that every other rollout would repeat.
            NoMoreSlotsError: the limiter was closed before all of them had begun.
        """
        # a rollout that is retried later gets another client
        run = dataclasses.replace(self, _clients={})
        try:
            rollouts = await self.env.run_rollouts(requests, run)
        except (ConfigError, NoMoreSlotsError):
            raise
        except (Exception, SystemExit) as error:
            # an override's own mistake, beside the rollouts that it plays
            return [_unplayed(request, error) for request in requests]
        keys = [request.key for request in requests]
        if not isinstance(rollouts, Sequence) or [getattr(one, "key", None) for one in rollouts] != keys:
            given = f"{len(rollouts)} results" if isinstance(rollouts, Sequence) else f"{rollouts!r:.100}"
            raise ConfigError(
                f"{type(self.env).__name__}.run_rollouts returned {given} for {len(requests)} requests; return one "
                "Rollout for each request, in order."
            )
        return list(rollouts)

    async def run_group(self, requests: Sequence[RolloutRequest], *, score: bool = True) -> Group:
        """Play the rollouts of one prompt concurrently, then score them together.

        Raises:
            ConfigError: a mistake that every other rollout would repeat.
        """
        return await self.finish_group(await self.play(requests), score=score)

    async def finish_group(self, rollouts: list[Rollout], *, score: bool = True) -> Group:
        """Score the finished rollouts of one prompt together and drop their clients."""
        if score:
            await self.score(rollouts)
        for rollout in rollouts:
            # a finished rollout holds no connection, nor the tokens that its handle recorded
            rollout.state.pop("client", None)
        if self.on_rollout is not None:
            for rollout in rollouts:
                self.on_rollout(rollout)
        rollouts.sort(key=lambda rollout: rollout.key)
        return Group(rollouts[0].key.example_id, rollouts)

    async def run_groups(self, groups: Iterable[Sequence[RolloutRequest]]) -> list[Group]:
        """Play and score groups, in order; a group is begun when the ones before it have their slots.

        Raises:
            ConfigError: as `run_group`; the other groups are cancelled.
        """
        try:
            with relaxed_gc():
                async with asyncio.TaskGroup() as tasks:
                    running = []
                    for group in groups:
                        await self.limiter.wait_for_room()
                        running.append(tasks.create_task(self.run_group(group)))
                return [task.result() for task in running]
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
        raise first

    async def score(self, rollouts: Sequence[Rollout]) -> None:
        """Score the finished rollouts of one group in place; one whose grading fails becomes `grading_error`.

        Where the worker that holds them died, they become `environment_error`.
        """
        finished = [rollout for rollout in rollouts if rollout.failure is None]
        if not finished:
            return
        states = [rollout.state for rollout in finished]
        started = time.perf_counter()
        failure: Failure | None = None
        outcome = Outcome.GRADING_ERROR
        scores: list[RolloutScore] = []
        deadline: asyncio.Timeout | None = None
        self.activity.change(scoring=len(finished))
        try:
            async with grading_deadline(self.grading_timeout_s) as deadline:
                scores = await self.env.rubric.score_group(states)
        except RolloutWorkerError as error:
            # the rollouts are gone with it, and not only their grades
            outcome, failure = Outcome.ENVIRONMENT_ERROR, failure_from(error)
        except Exception as error:
            failure = (
                Failure("TimeoutError", f"scoring did not end within grading_timeout_s={self.grading_timeout_s:g}")
                if deadline is not None and deadline.expired()
                else failure_from(error)
            )
        finally:
            self.activity.change(scoring=-len(finished))
        for index, rollout in enumerate(finished):
            rollout.timing.scoring_s = time.perf_counter() - started
            if failure is not None:
                rollout.outcome, rollout.failure = outcome, failure
            else:
                rollout.take_score(scores[index])


def _unplayed(request: RolloutRequest, error: BaseException) -> Rollout:
    """Return the rollout of a request whose environment failed beside its rollouts."""
    completion: Any = "" if isinstance(request.prompt, str) else []
    row = (request.prompt, completion, request.answer, request.task, request.info)
    return Rollout(request.key, Outcome.ENVIRONMENT_ERROR, *row, failure=failure_from(error))


_gc_lock = threading.Lock()
_gc_users = 0
_gc_before: tuple[int, int, int] = (700, 10, 10)


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Raise the garbage collector's first threshold to at least `YOUNG_OBJECTS`.

    May be nested, and used from any thread.
    """
    global _gc_users, _gc_before
    with _gc_lock:
        _gc_users += 1
        if _gc_users == 1:
            _gc_before = gc.get_threshold()
            # 0 means that the user has switched automatic collection off
            if 0 < _gc_before[0] < YOUNG_OBJECTS:
                gc.set_threshold(YOUNG_OBJECTS, *_gc_before[1:])
    try:
        yield
    finally:
        with _gc_lock:
            _gc_users -= 1
            if _gc_users == 0:
                gc.set_threshold(*_gc_before)
