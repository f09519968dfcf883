"""The client that `Environment.run_rollouts` is given: one recording client a prompt, all under one semaphore."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, overload

from verifiers.concurrency import gather_owned
from verifiers.errors import ConfigError, ModelError, OverlongPromptError
from verifiers.inference.limiter import Limiter, NoMoreSlotsError
from verifiers.rollouts.activity import RolloutActivity, counted_slot
from verifiers.rollouts.recording_client import RolloutClient, rows_from_turns
from verifiers.rollouts.rollout import Rollout, RolloutRequest, failure_from, straggler, timed_out
from verifiers.types import Failure, Outcome, RolloutInput, SamplingArgs, State, Timing

__all__ = [
    "FATAL_ERRORS",
    "BatchClient",
    "BatchLimits",
    "RolloutRecord",
    "completion_and_state",
]

logger = logging.getLogger("verifiers.rollouts")

PlaysRow = Callable[[RolloutInput, str, SamplingArgs, RolloutClient], Awaitable[Any]]
"""A rollout by row, model, sampling arguments and client; it gives (completion, state), or the state."""

FATAL_ERRORS = (ConfigError, NoMoreSlotsError)
"""Errors that every other rollout would repeat: they end the run instead of one rollout."""


@dataclass(slots=True)
class BatchLimits:
    """The limits that all rollouts of one call of `run_rollouts` share.

    Attributes:
        limiter: the semaphore of everything in flight.
        activity: counts what waits and runs.
        rollout_timeout_s: deadline of one rollout from its slot on, and of what the environment does beside its
            rollouts, in seconds.
        raises: raise the first failure instead of recording it.
        on_end: called with each rollout's record when the rollout has ended.
    """

    limiter: Limiter
    activity: RolloutActivity
    rollout_timeout_s: float
    raises: bool = False
    on_end: Callable[[RolloutRecord], None] | None = None
    _suspended: int = 0
    _is_dropped: bool = False
    _own_time: asyncio.Timeout | None = None

    def own_time(self) -> asyncio.Timeout:
        """Return a deadline, to be entered, of what the environment does while none of its rollouts waits or runs.

        Where the deadline is over, `failure` gives the reason.
        """
        self._own_time = asyncio.timeout(self.rollout_timeout_s)
        return self._own_time

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend the deadline of `own_time`, while a rollout waits for its slot or runs; it begins again after."""
        self._suspended += 1
        self._reschedule(None)
        try:
            yield
        finally:
            self._suspended -= 1
            if not self._suspended:
                self._reschedule(self.rollout_timeout_s)

    @asynccontextmanager
    async def call_slot(self) -> AsyncIterator[None]:
        """Hold a slot for one call to the policy that an environment makes outside of `BatchClient.play`."""
        async with AsyncExitStack() as held:
            with self.suspended():
                await held.enter_async_context(counted_slot(self.limiter, self.activity))
            yield

    def drop(self, records: Sequence[RolloutRecord]) -> None:
        """Drop the rollouts that are in play; where none is, what the environment does before the next of them."""
        in_play = [record for record in records if record.is_in_play]
        for record in in_play:
            record.drop()
        if not in_play and not all(record.has_ended for record in records):
            self._reschedule(0.0)
            self._is_dropped = True

    def failure(self, seconds: float) -> tuple[Outcome, Failure] | None:
        """Return the outcome of a batch whose own time is over, after `seconds` in all; None where it is not."""
        if self._own_time is None or not self._own_time.expired():
            return None
        return straggler(seconds) if self._is_dropped else timed_out(self.rollout_timeout_s)

    def _reschedule(self, delay_s: float | None) -> None:
        timeout = self._own_time
        if timeout is not None and not timeout.expired() and not self._is_dropped:
            timeout.reschedule(None if delay_s is None else asyncio.get_running_loop().time() + delay_s)


@dataclass(slots=True)
class RolloutRecord:
    """One rollout while it is played, and what became of it.

    Attributes:
        client: records what the policy answers.
        outcome: set where the rollout failed; None while it runs or where it is finished.
        failure: the reason, with `outcome`.
        timing: of the slot and of the rollout.
        result: the completion and the state of a rollout that `play` has run.
    """

    request: RolloutRequest
    client: RolloutClient
    outcome: Outcome | None = None
    failure: Failure | None = None
    timing: Timing = field(default_factory=Timing)
    result: tuple[Any, State] | None = None
    has_ended: bool = False
    _deadline: asyncio.Timeout | None = None
    _is_dropped: bool = False

    async def play(
        self, limits: BatchLimits, rollout: Callable[[RolloutClient], Awaitable[Any]]
    ) -> tuple[Any, State]:
        """Run one rollout under the limits; a failure is recorded, and its result has the error in the state.

        Raises:
            ConfigError, NoMoreSlotsError: an error that every other rollout would repeat.
            Exception: the failure, where the limits say so.
        """
        submitted = started = time.perf_counter()
        self._deadline = deadline = asyncio.timeout(0.0 if self._is_dropped else None)
        try:
            with limits.suspended():
                async with deadline, counted_slot(limits.limiter, limits.activity):
                    started = time.perf_counter()
                    if not deadline.expired() and not self._is_dropped:
                        deadline.reschedule(asyncio.get_running_loop().time() + limits.rollout_timeout_s)
                    self.client.has_slot = True
                    result = await rollout(self.client)
            completion, state = completion_and_state(result)
        except FATAL_ERRORS:
            raise
        except OverlongPromptError:
            # the environment let it propagate, and the conversation is lost
            state = self.bare_state()
            state["prompt_too_long"] = True
            completion = state["completion"]
        except (Exception, SystemExit) as error:
            state = self.bare_state()
            state["error"] = error
            completion = state["completion"]
            if not deadline.expired():
                self.fail(error)
            elif self._is_dropped:
                self.outcome, self.failure = straggler(time.perf_counter() - submitted)
            else:
                self.outcome, self.failure = timed_out(limits.rollout_timeout_s)
        finally:
            self._deadline = None
            self.client.has_slot = False
            self.timing.queued_s += started - submitted
            self.timing.generation_s += time.perf_counter() - started
        self.result = completion, state
        self.end(limits, state)
        return completion, state

    def end(self, limits: BatchLimits, state: State | None) -> None:
        """Judge the rollout by what its client recorded and by the state that it left, once.

        Raises:
            ConfigError, NoMoreSlotsError: the environment swallowed it.
            Exception: the failure, where the limits say so.
        """
        if self.failure is None and state is not None:
            self._judge(state)
        if not self.has_ended:
            self.has_ended = True
            if limits.on_end is not None:
                limits.on_end(self)
        if limits.raises and self.failure is not None:
            raise self.failure.exception or TimeoutError(self.failure.text)

    def fail(self, error: BaseException) -> None:
        """Record an exception as the rollout's failure."""
        policy_error = self.client.last_error
        is_provider = isinstance(error, ModelError) or _chain_has(error, policy_error)
        self.outcome = Outcome.PROVIDER_ERROR if is_provider else Outcome.ENVIRONMENT_ERROR
        self.failure = failure_from(error)

    def fail_with_batch(self, error: BaseException, expired: tuple[Outcome, Failure] | None) -> None:
        """Record that `run_rollouts` raised.

        Args:
            expired: the outcome of rollouts that had not ended, where the batch's own time was over.
        """
        if self.failure is not None:
            return
        if expired is None:
            self.fail(error)
        elif not self.has_ended:
            self.outcome, self.failure = expired

    @property
    def is_in_play(self) -> bool:
        """True while `play` runs."""
        return self._deadline is not None

    def drop(self) -> None:
        """Give the rollout up, if it is in play."""
        if self._deadline is not None and not self._deadline.expired():
            self._is_dropped = True
            self._deadline.reschedule(asyncio.get_running_loop().time())

    def bare_state(self) -> State:
        """Return the state of a rollout of which nothing is known but its request."""
        request = self.request
        return State(
            id=request.key.example_id,
            prompt=request.prompt,
            completion="" if isinstance(request.prompt, str) else [],
            answer=request.answer,
            task=request.task,
            info=dict(request.info),
            responses=[],
            trajectory=[],
            turn=0,
            timing={"generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0},
        )

    def finish(self, limits: BatchLimits, result: Any, seconds: float) -> Rollout:
        """Return the rollout, with exactly one outcome, from what `run_rollouts` gave for it.

        Args:
            result: (completion, state), or the state; None for a rollout that failed without one.
            seconds: that all rollouts of the batch took.
        """
        request = self.request
        completion: Any = None
        state: State | None = None
        if not self.has_ended:
            self.timing.generation_s = seconds
        if result is not None or self.failure is None:
            try:
                completion, state = completion_and_state(result)
            except TypeError as error:
                self.fail(error)
        self.end(limits, state)
        if self.failure is not None:
            logger.debug("rollout %s ended as %s: %s", request.key, self.outcome, self.failure)
            state = state if state is not None else self.bare_state()
            completion = state.get("completion") or ("" if isinstance(request.prompt, str) else [])
        assert state is not None
        # rubrics read the conversation from the state; the first generation of the API left it empty there
        state["completion"] = completion
        for name, value in (("prompt", request.prompt), ("answer", request.answer), ("task", request.task)):
            state.setdefault(name, value)
        state.setdefault("info", dict(request.info))
        cut_off = self.client.finish_reason == "length" or self.client.is_cut_off
        truncated = cut_off or _is_overlong(self.client, state)
        rows, forks = rows_from_turns(self.client.turns)
        # reward functions may ask the same server, but what it answers them is not trained on
        self.client.stop_recording()
        # a batch holds its clients: without this cycle a rollout is freed when it is let go of
        self.client.batch = self.client.call_slot = None
        # as the state has them: `setup_state` may draw the question, and the reward functions see that one
        return Rollout(
            key=request.key,
            outcome=self.outcome or (Outcome.TRUNCATED if truncated else Outcome.COMPLETED),
            prompt=state["prompt"],
            completion=completion,
            answer=state["answer"],
            task=state["task"],
            info=state["info"],
            rows=rows,
            forks=forks,
            turns=self.client.calls,
            failure=self.failure,
            attempts=1 + self.client.retries,
            timing=self.timing,
            usage=self.client.usage,
            state=state,
        )

    def _judge(self, state: State) -> None:
        policy_error, stored = self.client.fatal_error or self.client.last_error, state.get("error")
        if isinstance(policy_error, FATAL_ERRORS):
            raise policy_error
        if policy_error is not None:
            # the environment swallowed it and continued without the policy's answer
            self.outcome, self.failure = Outcome.PROVIDER_ERROR, failure_from(policy_error)
        elif isinstance(stored, BaseException) and not isinstance(stored, OverlongPromptError):
            self.fail(stored)


def _is_overlong(client: RolloutClient, state: State) -> bool:
    return (
        client.overlong or isinstance(state.get("error"), OverlongPromptError) or state.get("prompt_too_long") is True
    )


class BatchClient(Sequence[RolloutClient]):
    """A sequence of recording clients, `client[i]` for prompt i, which `Environment.run_rollouts` is given.

    A slice is a batch of those prompts, for `super().run_rollouts`. The batch of a single prompt is itself a client
    shaped like `openai.AsyncOpenAI`.

    Args:
        records: the rollouts, in the order of the prompts.
        limits: shared by all of them.
        sampling_args: for a `run_rollouts` that is given none.
    """

    def __init__(
        self, records: Sequence[RolloutRecord], limits: BatchLimits, sampling_args: dict[str, Any] | None = None
    ) -> None:
        self.records = records
        self.limits = limits
        self.sampling_args = sampling_args or {}
        for record in records:
            record.client.batch, record.client.call_slot = self, limits.call_slot

    @classmethod
    def of(cls, client: Any, prompts: int) -> BatchClient | None:
        """Return the batch that a client stands for, or None for a client that belongs to no batch.

        Raises:
            ConfigError: it was made for another number of prompts.
        """
        batch: BatchClient | None = None
        if isinstance(client, BatchClient):
            batch = client
        elif isinstance(client, RolloutClient) and isinstance(client.batch, BatchClient):
            batch = client.batch.only([record for record in client.batch.records if record.client is client])
        if batch is not None and len(batch.records) != prompts:
            raise ConfigError(
                f"run_rollouts was given {prompts} prompts with a client for {len(batch.records)}; give it "
                "client[i:j], the client of those prompts."
            )
        return batch

    def only(self, records: Sequence[RolloutRecord]) -> BatchClient:
        """Return the batch of some of the rollouts."""
        part = object.__new__(BatchClient)
        part.records, part.limits, part.sampling_args = records, self.limits, self.sampling_args
        return part

    def select(self, indices: Sequence[int]) -> BatchClient:
        """Return the batch of the prompts at these places."""
        return self.only([self.records[index] for index in indices])

    async def play_rows(
        self, rows: Sequence[RolloutInput], play: PlaysRow, model: str, sampling_args: SamplingArgs | None = None
    ) -> list[tuple[Any, State]]:
        """Play each row with its client, side by side; see `RolloutRecord.play`."""
        given = self.sampling_args if sampling_args is None else sampling_args

        work = []
        for row, record in zip(rows, self.records, strict=True):
            row = {**row, "example_id": record.request.key.example_id}
            rollout = functools.partial(play, row, model, dict(given))
            work.append(record.play(self.limits, rollout))
        # nothing runs beside a single one: a task of its own would only cost
        return [await work[0]] if len(work) == 1 else await gather_owned(work)

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, index: int) -> RolloutClient: ...
    @overload
    def __getitem__(self, index: slice) -> BatchClient: ...
    def __getitem__(self, index: int | slice) -> RolloutClient | BatchClient:
        if isinstance(index, slice):
            return self.only(self.records[index])
        return self.records[index].client

    # -- the shape of openai.AsyncOpenAI, for a batch of one prompt -------------------------------------------------

    @property
    def chat(self) -> Any:
        return self._single().chat

    @property
    def completions(self) -> Any:
        return self._single().completions

    @property
    def untrained(self) -> RolloutClient:
        """A client of the same server whose calls are not part of any rollout; see `RolloutClient.untrained`."""
        return self.records[0].client.untrained

    @property
    def base_url(self) -> str:
        return self.records[0].client.base_url

    @property
    def api_key(self) -> str:
        return self.records[0].client.api_key

    def with_options(self, **_: Any) -> BatchClient:
        """Return the same batch: timeouts and retries are the run's."""
        return self

    async def close(self) -> None:
        """Do nothing: connections belong to the run."""

    def _single(self) -> RolloutClient:
        if len(self.records) != 1:
            raise ConfigError(
                f"run_rollouts was given a client for {len(self.records)} prompts, and it was called as if it "
                "belonged to one; call client[i] for prompt i, so that each rollout's tokens are recorded as its own."
            )
        return self.records[0].client


def completion_and_state(result: Any) -> tuple[Any, State]:
    """Return what a rollout gave, (completion, state) or the state alone, as (completion, state).

    Raises:
        TypeError: neither of them.
    """
    completion, state = result if isinstance(result, tuple) and len(result) == 2 else (None, result)
    if not isinstance(state, dict):
        raise TypeError(
            f"rollout returned {result!r:.200}; it must return (completion, state), or the state as a dict"
        )
    return (state.get("completion") if state is result else completion), state  # type: ignore[return-value]


def _chain_has(error: BaseException | None, wanted: BaseException | None) -> bool:
    seen: set[int] = set()
    # `raise error from error` makes a chain without an end
    while error is not None and wanted is not None and id(error) not in seen:
        if error is wanted:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
