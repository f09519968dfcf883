"""Starting an installed rollout server as a process of its own, and being sure that it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO, Any

from verifiers.errors import ConfigError, WeightSyncError
from verifiers.installation import SERVERS, install_hint

logger = logging.getLogger("verifiers.train")

_END_S = 15.0
"""Longer than a server takes to end what it started itself."""

_END_AFTER_FAILURE_S = 2.0
"""A run that fails has ended within 5 seconds, whatever its server and its environments do."""

# run by another interpreter, which may have no verifiers
_START = """
import sys
from importlib.metadata import entry_points
found = [point for point in entry_points(group="verifiers.servers") if point.name == {name!r}]
if not found:
    sys.exit("no rollout server named {name} is installed for " + sys.executable)
sys.exit(found[0].load()())
"""


def installed_servers() -> dict[str, str]:
    """Return the installed rollout servers by name, with what starts them ("module:function")."""
    return {point.name: point.value for point in entry_points(group="verifiers.servers")}


def share_cores(*, overlaps: bool) -> str | None:
    """Compute with half of the CPU's cores, where the rollout server has work on the same machine meanwhile.

    Two teams of threads that each take every core make a small model's steps several times slower. A trainer and a
    server that take turns have all cores each.

    Returns:
        A line for the user, or None where nothing was set: OMP_NUM_THREADS is set, which torchrun does for several
        ranks, or the two do not share cores at one time.
    """
    import torch

    if "OMP_NUM_THREADS" in os.environ or not overlaps:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // 2)
    torch.set_num_threads(threads)
    return (
        f"the trainer computes with {threads} of {cores} cores beside the server; OMP_NUM_THREADS sets another number"
    )


@contextlib.contextmanager
def launched_server(name: str, model: str, **options: Any) -> Iterator[str]:
    """Start a server as `starting_server` does, give its base URL once it listens, and stop it on the way out."""
    with starting_server(name, model, **options) as url:
        yield url()


@contextlib.contextmanager
def starting_server(
    name: str,
    model: str,
    *,
    args: Sequence[str] = (),
    start_timeout_s: float = 180.0,
    log_path: str | Path | None = None,
) -> Iterator[Callable[[], str]]:
    """Start a server on a free loopback port, and stop it on the way out.

    Gives a function that waits until the server listens, and returns its base URL; before it is called there is time
    for other work. The environment variable VERIFIERS_<NAME>_PYTHON names the interpreter that has the server
    installed, where that is another than this one.

    Args:
        name: of an installed server, e.g. "embedded" or "vllm".
        start_timeout_s: how long it may take until it listens, from when its URL is asked for.
        log_path: where its output goes; a temporary file when left out.

    Raises:
        ConfigError: no such server is installed.
        WeightSyncError: it ended, or did not listen in time; the message has the end of its output.
    """
    interpreter = _interpreter_for(name)
    with tempfile.TemporaryDirectory(prefix="verifiers-server-") as scratch, contextlib.ExitStack() as stack:
        port_file = Path(scratch) / "port"
        log = stack.enter_context(open(log_path or Path(scratch) / "log", "wb+"))
        command = [interpreter, "-c", _START.format(name=name), "--model", model]
        command += ["--port", "0", "--port-file", str(port_file), "--parent-pid", str(os.getpid()), *args]
        # idle threads of the server must not spin on the trainer's cores: a training step took several times as long
        environment = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", **os.environ}
        # a group of its own, which ends with it
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, process_group=0)
        within_s, port = _END_AFTER_FAILURE_S, None

        def url() -> str:
            nonlocal port
            port = _wait_for_port(name, process, port_file, log, start_timeout_s)
            return f"http://127.0.0.1:{port}/v1"

        try:
            yield url
            if port is not None:
                within_s = _END_S
        finally:
            if port is not None and process.poll() is not None:
                logger.error(
                    "the %s server has ended by itself, with code %d: %s", name, process.returncode, _tail(log)
                )
            _stop(process, within_s)


def _interpreter_for(name: str) -> str:
    variable = f"VERIFIERS_{name.upper()}_PYTHON"
    given = os.environ.get(variable)
    if given is not None:
        if not Path(given).is_file():
            raise ConfigError(f"the interpreter of the {name} server, {given!r}, does not exist ({variable}).")
        return given
    servers = installed_servers()
    if name not in servers:
        how = f"{install_hint(name)}, or " if name in SERVERS else ""
        raise ConfigError(
            f"no rollout server named {name!r} is installed (there are: {', '.join(sorted(servers)) or 'none'}); "
            f"{how}set {variable} to the interpreter of the environment that has it"
        )
    return sys.executable


def _wait_for_port(
    name: str, process: subprocess.Popen[bytes], port_file: Path, log: IO[bytes], timeout_s: float
) -> int:
    deadline = time.monotonic() + timeout_s
    while not port_file.exists() and process.poll() is None:
        if time.monotonic() > deadline:
            raise WeightSyncError(f"the {name} server did not listen within {timeout_s:g} s: {_tail(log)}")
        time.sleep(0.05)
    # it may have ended since
    if process.poll() is not None:
        raise WeightSyncError(f"the {name} server ended with code {process.returncode}: {_tail(log)}")
    return int(port_file.read_text().strip())


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace").strip()[-2000:] or "(it printed nothing)"


def _stop(process: subprocess.Popen[bytes], within_s: float) -> None:
    """End a server, and after `within_s` seconds also what it has started."""
    try:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=within_s)
    finally:
        # also where a second Ctrl-C cuts the wait; a server that has ended may have left processes in its group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1.0)
