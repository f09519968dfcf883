"""Workers as actors of a Ray cluster.

Ray places, supervises and restarts the process of a worker, and shows what it prints. What the worker plays travels
over a connection that it opens to rank 0, as a process does over its socket.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import platform
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import verifiers
from verifiers.errors import ConfigError
from verifiers.workers.pool import NoRoomError, WorkerLink
from verifiers.workers.worker import RolloutWorker, set_up_process

logger = logging.getLogger("verifiers.workers")

_LONGEST_KEY = 64
_CONNECT_S = 60.0
_GREETING_S = 10.0
_REACH_S = 10.0
# within which a cluster that is large enough must have room for a worker
_PENDING_S = 300.0
_POLL_S = 0.2


class RayEngine:
    """An engine that starts workers as actors.

    Args:
        count: of workers; as many as the cluster has room for where None.
        address: of the cluster, as `ray.init` takes it. Where this process has joined a cluster already, that one is
            used, and left as it is.
        resources: of one worker, as Ray names them; "GPU" and "memory" are Ray's own.
        joins_s: seconds that nodes may take to join, until the cluster is large enough.

    Attributes:
        listens_at: host and port of rank 0 that workers connect to, once the engine is open.
    """

    def __init__(
        self,
        count: int | None = None,
        *,
        address: str = "auto",
        cpus: float = 1.0,
        resources: Mapping[str, float] | None = None,
        multiplex: int = 64,
        joins_s: float = 0.0,
    ) -> None:
        self._count, self._address = count, address
        self._joins_s = joins_s
        self._need = {"CPU": cpus, **(resources or {})}
        self._options: dict[str, Any] = {
            "num_cpus": cpus,
            "num_gpus": self._need.get("GPU"),
            "memory": self._need.get("memory"),
            "resources": {name: n for name, n in self._need.items() if name not in ("CPU", "GPU", "memory")},
            "max_concurrency": multiplex + 2,
            "max_restarts": -1,
            "max_task_retries": 0,
            "scheduling_strategy": "SPREAD",
        }
        self._has_joined = False
        self._server: asyncio.Server | None = None
        self.listens_at: tuple[str, int] = ("", 0)
        self._actors: dict[int, Any] = {}
        self._expected: _Expected = {}

    async def open(self) -> int:
        """Join the cluster and return how many workers there are to be.

        Raises:
            ConfigError: there is no such cluster, or it is too small.
        """
        self._has_joined = await asyncio.to_thread(_join, self._address)
        import ray.util

        wanted = max(self._count or 0, 1)
        limit = time.monotonic() + self._joins_s
        while (room := self._room(ray.nodes())) < wanted and time.monotonic() < limit:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        if room < wanted:
            need = ", ".join(f"{amount:g} {name}" for name, amount in self._need.items())
            has = ray.cluster_resources()
            total = ", ".join(f"{has.get(name, 0.0):g} {name}" for name in self._need)
            raise ConfigError(
                f"the Ray cluster has room for {room} workers of {need}, and not for {wanted}: its nodes have "
                f"{total} together. Give [workers] a smaller count, cpus or resources, or add nodes."
            )
        host = ray.util.get_node_ip_address()
        listening = functools.partial(_Arrival, self._expected)
        self._server = await asyncio.get_running_loop().create_server(listening, host, 0)
        self.listens_at = (host, self._server.sockets[0].getsockname()[1])
        return self._count or room

    def _room(self, nodes: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of workers that fit the nodes, where nothing else is on them."""
        has = [node["Resources"] for node in nodes if node["Alive"]]
        # 0.3 / 0.1 is less than 3
        fits = [[int(found.get(name, 0.0) / amount + 1e-6) for name, amount in self._need.items()] for found in has]
        return sum(min(each) for each in fits)

    async def start(self, link: WorkerLink) -> _RayWorker:
        """Place an actor and connect it to its link.

        Raises:
            NoRoomError: the cluster had no room for it in time.
            ConfigError: its node has other versions than rank 0.
            RayError, TimeoutError: it died, or did not connect.
        """
        import ray

        number = link.number
        # one whose process died is restarted by Ray
        if number not in self._actors:
            self._actors[number] = ray.remote(RolloutActor).options(**self._options).remote()
        actor = self._actors[number]
        worker = _RayWorker(link, functools.partial(self._end_actor, number))
        try:
            place = await self._placed(actor)
            worker.node = place["node"]
            if (theirs := place["versions"]) != (ours := _versions()):
                raise ConfigError(
                    f"the Ray node {place['node']} has {theirs} and rank 0 has {ours}; install the same on each node"
                )
            key = secrets.token_hex(32)
            arrived = asyncio.get_running_loop().create_future()

            def connect(transport: asyncio.Transport) -> asyncio.Protocol:
                link.connection.connection_made(transport)
                arrived.set_result(None)
                return link.connection

            self._expected[key] = connect
            worker.watch(actor.serve.remote(*self.listens_at, key))
            try:
                await asyncio.wait({arrived, worker.ended}, timeout=_CONNECT_S, return_when="FIRST_COMPLETED")
            finally:
                self._expected.pop(key, None)
            if worker.ended.done() and not arrived.done():
                raise RuntimeError(await worker.wait())
            if not arrived.done():
                raise TimeoutError(f"no connection from the Ray node {place['node']} within {_CONNECT_S:g} s")
        except BaseException:
            self._end_actor(number)
            raise
        return worker

    async def _placed(self, actor: Any) -> dict[str, str]:
        from ray.exceptions import ActorUnavailableError

        try:
            async with asyncio.timeout(_PENDING_S):
                while True:
                    try:
                        return cast(dict[str, str], await actor.describe.remote())
                    except ActorUnavailableError:
                        await asyncio.sleep(_POLL_S)
        except TimeoutError:
            need = ", ".join(f"{amount:g} {name}" for name, amount in self._need.items())
            raise NoRoomError(
                f"no node of the Ray cluster had {need} free within {_PENDING_S:g} s; give [workers] a smaller "
                "count, or see `ray status` for what holds them"
            ) from None

    def _end_actor(self, number: int) -> None:
        """End an actor for good; the next worker of this number gets a new one."""
        import ray

        actor = self._actors.pop(number, None)
        if actor is not None and ray.is_initialized():
            ray.kill(actor)

    async def close(self) -> None:
        for number in list(self._actors):
            self._end_actor(number)
        if self._server is not None:
            self._server.close()
        if self._has_joined:
            import ray

            await asyncio.to_thread(ray.shutdown)


def _join(address: str) -> bool:
    """Join a cluster, where this process has joined none, and tell whether it did."""
    import ray.exceptions

    if ray.is_initialized():
        return False
    name = "address"
    if address == "auto" and os.environ.get("RAY_ADDRESS"):
        name, address = "RAY_ADDRESS", os.environ["RAY_ADDRESS"]
    try:
        _check_reachable(address)
        ray.init(address=address, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            f"cannot join the Ray cluster at {name} = {address!r} ({text}); start one by `ray start --head`, or "
            "give the address of its head as host:6379."
        ) from None
    return True


def _check_reachable(address: str) -> None:
    """Raise OSError where nothing listens at host:port: Ray itself tries for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        with socket.create_connection((host.strip("[]"), int(port)), _REACH_S):
            pass


def _versions() -> str:
    """Return what has to be the same on rank 0 and on a worker's node."""
    major, minor, _ = platform.python_version_tuple()
    return f"verifiers {verifiers.__version__} on Python {major}.{minor}"


class _RayWorker:
    """A worker that an actor serves on a node; `ended` is done when it has ended."""

    def __init__(self, link: WorkerLink, end_actor: Callable[[], None]) -> None:
        self._link, self._end_actor = link, end_actor
        self.ended: asyncio.Future[Any]
        self.node = ""
        self._is_killed = False

    def watch(self, call: Any) -> None:
        # no task, which the end of the event loop would cancel before the worker has ended
        self.ended = asyncio.wrap_future(call.future())
        self.ended.add_done_callback(self._note_end)

    def _note_end(self, ended: asyncio.Future[Any]) -> None:
        if not ended.cancelled():
            # it counts as seen, also where nobody waits for it any more
            ended.exception()
        # a host that is gone closes no connection
        self._link.connection.abort()

    def kill(self) -> None:
        self._is_killed = True
        self._end_actor()

    async def wait(self) -> str:
        await asyncio.wait({self.ended})
        error = self.ended.exception()
        if error is None:
            self._end_actor()
            return "ended"
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return "was killed" if self._is_killed else f"died on the Ray node {self.node} ({text})"


# -- connections --------------------------------------------------------------------------------------------------


_Expected = dict[str, Callable[[asyncio.Transport], asyncio.Protocol]]


class _Arrival(asyncio.Protocol):
    """A connection whose first line has to be a secret that an actor was given, good for one connection.

    Any other is closed as soon as it sends something else, or nothing for a while.
    """

    def __init__(self, expected: _Expected) -> None:
        self._expected = expected
        self._received = b""
        self._transport: asyncio.Transport
        self._silence: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._silence = asyncio.get_running_loop().call_later(_GREETING_S, self._transport.abort)

    def connection_lost(self, error: Exception | None) -> None:
        self._silence.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        key, end, rest = self._received.partition(b"\n")
        if not end and len(key) <= _LONGEST_KEY:
            return
        begin = self._expected.pop(key.decode(errors="replace"), None)
        if begin is None:
            self._transport.abort()
            return
        self._silence.cancel()
        protocol = begin(self._transport)
        self._transport.set_protocol(protocol)
        if rest:
            protocol.data_received(rest)


# -- in the actor -------------------------------------------------------------------------------------------------


class RolloutActor:
    async def describe(self) -> dict[str, str]:
        import ray.util

        return {"node": ray.util.get_node_ip_address(), "versions": _versions()}

    async def serve(self, host: str, port: int, key: str) -> None:
        """Run a worker: serve rank 0 until a `close` message, or until the connection is lost."""
        # Ray shows both on rank 0, whose standard output may be a result for machines
        sys.stdout.flush()
        os.dup2(2, 1)
        worker = RolloutWorker(functools.partial(set_up_process, keeps_path=True))
        loop = asyncio.get_running_loop()
        connected = socket.create_connection((host, port), _CONNECT_S)
        connected.sendall(f"{key}\n".encode())
        connected.setblocking(False)
        await loop.create_connection(lambda: worker.connection, sock=connected)
        await worker.serve()
