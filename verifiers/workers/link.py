"""Rank 0's side of one worker: what it plays and holds, its scores, and its end."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, Protocol

from verifiers.errors import ConfigError, RolloutWorkerError
from verifiers.inference.wire import plain_data, without_tokens
from verifiers.rollouts.recording_client import RecordedAnswer, RolloutClient
from verifiers.types import RolloutScore, State
from verifiers.workers.connection import ROW_FIELDS, Connection, error_from, failure_data

logger = logging.getLogger("verifiers.workers")

Message = Mapping[str, Any]


class RunningWorker(Protocol):
    """A started process or actor."""

    def kill(self) -> None: ...

    async def wait(self) -> str:
        """Wait for its end and return the reason, for the end of a sentence."""
        ...


Group = tuple[int, int]


@dataclass(slots=True)
class _Played:
    """A rollout that a worker plays, or holds for its score; `recorded` has answers by the number of their call."""

    group: Group
    client: RolloutClient
    done: asyncio.Future[Message]
    context: Context
    recorded: dict[int, RecordedAnswer] = field(default_factory=dict)


class WorkerLink:
    """One worker, from its start to its end; belongs to one event loop.

    Args:
        on_change: called when it may take more, has become ready, or could not load its environment.

    Attributes:
        in_play: rollouts that it plays, or that wait for their slots to be played there.
        groups: number of its rollouts by group, those included that it holds for their score.
        ready: done when its environment is loaded.
        failure: its environment could not be loaded.
    """

    def __init__(self, number: int, on_change: Callable[[WorkerLink], None]) -> None:
        self.number = number
        self.connection = Connection(self._take, self._lose)
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()
        self.running: RunningWorker | None = None
        self.in_play = 0
        self.groups: Counter[Group] = Counter()
        self.failure: Exception | None = None
        self._on_change = on_change
        self._numbers = itertools.count()
        self._rollouts: dict[int, _Played] = {}
        self._scores: dict[int, asyncio.Future[list[dict[str, Any]]]] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}

    @property
    def may_play(self) -> bool:
        """True where its environment is loaded and its connection stands."""
        return self.ready.done() and not self.lost.done()

    @property
    def unscored(self) -> int:
        """Rollouts that it plays, or holds for their score."""
        return self.groups.total()

    # -- for the pool ---------------------------------------------------------------------------------------------

    def take(self, group: Group) -> None:
        self.in_play += 1
        self.groups[group] += 1

    def give_back(self, group: Group) -> None:
        """Stop counting a rollout that is not held here."""
        self.groups[group] -= 1
        self.groups += Counter()
        self._on_change(self)

    async def play(self, env: int, path: Sequence[int], group: Group, state: State) -> None:
        """Play a rollout that was taken, in its state; a worker that played it to its end holds it.

        Raises:
            RolloutWorkerError: the worker died meanwhile.
            Exception: what the environment raised.
        """
        client: RolloutClient = state["client"]
        number = next(self._numbers)
        done: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._rollouts[number] = _Played(group, client, done, copy_context())
        try:
            if self.lost.done():
                raise RolloutWorkerError(f"worker {self.number} died before the rollout began")
            key = (*group, 0)
            self.connection.send(
                {
                    "op": "play", "rollout": number, "env": env, "path": path, "key": key, "model": state["model"],
                    "row": {name: state[name] for name in ROW_FIELDS}, "sampling_args": state["sampling_args"],
                    "base_url": client.base_url, "api_key": client.api_key,
                }
            )  # fmt: skip
            message = await done
            _take_status(client, message)
            if "error" in message:
                error = error_from(message["error"])
                if message["is_policys"] and error.__cause__ is not None:
                    error.__cause__.__cause__ = client.last_error
                raise error
        except BaseException:
            self._rollouts.pop(number, None)
            self._cancel("play", number)
            raise
        state.update(message["state"])
        if "kept_error" in message:
            state["error"] = error_from(message["kept_error"])
            self._rollouts.pop(number, None)
        else:
            state.held = self, number

    async def score(self, env: int, states: Sequence[State]) -> list[RolloutScore]:
        """Score rollouts that this worker holds, and free them.

        Raises:
            RolloutWorkerError: the worker died before.
            Exception: what the rubric raised.
        """
        number, held = next(self._numbers), [state.held[1] for state in states]
        if not set(held) <= self._rollouts.keys():
            raise RolloutWorkerError(f"worker {self.number} died before the rollouts were scored")
        waiting = self._scores[number] = asyncio.get_running_loop().create_future()
        rollouts = [(rollout, state["task"]) for rollout, state in zip(held, states, strict=True)]
        self.connection.send({"op": "score", "score": number, "env": env, "rollouts": rollouts})
        try:
            results = await waiting
        except asyncio.CancelledError:
            self._cancel("score", number)
            raise
        finally:
            del self._scores[number]
            for state in states:
                self._forget(state)
        for state, result in zip(states, results, strict=True):
            state.update(reward=result["score"]["reward"], metrics=result["score"]["metrics"])
            if result["advantage"] is not None:
                state["advantage"] = result["advantage"]
        return [RolloutScore(**result["score"]) for result in results]

    def drop(self, state: State) -> None:
        """Free a rollout that the worker has played and that nobody will score."""
        _, number = state.held
        if self._forget(state):
            self._cancel("play", number)

    def lose(self, reason: str) -> None:
        error = RolloutWorkerError(f"worker {self.number} {reason}")
        for task in self._calls.values():
            task.cancel()
        for played in self._rollouts.values():
            if not played.done.done():
                played.done.set_exception(RolloutWorkerError(*error.args))
            else:
                self.groups[played.group] -= 1
        self._rollouts.clear()
        for waiting in self._scores.values():
            if not waiting.done():
                waiting.set_exception(RolloutWorkerError(*error.args))

    def _cancel(self, kind: str, number: int) -> None:
        # also of what has just ended there, so that the worker does not hold it
        self.connection.send({"op": "cancel", "kind": kind, "number": number})

    def _forget(self, state: State) -> bool:
        """Forget a rollout that is held; return whether it was."""
        (_, number), state.held = state.held, None
        played = self._rollouts.pop(number, None)
        if played is not None:
            self.give_back(played.group)
        return played is not None

    # -- what the worker sends ------------------------------------------------------------------------------------

    def _lose(self) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def _take(self, message: Message) -> None:
        getattr(self, f"_on_{message['op']}")(message)

    def _on_ready(self, _: Message) -> None:
        self.ready.set_result(None)
        self._on_change(self)

    def _on_failed(self, message: Message) -> None:
        self.failure = error_from(message["error"])
        self._on_change(self)

    def _on_log(self, message: Message) -> None:
        logging.getLogger(message["name"]).log(message["level"], "worker %d: %s", self.number, message["text"])

    def _on_done(self, message: Message) -> None:
        played = self._rollouts.get(message["rollout"])
        if played is not None and not played.done.done():
            played.done.set_result(message)

    def _on_scored(self, message: Message) -> None:
        waiting = self._scores.get(message["score"])
        if waiting is None or waiting.done():
            return
        if "error" in message:
            waiting.set_exception(error_from(message["error"]))
        else:
            waiting.set_result(message["scores"])

    def _on_call(self, message: Message) -> None:
        number, played = message["call"], self._rollouts.get(message["rollout"])
        if played is not None and not played.done.done():
            task = self._calls[number] = asyncio.create_task(self._call(played, message), context=played.context)
            task.add_done_callback(lambda _: self._calls.pop(number, None))
        else:
            over = ConfigError("the rollout is over, and its client was called.")
            self.connection.send({"op": "answer", "call": number, "error": failure_data(over)})

    async def _call(self, played: _Played, message: Message) -> None:
        client = played.client if message["trained"] else played.client.untrained
        try:
            response, recorded = await client.call(message["path"], message["arguments"])
            if recorded is not None:
                played.recorded[message["call"]] = recorded
            told = {"response": without_tokens(plain_data(response), message["arguments"])}
        except Exception as error:
            told = {"error": failure_data(error)}
        self.connection.send({"op": "answer", "call": message["call"], **told})

    def _on_abandon(self, message: Message) -> None:
        task = self._calls.get(message["call"])
        if task is None or not task.cancel():
            # the answer was sent, and nobody reads it
            self._on_forget_answer(message)

    def _on_forget_answer(self, message: Message) -> None:
        played = self._rollouts.get(message["rollout"])
        recorded = played.recorded.pop(message["call"], None) if played is not None else None
        if played is not None and recorded is not None:
            played.client.forget(recorded)


def _take_status(client: RolloutClient, message: Message) -> None:
    """Take over what the environment has judged of the policy's answers and failures."""
    client.is_cut_off, client.overlong = message["is_cut_off"], message["overlong"]
    if not message["is_fatal"]:
        # an error that one agent caused by what it asked for
        client.fatal_error = None
    if "last_error" not in message:
        # failed calls that the environment has made good
        client.last_error = None
    elif client.last_error is None:
        client.last_error = error_from(message["last_error"])
