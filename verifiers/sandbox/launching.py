"""Starting the first process of a sandbox, and knowing when it is gone."""

from __future__ import annotations

import functools
import importlib.util
import os
import site
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.sandbox.child.files import remove_tree
from verifiers.sandbox.child.wire import send_frame
from verifiers.sandbox.spec import SandboxSpec

__all__ = ["CLOSE_S", "START_S", "Launched", "launch", "module_places", "python_places", "why_not"]

START_S = 30.0
CLOSE_S = 10.0

_ROOT = str(Path(__file__).resolve().parents[2])
_BOOT = "import sys; sys.path.append(sys.argv[2]); from verifiers.sandbox.child.launch import main; main()"
_NOT_READABLE = ("/", "/proc", "/sys", "/dev", "/tmp", "/etc", "/sandbox")


@dataclass(frozen=True, slots=True)
class Launched:
    """A sandbox's first process and this end of its socket. Closing the socket ends the sandbox."""

    process: subprocess.Popen[bytes]
    control: socket.socket

    def kill(self) -> None:
        """End it the hard way; harmless when it has ended."""
        self.process.kill()


@functools.cache
def python_places() -> tuple[str, ...]:
    """The directories that this Python and its installed packages live in."""
    executable = os.path.realpath(sys.executable)
    places = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, os.path.dirname(executable)]
    places += site.getsitepackages()
    if site.ENABLE_USER_SITE:
        places.append(site.getusersitepackages())
    # both names of a place count: links inside of it may use either
    both = {os.path.normpath(place) for place in (*places, *map(os.path.realpath, places))}
    return tuple(sorted(place for place in both if place != "/" and os.path.isdir(place)))


def _below(path: str, places: Iterable[str]) -> bool:
    return any(path == place or path.startswith(place + "/") for place in places)


def module_places(modules: Iterable[str]) -> tuple[list[str], list[str]]:
    """Where the top-level packages of some modules are: directories for sys.path, and what must be readable.

    Nothing is imported. Modules that cannot be found are left out; importing them will say so.
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
    """The entries of sys.path that belong to this Python, as opposed to the caller's own directories."""
    return [path for path in sys.path if os.path.isabs(path) and _below(os.path.normpath(path), python_places())]


def _environment(spec: SandboxSpec) -> dict[str, str]:
    path = [os.path.dirname(sys.executable), "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"]
    return {
        "PATH": ":".join([*path, "/sbin", "/bin"]),
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        **spec.env,
    }


def _readable(spec: SandboxSpec) -> list[str]:
    for path in spec.readable:
        if not os.path.isabs(path) or os.path.normpath(path) in _NOT_READABLE:
            raise ConfigError(
                f"A sandbox's readable takes absolute paths below {', '.join(_NOT_READABLE)}, not {path!r}; "
                "name the directories that are needed."
            )
        if not os.path.exists(path):
            raise ConfigError(f"A sandbox's readable names {path!r}, which does not exist.")
    return [*python_places(), *spec.readable]


def launch(
    spec: SandboxSpec, tier: str, *, preload: Sequence[str] = (), paths: Sequence[str] = (), start: bool = True
) -> Launched:
    """Start a sandbox's first process. It answers with a message `ready` or `failed` on the socket.

    Args:
        tier: "process" or "namespaces".
        preload: modules that its agent imports before it answers.
        paths: directories for its sys.path, beside the standard library.
    """
    environment = _environment(spec)
    config: dict[str, Any] = {
        "tier": tier,
        "parent": os.getpid(),
        "memory_bytes": spec.memory_bytes,
        "file_bytes": spec.file_bytes,
        "disk_bytes": spec.disk_bytes,
        "processes": spec.processes,
        "open_files": spec.open_files,
        "environment": environment,
        "temporary": tempfile.gettempdir(),
        "executable": sys.executable,
        "readable": _readable(spec),
        "required": [sys.executable, os.__file__, *spec.readable],
        "preload": list(preload),
        "paths": list(paths),
    }
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-W", "ignore", "-c", _BOOT, str(theirs.fileno()), _ROOT],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    try:
        send_frame(ours, config)
    except BaseException:
        ours.close()
        process.kill()
        process.wait()
        raise
    return Launched(process, ours)


def remove_left_over(directory: str | None) -> None:
    """Remove the directory of a process tier whose first process was killed before it could do so."""
    if directory and os.path.isdir(directory) and os.path.basename(directory).startswith("sandbox-"):
        try:
            remove_tree(directory)
        except OSError:
            # something still writes to it; it stays, as any other leftover in the temporary directory
            pass


def why_not(tier: str, message: str) -> str:
    """What to do about a tier that could not be opened."""
    if tier == "namespaces":
        return (
            f"The namespaces tier does not work here: {message}. Allow user namespaces (sysctl "
            "user.max_user_namespaces, kernel.unprivileged_userns_clone and "
            "kernel.apparmor_restrict_unprivileged_userns; in a container its seccomp profile), or take another tier."
        )
    return f"A sandbox of the tier {tier!r} could not be opened: {message}."
