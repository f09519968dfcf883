"""First process of a sandbox: starts commands when asked, holds them to their time, and cleans up at the end.

The program that opened the sandbox holds the other end of one socket. When that end is closed, by `close` or because
the program died, everything in the sandbox is killed and its files are removed.

The agent runs nobody's code itself: every command, file access and call gets a process of its own, forked and
confined. Standard library only, and one thread, because it forks without exec.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import selectors
import signal
import socket
import stat
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from verifiers.sandbox.confinement import (
    Limits,
    adopt_orphans,
    close_all_but,
    confine,
    kill_everyone,
    kill_group,
    kill_trees,
    kill_user,
    leave_keyring,
    orphans,
    set_dumpable,
    tasks_of_user,
    unusable_path,
)
from verifiers.sandbox.frames import Frames, pack

MAX_RESULT_BYTES = 16 << 20
_SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")
# rm goes deeper than Python may recurse; it needs help only where rights were taken from directories
_REMOVE = 'exec 2>/dev/null; rm -rf "$0" || { chmod -R u+rwx "$0"; rm -rf "$0"; }'
_LOOK_S = 0.5
_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# that a socket holds at most by the kernel's defaults; nothing tells what each does hold
_SOCKET_BYTES = 208 << 10


class _Run:
    # plain, as `dataclasses` would take a fifth of the time that a sandbox needs to start
    __slots__ = ("answer", "being_killed", "deadline", "id", "kind", "pid", "timed_out")

    def __init__(self, message: dict[str, Any], pid: int, started: float) -> None:
        self.id: int = message["id"]
        self.kind: str = message["kind"]
        self.pid = pid
        timeout_s = message.get("timeout_s")
        self.deadline: float | None = None if timeout_s is None else started + timeout_s
        self.timed_out = False
        self.being_killed = False
        self.answer: dict[str, Any] | None = None


class Agent:
    """The sandbox's side of the socket, until that is closed.

    Args:
        contained: this is the first process of a pid namespace with a root directory of its own.
    """

    def __init__(self, control: socket.socket, limits: Limits, *, contained: bool) -> None:
        self.control = control
        self.limits = limits
        self.contained = contained
        # by process number
        self._runs: dict[int, _Run] = {}
        self._frames = Frames()
        self._looked_at_use = 0.0
        self._files = 0
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)

    def serve(self, parent: int | None = None) -> None:
        """Serve until the socket is closed by its other end, or this process has another parent than `parent`."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        while parent is None or os.getppid() == parent:
            for key, _ in self._selector.select(self._wait_s()):
                if key.fd == self._wake_read:
                    self._drain_wakeups()
                elif not self._receive():
                    return
            self.reap()
            self._kill_overdue()
            if self.contained and self._runs and time.monotonic() > self._looked_at_use + _LOOK_S:
                self._hold_memory()

    def _wait_s(self) -> float:
        deadlines = [run.deadline for run in self._runs.values() if run.deadline is not None]
        # so long for the parent, whose death nothing else tells of, and for the memory
        longest = _LOOK_S if self.contained and self._runs else 1.0
        return max(0.0, min([longest, *(deadline - time.monotonic() for deadline in deadlines)]))

    def _hold_memory(self) -> None:
        """Kill everything when all processes together hold more than one may, or fill the memory with empty files.

        Each process's limit is its own, and a tmpfs made by bubblewrap counts bytes but no files.
        """
        self._looked_at_use = time.monotonic()
        held = _SOCKET_BYTES * _numbers("/proc/net/sockstat", ("sockets:",), place=2)
        resident = sum(map(_resident, _others()))
        if held + resident > self.limits.memory_bytes:
            # what several share is counted once, where the kernel tells, which takes longer; and twice, as what forks
            # or ends meanwhile counts as more than it holds
            resident = min(sum(_proportional(pid) or _resident(pid) for pid in _others()) for _ in range(2))
        held += resident
        disk = os.statvfs(self.limits.directory)
        before, self._files = self._files, disk.f_files - disk.f_ffree
        most_files = max(1024, min(disk.f_blocks * disk.f_frsize // 4096, 1 << 18))
        # those that are there already may be removed, however many
        if held > self.limits.memory_bytes or self._files > max(most_files, before):
            kill_everyone()
            # what they made since the count does not count as files of the next program
            self._files = disk.f_files

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
            self.reply({"id": message["id"], "problem": _import_module(message["module"], message["paths"])})
        elif message["op"] == "kill":
            for run in [run for run in self._runs.values() if run.id == message["id"]]:
                self._kill(run)

    def reply(self, message: dict[str, Any]) -> None:
        try:
            self.control.sendall(pack(message))
        except OSError:
            # the other end is gone, which the next read tells
            pass

    def _spawn(self, message: dict[str, Any], fds: list[int]) -> None:
        started = time.monotonic()
        try:
            pid = os.fork()
        except OSError as error:
            self.reply({"id": message["id"], "error": f"no process could be started: {error}"})
            return
        if pid == 0:
            code = 126
            try:
                code = self._become(message, fds)
            except BaseException as error:
                say(f"{type(error).__name__}: {error}")
            finally:
                os._exit(code)
        self._runs[pid] = _Run(message, pid, started)

    def _become(self, message: dict[str, Any], fds: Sequence[int]) -> int:
        kind = message["kind"]
        answer = fds[1]
        if kind == "call":
            # what it prints is thrown away, as the agent's own standard streams lead nowhere
            close_all_but({answer})
        else:
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
            close_all_but(set())
        confine(self.limits, message.get("cpu_time_s"))
        try:
            if kind == "exec":
                execute(message["command"], {**self.limits.environment, **message.get("env", {})})
            elif kind == "relay":
                # it outlives the program, which must not be able to put code of its own into it
                set_dumpable(False)
                # imported here, as asyncio takes longer to load than all else that a sandbox starts with
                from verifiers.sandbox import relay

                relay.run(message["target"])
            elif kind == "call":
                _write_all(answer, _answer(message))
            elif kind == "read":
                read_file(message, self.limits, self.contained)
            else:
                write_file(message, self.limits, self.contained)
        except OSError as error:
            # told in numbers, so that the caller can raise the same
            say(f"{error.errno} {error.strerror}")
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
            }
            if not run.being_killed:
                self.reply(run.answer)

    def _kill_orphans(self) -> None:
        """Kill what a call has left behind, which could meddle with the next one."""
        if self.contained and not self._runs:
            kill_everyone()
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
            self._kill_at_once()
            # should even that leave something, the next round tries again
            run.deadline = time.monotonic() + 1.0
        run.being_killed = False
        if run.answer is not None:
            self.reply(run.answer)

    def _kill_at_once(self) -> None:
        if self.contained:
            kill_everyone()
        elif self.limits.uid is not None:
            kill_user(self.limits.uid)

    def kill_all(self) -> None:
        self._kill_at_once()
        for pid in self._runs:
            kill_group(pid)
        kill_trees(lambda: orphans(()), self.reap)


def _others() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _resident(pid: str) -> int:
    return _numbers(f"/proc/{pid}/status", ("RssAnon:", "RssShmem:", "HugetlbPages:")) << 10


def _proportional(pid: str) -> int:
    return _numbers(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")) << 10


def _numbers(path: str, names: tuple[str, ...], place: int = 1) -> int:
    """Return the sum of the named lines' numbers in a file of /proc; 0 where it cannot be read."""
    try:
        with open(path) as file:
            return sum(int(line.split()[place]) for line in file if line.startswith(names))
    except OSError:
        return 0


def _import_module(module: str, paths: list[str]) -> str | None:
    sys.path.extend(path for path in paths if path not in sys.path)
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    import gc

    # pages that the collector does not touch stay shared with the forked calls
    gc.collect()
    gc.freeze()
    return None


# --- work of a process that was forked for one request


def say(text: str) -> None:
    try:
        os.write(2, text.encode(errors="replace"))
    except OSError:
        pass


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def execute(command: str | list[str], environment: dict[str, str]) -> None:
    """Replace this process by a command, or end it as a shell would where there is no such command."""
    if isinstance(command, str):
        shell = next((path for path in _SHELLS if os.access(path, os.X_OK)), _SHELLS[-1])
        command = [shell, "-c", command]
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        say(f"{command[0]}: {error.strerror}\n")
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _open(path: str, limits: Limits, flags: int, contained: bool) -> int:
    """Open a regular file. Unless `contained`, no path and no link may lead out of the sandbox's directory."""
    whole = os.path.join(limits.directory, path)
    directory = os.path.realpath(limits.directory)
    if not contained and os.path.commonpath([directory, os.path.realpath(whole)]) != directory:
        raise PermissionError(errno.EACCES, "the path leads out of the sandbox's directory")
    if flags & os.O_WRONLY:
        os.makedirs(os.path.dirname(whole), exist_ok=True)
    # O_NONBLOCK: opening a named pipe must not wait for its other end
    fd = os.open(whole, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o644)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, os.strerror(number))
    return fd


def read_file(request: dict[str, Any], limits: Limits, contained: bool) -> None:
    fd = _open(request["path"], limits, os.O_RDONLY, contained)
    left = request["max_bytes"]
    while data := os.read(fd, 1 << 16):
        left -= len(data)
        if left < 0:
            raise OSError(errno.EFBIG, f"the file is longer than {request['max_bytes']} bytes")
        _write_all(1, data)


def write_file(request: dict[str, Any], limits: Limits, contained: bool) -> None:
    fd = _open(request["path"], limits, os.O_WRONLY | os.O_CREAT, contained)
    # only now: a special file would have been truncated before it was looked at
    os.ftruncate(fd, 0)
    while data := os.read(0, 1 << 16):
        _write_all(fd, data)


def _answer(request: dict[str, Any]) -> bytes:
    try:
        module, _, path = request["function"].partition(":")
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except Exception as error:
        return json.dumps({"missing": f"{type(error).__name__}: {error}"}).encode()
    try:
        value = found(*request["args"], **request["kwargs"])
        data = json.dumps({"value": value}).encode()
    # also SystemExit and KeyboardInterrupt: the process ends here, and its caller has to be told why
    except BaseException as error:
        return json.dumps({"kind": type(error).__name__, "message": str(error)[:2000]}).encode()
    if len(data) > MAX_RESULT_BYTES:
        message = f"its result is {len(data)} bytes of JSON, over the limit of {MAX_RESULT_BYTES}"
        return json.dumps({"kind": "OverflowError", "message": message}).encode()
    return data


def remove_tree(path: str) -> None:
    """Remove a directory with all it holds, however deep and with whatever rights. Nothing may be writing to it."""
    try:
        for entry in os.listdir(path):
            os.unlink(os.path.join(path, entry))
        os.rmdir(path)
    except OSError:
        # there are directories in it
        os.spawnlp(os.P_WAIT, "sh", "sh", "-c", _REMOVE, path)


# --- start


def main() -> NoReturn:
    """Run the agent; the socket's descriptor is the first argument."""
    # the caller may ignore or block what has to arrive here
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    control = socket.socket(fileno=int(sys.argv[1]))
    frames = Frames()
    config: dict[str, Any] | None = None
    while config is None and frames.receive(control):
        config = next((message for message, _ in frames.messages()), None)
    if config is not None:
        try:
            leave_keyring()
            set_dumpable(False)
            (_serve_contained if config["isolation"] == "bubblewrap" else _serve_directory)(control, config)
        except Exception as error:
            try:
                control.sendall(pack({"failed": str(error)}))
            except OSError:
                pass
    os._exit(0 if config is not None else 1)


def _serve(agent: Agent, note: str, parent: int | None) -> None:
    # errors of the start went to the program; nothing else may
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    os.close(null)
    agent.reply({"ready": True, "directory": agent.limits.directory, "note": note})
    agent.serve(parent)


def _serve_directory(control: socket.socket, config: dict[str, Any]) -> None:
    """Serve the process level: a directory of the host's, removed at the end."""
    for number in _END_SIGNALS:
        signal.signal(number, lambda number, frame: sys.exit())
    adopt_orphans()
    directory = os.path.join(config["temporary"], f"sandbox-{os.urandom(8).hex()}")
    os.mkdir(directory, 0o700)
    try:
        os.environ.update(HOME=directory, TMPDIR=directory)
        config = {**config, "directory": directory}
        config["environment"] = {**config["environment"], "HOME": directory, "TMPDIR": directory}
        limits, note = Limits.of(config), "another user"
        if limits.uid is not None:
            os.chown(directory, limits.uid, limits.uid)
        if limits.uid is None or unusable_path(limits, [sys.executable]):
            os.chown(directory, os.getuid(), os.getgid())
            limits = Limits.of(config, uid=None, base_processes=tasks_of_user(os.getuid()))
            note = "same user"
        agent = Agent(control, limits, contained=False)
        try:
            _serve(agent, note, config["parent"])
        finally:
            # the cleaning up is not to be interrupted
            for number in _END_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            agent.kill_all()
    finally:
        remove_tree(directory)


def _serve_contained(control: socket.socket, config: dict[str, Any]) -> None:
    """Serve the bubblewrap level: when this process ends, for whatever reason, the kernel kills all others."""
    os.environ.update(HOME=config["directory"], TMPDIR="/tmp")
    config["environment"] = {**config["environment"], "HOME": config["directory"], "TMPDIR": "/tmp"}
    # RLIMIT_NPROC counts the agent too where the sandbox runs as the agent's user
    limits = Limits.of(config, base_processes=1 if config["uid"] is None else 0)
    if limits.uid is not None:
        os.chown(limits.directory, limits.uid, limits.uid)
        for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time"):
            # more namespaces would be a way to more of the kernel
            try:
                with open(f"/proc/sys/user/max_{name}_namespaces", "w") as file:
                    file.write("0")
            except OSError:
                continue
    path = unusable_path(limits, config["required"])
    if path is not None:
        raise PermissionError(
            f"{path!r} cannot be read by the user that the sandbox runs as; let everybody read it (chmod -R o+rX)"
        )
    _serve(Agent(control, limits, contained=True), "", None)
