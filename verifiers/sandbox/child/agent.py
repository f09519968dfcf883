"""The process inside a sandbox that starts commands when asked, and kills them when their time is over.

It runs nobody's code itself: every command, file access and call gets a process of its own, forked and confined. It
must have one thread only, because it forks without exec.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from verifiers.sandbox.child.calls import answer_call, import_module
from verifiers.sandbox.child.confine import Limits, close_all_but, confine
from verifiers.sandbox.child.files import read_file, write_file
from verifiers.sandbox.child.killing import kill_group, kill_trees, kill_user, orphans
from verifiers.sandbox.child.wire import Frames, send_frame

__all__ = ["Agent"]

_SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")
_LOOK_S = 0.5
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class _Run:
    """A command under way."""

    # plain, as `dataclasses` would take a fifth of the time that a sandbox needs to start
    __slots__ = ("answer", "being_killed", "deadline", "id", "kind", "pid", "started", "timed_out")

    def __init__(self, message: dict[str, Any], pid: int, started: float) -> None:
        self.id: int = message["id"]
        self.kind: str = message["kind"]
        self.pid = pid
        self.started = started
        timeout_s = message.get("timeout_s")
        self.deadline: float | None = None if timeout_s is None else started + timeout_s
        self.timed_out = False
        self.being_killed = False
        self.answer: dict[str, Any] | None = None


class Agent:
    """Answers the requests on a socket until it is closed.

    Args:
        contained: the root directory is the sandbox's own, so files need no check of their paths.
    """

    def __init__(self, control: socket.socket, limits: Limits, *, contained: bool) -> None:
        self.control = control
        self.limits = limits
        self.contained = contained
        # by process number
        self._runs: dict[int, _Run] = {}
        self._frames = Frames()
        self._looked_at_memory = 0.0
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)

    def serve(self, *, also_watch: int | None = None, stop: Callable[[], bool] = lambda: False) -> None:
        """Work until the socket is closed by its other end, `also_watch` can be read, or `stop` says so."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        if also_watch is not None:
            self._selector.register(also_watch, selectors.EVENT_READ)
        while not stop():
            events = self._selector.select(self._wait_s())
            for key, _ in events:
                if key.fd == self._wake_read:
                    self._drain_wakeups()
                elif key.fileobj is not self.control or not self._receive():
                    return
            self.reap()
            self._kill_overdue()
            if self.contained and self._runs and time.monotonic() > self._looked_at_memory + _LOOK_S:
                self._hold_memory()

    def _wait_s(self) -> float:
        deadlines = [run.deadline for run in self._runs.values() if run.deadline is not None]
        # so long for `stop`, where no descriptor tells of the parent's death, and for the memory
        longest = _LOOK_S if self.contained and self._runs else 1.0
        return max(0.0, min([longest, *(deadline - time.monotonic() for deadline in deadlines)]))

    def _hold_memory(self) -> None:
        """Kill everything when all processes together hold more than one may: each limit is of one process alone."""
        self._looked_at_memory = time.monotonic()
        held = 0
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                try:
                    with open(f"/proc/{name}/statm") as file:
                        _, resident, shared, *_ = map(int, file.read().split())
                except OSError:
                    continue
                held += (resident - shared) * _PAGE_BYTES
        if held > self.limits.memory_bytes:
            self._kill_everyone()

    def _drain_wakeups(self) -> None:
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            pass

    def _receive(self) -> bool:
        try:
            if not self._frames.receive(self.control):
                return False
        except ConnectionError:
            return False
        for message, fds in self._frames.messages():
            try:
                self._handle(message, fds)
            finally:
                for fd in fds:
                    os.close(fd)
        return True

    def _handle(self, message: dict[str, Any], fds: list[int]) -> None:
        if message["op"] == "spawn":
            self._spawn(message, fds)
        elif message["op"] == "import":
            self._reply({"id": message["id"], "error": import_module(message["module"])})
        elif message["op"] == "kill":
            for run in [run for run in self._runs.values() if run.id == message["id"]]:
                self._kill(run)

    def _reply(self, message: dict[str, Any]) -> None:
        try:
            send_frame(self.control, message)
        except OSError:
            # the other end is gone; the next read tells
            pass

    def _spawn(self, message: dict[str, Any], fds: list[int]) -> None:
        started = time.monotonic()
        try:
            pid = os.fork()
        except OSError as error:
            self._reply({"id": message["id"], "error": f"no process could be started: {error}"})
            return
        if pid == 0:
            code = 126
            try:
                code = self._become(message, fds)
            except BaseException as error:
                _say(f"{type(error).__name__}: {error}")
            finally:
                os._exit(code)
        self._runs[pid] = _Run(message, pid, started)

    def _become(self, message: dict[str, Any], fds: list[int]) -> int:
        """What the forked child does; returns its exit code."""
        kind = message["kind"]
        if kind == "call":
            close_all_but({fds[0]})
        else:
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
            close_all_but(set())
        confine(self.limits, message.get("cpu_time_s"))
        if kind == "exec":
            _execute(message["command"], self.limits)
        try:
            if kind == "call":
                answer_call(message, fds[0])
            elif kind == "read":
                read_file(message["path"], self.limits.directory, 1, message["max_bytes"], self.contained)
            else:
                write_file(message["path"], self.limits.directory, 0, self.contained)
        except OSError as error:
            # told in numbers, so that the caller can raise the same
            _say(f"{error.errno} {error.strerror}")
            return 1
        return 0

    def reap(self) -> None:
        """Wait for every child that has ended, and report those that were asked for."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            run = self._runs.pop(pid, None)
            if run is None:
                continue
            if run.kind == "call":
                self._kill_orphans()
            run.answer = {
                "id": run.id,
                "exit": os.waitstatus_to_exitcode(status),
                "timed_out": run.timed_out,
                "elapsed_s": time.monotonic() - run.started,
            }
            if not run.being_killed:
                self._reply(run.answer)

    def _kill_orphans(self) -> None:
        """A call leaves nothing behind that could meddle with the next one."""
        if self.contained and not self._runs:
            self._kill_everyone()
            try:
                # all are killed, and all of them become children of this process
                while True:
                    os.waitpid(-1, 0)
            except ChildProcessError:
                return
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            # no child of any kind, so nothing to look for
            return
        kill_trees(lambda: orphans(self._runs), self._reap_unknown)

    def _kill_everyone(self) -> None:
        """Kill all other processes of these namespaces, in one system call that nothing can outrun."""
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _reap_unknown(self) -> None:
        for pid in orphans(self._runs):
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for run in list(self._runs.values()):
            if run.deadline is not None and now >= run.deadline and run.pid in self._runs:
                run.timed_out = True
                self._kill(run)

    def _kill(self, run: _Run) -> None:
        """Kill a command with all it started. Daemons cannot be told apart, so every command's daemons go."""

        def roots() -> set[int]:
            mine = {run.pid} if run.pid in self._runs else set()
            return mine | orphans(self._runs)

        kill_group(run.pid)
        run.deadline = None
        # its end is told when all that it started has ended too
        run.being_killed = True
        if not kill_trees(roots, self.reap):
            self._kill_the_lot()
            # should even that leave something, the next round tries again
            run.deadline = time.monotonic() + 1.0
        run.being_killed = False
        if run.answer is not None:
            self._reply(run.answer)

    def _kill_the_lot(self) -> None:
        """Kill also what other commands have started, in one system call where there is one for it."""
        if self.contained:
            self._kill_everyone()
        elif self.limits.uid is not None:
            kill_user(self.limits.uid)

    def kill_all(self) -> None:
        """Kill everything in the sandbox."""
        self._kill_the_lot()
        for pid in self._runs:
            kill_group(pid)
        kill_trees(lambda: orphans(()), self.reap)


def _say(text: str) -> None:
    try:
        os.write(2, text.encode(errors="replace"))
    except OSError:
        pass


def _execute(command: str | list[str], limits: Limits) -> None:
    """Replace this process by a command, or end it as a shell would where there is no such command."""
    if isinstance(command, str):
        shell = next((path for path in _SHELLS if os.access(path, os.X_OK)), _SHELLS[-1])
        command = [shell, "-c", command]
    try:
        os.execvpe(command[0], command, limits.environment)
    except OSError as error:
        _say(f"{command[0]}: {error.strerror}\n")
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
