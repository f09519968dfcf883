"""The process and bubblewrap levels: choosing between them, starting a sandbox's first process, and talking to it."""

from __future__ import annotations

import asyncio
import errno
import functools
import importlib.util
import logging
import math
import os
import secrets
import site
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError, SandboxError
from verifiers.sandbox import bubblewrap
from verifiers.sandbox.agent import remove_tree
from verifiers.sandbox.frames import FrameError, Frames, pack
from verifiers.sandbox.pipes import Drain, SandboxProcess, close_all, drained, ended, open_pipes
from verifiers.sandbox.spec import READ_BYTES, Sandbox, SandboxSpec, checked_command

logger = logging.getLogger("verifiers.sandbox")

_START_S = 30.0
_CLOSE_S = 10.0
_KILL_S = 15.0
_FILE_S = 30.0
# the agent kills at the deadline; past this much more the agent itself is taken for dead
_GRACE_S = 15.0
_BOOT = "import sys; sys.path.append(sys.argv[2]); from verifiers.sandbox.agent import main; main()"
# the part of the range that nothing else hands out users from (systemd's list of user ids)
_USERS = range(1_879_048_192, 2_147_483_646)
_NOBODY = 65534

# how bubblewrap works here, once it has; and why it does not
_recipes: list[bubblewrap.Recipe] = []
_unavailable = ""
_announced: set[str] = set()

Answer = asyncio.Future[dict[str, Any]]


class DiedEarlyError(SandboxError):
    """A sandbox's first process could not be started, or ended before it was ready."""


class AgentSandbox(Sandbox):
    """A sandbox made of processes of this machine. Opened by `open_agent_sandbox`.

    Attributes:
        note: whose user the commands of the process level run as.
    """

    def __init__(
        self, spec: SandboxSpec, level: str, process: subprocess.Popen[bytes], control: socket.socket
    ) -> None:
        self.isolation = level
        self.spec = spec
        self.process = process
        self.note = ""
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._frames = Frames()
        self._outgoing: deque[tuple[bytearray, list[int]]] = deque()
        self._ready: Answer = self._loop.create_future()
        self._gone = False
        self._answers: dict[int, Answer] = {}
        self._numbers = 0
        self._directory: str | None = None
        # more at once would only fail at the limit of processes, as a shell needs some of its own
        self._turns = asyncio.Semaphore(max(1, spec.processes // 4))
        self._loop.add_reader(control, self._receive)

    async def begin(self, configuration: dict[str, Any]) -> None:
        self._post(configuration)
        answer = await asyncio.shield(self._ready)
        if answer.get("lost"):
            problem = await asyncio.to_thread(self._last_output)
            raise DiedEarlyError(problem or "its first process ended before it was ready")
        if "failed" in answer:
            raise SandboxError(f"A sandbox of the level {self.isolation!r} could not be opened: {answer['failed']}.")
        self._close_errors()
        self.note = answer["note"]
        if self.isolation == "process":
            self._directory = answer["directory"]

    def _last_output(self) -> str:
        """Wait for the end of a first process that did not start well, and return what it said of that."""
        return self.process.communicate(timeout=_CLOSE_S)[1].decode(errors="replace").strip()[-500:]

    def _close_errors(self) -> None:
        if self.process.stderr is not None:
            self.process.stderr.close()

    @property
    def alive(self) -> bool:
        """True while its processes are there to be asked for something."""
        return not self._gone and self._closing is None and self.process.poll() is None

    # --- the socket

    def _receive(self) -> None:
        try:
            open_still = self._frames.receive(self._control)
            for message, _ in self._frames.messages():
                self._take(message)
        except BlockingIOError:
            return
        except (OSError, FrameError):
            open_still = False
        if not open_still:
            self._lost()

    def _take(self, message: dict[str, Any]) -> None:
        answer = self._answers.pop(message["id"], None) if "id" in message else self._ready
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _lost(self) -> None:
        """Give up every request: the other end is closed, so nothing of the sandbox is alive that could answer."""
        self._loop.remove_reader(self._control)
        self._loop.remove_writer(self._control)
        self._drop_outgoing()
        self._gone = True
        for answer in (self._ready, *self._answers.values()):
            if not answer.done():
                answer.set_result({"lost": True})
        self._answers.clear()

    def _post(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        try:
            data = bytearray(pack({**message, "fds": len(fds)}))
        except (FrameError, TypeError) as error:
            close_all(fds)
            raise ConfigError(f"This cannot be sent into a sandbox: {error}.") from error
        self._outgoing.append((data, list(fds)))
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                data, fds = self._outgoing[0]
                if fds:
                    sent = socket.send_fds(self._control, [data], fds)
                    close_all(fds)
                    fds.clear()
                else:
                    sent = self._control.send(data)
                del data[:sent]
                if not data:
                    self._outgoing.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._control, self._flush)
            return
        except OSError:
            # the reader of the socket sees the same and says so
            self._drop_outgoing()
        self._loop.remove_writer(self._control)

    def _drop_outgoing(self) -> None:
        for _, fds in self._outgoing:
            close_all(fds)
        self._outgoing.clear()

    # --- requests to the agent

    def _request(self, message: dict[str, Any], fds: Sequence[int] = ()) -> tuple[int, Answer]:
        """Send a request with descriptors, which are closed here; return its number and the answer to come."""
        if self._closing is not None or self._gone:
            close_all(fds)
            raise SandboxError("The sandbox is closed." if self._closing is not None else "The sandbox died.")
        self._numbers += 1
        number = self._numbers
        self._answers[number] = answer = self._loop.create_future()
        try:
            self._post({**message, "id": number}, fds)
        except BaseException:
            del self._answers[number]
            raise
        return number, answer

    def _spawn(self, with_stdin: bool, **request: Any) -> tuple[int, Answer, tuple[int, int, int]]:
        """Have a process started; return the request's number, the answer to come, and our ends of its pipes."""
        theirs, ours = open_pipes(with_stdin)
        try:
            return *self._request({"op": "spawn", **request}, theirs), ours
        except BaseException:
            close_all(ours)
            raise

    def _kill_run(self, number: int) -> None:
        if not self._gone and self._closing is None:
            self._post({"op": "kill", "id": number})

    async def _answer(self, number: int, answer: Answer, timeout_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                message = await answer
        except TimeoutError:
            # an agent that no longer answers, stopped or starved: the sandbox cannot be trusted to end anything
            self.process.kill()
            raise SandboxError(f"The sandbox did not end a command within {_GRACE_S:g} s of its time.") from None
        finally:
            if self._answers.pop(number, None) is not None:
                self._kill_run(number)
        if message.get("lost"):
            raise SandboxError("The sandbox was closed." if self._closing is not None else "The sandbox died.")
        if "error" in message:
            raise SandboxError(f"The sandbox could not run this: {message['error']}.")
        return message

    async def exchange(
        self, kind: str, *, stdin: bytes | None, keep_bytes: int, timeout_s: float, **request: Any
    ) -> tuple[dict[str, Any], Drain, Drain]:
        """Run something to its end, feeding and draining its pipes; return the agent's report, stdout and stderr."""
        number, answer, pipes = self._spawn(stdin is not None, kind=kind, timeout_s=timeout_s, **request)
        with drained(pipes, stdin, keep_bytes, self.spec.output_bytes, lambda: self._kill_run(number)) as (out, err):
            message = await self._answer(number, answer, timeout_s)
        return message, out, err

    async def import_module(self, module: str, paths: Sequence[str], timeout_s: float) -> str | None:
        """Import a module where calls are forked from; None, or the sentence that says why it could not be."""
        number, answer = self._request({"op": "import", "module": module, "paths": list(paths)})
        problem: str | None = (await self._answer(number, answer, timeout_s))["problem"]
        return problem

    async def _run(
        self, command: str | list[str], *, stdin: bytes | None, timeout_s: float, env: dict[str, str]
    ) -> tuple[int | None, Drain, Drain]:
        cpu_s = self.spec.cpu_time_s
        async with self._turns:
            message, out, err = await self.exchange(
                "exec",
                stdin=stdin,
                keep_bytes=self.spec.output_bytes,
                timeout_s=timeout_s,
                command=command,
                cpu_time_s=math.ceil(timeout_s) + 1 if cpu_s is None else cpu_s,
                env=env,
            )
        return None if message["timed_out"] else message["exit"], out, err

    async def start(self, command: Sequence[str]) -> SandboxProcess:
        return self._start("exec", command=checked_command(command))

    async def _start_relay(self, target: str) -> SandboxProcess:
        return self._start("relay", target=target)

    def _start(self, kind: str, **request: Any) -> SandboxProcess:
        number, answer, pipes = self._spawn(True, kind=kind, cpu_time_s=self.spec.cpu_time_s, **request)
        return _AgentProcess(self, number, answer, pipes)

    async def read(self, path: str, *, max_bytes: int = READ_BYTES) -> bytes:
        message, out, err = await self.exchange(
            "read", stdin=None, keep_bytes=max_bytes, timeout_s=_FILE_S, path=os.fspath(path), max_bytes=max_bytes
        )
        _raise_for(message, err, path)
        return bytes(out.kept)

    async def _write(self, path: str, data: bytes) -> None:
        message, _, err = await self.exchange(
            "write", stdin=data, keep_bytes=0, timeout_s=_FILE_S, path=os.fspath(path)
        )
        _raise_for(message, err, path)

    async def send_files(self, other: AgentSandbox) -> None:
        """Copy the working directory into that of another sandbox. Raises OSError where that is impossible."""
        reading, writing = os.pipe()
        nothing = [os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC) for _ in range(4)]
        # sparse files stay so, as they may be longer than the disk is large
        ends = (
            (self, ["tar", "-cSf", "-", "."], [nothing[0], writing, nothing[1]]),
            (other, ["tar", "-xpf", "-"], [reading, *nothing[2:]]),
        )
        answers = [
            (
                sandbox,
                sandbox._request({"op": "spawn", "kind": "exec", "timeout_s": _FILE_S, "command": command}, fds),
            )
            for sandbox, command, fds in ends
        ]
        for sandbox, (number, answer) in answers:
            if (await sandbox._answer(number, answer, _FILE_S))["exit"] != 0:
                raise OSError(errno.EIO, "its files cannot be copied")

    async def _close(self) -> None:
        try:
            # ends the sandbox even where a forked process of the caller has a copy of this end
            self._control.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        # which releases started processes, too
        self._lost()
        try:
            if not await ended(self.process, _CLOSE_S):
                self.process.kill()
                await ended(self.process, _CLOSE_S)
            if self.process.returncode and self._directory:
                # killed before it could do so itself
                remove_tree(self._directory)
        finally:
            self._control.close()
            self._close_errors()


class _AgentProcess(SandboxProcess):
    def __init__(
        self,
        sandbox: AgentSandbox,
        number: int,
        answer: Answer,
        pipes: tuple[int, int, int],
    ) -> None:
        self._answer = answer
        self._ask_to_kill = lambda: sandbox._kill_run(number)
        super().__init__(pipes, sandbox.spec.output_bytes, self._ask_to_kill)
        answer.add_done_callback(lambda answer: self.release())

    async def wait(self, *, timeout_s: float | None = None) -> int | None:
        async with asyncio.timeout(timeout_s):
            message = await asyncio.shield(self._answer)
        exit_code: int | None = message.get("exit")
        return exit_code

    async def kill(self) -> None:
        if not self._answer.done():
            self._ask_to_kill()
        try:
            await self.wait(timeout_s=_KILL_S)
        except TimeoutError:
            raise SandboxError(f"The sandbox did not kill a process within {_KILL_S:g} s.") from None


def _raise_for(message: dict[str, Any], err: Drain, path: str) -> None:
    if message["exit"] == 0:
        return
    number, _, text = err.text.partition(" ")
    if number.isdigit():
        raise OSError(int(number), text, path)
    raise OSError(errno.EIO, f"the access did not end well (exit code {message['exit']})", path)


# -- opening one ----------------------------------------------------------------------------------------------------


async def open_agent_sandbox(spec: SandboxSpec) -> AgentSandbox:
    """Open a sandbox of the level process or bubblewrap; "auto" takes bubblewrap where it works."""
    global _unavailable
    level = spec.isolation
    if level == "auto":
        level = "process" if _unavailable else "bubblewrap"
    try:
        sandbox = await (_open(spec, level) if level == "process" else _open_bubblewrap(spec))
    except DiedEarlyError as error:
        if level == "process":
            raise SandboxError(f"A sandbox of the level 'process' could not be opened: {error}.") from error
        # where bubblewrap has worked, a failure of it must not let code out
        if spec.isolation != "auto" or _recipes:
            raise
        _unavailable = str(error)
        sandbox = await _open(spec, "process")
    _announce(sandbox)
    return sandbox


async def _open_bubblewrap(spec: SandboxSpec) -> AgentSandbox:
    problems = []
    for recipe in list(_recipes) or bubblewrap.recipes():
        try:
            sandbox = await _open(spec, "bubblewrap", recipe)
        except DiedEarlyError as error:
            problems.append(str(error))
        else:
            _recipes[:] = [recipe]
            return sandbox
    why = bubblewrap.why_unavailable(problems)
    raise DiedEarlyError(f"The isolation level 'bubblewrap' does not work here: {why}.")


async def _open(spec: SandboxSpec, level: str, recipe: bubblewrap.Recipe | None = None) -> AgentSandbox:
    checked_readable(spec.readable)
    uid = _spare_user()
    user_map = bubblewrap.UserMap(uid) if recipe and uid is not None else None
    try:
        sandbox = AgentSandbox(spec, level, *_launch(spec, recipe, user_map))
    except OSError as error:
        if user_map is not None:
            user_map.close()
        if recipe is not None and error.errno in (errno.ENOENT, errno.EACCES, errno.ENOEXEC):
            raise DiedEarlyError(f"{recipe.executable}: {error.strerror}") from error
        raise SandboxError(f"A sandbox of the level {level!r} could not be opened: {error}.") from error
    try:
        async with asyncio.timeout(_START_S):
            if user_map is not None:
                await user_map.write()
            await sandbox.begin(_configuration(spec, level, bubblewrap.USER if user_map else uid))
    except TimeoutError:
        await sandbox.close()
        raise SandboxError(f"A sandbox of the level {level!r} did not start within {_START_S:g} s.") from None
    except OSError as error:
        await sandbox.close()
        raise DiedEarlyError(f"the map of its users could not be written: {error}") from error
    except BaseException:
        await sandbox.close()
        raise
    finally:
        if user_map is not None:
            user_map.close()
    return sandbox


def _announce(sandbox: AgentSandbox) -> None:
    if sandbox.isolation in _announced:
        return
    _announced.add(sandbox.isolation)
    if sandbox.isolation == "bubblewrap":
        logger.info(
            "Sandbox isolation level bubblewrap: no network, no host processes, no host files but the system's and "
            "Python's (read-only); the kernel itself is shared."
        )
        return
    logger.warning(
        "Sandbox isolation level process%s: time, memory, output and environment are held, but neither reading the "
        "host's files nor the network; it runs as %s.",
        f" ({_unavailable.rstrip('.')})" if _unavailable else "",
        "its own user" if sandbox.note == "another user" else "the caller's own user, whose processes it can reach",
    )


def _spare_user() -> int | None:
    """Return a user that nobody else is, where this program is root and may become it."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return None
    try:
        with open("/proc/self/uid_map") as file:
            ranges = [range(int(first), int(first) + int(count)) for first, _, count in map(str.split, file)]
    except OSError:
        return None
    wanted = _USERS.start + secrets.randbelow(len(_USERS))
    return next((uid for uid in (wanted, _NOBODY) if any(uid in numbers for numbers in ranges)), None)


def _configuration(spec: SandboxSpec, level: str, uid: int | None) -> dict[str, Any]:
    names = ("memory_bytes", "file_bytes", "processes", "open_files")
    return {name: getattr(spec, name) for name in names} | {
        "isolation": level,
        "uid": uid,
        "parent": os.getpid(),
        "environment": _environment(spec),
        "temporary": tempfile.gettempdir(),
        "directory": bubblewrap.HOME,
        "required": [sys.executable, os.__file__, *spec.readable],
    }


def _environment(spec: SandboxSpec) -> dict[str, str]:
    path = [os.path.dirname(sys.executable), "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"]
    return {
        "PATH": ":".join([*path, "/sbin", "/bin"]),
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        **spec.env,
    }


def _launch(
    spec: SandboxSpec, recipe: bubblewrap.Recipe | None, user_map: bubblewrap.UserMap | None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the agent; returns its process and this end of its socket. Raises OSError."""
    ours, theirs = socket.socketpair()
    agent = [sys.executable, "-I", "-S", "-W", "ignore", "-c", _BOOT, str(theirs.fileno()), SOURCE_ROOT]
    pass_fds = [theirs.fileno()]
    if recipe is not None:
        filter_fd, writing = os.pipe()
        os.write(writing, bubblewrap.call_filter())
        os.close(writing)
        visible = [*_python_places(), str(_PACKAGE), *spec.readable]
        agent = bubblewrap.command(recipe, visible, spec.disk_bytes, user_map, filter_fd) + agent
        pass_fds += [filter_fd, *(user_map.pass_fds if user_map is not None else ())]
        if os.access(recipe.executable, os.X_OK):
            # files are memory, too
            agent = bubblewrap.in_cgroup(spec.memory_bytes + spec.disk_bytes, agent)
    try:
        process = subprocess.Popen(
            agent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=pass_fds,
            env=_environment(spec),
            cwd="/",
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        if recipe is not None:
            os.close(filter_fd)
    ours.setblocking(False)
    return process, ours


# -- directories of this Python and of modules, which sandboxes can read -------------------------------------------

_PACKAGE = Path(__file__).resolve().parents[1]
SOURCE_ROOT = str(_PACKAGE.parent)
_NOT_READABLE = ("/", "/proc", "/sys", "/dev", "/tmp", "/etc", "/sandbox")


@functools.cache
def _python_places() -> tuple[str, ...]:
    executable = os.path.realpath(sys.executable)
    places = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, os.path.dirname(executable)]
    places += site.getsitepackages()
    if site.ENABLE_USER_SITE:
        places.append(site.getusersitepackages())
    # both names of a place count: links inside of it may use either
    both = {os.path.normpath(place) for place in (*places, *map(os.path.realpath, places))}
    return tuple(sorted(place for place in both if place != "/" and os.path.isdir(place)))


def checked_readable(readable: Sequence[str]) -> Sequence[str]:
    """Return the paths of a spec. Raises ConfigError for those that do not exist or would give everything away."""
    for path in readable:
        if not os.path.isabs(path) or os.path.normpath(path) in _NOT_READABLE:
            raise ConfigError(
                f"A sandbox's readable takes absolute paths below {', '.join(_NOT_READABLE)}, not {path!r}; "
                "name the directories that are needed."
            )
        if not os.path.exists(path):
            raise ConfigError(f"A sandbox's readable names {path!r}, which does not exist.")
    return readable


def module_places(modules: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return where the top-level packages of some modules are: directories for sys.path, and what must be readable.

    Nothing is imported. Modules that cannot be found are left out; importing them raises.
    """
    roots, readable = [], []
    for name in sorted({module.partition(".")[0] for module in modules}):
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        if spec is None:
            continue
        for place in spec.submodule_search_locations or [spec.origin or ""]:
            if os.path.isabs(place) and os.path.exists(place):
                roots.append(os.path.dirname(place))
                readable.append(place)
    return roots, readable


def installed_paths() -> list[str]:
    """Return the entries of sys.path that belong to this Python, as opposed to the caller's own directories."""
    places = _python_places()

    def is_installed(path: str) -> bool:
        return any(path == place or path.startswith(place + "/") for place in places)

    return [path for path in sys.path if os.path.isabs(path) and is_installed(os.path.normpath(path))]
