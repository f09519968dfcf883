"""Processes with torch, transformers and trl imported, in milliseconds: a parent imports them once and forks.

    python forks.py MODULE [MODULE ...]

The parent has one thread, so forking it is safe. It reads lines of JSON, {"run": "module:function", "given": {...},
"log": PATH, "environ": {...}, "ranks": N}, and forks a process for each, in a session of its own, that calls the
function with `given`, on several ranks under the supervision that torchrun is made of. It ends as an interpreter
does: atexit, threads that are not daemons, buffers. The parent answers {"pid": N} at once, and {"ended": N,
"code": C} when the process has ended (-9 for one that was killed).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Forked", "Forks", "fork_parent"]


@dataclass(slots=True)
class Forked:
    """One process.

    Attributes:
        code: its exit code, minus the signal that killed it; None while it runs.
        ended_at: `time.monotonic()` when its end was noticed.
    """

    pid: int
    log: Path
    code: int | None = None
    ended_at: float = 0.0

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; nothing where it has ended."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Forks:
    """The side of the tests: asks a parent for processes and hears of their ends."""

    def __init__(self, parent: subprocess.Popen[bytes]) -> None:
        self._parent = parent
        self._changed = threading.Condition()
        self._started: list[Forked] = []
        self._by_pid: dict[int, Forked] = {}
        self._has_ended = False
        self._reader = threading.Thread(target=self._read, name="forks-reader", daemon=True)
        self._reader.start()

    def start(
        self,
        run: str,
        given: Mapping[str, Any],
        log: Path,
        environ: Mapping[str, str] | None = None,
        ranks: int = 1,
    ) -> Forked:
        """Return a process that calls `module:function` with `given`; its output is appended to `log`.

        On several ranks it is their launcher, whose exit code is not 0 where one of them fails.
        """
        order = {
            "run": run,
            "given": dict(given),
            "log": str(log),
            "environ": dict(environ or {}),
            "ranks": ranks,
        }
        assert self._parent.stdin is not None
        with self._changed:
            self._parent.stdin.write(json.dumps(order).encode() + b"\n")
            self._parent.stdin.flush()
            # importing is what takes long, and only the first start waits for it
            self._changed.wait_for(lambda: bool(self._started) or self._has_ended, 300.0)
            assert self._started, "the parent of the forks does not answer"
            forked = self._started.pop(0)
            forked.log = log
            return forked

    def wait(self, forked: Forked, timeout_s: float) -> int:
        """Return the exit code; a TimeoutError after `timeout_s` has the end of the output."""
        with self._changed:
            if self._changed.wait_for(lambda: forked.code is not None, timeout_s):
                assert forked.code is not None
                return forked.code
        raise TimeoutError(f"still running after {timeout_s:g} s: {forked.log.read_text()[-3000:]}")

    def run(self, run: str, given: Mapping[str, Any], log: Path, ranks: int = 1, timeout_s: float = 150.0) -> int:
        """Start a process as `start` does, and return its exit code; one that takes longer is killed."""
        forked = self.start(run, given, log, ranks=ranks)
        try:
            return self.wait(forked, timeout_s)
        finally:
            self.end(forked)

    def end(self, forked: Forked) -> None:
        """Kill it, stopped or not, and everything it started."""
        if forked.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(forked.pid, signal.SIGKILL)
            self.wait(forked, 10.0)

    def _read(self) -> None:
        assert self._parent.stdout is not None
        for line in self._parent.stdout:
            said = json.loads(line)
            with self._changed:
                if "pid" in said:
                    forked = self._by_pid[said["pid"]] = Forked(said["pid"], Path(os.devnull))
                    self._started.append(forked)
                else:
                    forked = self._by_pid.pop(said["ended"])
                    forked.code, forked.ended_at = said["code"], time.monotonic()
                self._changed.notify_all()
        with self._changed:
            # such as by an import that failed
            self._has_ended = True
            self._changed.notify_all()


@contextlib.contextmanager
def fork_parent(*modules: str) -> Iterator[Forks]:
    """Return a parent that has imported `modules` of this folder; it ends with its children on the way out."""
    parent = subprocess.Popen([sys.executable, __file__, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield Forks(parent)
    finally:
        assert parent.stdin is not None
        parent.stdin.close()
        try:
            parent.wait(20.0)
        finally:
            parent.kill()
            parent.wait()
            assert parent.stdout is not None
            parent.stdout.close()


# -- the parent -------------------------------------------------------------------------------------------------


def _serve() -> dict[str, Any] | None:
    """Fork until the orders end; gives the order in a child, None in the parent."""
    children: set[int] = set()
    pending = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.005 if children else None)
        if ready:
            read = os.read(0, 65536)
            if not read:
                for pid in children:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                return None
            *lines, pending = (pending + read).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    return dict(json.loads(line))
                children.add(pid)
                _say({"pid": pid})
        for pid in _ended(children):
            children.discard(pid[0])
            _say({"ended": pid[0], "code": pid[1]})


def _ended(children: set[int]) -> Iterator[tuple[int, int]]:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)
        children.discard(pid)


def _say(what: dict[str, int]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _become(order: dict[str, Any]) -> None:
    os.setsid()
    os.environ.update(order["environ"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _call(run: str, given: dict[str, Any]) -> None:
    module, function = run.split(":")
    if code := getattr(importlib.import_module(module), function)(given):
        sys.exit(code)


def _call_on_ranks(run: str, given: dict[str, Any], ranks: int) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        start_method="fork",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    elastic_launch(config, _call_on_rank)(run, given)


def _call_on_rank(run: str, given: dict[str, Any]) -> None:
    # a process that torchrun starts has not inherited its handlers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _call(run, given)


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    for name in (*sys.argv[1:], "torch.distributed.launcher.api"):
        importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()
    # a child would copy every page of what was imported to collect garbage in it, which takes seconds when it ends
    gc.freeze()
    order = _serve()
    if order is not None:
        _become(order)
        if order["ranks"] > 1:
            _call_on_ranks(order["run"], order["given"], order["ranks"])
        else:
            _call(order["run"], order["given"])


if __name__ == "__main__":
    main()
