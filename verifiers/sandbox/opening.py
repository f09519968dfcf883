"""Choosing between the levels process and bubblewrap, starting a sandbox's first process, and what it can read."""

from __future__ import annotations

import asyncio
import errno
import functools
import importlib.util
import logging
import os
import secrets
import site
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError, SandboxError
from verifiers.sandbox import bubblewrap
from verifiers.sandbox.process import AgentSandbox, DiedEarlyError
from verifiers.sandbox.spec import SandboxSpec

__all__ = [
    "SOURCE_ROOT",
    "checked_readable",
    "installed_paths",
    "module_places",
    "open_agent_sandbox",
    "visible_paths",
]

logger = logging.getLogger("verifiers.sandbox")

_START_S = 30.0
_BOOT = "import sys; sys.path.append(sys.argv[2]); from verifiers.sandbox.agent import main; main()"
# the part of the range that nothing else hands out users from (systemd's list of user ids)
_USERS = range(1_879_048_192, 2_147_483_646)
_NOBODY = 65534

# how bubblewrap works here, once it has; and why it does not
_recipes: list[bubblewrap.Recipe] = []
_unavailable = ""
_announced: set[str] = set()


async def open_agent_sandbox(spec: SandboxSpec) -> AgentSandbox:
    """Open a sandbox of the level process or bubblewrap; "auto" takes bubblewrap where it works.

    Raises:
        SandboxError: the system does not allow it.
    """
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
    """Log once a process which level is in use and what it does not stop."""
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
    """Return the first message to the agent."""
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
        agent = bubblewrap.command(recipe, visible_paths(spec.readable), spec.disk_bytes, user_map, filter_fd) + agent
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
    """Return the directories that this Python and its installed packages live in."""
    executable = os.path.realpath(sys.executable)
    places = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, os.path.dirname(executable)]
    places += site.getsitepackages()
    if site.ENABLE_USER_SITE:
        places.append(site.getusersitepackages())
    # both names of a place count: links inside of it may use either
    both = {os.path.normpath(place) for place in (*places, *map(os.path.realpath, places))}
    return tuple(sorted(place for place in both if place != "/" and os.path.isdir(place)))


def visible_paths(readable: Sequence[str]) -> list[str]:
    """Return what can be read in a sandbox beside the system: Python, this package, and the `readable` paths."""
    return [*_python_places(), str(_PACKAGE), *readable]


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
