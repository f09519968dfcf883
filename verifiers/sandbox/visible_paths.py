"""The directories of this Python and of modules, which sandboxes can read."""

from __future__ import annotations

import functools
import importlib.util
import os
import site
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from verifiers.errors import ConfigError

__all__ = ["SOURCE_ROOT", "checked_readable", "installed_paths", "module_places", "visible_paths"]

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
    """Return the entries of sys.path that belong to this Python, as opposed to the caller's own directories."""
    places = _python_places()

    def is_installed(path: str) -> bool:
        return any(path == place or path.startswith(place + "/") for place in places)

    return [path for path in sys.path if os.path.isabs(path) and is_installed(os.path.normpath(path))]
