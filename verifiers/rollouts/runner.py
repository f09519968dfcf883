"""Rollouts that end: every request becomes exactly one `Rollout` with exactly one outcome.

Training, evaluation and the classic calls all come here. The runner calls the environment's `run_rollouts`, once a
group, and turns what can go wrong into outcomes: a failure of the machinery is never a reward of 0.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from verifiers.errors import ConfigError, RolloutWorkerError
from verifiers.inference.endpoint import Backend
from verifiers.inference.limiter import Limiter
from verifiers.inference.retry import RetryPolicy
from verifiers.inference.token_in import TokenIn
from verifiers.rollouts.activity import RolloutActivity
from verifiers.rollouts.batch_client import (
    FATAL_ERRORS,
    BatchClient,
    BatchLimits,
    RolloutRecord,
)
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.rollouts.rollout import Group, Rollout, RolloutRequest, failure_from
from verifiers.rubrics.scoring import call_score_group
from verifiers.types import Failure, Outcome, RolloutScore

__all__ = ["RolloutRunner", "RunsRollouts", "relaxed_gc"]

YOUNG_OBJECTS = 50_000
"""Allocations between two young collections while rollouts run: each would walk the rollouts in flight."""


class RunsRollouts(Protocol):
    """The part of an Environment that the runner uses."""

    rubric: Any
    sampling_args: dict[str, Any]

    async def run_rollouts(
        self,
        client: Any,
        model: str,
        prompts: Any,
        answers: Any,
        tasks: Any = None,
        infos: Any = None,
        sampling_args: Any = None,
    ) -> Any: ...


@dataclass(slots=True)
class RolloutRunner:
    """A runner that plays and scores rollouts of one environment against one endpoint.

    Attributes:
        model: the policy's name on the server.
        sampling_args: OpenAI sampling arguments, e.g. temperature, max_tokens.
        limiter: what may be in flight at once; share it to bound several runners together.
        rollout_timeout_s: deadline of one rollout from its start, in seconds.
        grading_timeout_s: deadline for scoring one group, in seconds.
        require_tokens: the server must return token ids and log-probs (training).
        policy_version: policy version now on the server.
        token_in: how turns are sent as token ids; None sends messages.
        check_call: of each trained call where tokens are required; see `RolloutClient`.
        vocab_size: number of token ids that the policy has, where that is known.
        on_rollout: called with every finished, scored rollout, on the event loop.
        activity: counts what waits, runs and is scored.
    """

    env: RunsRollouts
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
    on_rollout: Callable[[Rollout], None] | None = None
    activity: RolloutActivity = field(default_factory=RolloutActivity)

    async def run_group(self, requests: Sequence[RolloutRequest], *, score: bool = True) -> Group:
        """Run the rollouts of one prompt concurrently, then score them together.

        Raises:
            ConfigError: a mistake that every other rollout would repeat.
        """
        return await self.finish_group(await self.run_batch(requests), score=score)

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
        """Run and score groups, in order; a group is begun when the ones before it have their slots.

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

    async def run_batch(
        self,
        requests: Sequence[RolloutRequest],
        *,
        on_begin: Callable[[BatchClient], None] | None = None,
        on_end: Callable[[RolloutRecord], None] | None = None,
    ) -> list[Rollout]:
        """Run rollouts to their end by one call of the environment's `run_rollouts`, without scores.

        Args:
            on_begin: given the batch before it is played, to drop it.
            on_end: given each rollout's record when the rollout has ended.

        Raises:
            ConfigError: a mistake that every other rollout would repeat.
            NoMoreSlotsError: the limiter was closed before all of them had begun.
        """
        # the rollouts of a group share a request, and environments write into what they are given
        columns: dict[str, list[Any]] = {
            "prompts": [_own_copy(request.prompt) for request in requests],
            "answers": [request.answer for request in requests],
            "tasks": [request.task for request in requests],
            "infos": [_own_copy(request.info) for request in requests],
        }
        batch = self.batch_client(requests, on_end=on_end)
        if on_begin is not None:
            on_begin(batch)
        started = time.perf_counter()
        try:
            async with batch.limits.own_time():
                results: Any = await self.env.run_rollouts(
                    batch, self.model, **columns, sampling_args=dict(self.sampling_args)
                )
        except FATAL_ERRORS:
            raise
        except (Exception, SystemExit) as error:
            expired = batch.limits.failure(time.perf_counter() - started)
            for record in batch.records:
                record.fail_with_batch(error, expired)
            results = [record.result for record in batch.records]
        if not isinstance(results, Sequence) or len(results) != len(requests):
            given = f"{len(results)} results" if isinstance(results, Sequence) else f"{results!r:.100}"
            raise ConfigError(
                f"{type(self.env).__name__}.run_rollouts returned {given} for {len(requests)} prompts; return one "
                "(completion, state) for each prompt, in order."
            )
        seconds = time.perf_counter() - started
        rollouts = []
        for record, result in zip(batch.records, results, strict=True):
            rollouts.append(record.finish(batch.limits, result, seconds))
        return rollouts

    def batch_client(
        self,
        requests: Sequence[RolloutRequest],
        *,
        raises: bool = False,
        on_end: Callable[[RolloutRecord], None] | None = None,
    ) -> BatchClient:
        """Return the client with which `run_rollouts` plays these requests."""
        limits = BatchLimits(self.limiter, self.activity, self.rollout_timeout_s, raises=raises, on_end=on_end)
        records = [RolloutRecord(request, self._client(request)) for request in requests]
        return BatchClient(records, limits, self.sampling_args)

    def _client(self, request: RolloutRequest) -> RolloutClient:
        return RolloutClient(
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
        deadline = asyncio.timeout(self.grading_timeout_s)
        self.activity.change(scoring=len(finished))
        try:
            async with deadline:
                scores = await call_score_group(self.env.rubric, states)
        except RolloutWorkerError as error:
            # the rollouts are gone with it, and not only their grades
            outcome, failure = Outcome.ENVIRONMENT_ERROR, failure_from(error)
        except Exception as error:
            failure = (
                Failure("TimeoutError", f"scoring did not end within grading_timeout_s={self.grading_timeout_s:g}")
                if deadline.expired()
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


def _own_copy(value: Any) -> Any:
    """Return a deep copy; of plain JSON data, which prompts nearly always are, faster than `copy.deepcopy`."""
    kind = type(value)
    if kind is str or kind is int or kind is float or kind is bool or value is None:
        return value
    if kind is dict:
        return {name: _own_copy(item) for name, item in value.items()}
    if kind is list:
        return [_own_copy(item) for item in value]
    return copy.deepcopy(value)


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
