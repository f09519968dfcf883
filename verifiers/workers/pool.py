"""Environments of a run, played inline or by workers, behind the one method `run_rollouts`."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import itertools
import logging
import pickle
import sys
from collections.abc import AsyncIterator, Callable, Container, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from verifiers.concurrency import at_loop_end
from verifiers.envs.datasets import row_fields
from verifiers.errors import ConfigError, RolloutWorkerError
from verifiers.inference.limiter import Limiter
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.types import RolloutScore, State
from verifiers.workers.connection import ROW_FIELDS, refuse_unsendable
from verifiers.workers.link import RunningWorker, WorkerLink

logger = logging.getLogger("verifiers.workers")

Factory = Callable[[], Any]

_CHECKED_ROWS = 1000
_MOST_LOST_WORKERS = 2
_MOST_FAILED_STARTS = 3
_START_S = 300.0
_CLOSE_S = 7.0


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
            Exception: it cannot be started.
        """
        ...

    async def close(self) -> None: ...


class RemoteWorkers:
    """Workers that an engine starts, for the event loop on which rollouts are first asked of them.

    Args:
        make_engine: makes the engine, once for each event loop.
        factories: an environment on rank 0, which has the rows, and a function without arguments that makes the
            same one in a worker; picklable. A worker makes all of them at its start.
        blocked_s: seconds for which one piece of code may keep a worker's event loop from all others.

    Raises:
        ConfigError: a factory that cannot be pickled.
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
            env: on rank 0, which has the rows.
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
    try:
        data = pickle.dumps(factory)
    except Exception as error:
        raise ConfigError(
            f"the factory of the environment {type(env).__name__} cannot be pickled ({error}); give an importable "
            "function, or functools.partial of one with arguments that can be pickled."
        ) from error
    if getattr(getattr(factory, "func", factory), "__module__", "") == "__main__":
        raise ConfigError(
            f"the factory of the environment {type(env).__name__} is a function of the script that runs, which a "
            "worker cannot import; put it into a module of its own."
        )
    return base64.b64encode(data).decode()


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
    """The workers that play the rollouts of one call of `run_rollouts`, each through `play(state)`."""

    def __init__(self, pool: _Pool, index: int, env: Any) -> None:
        self._pool, self._index, self._env = pool, index, env
        self._states: list[State] = []

    @asynccontextmanager
    async def player(self, env: Any, request: RolloutRequest, limiter: Limiter) -> AsyncIterator[_Player]:
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
        player = _Player(link, self._index, path, group)
        try:
            yield player
        finally:
            link.in_play -= 1
            if player.state is None:
                link.give_back(group)
            else:
                self._states.append(player.state)

    def drop(self, kept: Container[int] = ()) -> None:
        """Free the rollouts that nobody will score: all but those with these ids of their states."""
        for state in self._states:
            if state.held is not None and id(state) not in kept:
                state.held[0].drop(state)


@dataclass(slots=True)
class _Player:
    """The player of one rollout; it has a state once the worker holds the rollout."""

    link: WorkerLink
    env: int
    path: Sequence[int]
    group: tuple[int, int]
    state: State | None = None

    async def play(self, state: State) -> None:
        await self.link.play(self.env, self.path, self.group, state)
        if state.held is not None:
            self.state = state


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
        self._is_closing = False
        self._close = at_loop_end(self._end)
        self._own(self._open())

    async def take(self, group: tuple[int, int]) -> WorkerLink:
        """Return the worker that holds rollouts of a group, else the one with the fewest, once it has room."""
        while True:
            if self._failure is not None:
                raise self._failure
            holder = next((link for link in self._links if group in link.groups), None)
            if holder is not None and holder.may_play:
                return holder
            # a group is scored in one worker: where its connection is lost, wait for its end
            if holder is None:
                free = [link for link in self._links if link.may_play and link.in_play < self._workers.multiplex]
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
        reason, no_room = "could not be started", False
        try:
            running = link.running = await self._engine.start(link)
            try:
                link.connection.send(self._workers.load_message())
                await asyncio.wait((link.ready, link.lost), timeout=_START_S, return_when="FIRST_COMPLETED")
                if link.ready.done():
                    await link.lost
            finally:
                link.connection.send({"op": "close"})
                if not link.ready.done():
                    # it imports, and reads nothing meanwhile
                    running.kill()
                reason = await _reap(running)
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
