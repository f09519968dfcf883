"""Rank 0's side of one worker: the batches that it plays, their calls of the model, and its scores."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context
from typing import Any, Protocol

from verifiers.errors import ConfigError, RolloutWorkerError
from verifiers.inference.wire import plain_data
from verifiers.rollouts.batch_client import FATAL_ERRORS, BatchClient, RolloutRecord
from verifiers.rollouts.recording_client import RecordedAnswer, RolloutClient
from verifiers.types import Outcome, RolloutKey, RolloutScore, State
from verifiers.workers.connection import Connection, error_from, failure_data, failure_from_data

__all__ = ["PlayedState", "RunningWorker", "WorkerLink"]

logger = logging.getLogger("verifiers.workers")

Message = Mapping[str, Any]

_TOKEN_FIELDS = ("logprobs", "prompt_token_ids", "token_ids", "weight_versions")


class RunningWorker(Protocol):
    """A started process or actor."""

    def kill(self) -> None:
        """End it at once, whatever it does."""
        ...

    async def wait(self) -> str:
        """Wait for its end and return the reason, for the end of a sentence."""
        ...


class PlayedState(State):
    """The state of a rollout that a worker played; what reward functions need of it stays there.

    Attributes:
        link: to the worker.
        place: batch and index there.
    """

    link: WorkerLink
    place: tuple[int, int]


class WorkerLink:
    """One worker, from its start to its end; belongs to one event loop.

    Args:
        number: of the worker, for logs and errors.
        grace_s: seconds within which it answers a cancellation, before it is killed.
        on_change: called when it may take more, or has become ready.

    Attributes:
        in_play: rollouts that it plays.
        unscored: rollouts that it plays, or holds for their score.
        groups: number of batches that it plays or holds, by group.
        is_ready: its environment is loaded.
        is_retiring: it gets no further group.
        failure: its environment could not be loaded.
        size_bytes, first_bytes: its memory, and what it had when it was ready.
    """

    def __init__(self, number: int, grace_s: float, on_change: Callable[[WorkerLink], None]) -> None:
        self.number = number
        self.connection = Connection(self._take, self._lose)
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running: RunningWorker | None = None
        self.in_play = self.unscored = 0
        self.groups: Counter[tuple[int, int]] = Counter()
        self.is_ready = self.is_retiring = False
        self.failure: Exception | None = None
        self.size_bytes = self.first_bytes = 0
        self._grace_s, self._on_change = grace_s, on_change
        self._numbers = itertools.count()
        self._batches: dict[int, _PlayedBatch] = {}
        self._scores: dict[int, asyncio.Future[list[dict[str, Any]]]] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._timers: dict[Any, asyncio.TimerHandle] = {}

    @property
    def may_play(self) -> bool:
        """True where its environment is loaded and it has ended all that was to end."""
        return self.is_ready and not self._timers

    # -- for the pool ---------------------------------------------------------------------------------------------

    async def play(
        self, env: int, batch: BatchClient, model: str, rows: Sequence[Mapping[str, Any]], sampling_args: Any
    ) -> list[tuple[Any, State]]:
        """Play the rollouts of a batch and return (completion, state) of each.

        Raises:
            RolloutWorkerError: the worker died meanwhile.
            ConfigError, MissingTokenIdsError, NoMoreSlotsError: an error that every other rollout would repeat.
        """
        number, size = next(self._numbers), len(rows)
        played = self._batches[number] = _PlayedBatch(self, number, batch)
        self.groups[played.group] += 1
        self.in_play += size
        self.unscored += size
        try:
            client = batch.records[0].client
            message = {
                "op": "run", "batch": number, "env": env, "model": model, "rows": rows,
                "sampling_args": sampling_args,
                "keys": [(key.block_id, key.example_id, key.generation) for key in played.keys],
                "timeout_s": batch.limits.rollout_timeout_s, "base_url": client.base_url, "api_key": client.api_key,
            }  # fmt: skip
            return await played.run(message)
        finally:
            self.in_play -= size
            if played.is_done and not played.holds:
                self.drop({number})
            elif not played.holds:
                self._forget(number)
                self.cancel("batch", number)
            self._on_change(self)

    async def score(self, env: int, states: Sequence[PlayedState]) -> list[RolloutScore]:
        """Score rollouts that this worker holds, and free them.

        Raises:
            RolloutWorkerError: the worker died before.
            Exception: what the rubric raised.
        """
        number, numbers = next(self._numbers), {state.place[0] for state in states}
        if not numbers <= self._batches.keys():
            raise RolloutWorkerError(f"worker {self.number} died before the rollouts were scored")
        waiting = self._scores[number] = asyncio.get_running_loop().create_future()
        places = [state.place for state in states]
        self.connection.send({"op": "score", "score": number, "env": env, "places": places})
        try:
            results = await waiting
        except asyncio.CancelledError:
            self.cancel("score", number)
            raise
        finally:
            del self._scores[number]
            for held in numbers:
                self._forget(held)
            self._on_change(self)
        for state, result in zip(states, results, strict=True):
            state.update(reward=result["score"]["reward"], metrics=result["score"]["metrics"])
            if result["advantage"] is not None:
                state["advantage"] = result["advantage"]
        return [RolloutScore(**result["score"]) for result in results]

    def drop(self, numbers: set[int]) -> None:
        """Free batches that the worker has played and that nobody will score."""
        for number in numbers & self._batches.keys():
            self._forget(number)
            self.connection.send({"op": "cancel", "kind": "batch", "number": number})
        self._on_change(self)

    def lose(self, reason: str) -> list[RolloutKey]:
        """End everything that is under way here, and return the rollouts that were played or held."""
        self.is_ready = False
        error = RolloutWorkerError(f"worker {self.number} {reason}")
        for timer in self._timers.values():
            timer.cancel()
        for task in self._calls.values():
            task.cancel()
        keys = [key for played in self._batches.values() for key in played.keys]
        for number, played in list(self._batches.items()):
            played.lose(error)
            self._forget(number)
        for waiting in self._scores.values():
            if not waiting.done():
                waiting.set_exception(RolloutWorkerError(*error.args))
        return keys

    def cancel(self, kind: str, number: int) -> None:
        """Cancel a batch or a score; a worker that does not answer is killed after `grace_s`."""
        if not self.lost.done():
            self.connection.send({"op": "cancel", "kind": kind, "number": number})
            self.expect((kind, number))

    def expect(self, what: Any, within_s: float | None = None) -> None:
        """Kill the worker unless `what` has come within so many seconds; `grace_s` when left out."""
        limit_s = self._grace_s if within_s is None else within_s

        def kill() -> None:
            if self.running is not None:
                logger.warning("worker %d gives no answer for %g s and is killed.", self.number, limit_s)
                self.running.kill()

        if what not in self._timers:
            self._timers[what] = asyncio.get_running_loop().call_later(limit_s, kill)

    def _settle(self, what: Any) -> None:
        timer = self._timers.pop(what, None)
        if timer is not None:
            timer.cancel()
            self._on_change(self)

    def _forget(self, number: int) -> None:
        played = self._batches.pop(number, None)
        if played is not None:
            self.unscored -= len(played.keys)
            for index in range(len(played.keys)):
                self._settle((number, index))
            self.groups[played.group] -= 1
            self.groups += Counter()

    # -- what the worker sends ------------------------------------------------------------------------------------

    def _lose(self) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def _take(self, message: Message) -> None:
        getattr(self, f"_on_{message['op']}")(message)

    def _on_ready(self, message: Message) -> None:
        self.is_ready = True
        self._settle("ready")
        self.size_bytes = self.first_bytes = message["bytes"]
        self._on_change(self)

    def _on_failed(self, message: Message) -> None:
        self.failure = error_from(message["error"])
        self._on_change(self)

    def _on_size(self, message: Message) -> None:
        self.size_bytes = message["bytes"]
        self._on_change(self)

    def _on_log(self, message: Message) -> None:
        logging.getLogger(message["name"]).log(message["level"], "worker %d: %s", self.number, message["text"])

    def _on_play(self, message: Message) -> None:
        number, index = message["place"]
        if number in self._batches:
            self._batches[number].begin(index)

    def _on_end(self, message: Message) -> None:
        number, index = message["place"]
        self._settle((number, index))
        if number in self._batches:
            self._batches[number].end(index, message)

    def _on_done(self, message: Message) -> None:
        if message["batch"] in self._batches:
            self._batches[message["batch"]].finish(message)

    def _on_ended(self, message: Message) -> None:
        self._settle((message["kind"], message["number"]))

    def _on_scored(self, message: Message) -> None:
        waiting = self._scores.get(message["score"])
        if waiting is None or waiting.done():
            return
        if "error" in message:
            waiting.set_exception(error_from(message["error"]))
        else:
            waiting.set_result(message["scores"])

    def _on_call(self, message: Message) -> None:
        number, (batch, index) = message["call"], message["place"]
        if batch in self._batches:
            played = self._batches[batch]
            work = played.call(index, message)
            task = self._calls[number] = asyncio.create_task(work, context=played.contexts.get(index))
            task.add_done_callback(lambda _: self._calls.pop(number, None))
        else:
            over = ConfigError("the rollout is over, and its client was called.")
            self.connection.send({"op": "answer", "call": number, "error": failure_data(over)})

    def _on_abandon(self, message: Message) -> None:
        task = self._calls.get(message["call"])
        if task is None or not task.cancel():
            # the answer was sent, and nobody reads it
            self._on_forget_answer(message)

    def _on_forget_answer(self, message: Message) -> None:
        number, index = message["place"]
        if number in self._batches:
            self._batches[number].forget(index, message["call"])


class _PlayedBatch:
    """The rollouts of one batch while a worker plays them, and until they are scored.

    Attributes:
        keys: of the rollouts.
        holds: the worker holds at least one of them for its score.
        is_done: the worker has played them.
        contexts: of the rollouts that have their slots, for their calls.
    """

    def __init__(self, link: WorkerLink, number: int, batch: BatchClient) -> None:
        self._link, self._number, self._batch = link, number, batch
        self.records: Sequence[RolloutRecord] = batch.records
        self.keys = [record.request.key for record in self.records]
        self.group = (self.keys[0].block_id, self.keys[0].example_id)
        self.holds = self.is_done = False
        self._tasks: asyncio.TaskGroup | None = None
        self._results: asyncio.Future[list[tuple[Any, State]]] = asyncio.get_running_loop().create_future()
        self.contexts: dict[int, Context] = {}
        self._queued: dict[int, asyncio.Task[None]] = {}
        self._ends: dict[int, asyncio.Future[None]] = {}
        self._recorded: dict[int, RecordedAnswer] = {}
        self._lost: RolloutWorkerError | None = None

    async def run(self, message: Message) -> list[tuple[Any, State]]:
        self._link.connection.send(message)
        started = time.perf_counter()
        results: list[tuple[Any, State]] = []
        try:
            async with asyncio.TaskGroup() as self._tasks:
                results = await self._results
        except asyncio.CancelledError:
            expired = self._batch.limits.failure(time.perf_counter() - started)
            # those that have ended, too: their completions are in the worker
            for record in self.records:
                if expired is not None and record.failure is None:
                    record.outcome, record.failure = expired
            raise
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
        else:
            if self._lost is not None:
                raise self._lost
            self.holds = any(record.failure is None for record in self.records)
            return results
        raise first

    def lose(self, error: RolloutWorkerError) -> None:
        self._lost = error
        for end in self._ends.values():
            if not end.done():
                end.set_exception(RolloutWorkerError(*error.args))
        if not self._results.done():
            # the rollouts that are in play record it first
            self._results.set_result([])

    def begin(self, index: int) -> None:
        """Play a rollout as soon as it has its slot."""
        assert self._tasks is not None
        self._queued[index] = self._tasks.create_task(self._begin(index))

    async def _begin(self, index: int) -> None:
        place = (self._number, index)
        try:
            await self.records[index].play(self._batch.limits, functools.partial(self._play, index))
        finally:
            self._queued.pop(index, None)
            end = self._ends.get(index)
            # one that has ended answers no more
            if (end is None or end.cancelled()) and not self.is_done and self._lost is None:
                self._link.connection.send({"op": "drop", "place": place})
                self._link.expect(place)

    async def _play(self, index: int, _: RolloutClient) -> State:
        self._queued.pop(index, None)
        self.contexts[index] = copy_context()
        if self._lost is not None:
            raise RolloutWorkerError(*self._lost.args)
        end = self._ends[index] = asyncio.get_running_loop().create_future()
        self._link.connection.send({"op": "begin", "place": (self._number, index)})
        await end
        return self.records[index].bare_state()

    def end(self, index: int, message: Message) -> None:
        end = self._ends.get(index)
        if end is None or end.done():
            return
        fatal = self.records[index].client.fatal_error
        if isinstance(fatal, FATAL_ERRORS):
            end.set_exception(fatal)
            return
        self._judge(index, message)
        end.set_result(None)

    def finish(self, message: Message) -> None:
        self.is_done = True
        for task in self._queued.values():
            # a slot would be for nothing
            task.cancel()
        for end in self._ends.values():
            if not end.done():
                end.set_result(None)
        if self._results.done():
            return
        fatal = [one for record in self.records if isinstance(one := record.client.fatal_error, FATAL_ERRORS)]
        if fatal or "error" in message:
            self._results.set_exception(fatal[0] if fatal else error_from(message["error"]))
            return
        results: list[tuple[Any, State]] = []
        for index, (record, result) in enumerate(zip(self.records, message["results"], strict=True)):
            self._judge(index, result)
            state = PlayedState(record.bare_state() | result["state"])
            state.link, state.place = self._link, (self._number, index)
            results.append((result["completion"], state))
        self._results.set_result(results)

    def _judge(self, index: int, verdict: Message) -> None:
        """Take what the worker knows of a rollout's end; its own deadline on rank 0 counts first."""
        record = self.records[index]
        client = record.client
        client.is_cut_off |= verdict.get("is_cut_off", False)
        # the worker knows which of the failed calls its environment has made good
        client.overlong = verdict.get("overlong", False)
        client.last_error = None
        if "failure" in verdict and record.failure is None:
            record.outcome = Outcome(verdict["outcome"])
            record.failure = failure_from_data(verdict["failure"])

    # -- the model ------------------------------------------------------------------------------------------------

    async def call(self, index: int, message: Message) -> None:
        """Make a call of the model and send its answer."""
        client: RolloutClient = self.records[index].client
        client = client if message["trained"] else client.untrained
        arguments = message["arguments"]
        try:
            response, recorded = await client.call(message["path"], arguments)
            if recorded is not None:
                self._recorded[message["call"]] = recorded
            answer = {"response": _without_tokens(plain_data(response), arguments)}
            self._link.connection.send({"op": "answer", "call": message["call"], **answer})
        except Exception as error:
            self._link.connection.send({"op": "answer", "call": message["call"], "error": failure_data(error)})

    def forget(self, index: int, call: int) -> None:
        recorded = self._recorded.pop(call, None)
        if recorded is not None:
            self.records[index].client.forget(recorded)


def _without_tokens(response: Message, arguments: Message) -> Message:
    """Return an answer without the token ids and log-probs that the environment has not asked for."""
    extra = arguments.get("extra_body") or {}
    asked = any((arguments.get(name) or extra.get(name)) for name in ("logprobs", "return_token_ids"))
    if asked or "choices" not in response:
        return response
    choices = [
        {name: value for name, value in choice.items() if name not in _TOKEN_FIELDS} for choice in response["choices"]
    ]
    return {**{name: value for name, value in response.items() if name not in _TOKEN_FIELDS}, "choices": choices}
