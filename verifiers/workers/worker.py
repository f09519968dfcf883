"""A worker: its own environments and event loop, and the rollouts that rank 0 asks of it.

Each batch of rollouts is played by the environment's `run_rollouts`, as it is without workers. A rollout begins when
rank 0 has a slot for it. Finished rollouts stay here until they are scored.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import pickle
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifiers.envs.lifecycle import run_teardown
from verifiers.errors import EnvironmentLoadError
from verifiers.inference.limiter import Limiter
from verifiers.rollouts.batch_client import BatchClient, BatchLimits, RolloutRecord
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.runner import RolloutRunner, relaxed_gc
from verifiers.rubrics.scoring import call_score_group
from verifiers.types import Outcome, RolloutKey, State
from verifiers.workers.client import ModelCalls, WorkerClient
from verifiers.workers.connection import ROW_FIELDS, Connection, failure_data

__all__ = ["STAYS_IN_WORKER", "RolloutWorker", "resident_bytes"]

Message = Mapping[str, Any]

STAYS_IN_WORKER = frozenset(
    {
        "client", "completion", "error", "input", "model", "oai_tools", "responses", "sampling_args", "tool_defs",
        "trajectory",
    }
)  # fmt: skip
"""Entries of a state that rank 0 gets otherwise or has no use for; everything else travels."""

_SIZE_EVERY_S = 2.0
_MOST_NESTED = 50


class RolloutWorker:
    """The part of a worker that is the same in each engine; belongs to the running event loop.

    Args:
        prepare: sets up the process, given the first message and before anything of the environment is imported.

    Attributes:
        connection: to rank 0.
        ended: set when the worker is told to end, or rank 0 is gone.
        guards: closed at the end.
    """

    def __init__(self, prepare: Callable[[RolloutWorker, Message], None]) -> None:
        self.connection = Connection(self._take, self._lose)
        self.ended = asyncio.Event()
        self.calls = ModelCalls(self.connection)
        self._factories: list[Callable[[], Any]] = []
        self._envs: dict[int, Any] = {}
        self._batches: dict[int, _Batch] = {}
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._size_at = 0.0
        self.guards = contextlib.ExitStack()
        self._prepare = prepare

    async def serve(self) -> None:
        """Serve rank 0 until a `close` message, or until the connection is lost; then tear the environments down."""
        with self.guards, relaxed_gc():
            try:
                await self.ended.wait()
            finally:
                await self._close()

    async def _close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for env in self._envs.values():
            await run_teardown(env)
        await self.connection.close()

    def environment(self, index: int) -> Any:
        """Return the environment of a factory, made once."""
        env = self._envs.get(index)
        if env is None:
            env = self._envs[index] = self._factories[index]()
        return env

    def start_task(self, kind: str, number: int, work: Awaitable[None]) -> None:
        """Begin work that rank 0 may cancel by this kind and number."""
        task = self._tasks[kind, number] = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._tasks.pop((kind, number), None))

    # -- what rank 0 sends ----------------------------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        getattr(self, f"_on_{message['op']}")(message)

    def _lose(self) -> None:
        self.ended.set()

    def _on_load(self, message: Message) -> None:
        self._prepare(self, message)
        try:
            self._factories = [pickle.loads(base64.b64decode(each)) for each in message["factories"]]
            for index in range(len(self._factories)):
                self.environment(index)
        except Exception as error:
            failed = EnvironmentLoadError(f"{type(error).__name__}: {error}")
            self.connection.send({"op": "failed", "error": failure_data(failed.with_traceback(error.__traceback__))})
            return
        self.connection.send({"op": "ready", "bytes": resident_bytes()})

    def _on_run(self, message: Message) -> None:
        batch = self._batches[message["batch"]] = _Batch(self, message)
        self.start_task("batch", message["batch"], batch.run())

    def _on_begin(self, message: Message) -> None:
        number, index = message["place"]
        if number in self._batches:
            self._batches[number].records[index].granted.set()

    def _on_drop(self, message: Message) -> None:
        number, index = message["place"]
        if number in self._batches:
            self._batches[number].records[index].drop()

    def _on_cancel(self, message: Message) -> None:
        kind, number = message["kind"], message["number"]
        task = self._tasks.get((kind, number))
        ended = {"op": "ended", "kind": kind, "number": number}
        if task is None:
            self.connection.send(ended)
        else:
            task.add_done_callback(lambda _: self.connection.send(ended))
            task.cancel()
        if kind == "batch":
            self._batches.pop(number, None)

    def _on_answer(self, message: Message) -> None:
        self.calls.answer(message)

    def _on_score(self, message: Message) -> None:
        self.start_task("score", message["score"], self._score(message))

    def _on_close(self, _: Message) -> None:
        self.ended.set()

    # -- scoring --------------------------------------------------------------------------------------------------

    async def _score(self, message: Message) -> None:
        try:
            rollouts = [self._batches[number].rollouts[index] for number, index in message["places"]]
            env = self.environment(message["env"])
            scores = await call_score_group(env.rubric, [rollout.state for rollout in rollouts])
        except Exception as error:
            self.connection.send({"op": "scored", "score": message["score"], "error": failure_data(error)})
        else:
            found = [
                {"score": dict(score), "advantage": rollout.state.get("advantage")}
                for rollout, score in zip(rollouts, scores, strict=True)
            ]
            self._send_result({"op": "scored", "score": message["score"], "scores": found})
        finally:
            for number, _ in message["places"]:
                self._batches.pop(number, None)
        self._tell_size()

    def _send_result(self, message: Message) -> None:
        try:
            self.connection.send(message)
        except ValueError:
            # a number of numpy's, or the like
            self.connection.send(_plain(message))

    def _tell_size(self) -> None:
        now = time.monotonic()
        if now >= self._size_at:
            self._size_at = now + _SIZE_EVERY_S
            self.connection.send({"op": "size", "bytes": resident_bytes()})


@dataclass(slots=True)
class _Record(RolloutRecord):
    """A rollout that begins when rank 0 has a slot for it."""

    send: Callable[[Message], None] = field(kw_only=True)
    place: tuple[int, int] = field(kw_only=True)
    granted: asyncio.Event = field(default_factory=asyncio.Event, kw_only=True)

    async def play(self, limits: BatchLimits, rollout: Callable[[Any], Awaitable[Any]]) -> tuple[Any, State]:
        if not self._is_dropped:
            # an environment may play it again
            self.granted.clear()
        try:
            with limits.suspended():
                self.send({"op": "play", "place": self.place})
                await self.granted.wait()
            # two arguments to super: slots create the class a second time
            return await RolloutRecord.play(self, limits, rollout)
        except asyncio.CancelledError:
            # by its environment, or with its batch: rank 0 frees its slot, or its place in the queue
            self.send({"op": "end", "place": self.place, **_status(self, self)})
            raise

    def drop(self) -> None:
        RolloutRecord.drop(self)
        # where it waits for its slot, or has not got on since: `play` ends it at once
        self._is_dropped = True
        self.granted.set()


@dataclass(slots=True)
class _Runner(RolloutRunner):
    """A runner whose rollouts have rank 0's clients and slots."""

    worker: RolloutWorker = field(kw_only=True)
    batch: int = field(kw_only=True)
    base_url: str = field(kw_only=True)
    api_key: str = field(kw_only=True)
    records: list[_Record] = field(default_factory=list, kw_only=True)

    def batch_client(
        self,
        requests: Sequence[RolloutRequest],
        *,
        raises: bool = False,
        on_end: Callable[[RolloutRecord], None] | None = None,
    ) -> BatchClient:
        calls, send = self.worker.calls, self.worker.connection.send
        for index, request in enumerate(requests):
            place = (self.batch, index)
            client = WorkerClient(calls, place, self.model, self.base_url, self.api_key)
            self.records.append(_Record(request, client, send=send, place=place))
        limits = BatchLimits(self.limiter, self.activity, self.rollout_timeout_s, raises=raises, on_end=on_end)
        return BatchClient(self.records, limits, self.sampling_args)


class _Batch:
    """The rollouts of one call of `run_rollouts`."""

    def __init__(self, worker: RolloutWorker, message: Message) -> None:
        self._worker, self._message = worker, message
        self._send = worker.connection.send
        self.number: int = message["batch"]
        self.records: list[_Record] = []
        self.rollouts: list[Rollout] = []

    async def run(self) -> None:
        """Play the rollouts; each one's end is told at once, and at the end what became of them."""
        message = self._message
        try:
            runner = _Runner(
                self._worker.environment(message["env"]),
                None,  # type: ignore[arg-type]
                message["model"],
                message["sampling_args"],
                limiter=Limiter(),
                rollout_timeout_s=message["timeout_s"],
                worker=self._worker,
                batch=self.number,
                base_url=message["base_url"],
                api_key=message["api_key"],
                records=self.records,
            )
            requests = [
                RolloutRequest(RolloutKey(*key), row["prompt"], row["answer"], row["task"], row["info"])
                for key, row in zip(message["keys"], message["rows"], strict=True)
            ]
            self.rollouts = await runner.run_batch(requests, on_end=self._tell_end)
            results = [
                {**_status(rollout, record), **_result(rollout, row)}
                for rollout, record, row in zip(self.rollouts, self.records, message["rows"], strict=True)
            ]
            self._send({"op": "done", "batch": self.number, "results": results})
        except (Exception, SystemExit) as error:
            # a mistake that every other rollout would repeat
            self._send({"op": "done", "batch": self.number, "error": failure_data(error)})
            return
        if all(rollout.failure is not None for rollout in self.rollouts):
            self._worker._batches.pop(self.number, None)

    def _tell_end(self, record: RolloutRecord) -> None:
        assert isinstance(record, _Record)
        self._send({"op": "end", "place": record.place, **_status(record, record)})


def _status(judged: RolloutRecord | Rollout, record: RolloutRecord) -> dict[str, Any]:
    """Return what became of a rollout, as far as it is decided in the worker."""
    status: dict[str, Any] = {}
    if judged.failure is not None:
        assert judged.outcome is not None
        status = {"outcome": str(Outcome(judged.outcome)), "failure": failure_data(judged.failure)}
    if record.client.is_cut_off:
        status["is_cut_off"] = True
    if record.client.overlong:
        status["overlong"] = True
    if record.client.fatal_error is not None:
        status["is_fatal"] = True
    return status


def _result(rollout: Rollout, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a finished rollout as plain data, without what it still has of its row."""
    state = {
        name: _plain(value)
        for name, value in rollout.state.items()
        if value is not None and name not in STAYS_IN_WORKER and name not in ROW_FIELDS
    }
    fields = {name: _plain(rollout.state.get(name)) for name in ROW_FIELDS}
    changed = {name: value for name, value in fields.items() if value != row[name]}
    return {"completion": _plain(rollout.completion), "state": {**state, **changed}}


def _plain(value: Any, outer: tuple[int, ...] = ()) -> Any:
    """Return nested data as JSON takes it; what is none becomes text."""
    kind = type(value)
    if kind is str or kind is int or kind is float or kind is bool or value is None:
        return value
    is_nested = len(outer) >= _MOST_NESTED or id(value) in outer
    if not is_nested:
        outer = (*outer, id(value))
        if isinstance(value, Mapping):
            return {str(name): _plain(item, outer) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [_plain(item, outer) for item in value]
        if callable(getattr(value, "model_dump", None)):
            return _plain(value.model_dump(), outer)
        if isinstance(value, (bool, int, float, str)):
            return next(base(value) for base in (bool, int, float, str) if isinstance(value, base))
        if callable(getattr(value, "tolist", None)):
            # numpy's
            return _plain(value.tolist(), outer)
    return f"<{kind.__name__}>" if is_nested else repr(value)


def resident_bytes() -> int:
    """Return the memory that this process holds; its most so far where the system tells no more."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
