"""First process of a sandbox: makes the tier, then watches over it until the program that asked for it is gone.

The program holds the other end of one socket. When that end is closed, by `close` or because the program died in
whatever way, everything in the sandbox is killed and its files are removed.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn

from verifiers.sandbox.child import mounts, system
from verifiers.sandbox.child.agent import Agent
from verifiers.sandbox.child.calls import import_module
from verifiers.sandbox.child.confine import Limits, close_all_but, confine, tasks_of_user
from verifiers.sandbox.child.files import remove_tree
from verifiers.sandbox.child.killing import kill_user
from verifiers.sandbox.child.wire import Frames, send_frame

__all__ = ["main"]

# the part of the range that nothing else hands out users from (systemd's list of user ids)
_USERS = (1_879_048_192, 2_147_483_646)
_NOBODY = 65534


class _PreloadError(Exception):
    """A module that the sandbox was to have ready could not be imported."""


def main() -> NoReturn:
    """Entry point; the socket's descriptor is the first argument."""
    # the caller may ignore or block what has to be heard here
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    control = socket.socket(fileno=int(sys.argv[1]))
    close_all_but({control.fileno()})
    config = _first_message(control)
    parent = _watch_parent(config["parent"])
    if os.getppid() != config["parent"]:
        # it died before it could be watched
        os._exit(1)
    try:
        if config["tier"] == "namespaces":
            _run_namespaces(control, config, parent)
        else:
            _run_process(control, config, parent)
    except BaseException as error:
        _fail(control, error)
        os._exit(1)
    os._exit(0)


def _first_message(control: socket.socket) -> dict[str, Any]:
    frames = Frames()
    while frames.receive(control):
        for message, _ in frames.messages():
            return message
    os._exit(1)


def _fail(control: socket.socket, error: BaseException) -> None:
    try:
        send_frame(control, {"failed": f"{error}", "kind": type(error).__name__})
    except OSError:
        pass


def _watch_parent(pid: int) -> int | None:
    """A descriptor that can be read once the process has ended; None where the system has no such thing."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _preload(config: dict[str, Any]) -> None:
    sys.path.extend(path for path in config["paths"] if path not in sys.path)
    for module in config["preload"]:
        problem = import_module(module)
        if problem is not None:
            raise _PreloadError(f"{module!r} could not be imported: {problem}")
    if config["preload"]:
        import gc

        # pages that the collector does not touch stay shared with the forked calls
        gc.collect()
        gc.freeze()


# --- process tier


def _spare_user() -> int | None:
    """A user that nobody else is, where this process is root and may become it."""
    if not system.LINUX or os.geteuid() != 0:
        return None
    try:
        with open("/proc/self/uid_map") as file:
            ranges = [(int(first), int(count)) for first, _, count in map(str.split, file)]
    except OSError:
        return None
    first_user, last_user = _USERS
    wanted = first_user + int.from_bytes(os.urandom(8)) % (last_user - first_user)
    for uid in (wanted, _NOBODY):
        if any(first <= uid < first + count for first, count in ranges):
            return uid
    return None


def _can_use(limits: Limits, executable: str) -> bool:
    """Whether the sandbox's user reaches its directory and Python; root may keep them where nobody else can."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            confine(limits, None)
            code = 0 if os.access(executable, os.X_OK) and os.access(".", os.W_OK | os.X_OK) else 1
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def _run_process(control: socket.socket, config: dict[str, Any], parent: int | None) -> None:
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, frame: stopped.append(number))
    system.become_subreaper()
    directory = os.path.join(config["temporary"], f"sandbox-{os.urandom(8).hex()}")
    os.mkdir(directory, 0o700)
    try:
        config = {**config, "directory": directory}
        config["environment"] = {**config["environment"], "HOME": directory, "TMPDIR": directory}
        os.environ.update(HOME=directory, TMPDIR=directory)
        limits, note = _process_limits(config)
        if limits.uid is not None:
            os.chown(directory, limits.uid, limits.uid)
        system.set_dumpable(False)
        agent = Agent(control, limits, contained=False)
        try:
            _preload(config)
            send_frame(control, {"ready": True, "directory": directory, "note": note})
            agent.serve(also_watch=parent, stop=lambda: bool(stopped) or os.getppid() != config["parent"])
        finally:
            agent.kill_all()
    finally:
        remove_tree(directory)


def _process_limits(config: dict[str, Any]) -> tuple[Limits, str]:
    uid = _spare_user()
    if uid is not None:
        limits = Limits.of(config, uid=uid)
        os.chown(config["directory"], uid, uid)
        usable = _can_use(limits, config["executable"])
        kill_user(uid)
        if usable:
            return limits, "another user"
        os.chown(config["directory"], os.getuid(), os.getgid())
    return Limits.of(config, base_processes=tasks_of_user(os.getuid())), "same user"


# --- namespaces tier

_NAMESPACES = (
    system.CLONE_NEWUSER
    | system.CLONE_NEWNS
    | system.CLONE_NEWPID
    | system.CLONE_NEWNET
    | system.CLONE_NEWIPC
    | system.CLONE_NEWUTS
    | system.CLONE_NEWCGROUP
)


def _enter_namespaces() -> bool:
    """Enter them with one user mapped, which is not root inside; True if it is not the caller outside either."""
    spare = _spare_user()
    uid, gid = (spare, spare) if spare is not None else (os.geteuid(), os.getegid())
    if spare is not None:
        os.setgroups([])
    me = os.getpid()
    ready, go = os.pipe()
    helper = os.fork()
    if helper == 0:
        # the map has to be written from outside the new user namespace, with the rights of there
        code = 1
        try:
            os.close(go)
            if os.read(ready, 1):
                for name, text in (
                    ("setgroups", "deny"),
                    ("gid_map", f"{mounts.USER} {gid} 1"),
                    ("uid_map", f"{mounts.USER} {uid} 1"),
                ):
                    with open(f"/proc/{me}/{name}", "w") as file:
                        file.write(text)
                code = 0
        finally:
            os._exit(code)
    try:
        os.close(ready)
        system.unshare(_NAMESPACES)
        os.write(go, b".")
    finally:
        os.close(go)
        status = os.waitpid(helper, 0)[1]
    if status != 0:
        raise PermissionError("the kernel did not take the map of users")
    return spare is not None


def _run_namespaces(control: socket.socket, config: dict[str, Any], parent: int | None) -> None:
    other_user = _enter_namespaces()
    # after unshare, as only mounts of one's own mount namespace can be bound; before the change of user, as root
    # may keep its Python where nobody else can go
    sources = mounts.open_sources(config["readable"])
    init = os.fork()
    if init == 0:
        code = 1
        try:
            _init(control, config, sources, other_user)
            code = 0
        except BaseException as error:
            _fail(control, error)
        finally:
            os._exit(code)
    for fd, _, _ in sources:
        os.close(fd)
    try:
        _watch(control, init, parent, config["parent"])
    finally:
        os.kill(init, signal.SIGKILL)
        os.waitpid(init, 0)


def _watch(control: socket.socket, init: int, parent: int | None, parent_pid: int) -> None:
    """Wait until the first process inside ends, the socket is closed, or the program is gone."""
    poll = select.poll()
    # no events: only the hang-up is of interest, what comes is for the process inside
    poll.register(control, 0)
    poll.register(os.pidfd_open(init), select.POLLIN)
    if parent is not None:
        poll.register(parent, select.POLLIN)
    while not poll.poll(1000):
        if os.getppid() != parent_pid:
            return


def _init(control: socket.socket, config: dict[str, Any], sources: list[mounts.Source], other_user: bool) -> None:
    """The first process inside: when it ends, for whatever reason, the kernel kills all others."""
    os.setsid()
    os.setresgid(mounts.USER, mounts.USER, mounts.USER)
    os.setresuid(mounts.USER, mounts.USER, mounts.USER)
    system.die_with_parent(signal.SIGKILL)
    mounts.build_root(sources, disk_bytes=config["disk_bytes"])
    close_all_but({control.fileno()})
    socket.sethostname("sandbox")
    for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time"):
        # more namespaces would be a way to more of the kernel
        try:
            with open(f"/proc/sys/user/max_{name}_namespaces", "w") as file:
                file.write("0")
        except OSError:
            continue
    system.drop_capabilities()
    system.join_new_keyring()
    system.forbid_new_privileges()
    environment = {**config["environment"], "HOME": mounts.HOME, "TMPDIR": "/tmp"}
    os.environ.update(HOME=mounts.HOME, TMPDIR="/tmp")
    config = {**config, "directory": mounts.HOME, "environment": environment}
    # this process counts, and the one that watches it where it has the same user
    limits = Limits.of(config, base_processes=1 if other_user else 2)
    os.chdir(mounts.HOME)
    for path in config["required"]:
        if not os.access(path, os.R_OK):
            raise PermissionError(
                f"{path!r} cannot be read by the user that the sandbox runs as; let everybody read it (chmod -R o+rX)"
            )
    system.set_dumpable(False)
    agent = Agent(control, limits, contained=True)
    _preload(config)
    send_frame(control, {"ready": True, "directory": mounts.HOME, "note": ""})
    agent.serve()
