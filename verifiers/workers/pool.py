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
from verifiers.workers.connection import ROW_FIELDS, Asked, Connection, error_from, refuse_unsendable

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
    end: Asked
    context: Context
    is_held: bool = False
    recorded: dict[int, RecordedAnswer] = field(default_factory=dict)


class WorkerLink:
    """One worker, from its start to its end; belongs to one event loop.

    Args:
        on_change: called when it may take more.

    Attributes:
        is_ready: its environments are loaded.
        in_play: rollouts that it plays, or that wait for their slots to be played there.
        groups: number of its rollouts by group, those included that it holds for their score.
    """

    def __init__(self, number: int, on_change: Callable[[], None]) -> None:
        self.number = number
        self.connection = Connection(self)
        self.is_ready = False
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running: RunningWorker | None = None
        self.in_play = 0
        self.groups: Counter[Group] = Counter()
        self._on_change = on_change
        self._numbers = itertools.count()
        self._rollouts: dict[int, _Played] = {}

    @property
    def may_play(self) -> bool:
        """True where its environment is loaded and its connection stands."""
        return self.is_ready and not self.lost.done()

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
            self._on_change()
        else:
            self.give_back(group)

    def give_back(self, group: Group) -> None:
        """Stop counting a rollout that is not held here."""
        self.groups[group] -= 1
        self.groups += Counter()
        self._on_change()

    async def play(self, env: int, path: Sequence[int], group: Group, state: State) -> None:
        """Play a rollout that was taken, in its state; a worker that played it to its end holds it.

        Raises:
            RolloutWorkerError: the worker died meanwhile.
        """
        client: RolloutClient = state["client"]
        number = next(self._numbers)
        try:
            if self.lost.done():
                raise RolloutWorkerError(f"worker {self.number} died before the rollout began")
            asked = self.connection.ask(
                "play", rollout=number, env=env, path=path, key=(*group, 0), model=state["model"],
                row={name: state[name] for name in ROW_FIELDS}, sampling_args=state["sampling_args"],
                base_url=client.base_url, api_key=client.api_key,
            )  # fmt: skip
            played = self._rollouts[number] = _Played(group, client, asked, copy_context())
            told = await self._told(asked, state)
            _take_status(client, told)
            if "error" in told:
                state["completion"] = told["completion"]
                error = error_from(told["error"])
                if told["is_policys"] and error.__cause__ is not None:
                    error.__cause__.__cause__ = client.last_error
                raise error
        except BaseException:
            # also of what has just ended there, so that the worker does not hold it
            self.connection.send({"op": "drop", "rollout": number})
            self._rollouts.pop(number, None)
            raise
        state.update(told["state"])
        if "kept_error" in told:
            state["error"] = error_from(told["kept_error"])
            del self._rollouts[number]
        else:
            played.is_held = True
            state.held = self, number

    async def _told(self, asked: Asked, state: State) -> Message:
        """Wait for what came of a rollout; one that is cancelled keeps in its state what was said."""
        try:
            # a cancellation must leave the answer to the worker's last words
            await asyncio.wait([asked])
        except asyncio.CancelledError:
            self.connection.interrupt(asked)
            try:
                # a worker that is blocked does not send them
                await asyncio.wait([asked], timeout=_CANCEL_S)
                if asked.done() and asked.exception() is None:
                    state["completion"] = asked.result().get("state", asked.result())["completion"]
            finally:
                # also where it is cancelled a second time
                asked.cancel()
            raise
        told: Message = asked.result()
        return told

    async def score(self, env: int, states: Sequence[State]) -> list[RolloutScore]:
        """Score rollouts that this worker holds, and free them.

        Raises:
            RolloutWorkerError: the worker died before.
        """
        held = [state.held[1] for state in states]
        if not set(held) <= self._rollouts.keys():
            raise RolloutWorkerError(f"worker {self.number} died before the rollouts were scored")
        rollouts = [(rollout, state["task"]) for rollout, state in zip(held, states, strict=True)]
        try:
            results = await self.connection.ask("score", env=env, rollouts=rollouts)
        finally:
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
            self.connection.send({"op": "drop", "rollout": number})

    def lose(self, reason: str) -> None:
        self.connection.cancel_work()
        for played in self._rollouts.values():
            self.groups[played.group] -= played.is_held
        self._rollouts.clear()
        self.connection.fail(RolloutWorkerError(f"worker {self.number} {reason}"))

    def _forget(self, state: State) -> bool:
        """Forget a rollout that is held; return whether it was."""
        (_, number), state.held = state.held, None
        played = self._rollouts.pop(number, None)
        if played is not None:
            self.give_back(played.group)
        return played is not None

    # -- what the worker asks and tells ---------------------------------------------------------------------------

    def on_lost(self) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def on_log(self, message: Message) -> None:
        logging.getLogger(message["name"]).log(message["level"], "worker %d: %s", self.number, message["text"])

    def on_call(self, message: Message) -> asyncio.Task[Any]:
        played = self._rollouts.get(message["rollout"])
        # calls of a rollout that run at once have contexts of their own: roles are in them
        context = None if played is None else played.context.copy()
        return asyncio.create_task(self._call(played, message), context=context)

    async def _call(self, played: _Played | None, message: Message) -> Any:
        # its end may have come in the same read
        if played is None or played.end.done():
            raise ConfigError("the rollout is over, and its client was called.")
        client = played.client if message["trained"] else played.client.untrained
        with as_role(message["role"]):
            response, recorded = await client.call(message["path"], message["arguments"])
        if recorded is not None:
            played.recorded[message["ask"]] = recorded
        return without_tokens(plain_data(response), message["arguments"])

    def on_forget_answer(self, message: Message) -> None:
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
            "factories": self._factories, "levels": levels,
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
                loading = any(link.running is not None and not link.is_ready for link in self._links)
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
        link = WorkerLink(number, self._wake)
        self._links.append(link)
        reason, no_room, is_late = "could not be started", False, False
        try:
            running = link.running = await self._engine.start(link)
            try:
                loaded = link.connection.ask("load", **self._workers.load_message())
                done, _ = await asyncio.wait((loaded, link.lost), timeout=_START_S, return_when="FIRST_COMPLETED")
                is_late = not done
                if loaded.done():
                    self._note_load(link, loaded)
                if link.is_ready:
                    await link.lost
            finally:
                link.connection.send({"op": "close"})
                if not link.is_ready:
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
        if no_room and not any(link.is_ready for link in self._links):
            self._fail(ConfigError(f"rollout worker {number} {reason}."))
            return
        if not no_room:
            # one without room waits on while others play
            self._failed_starts = 0 if link.is_ready else self._failed_starts + 1
        if self._failed_starts < _MOST_FAILED_STARTS:
            self._own(self._live(number))
            return
        text = f"{self._failed_starts} rollout workers ended at their start; worker {number} {reason}."
        self._fail(ConfigError(text))

    def _note_load(self, link: WorkerLink, loaded: asyncio.Future[Any]) -> None:
        if (error := loaded.exception()) is not None:
            self._fail(ConfigError(f"a rollout worker could not load its environment: {error}"))
            return
        link.is_ready = True
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
