"""The rollouts of one batch that a worker plays, as rank 0 has them: their slots, ends and calls of the model."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping, Sequence
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any

from verifiers.errors import RolloutWorkerError
from verifiers.inference.wire import plain_data
from verifiers.rollouts.batch_client import FATAL_ERRORS, BatchClient, RolloutRecord
from verifiers.rollouts.recording_client import RecordedAnswer, RolloutClient
from verifiers.types import Outcome, State
from verifiers.workers.connection import error_from, failure_data, failure_from_data

if TYPE_CHECKING:
    from verifiers.workers.link import WorkerLink

__all__ = ["PlayedBatch", "PlayedState"]

Message = Mapping[str, Any]

_TOKEN_FIELDS = ("logprobs", "prompt_token_ids", "token_ids", "weight_versions")


class PlayedState(State):
    """The state of a rollout that a worker played; what reward functions need of it stays there.

    Attributes:
        link: to the worker.
        place: batch and index there.
    """

    link: WorkerLink
    place: tuple[int, int]


class PlayedBatch:
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
        for index, end in self._ends.items():
            if not end.done() and index not in self._queued:
                end.set_exception(RolloutWorkerError(*error.args))
        if not self._results.done():
            # the rollouts that are in play record it first
            self._results.set_result([])

    def begin(self, index: int) -> None:
        """Play a rollout as soon as it has its slot."""
        assert self._tasks is not None
        if self._results.done():
            # a task of the environment's that has outlived the batch
            return
        # an environment may play one again that it gave up
        end = self._ends[index] = asyncio.get_running_loop().create_future()
        self._queued[index] = self._tasks.create_task(self._begin(index, end))

    async def _begin(self, index: int, end: asyncio.Future[None]) -> None:
        place = (self._number, index)
        try:
            await self.records[index].play(self._batch.limits, functools.partial(self._play, index, end))
        finally:
            if self._ends[index] is end:
                self._queued.pop(index, None)
            # one that has ended answers no more
            if (not end.done() or end.cancelled()) and not self.is_done and self._lost is None:
                self._link.connection.send({"op": "drop", "place": place})
                self._link.expect(place)

    async def _play(self, index: int, end: asyncio.Future[None], _: RolloutClient) -> State:
        self._queued.pop(index, None)
        self.contexts[index] = copy_context()
        if self._lost is not None:
            raise RolloutWorkerError(*self._lost.args)
        self._link.connection.send({"op": "begin", "place": (self._number, index)})
        await end
        return self.records[index].bare_state()

    def end(self, index: int, message: Message) -> None:
        end = self._ends.get(index)
        if end is None or end.done():
            return
        if index in self._queued:
            # given up before it had its slot: it takes none, and the worker has nothing to end
            end.set_result(None)
            self._queued[index].cancel()
            return
        self._forgive(index, message)
        fatal = self.records[index].client.fatal_error
        if isinstance(fatal, FATAL_ERRORS):
            end.set_exception(fatal)
            return
        self._take_status(index, message)
        end.set_result(None)

    def finish(self, message: Message) -> None:
        self.is_done = True
        for task in self._queued.values():
            # what is queued needs no slot any more
            task.cancel()
        for end in self._ends.values():
            if not end.done():
                end.set_result(None)
        if self._results.done():
            return
        for index, result in enumerate(message.get("results", ())):
            self._forgive(index, result)
        fatal = [one for record in self.records if isinstance(one := record.client.fatal_error, FATAL_ERRORS)]
        if fatal or "error" in message:
            self._results.set_exception(fatal[0] if fatal else error_from(message["error"]))
            return
        results: list[tuple[Any, State]] = []
        for index, (record, result) in enumerate(zip(self.records, message["results"], strict=True)):
            self._take_status(index, result)
            state = PlayedState(record.bare_state() | result["state"])
            state.link, state.place = self._link, (self._number, index)
            results.append((result["completion"], state))
        self._results.set_result(results)

    def _forgive(self, index: int, status: Message) -> None:
        """Leave out an error that one agent in the worker caused by what it asked for."""
        if not status.get("is_fatal", False):
            self.records[index].client.fatal_error = None

    def _take_status(self, index: int, status: Message) -> None:
        """Take the worker's status of a rollout; a deadline that passed on rank 0 comes first."""
        record = self.records[index]
        client = record.client
        client.is_cut_off |= status.get("is_cut_off", False)
        # the status leaves out failed calls that the environment has made good
        client.overlong = status.get("overlong", False)
        client.last_error = None
        if "failure" in status and record.failure is None:
            record.outcome = Outcome(status["outcome"])
            record.failure = failure_from_data(status["failure"])

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
