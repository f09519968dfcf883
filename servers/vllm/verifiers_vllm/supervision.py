"""vLLM as a process group of its own, and the certainty that all of it ends.

vLLM's server starts engine processes. They share its process group, so that one signal reaches all of them;
the group is ended by SIGTERM first, and for good after a grace period. In the other direction the server's process,
``python -m verifiers_vllm.supervision MODEL ...``, watches for the end of the one that started it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

SUPERVISOR_VARIABLE = "VERIFIERS_VLLM_SUPERVISOR"
_GRACE_S = 8.0
_PARENT_POLL_S = 0.25
_CAUSE = re.compile(rb"(?<![\w.`])(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): .+")
"""The end of a traceback, and no error that a warning speaks of."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class ServerGroup:
    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "verifiers_vllm.supervision", *arguments]
        environment = {**environment, SUPERVISOR_VARIABLE: str(os.getpid())}
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
        self._cause: str | None = None
        pairs = ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        self._readers = [threading.Thread(target=self._pass_on, args=pair, daemon=True) for pair in pairs]
        for reader in self._readers:
            reader.start()

    def cause(self, timeout_s: float = 1.0) -> str | None:
        """Return the first error that the ended server named: later ones say that something has failed before."""
        deadline = time.monotonic() + timeout_s
        for reader in self._readers:
            # an engine that is left keeps the pipe open
            reader.join(max(0.0, deadline - time.monotonic()))
        return self._cause

    def _pass_on(self, source: IO[bytes], target: TextIO) -> None:
        rest = b""
        while chunk := os.read(source.fileno(), 2**16):
            with contextlib.suppress(OSError, ValueError):
                target.buffer.write(chunk)
                target.flush()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if self._cause is None and (found := _CAUSE.search(line)):
                    self._cause = _COLOURS.sub("", found[0].decode(errors="replace")).strip()
            # a progress bar ends no line
            rest = rest[-2000:]

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def end(self, grace_s: float = _GRACE_S) -> None:
        """Send SIGTERM to the whole group, and SIGKILL to what is left of it after the grace period."""
        if self.exit_code is not None:
            # the process that would have ended the engines in order is gone
            grace_s = min(grace_s, 1.0)
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and self._is_left():
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and self._is_left():
            time.sleep(0.02)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _is_left(self) -> bool:
        self._process.poll()
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            # macOS says so of a group that has only processes nobody waited for
            return False
        return _group_has_live_member(self._process.pid)


def answers(url: str, timeout_s: float = 2.0) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def process_lives(pid: int) -> bool:
    """Return whether process `pid` runs. One that has ended but was not waited for (a zombie) does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _state(Path(f"/proc/{pid}/stat"))[0] not in ("Z", "X")


def _group_has_live_member(group: int) -> bool:
    """Return whether a process of the group runs; zombies do not count, and without /proc every group counts."""
    proc = Path("/proc")
    if not (proc / "self/stat").is_file():
        return True
    for entry in proc.iterdir():
        if entry.name.isdigit():
            state, its_group = _state(entry / "stat")
            if its_group == group and state not in ("Z", "X"):
                return True
    return False


def _state(stat: Path) -> tuple[str, int]:
    """Read the state letter and process group from a stat file; ("?", -1) where it cannot be read."""
    try:
        fields = stat.read_text().rpartition(")")[2].split()
        return fields[0], int(fields[2])
    except (OSError, IndexError, ValueError):
        return "?", -1


# -- in the server's process ---------------------------------------------------------------------------------------


def follow(supervisor: int) -> None:
    """End this process group as soon as process `supervisor` is not this one's parent any more."""

    def watch() -> None:
        while os.getppid() == supervisor:
            time.sleep(_PARENT_POLL_S)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="vf-supervisor-watch", daemon=True).start()


def main() -> None:
    """Run ``vllm serve`` with this process's arguments."""
    # taken out: engine processes inherit the environment, and are not the supervisor's children
    supervisor = os.environ.pop(SUPERVISOR_VARIABLE, "")
    if supervisor:
        follow(int(supervisor))
    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
