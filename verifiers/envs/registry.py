"""Environments by name: an entry point of an installed package, or else a module."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import pkgutil
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from verifiers.errors import ConfigError, EnvironmentLoadError, UnknownEnvironmentError
from verifiers.installation import EXTRAS, install_hint

if TYPE_CHECKING:
    from verifiers.envs.environment import Environment

logger = logging.getLogger("verifiers.envs.registry")

HARBOR = "harbor:"
"""Before a path: the environment is of the task folders there."""

ENTRY_POINT_GROUP = "verifiers.environments"


def load_environment(env_id: str, **env_args: Any) -> Environment:
    """Make the environment of that name.

    It is looked for among the entry points of the group `verifiers.environments`, then as a module whose name is
    `env_id` with underscores for hyphens; what is called is its `load_environment(**env_args)`. Names are compared
    with hyphens and underscores equal; an owner before a slash, as in "owner/my-env", is left out. "harbor:PATH" is
    the `HarborEnv` of the task folders at a path.

    Raises:
        UnknownEnvironmentError (a ValueError): nothing of that name; the message names the nearest.
        ConfigError: a module without `load_environment`, arguments that it does not take, or one raised by the
            environment itself.
        EnvironmentLoadError (a RuntimeError): its code failed; `__cause__` is the error.
    """
    given = dict(env_args)
    if not isinstance(env_id, str):
        raise ConfigError(f"env_id is {env_id!r:.100}; give the name of an environment, such as 'my-env'.")
    if env_id.startswith(HARBOR):
        # named, as environments do not import integrations
        make = importlib.import_module("verifiers.integrations.harbor").HarborEnv
        env_args = {"path": env_id.removeprefix(HARBOR), **env_args}
    else:
        make = _find_factory(env_id)
    _check_arguments(env_id, make, env_args)
    try:
        env: Any = make(**env_args)
    except ConfigError:
        raise
    except Exception as error:
        raise EnvironmentLoadError(
            f"The environment {env_id!r} could not be made: {type(error).__name__}: {error}{_raised_at(error)}"
        ) from error
    if env is None or isinstance(env, (type, list, dict)) or inspect.iscoroutine(env):
        if inspect.iscoroutine(env):
            env.close()
        text = f"load_environment of {env_id!r} returned {env!r:.100}; it must return an environment itself."
        raise ConfigError(text)
    _name(env, env_id, given)
    return cast("Environment", env)


def _name(env: Any, env_id: str, env_args: dict[str, Any]) -> None:
    """Let an environment that has no name of its own say in what is stored of it where it came from."""
    from verifiers.envs.environment import Environment

    if isinstance(env, Environment):
        own = vars(env)
        own["env_id"], own["env_args"] = own.get("env_id") or env_id, own.get("env_args") or env_args


def _entry_points() -> Iterable[EntryPoint]:
    return importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)


def _module_name(env_id: str) -> str:
    return env_id if env_id.startswith(HARBOR) else env_id.strip().rsplit("/", 1)[-1].replace("-", "_")


def declared_by(env_id: str) -> EntryPoint | None:
    """Return the entry point of an installed package that declares the environment; None where none does."""
    name = _module_name(env_id)
    return next((entry for entry in _entry_points() if _module_name(entry.name) == name), None)


def module_of(env_id: str) -> str | None:
    """Return the name in `sys.modules` of the environment's module once it is loaded; None where there is none."""
    entry, name = declared_by(env_id), _module_name(env_id)
    if entry is not None:
        return entry.module
    if _own_file(name) is not None:
        return f"verifiers_environment_{name}"
    is_name = all(part.isidentifier() for part in name.split("."))
    return name if is_name and _module_exists(name) else None


def _find_factory(env_id: str) -> Callable[..., Any]:
    entry, module = declared_by(env_id), module_of(env_id)
    if module is None:
        raise UnknownEnvironmentError(_unknown_message(env_id))
    attribute = entry.attr if entry is not None else ""
    factory = getattr(_import(env_id, module), attribute or "load_environment", None)
    if not callable(factory):
        raise ConfigError(
            f"The module {module!r} was found for {env_id!r}, but it has no function load_environment(**kwargs) "
            "that returns an environment."
        )
    return factory


def _own_file(name: str) -> Path | None:
    """Return a file on the import path that no import statement finds: `my-env.py`, `2fast.py`, or `json.py`."""
    if name.isidentifier() and name not in sys.stdlib_module_names and _module_exists(name):
        return None
    standard = Path(os.__file__).parent
    for directory in map(Path, sys.path):
        if directory == standard or not directory.is_dir():
            continue
        for path in sorted(directory.glob("*.py")):
            if _module_name(path.stem) == name:
                return path
    return None


def _import_file(module: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules[module] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(made)
    except BaseException:
        del sys.modules[module]
        raise
    return made


def _module_exists(name: str) -> bool:
    parent, _, _ = name.rpartition(".")
    if parent and not _module_exists(parent):
        return False
    if name in sys.modules:
        return True
    if parent and not hasattr(_import(name, parent), "__path__"):
        return False
    return importlib.util.find_spec(name) is not None


def _import(env_id: str, module: str) -> Any:
    try:
        path = None if module in sys.modules else _own_file(_module_name(env_id))
        return importlib.import_module(module) if path is None else _import_file(module, path)
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        # a module's name need not be its package's
        how = install_hint(EXTRAS[missing]) if missing in EXTRAS else "install the package that provides it"
        raise EnvironmentLoadError(
            f"The environment {env_id!r} needs the module {error.name!r}, which is not installed; {how}."
        ) from error
    except Exception as error:
        raise EnvironmentLoadError(
            f"The module {module!r} of the environment {env_id!r} failed at its import: "
            f"{type(error).__name__}: {error}{_raised_at(error)}"
        ) from error


def _raised_at(error: Exception) -> str:
    """Return the last line of the user's own code that an error came through, in brackets."""
    libraries = (sysconfig.get_path("stdlib"), f"{Path(__file__).parents[1]}{os.sep}", "<frozen")
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(libraries)]
    own = [one for one in frames if not re.search(r"(site|dist)-packages", one.filename)] or frames[:1]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}: {own[-1].line})" if own else ""


def _check_arguments(env_id: str, factory: Callable[..., Any], env_args: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        # a factory written in C: the call itself will tell
        return
    try:
        signature.bind(**env_args)
    except TypeError as error:
        accepted = [str(parameter) for parameter in signature.parameters.values()]
        raise ConfigError(
            f"The environment {env_id!r} cannot be made with these arguments ({error}); "
            f"it takes {', '.join(accepted) or 'none'}."
        ) from error


def _unknown_message(env_id: str) -> str:
    name = _module_name(env_id)
    declared = {_module_name(name): name for name in sorted(entry.name for entry in _entry_points())}
    near = [declared[match] for match in difflib.get_close_matches(name, declared, n=3)]
    near += [match for match in _near_modules(name) if _module_name(match) not in declared]
    nearest = f"the nearest are {', '.join(map(repr, near[:3]))}" if near else "none has a name like it"
    return (
        f"There is no environment {env_id!r} among the installed packages and importable modules "
        f"({nearest}); install its package by `vf-install DIRECTORY_OR_URL`, or by "
        f"`vf-install {name.replace('_', '-')}` for one in ./environments."
    )


def _near_modules(name: str) -> list[str]:
    """Return importable modules of a similar name whose source mentions `load_environment`; none is run."""
    modules = {
        module.name: module
        for module in pkgutil.iter_modules()
        if module.name not in sys.stdlib_module_names and not module.name.startswith("_")
    }
    near = []
    for match in difflib.get_close_matches(name, modules, n=10):
        spec = importlib.util.find_spec(match)
        origin = Path(spec.origin) if spec and spec.origin else None
        if origin and origin.suffix == ".py" and "load_environment" in origin.read_text(errors="replace"):
            near.append(match)
    return near
