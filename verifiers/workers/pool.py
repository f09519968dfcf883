"""Rank 0's side of the workers: what each plays and holds, which one gets a rollout, and their lives.

Environments of a run are played inline or by workers, behind the one method `run_rollouts`.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import itertools
import logging
import pickle
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, Protocol

from verifiers.concurrency import at_loop_end
from verifiers.envs.datasets import row_fields
from verifiers.errors import ConfigError, RolloutWorkerError
from verifiers.inference.limiter import Limiter
from verifiers.inference.wire import plain_data, without_tokens
from verifiers.rollouts.recording_client import RecordedAnswer, RolloutClient, as_role
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import Player, Run
from verifiers.types import RolloutScore, State
from verifiers.workers.connection import ROW_FIELDS, Connection, error_from, failure_data, refuse_unsendable

logger = logging.getLogger("verifiers.workers")

Factory = Callable[[], Any]
Message = Mapping[str, Any]
Group = tuple[int, int]

_CHECKED_ROWS = 1000
_MOST_LOST_WORKERS = 2
_MOST_FAILED_STARTS = 3
_START_S = 300.0
_HELD_AT_START = 8
_CLOSE_S = 7.0
_CANCEL_S = 1.0


class RunningWorker(Protocol):
    """A started process or actor."""

    def kill(self) -> None: ...

    async def wait(self) -> str:
        """Wait for its end and return the reason, for the end of a sentence."""
        ...


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

    def end_play(self, group: Group, *, is_held: bool) -> None:
        """Stop counting a rollout as played; one that is held for its score stays counted for its group."""
        self.in_play -= 1
        if is_held:
            self._on_change(self)
        else:
            self.give_back(group)

    def give_back(self, group: Group) -> None:
        """Stop counting a rollout that is not held here."""
        self.groups[group] -= 1
        self.groups += Counter()
        self._on_change(self)

    async def play(self, env: int, path: Sequence[int], group: Group, state: State) -> None:
        """Play a rollout that was taken, in its state; a worker that played it to its end holds it.

        Raises:
            RolloutWorkerError: the worker died meanwhile.
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
            # a cancellation must leave the future to the worker's last message
            await asyncio.wait([done])
            message = done.result()
            _take_status(client, message)
            if "error" in message:
                state["completion"] = message["completion"]
                error = error_from(message["error"])
                if message["is_policys"] and error.__cause__ is not None:
                    error.__cause__.__cause__ = client.last_error
                raise error
        except BaseException as error:
            self._cancel("play", number)
            try:
                if isinstance(error, asyncio.CancelledError):
                    # what was said before a deadline; a worker that is blocked does not send it
                    await asyncio.wait([done], timeout=_CANCEL_S)
                    if done.done() and done.exception() is None:
                        state["completion"] = done.result().get("state", done.result())["completion"]
            finally:
                # also where it is cancelled a second time
                self._rollouts.pop(number, None)
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
            state["trajectory"] = result["steps"]
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
            # calls of a rollout that run at once have contexts of their own: roles are in them
            context = played.context.copy()
            task = self._calls[number] = asyncio.create_task(self._call(played, message), context=context)
            task.add_done_callback(lambda _: self._calls.pop(number, None))
        else:
            over = ConfigError("the rollout is over, and its client was called.")
            self.connection.send({"op": "answer", "call": number, "error": failure_data(over)})

    async def _call(self, played: _Played, message: Message) -> None:
        client = played.client if message["trained"] else played.client.untrained
        try:
            with as_role(message["role"]):
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


# -- environments in workers ----------------------------------------------------------------------------------------


class InlineWorkers:
    """The event loop beside the trainer: each environment plays its own rollouts."""

    def of(self, env: Any, rows: Any = ()) -> Any:
        return env


class NoRoomError(ConfigError):
    """A cluster had no room for a worker within the time that it may take."""


class WorkerEngine(Protocol):
    """A way to start workers: as processes, or as actors of a cluster."""

    async def open(self) -> int:
        """Get ready to start workers, and return how many there are to be.

        Raises:
            ConfigError: there cannot be so many.
        """
        ...

    async def start(self, link: WorkerLink) -> RunningWorker:
        """Start a worker and connect it to its link.

        Raises:
            NoRoomError: there is no room for it at present.
        """
        ...

    async def close(self) -> None: ...


class RemoteWorkers:
    """Workers that an engine starts, for the event loop on which rollouts are first asked of them.

    Args:
        factories: an environment on rank 0, which has the rows, and a function without arguments that makes the
            same one in a worker; picklable. A worker makes all of them at its start.
        blocked_s: seconds for which one piece of code may keep a worker's event loop from all others.
    """

    def __init__(
        self,
        make_engine: Callable[[], WorkerEngine],
        factories: Sequence[tuple[Any, Factory]],
        *,
        multiplex: int = 64,
        blocked_s: float = 120.0,
    ) -> None:
        self._make_engine = make_engine
        self._envs = [env for env, _ in factories]
        self._factories = [_pickled(env, factory) for env, factory in factories]
        self.multiplex, self.blocked_s = multiplex, blocked_s
        self._pool: _Pool | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def of(self, env: Any, rows: Any = ()) -> Any:
        """Return the environment as it is played and scored by the workers, to be used in its place.

        Args:
            rows: a dataset; its first 1,000 rows are looked at.

        Raises:
            ConfigError: the workers cannot make this environment, or a field of a row cannot travel to them.
        """
        reason = getattr(env, "not_in_workers", "")
        if reason:
            raise ConfigError(f'workers cannot play {type(env).__name__}: {reason}; give it engine = "inline".')
        for row in itertools.islice(rows, _CHECKED_ROWS):
            refuse_unsendable(dict(zip(ROW_FIELDS, row_fields(row), strict=True)))
        for index, known in enumerate(self._envs):
            if known is env:
                return _RemoteEnvironment(self, index, env)
        raise ConfigError(
            f"the workers cannot make the environment {type(env).__name__}; give them a factory of it, too."
        )

    def load_message(self) -> dict[str, Any]:
        levels = {name: logging.getLogger(name).getEffectiveLevel() for name in ("root", "verifiers")}
        return {
            "op": "load", "factories": self._factories, "levels": levels,
            "sys_path": [path for path in sys.path if isinstance(path, str)], "blocked_s": self.blocked_s,
        }  # fmt: skip

    def pool(self) -> _Pool:
        """Return the workers of the running event loop, started at the first call and ended with the loop."""
        loop = asyncio.get_running_loop()
        if self._pool is None or self._loop is not loop:
            self._pool, self._loop = _Pool(self, self._make_engine()), loop
        return self._pool


def _pickled(env: Any, factory: Factory) -> str:
    data = io.BytesIO()
    try:
        _Importable(data).dump(factory)
    except Exception as error:
        raise ConfigError(
            f"the factory of the environment {type(env).__name__} cannot be pickled ({error}); give an importable "
            "function, or functools.partial of one with arguments that can be pickled."
        ) from error
    return base64.b64encode(data.getvalue()).decode()


class _Importable(pickle.Pickler):
    """A pickler that refuses what the script, notebook or prompt that runs has defined."""

    def reducer_override(self, thing: Any) -> Any:
        if getattr(thing, "__module__", "") == "__main__":
            name = getattr(thing, "__qualname__", type(thing).__qualname__)
            raise TypeError(f"{name} is of the script that runs, which a worker cannot import; put it into a module")
        return NotImplemented


class _RemoteEnvironment:
    """An environment whose rollouts workers play and score; everything else is that of the one on rank 0."""

    def __init__(self, workers: RemoteWorkers, index: int, env: Any) -> None:
        self._workers, self._index, self._env = workers, index, env
        self.rubric: Any = _RemoteRubric(index, env.rubric)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    async def run_rollouts(self, requests: Sequence[RolloutRequest], run: Run) -> list[Rollout]:
        """Play the requests by the `run_rollouts` of the environment, each rollout in a worker."""
        players = _Players(self._workers.pool(), self._index, self._env)
        kept: set[int] = set()
        try:
            own = dataclasses.replace(run, workers=players)
            rollouts: list[Rollout] = await self._env.run_rollouts(requests, own)
            kept = {id(rollout.state) for rollout in rollouts if rollout.failure is None}
            return rollouts
        finally:
            players.drop(kept)


class _Players:
    """The workers that play the rollouts of one call of `run_rollouts`."""

    def __init__(self, pool: _Pool, index: int, env: Any) -> None:
        self._pool, self._index, self._env = pool, index, env
        self._states: list[State] = []

    @asynccontextmanager
    async def player(self, env: Any, request: RolloutRequest, limiter: Limiter) -> AsyncIterator[Player]:
        """Give a player for a rollout of this environment, or of one in its group, once a worker has room."""
        if request.lost_workers >= _MOST_LOST_WORKERS:
            raise RolloutWorkerError(f"{_MOST_LOST_WORKERS} workers died under this rollout; it is not played again")
        path = _path_to(self._env, env)
        if path is None:
            raise ConfigError(f"workers cannot play {type(env).__name__}, which {type(self._env).__name__} asked.")
        group = (request.key.block_id, request.key.example_id)
        with limiter.queueing():
            link = await self._pool.take(group)
        link.take(group)
        is_held = False

        async def play(state: State) -> None:
            nonlocal is_held
            await link.play(self._index, path, group, state)
            if state.held is not None:
                is_held = True
                self._states.append(state)

        try:
            yield play
        finally:
            link.end_play(group, is_held=is_held)

    def drop(self, kept: Container[int] = ()) -> None:
        """Free the rollouts that nobody will score: all but those with these ids of their states."""
        for state in self._states:
            if state.held is not None and id(state) not in kept:
                state.held[0].drop(state)


def _path_to(group: Any, env: Any) -> tuple[int, ...] | None:
    """Return the places by which an environment is found in a group, () for the group itself; None outside it."""
    if group is env:
        return ()
    for place, member in enumerate(getattr(group, "envs", None) or ()):
        inner = _path_to(member, env)
        if inner is not None:
            return (place, *inner)
    return None


class _RemoteRubric:
    """A rubric that scores each group in the worker that played it; everything else is that of the one on rank 0."""

    def __init__(self, env: int, rubric: Any) -> None:
        self._env, self._rubric = env, rubric

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rubric, name)

    @property
    def has_group_funcs(self) -> bool:
        """True where the rubric may compare the rollouts of a group."""
        module = str(getattr(self._rubric.score_group, "__module__", ""))
        return module.partition(".")[0] != "verifiers" or bool(self._rubric.has_group_funcs)

    async def score_group(self, states: Sequence[State]) -> list[RolloutScore]:
        if len({state.held and state.held[0] for state in states}) > 1:
            # those that were played again are in another worker
            for state in states:
                if state.held is not None:
                    state.held[0].drop(state)
            raise RolloutWorkerError("a worker died before the rollouts of its group were scored")
        link: WorkerLink = states[0].held[0]
        return await link.score(self._env, states)


class _Pool:
    def __init__(self, workers: RemoteWorkers, engine: WorkerEngine) -> None:
        self._workers, self._engine = workers, engine
        self._links: list[WorkerLink] = []
        self._lives: set[asyncio.Task[None]] = set()
        self._waiting: list[asyncio.Future[None]] = []
        self._failure: Exception | None = None
        self._failed_starts = 0
        self._is_starting, self._is_closing = True, False
        self._close = at_loop_end(self._end)
        self._own(self._open())

    async def take(self, group: Group) -> WorkerLink:
        """Return the worker that holds rollouts of a group, else the one with the fewest, once it has room.

        While others load at the start, a worker gets no more than a few to play and score: a model that answers at
        once would have given it all there is.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            holder = next((link for link in self._links if group in link.groups), None)
            if holder is not None and holder.may_play:
                return holder
            # a group is scored in one worker: where its connection is lost, wait for its end
            if holder is None:
                ready = [link for link in self._links if link.may_play]
                loading = any(link.running is not None and not link.ready.done() for link in self._links)
                self._is_starting = self._is_starting and (loading or not ready)
                free = [link for link in ready if link.in_play < self._workers.multiplex]
                if self._is_starting:
                    most = min(_HELD_AT_START, self._workers.multiplex)
                    free = [link for link in free if link.unscored < most]
                if free:
                    return min(free, key=lambda link: (link.unscored, link.number))
            change = asyncio.get_running_loop().create_future()
            self._waiting.append(change)
            await change

    # -- lives of workers -----------------------------------------------------------------------------------------

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._lives.add(task)
        task.add_done_callback(self._lives.discard)

    async def _open(self) -> None:
        try:
            count = await self._engine.open()
        except Exception as error:
            self._fail(error)
            return
        for number in range(count):
            self._own(self._live(number))

    async def _live(self, number: int) -> None:
        """Start a worker and see to its end; start the next one where it was not to end."""
        link = WorkerLink(number, self._note_change)
        self._links.append(link)
        reason, no_room, is_late = "could not be started", False, False
        try:
            running = link.running = await self._engine.start(link)
            try:
                link.connection.send(self._workers.load_message())
                done, _ = await asyncio.wait((link.ready, link.lost), timeout=_START_S, return_when="FIRST_COMPLETED")
                is_late = not done
                if link.ready.done():
                    await link.lost
            finally:
                link.connection.send({"op": "close"})
                if not link.ready.done():
                    # it imports, and reads nothing meanwhile
                    running.kill()
                reason = await _reap(running)
                if is_late:
                    reason = f"had not loaded its environment after {_START_S:g} s"
                await link.connection.close()
        except Exception as error:
            reason, no_room = f"could not be started: {error}", isinstance(error, NoRoomError)
        finally:
            self._links.remove(link)
            link.lose(reason)
            self._wake()
        if self._is_closing or self._failure is not None:
            return
        logger.warning("worker %d %s.", number, reason)
        if no_room and not any(link.ready.done() for link in self._links):
            self._fail(ConfigError(f"rollout worker {number} {reason}."))
            return
        if not no_room:
            # one without room waits on while others play
            self._failed_starts = 0 if link.ready.done() else self._failed_starts + 1
        if self._failed_starts < _MOST_FAILED_STARTS:
            self._own(self._live(number))
            return
        text = f"{self._failed_starts} rollout workers ended at their start; worker {number} {reason}."
        self._fail(ConfigError(text))

    def _note_change(self, link: WorkerLink) -> None:
        if link.failure is not None:
            self._fail(ConfigError(f"a rollout worker could not load its environment: {link.failure}"))
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for change in waiting:
            if not change.done():
                change.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._wake()

    async def _end(self) -> None:
        self._is_closing = True
        lives = list(self._lives)
        for task in lives:
            task.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        await self._engine.close()


async def _reap(running: RunningWorker) -> str:
    """Wait for a worker's end and return its reason; one that does not end is killed."""
    try:
        async with asyncio.timeout(_CLOSE_S):
            return await running.wait()
    except TimeoutError:
        running.kill()
        return await running.wait()
    except BaseException:
        running.kill()
        raise
