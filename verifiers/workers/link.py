"""Rank 0's side of one worker: what it plays and holds, its scores, and its end."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from verifiers.errors import ConfigError, RolloutWorkerError
from verifiers.rollouts.batch_client import BatchClient
from verifiers.types import RolloutScore, State
from verifiers.workers.connection import Connection, error_from, failure_data
from verifiers.workers.played_batch import PlayedBatch, PlayedState

__all__ = ["RunningWorker", "WorkerLink"]

logger = logging.getLogger("verifiers.workers")

Message = Mapping[str, Any]


class RunningWorker(Protocol):
    """A started process or actor."""

    def kill(self) -> None:
        """End it at once, whatever it does."""
        ...

    async def wait(self) -> str:
        """Wait for its end and return the reason, for the end of a sentence."""
        ...


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
        self._batches: dict[int, PlayedBatch] = {}
        self._scores: dict[int, asyncio.Future[list[dict[str, Any]]]] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._timers: dict[Any, asyncio.TimerHandle] = {}

    @property
    def may_play(self) -> bool:
        """True where its environment is loaded, its connection stands, and it has ended all that was to end."""
        return self.is_ready and not self.lost.done() and not self._timers

    # -- for the pool ---------------------------------------------------------------------------------------------

    async def play(
        self, env: int, batch: BatchClient, model: str, rows: Sequence[Mapping[str, Any]], sampling_args: Any
    ) -> list[tuple[Any, State]]:
        """Play the rollouts of a batch and return (completion, state) of each.

        Raises:
            RolloutWorkerError: the worker died meanwhile.
            ConfigError, NoMoreSlotsError: an error that every other rollout would repeat.
        """
        number, size = next(self._numbers), len(rows)
        played = self._batches[number] = PlayedBatch(self, number, batch)
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

    def lose(self, reason: str) -> bool:
        """End everything that is under way here, and tell whether rollouts were played or held."""
        self.is_ready = False
        error = RolloutWorkerError(f"worker {self.number} {reason}")
        for timer in self._timers.values():
            timer.cancel()
        for task in self._calls.values():
            task.cancel()
        has_lost = bool(self._batches)
        for number, played in list(self._batches.items()):
            played.lose(error)
            self._forget(number)
        for waiting in self._scores.values():
            if not waiting.done():
                waiting.set_exception(RolloutWorkerError(*error.args))
        return has_lost

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
                logger.warning("worker %d did not answer within %g s and was killed.", self.number, limit_s)
                self.running.kill()

        if what not in self._timers:
            self._timers[what] = asyncio.get_running_loop().call_later(limit_s, kill)

    def _stop_expecting(self, what: Any) -> None:
        timer = self._timers.pop(what, None)
        if timer is not None:
            timer.cancel()
            self._on_change(self)

    def _forget(self, number: int) -> None:
        played = self._batches.pop(number, None)
        if played is not None:
            self.unscored -= len(played.keys)
            for index in range(len(played.keys)):
                self._stop_expecting((number, index))
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
        self._stop_expecting("ready")
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
        self._stop_expecting((number, index))
        if number in self._batches:
            self._batches[number].end(index, message)

    def _on_done(self, message: Message) -> None:
        if message["batch"] in self._batches:
            self._batches[message["batch"]].finish(message)

    def _on_ended(self, message: Message) -> None:
        self._stop_expecting((message["kind"], message["number"]))

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
