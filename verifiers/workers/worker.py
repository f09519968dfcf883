"""A worker: its own environments and event loop, and the rollouts that rank 0 asks of it.

Rank 0 has the limits of a rollout: it begins here when it has its slot, and is cancelled at its deadline. Finished
rollouts stay here until they are scored.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

from verifiers.concurrency import own_cancels_fail
from verifiers.envs.lifecycle import run_teardown
from verifiers.errors import EnvironmentLoadError, OverlongPromptError
from verifiers.inference.endpoint import CHAT, COMPLETIONS
from verifiers.inference.retry import RetryPolicy
from verifiers.inference.wire import WireObject, given_arguments, request_body
from verifiers.interrupt import exit_if_blocked
from verifiers.rollouts.recording_client import RecordedAnswer, RolloutClient, present_role
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.rollouts.run import begin_state, blames_policy, credit_of_steps, relaxed_gc
from verifiers.types import RolloutKey, State
from verifiers.workers.connection import ROW_FIELDS, Connection, failure_data

Message = Mapping[str, Any]

STAYS_IN_WORKER = frozenset(
    {
        "client", "completion", "error", "input", "model", "oai_tools", "responses", "sampling_args", "tool_defs",
        "trajectory",
    }
)  # fmt: skip
"""Entries of a state that rank 0 gets otherwise or has no use for; everything else travels."""

_MOST_NESTED = 50
_MOST_BITS = 10_000
_ONE_TRY = RetryPolicy(max_attempts=1)


class ModelCalls:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def call(self, rollout: int, path: str, arguments: Mapping[str, Any], *, trained: bool) -> tuple[int, Any]:
        """Return the number and the answer of a call, or raise what it raised on rank 0.

        A call is `trained` where it is of the policy, and part of the rollout.
        """
        plain = given_arguments(arguments)
        if type(plain.get("timeout")).__name__ == "Timeout":
            # the SDK's, of which a backend reads this
            plain["timeout"] = plain["timeout"].read
        if plain.get("messages") is not None:
            plain["messages"] = request_body(plain)["messages"]
        told = {"rollout": rollout, "path": path, "arguments": plain, "trained": trained, "role": present_role()}
        asked = self._connection.ask("call", **told)
        try:
            return asked.number, await asked
        except asyncio.CancelledError:
            # an answer that is on its way is read by nobody
            self.forget(rollout, asked.number)
            raise

    def forget(self, rollout: int, number: int) -> None:
        self._connection.send({"op": "forget_answer", "rollout": rollout, "call": number})


class _Answer(WireObject):
    __slots__ = ("number",)

    number: int


class _PolicyBackend:
    """A backend that sends the trained calls of one rollout; retries, limits and seeds are rank 0's."""

    def __init__(self, calls: ModelCalls, rollout: int, base_url: str, api_key: str) -> None:
        self._calls, self._rollout = calls, rollout
        self.base_url, self.api_key = base_url, api_key

    async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        number, response = await self._calls.call(self._rollout, path, arguments, trained=True)
        answer = _Answer(response)
        answer.number = number
        return answer

    async def close(self) -> None:
        """Do nothing: no connection is open."""


class WorkerClient(RolloutClient):
    """The client of one rollout in a worker: it looks like any rollout's client, and asks rank 0."""

    def __init__(self, calls: ModelCalls, rollout: int, model: str, base_url: str = "", api_key: str = "") -> None:
        super().__init__(_PolicyBackend(calls, rollout, base_url, api_key), retry=_ONE_TRY, model=model)
        self._calls, self._rollout = calls, rollout
        self._numbers: dict[RecordedAnswer, int] = {}

    @property
    def untrained(self) -> RolloutClient:
        other = WorkerClient(self._calls, self._rollout, self._model or "", self.base_url, self.api_key)
        other.is_recording = False
        return other

    async def call(self, path: str, arguments: dict[str, Any]) -> tuple[Any, RecordedAnswer | None]:
        if not self.is_recording or arguments.get("model") != self._model:
            _, response = await self._calls.call(self._rollout, path, arguments, trained=False)
            return (WireObject(response) if path in (CHAT, COMPLETIONS) else response), None
        answer, recorded = await super().call(path, arguments)
        if recorded is not None:
            self._numbers[recorded] = answer.number
        return answer, recorded

    def forget(self, answer: RecordedAnswer) -> None:
        super().forget(answer)
        self._calls.forget(self._rollout, self._numbers.pop(answer))


class RolloutWorker:
    """The part of a worker that is the same in each engine; belongs to the running event loop.

    Args:
        prepare: sets up the process, given the first message and before anything of the environment is imported.

    Attributes:
        ended: set when the worker is told to end, or rank 0 is gone.
    """

    def __init__(self, prepare: Callable[[RolloutWorker, Message], None]) -> None:
        self.ended = asyncio.Event()
        self.connection = Connection(self)
        self.calls = ModelCalls(self.connection)
        self._envs: list[Any] = []
        self._held: dict[int, State] = {}
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
        await asyncio.gather(*self.connection.cancel_work(), return_exceptions=True)
        for env in self._envs:
            await run_teardown(env)
        await self.connection.close()

    # -- what rank 0 asks and tells -------------------------------------------------------------------------------

    def on_lost(self) -> None:
        self.ended.set()

    def on_close(self, _: Message) -> None:
        self.ended.set()

    def on_drop(self, message: Message) -> None:
        self._held.pop(message["rollout"], None)

    async def on_load(self, message: Message) -> None:
        self._prepare(self, message)
        try:
            for each in message["factories"]:
                self._envs.append(pickle.loads(base64.b64decode(each))())
        except (Exception, SystemExit) as error:
            failed = EnvironmentLoadError(f"{type(error).__name__}: {error}")
            raise failed.with_traceback(error.__traceback__) from None

    async def on_play(self, message: Message) -> Message:
        """Play a rollout and return what came of it; its limits are rank 0's."""
        number, row, model = message["rollout"], message["row"], message["model"]
        client = WorkerClient(self.calls, number, model, message["base_url"], message["api_key"])
        request = RolloutRequest(RolloutKey(*message["key"]), **row)
        state = begin_state(request, client, model, message["sampling_args"])
        told: dict[str, Any]
        try:
            env = self._envs[message["env"]]
            for place in message["path"]:
                env = env.envs[place]
            try:
                with own_cancels_fail():
                    await env.play(state)
            except OverlongPromptError as error:
                # the environment let it propagate
                state["error"] = error
            kept = state.get("error")
            if isinstance(kept, OverlongPromptError):
                state["prompt_too_long"] = True
            told = {"state": _result(state, row)}
            if isinstance(kept, BaseException) and not isinstance(kept, OverlongPromptError):
                told["kept_error"] = failure_data(kept)
            else:
                self._held[number] = state
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError):
                # code of the environment may have done that; of what rank 0 cancels it takes what was said
                error = RuntimeError("CancelledError: code of the environment cancelled the rollout")
            told = {"error": failure_data(error), "is_policys": blames_policy(error, client)}
            told["completion"] = _plain(state["completion"])
        told |= {"is_cut_off": client.is_cut_off, "overlong": client.overlong}
        told["is_fatal"] = client.fatal_error is not None
        if client.last_error is not None:
            told["last_error"] = failure_data(client.last_error)
        return told

    async def on_score(self, message: Message) -> list[Message]:
        """Score rollouts that are held, and hold them no longer."""
        try:
            states = [self._held[number] for number, _ in message["rollouts"]]
            for state, (_, task) in zip(states, message["rollouts"], strict=True):
                # as a group of environments calls it
                state["task"] = task
            with own_cancels_fail():
                scores = await self._envs[message["env"]].rubric.score_group(states)
        finally:
            for number, _ in message["rollouts"]:
                self._held.pop(number, None)
        # a reward may be a number of numpy's, or the like
        return [
            {"score": _plain(score), "advantage": _plain(state.get("advantage")), "steps": _plain(_credit(state))}
            for state, score in zip(states, scores, strict=True)
        ]


def _credit(state: State) -> list[dict[str, Any]]:
    """Return what the steps of a trajectory were given."""
    return [
        dict(zip(("reward", "advantage"), step, strict=True)) for step in zip(*credit_of_steps(state), strict=True)
    ]


def _result(state: State, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a finished rollout as plain data, without what its state still has of the row."""
    entries = {
        name: _plain(value)
        for name, value in state.items()
        if value is not None and name not in STAYS_IN_WORKER and name not in ROW_FIELDS
    }
    fields = {name: _plain(state.get(name)) for name in ROW_FIELDS}
    changed = {name: value for name, value in fields.items() if value != row[name]}
    return {"completion": _plain(state["completion"]), **entries, **changed}


def _plain(value: Any, outer: tuple[int, ...] = ()) -> Any:
    """Return nested data as JSON takes it; what is none becomes text."""
    kind = type(value)
    if kind is str or kind is float or kind is bool or value is None:
        return value
    if kind is int:
        # Python neither writes nor reads more decimal digits than some thousands
        return value if value.bit_length() <= _MOST_BITS else hex(value)
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
            return next(_plain(base(value)) for base in (bool, int, float, str) if isinstance(value, base))
        if callable(getattr(value, "tolist", None)):
            # numpy's
            return _plain(value.tolist(), outer)
    return f"<{kind.__name__}>" if is_nested else repr(value)


# -- the process of a worker -----------------------------------------------------------------------------------------


def set_up_process(worker: RolloutWorker, load: Message, *, keeps_path: bool = False) -> None:
    """Set up the process of a worker, as its first message says.

    Args:
        keeps_path: modules are found where this process finds them, and only then where rank 0 does.
    """
    own = sys.path if keeps_path else []
    sys.path[:] = [*own, *(path for path in load["sys_path"] if path not in own)]
    handler = _SendsLogs(asyncio.get_running_loop(), worker.connection.send)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(handlers=[handler], level=load["levels"]["root"], force=True)
    logging.getLogger("verifiers").setLevel(load["levels"]["verifiers"])
    # what the environment does while it is loaded may take its time
    asyncio.get_running_loop().call_soon(_guard, worker.guards, load["blocked_s"])


def _guard(guards: contextlib.ExitStack, blocked_s: float) -> None:
    guard = asyncio.get_running_loop().create_task(exit_if_blocked(blocked_s))
    guards.callback(guard.cancel)


class _SendsLogs(logging.Handler):
    """A handler that sends log records to rank 0, from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[Message], None]) -> None:
        super().__init__()
        self._loop, self._send = loop, send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:
            # a mistake in the call that logs, which is printed and ends nothing
            self.handleError(record)
            return
        message = {"op": "log", "name": record.name, "level": record.levelno, "text": text}
        # the loop may have ended
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._send, message)
