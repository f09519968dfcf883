"""Parts that several commands share: JSON arguments, import paths, exit codes, interrupts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from verifiers.errors import ConfigError, Error

__all__ = [
    "DONE",
    "ENVIRONMENTS_DIRECTORY",
    "FAILED",
    "INTERRUPTED",
    "USAGE",
    "CommandFailedError",
    "Interruptible",
    "handle_interrupts",
    "json_object",
    "make_importable",
    "module_name",
    "run_command",
]

ENVIRONMENTS_DIRECTORY = "./environments"


def json_object(flag: str, text: str) -> dict[str, Any]:
    """Parse the JSON object given for a flag.

    Raises:
        ConfigError: the text is no JSON, or no object.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{flag} is {text!r}, which is no JSON ({error}); give an object like '{{\"n\": 1}}'."
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} is {text!r}; give a JSON object like '{{\"n\": 1}}'.")
    return value


def make_importable(env: str, directory: str | None = None, *, last: str | None = None) -> str:
    """Put where an environment may be on the import path, and return the environment's name.

    In front are the directory of a path and the packages of `directory`; at the end, so that nothing installed is
    shadowed, are the working directory and `last`.

    Args:
        env: a name, or the path of a module (`path/to/my_env.py`) or of a package's directory.
        directory: holds environment packages; None for ./environments, where there is one.
        last: a further directory, which need not exist.

    Raises:
        ConfigError: a file or directory that does not exist.
    """
    if directory is not None and not os.path.isdir(directory):
        raise ConfigError(f"--env-dir-path is {directory!r}, and there is no such directory.")
    # absolute, because worker processes that inherit it run elsewhere
    root = os.path.abspath(directory or ENVIRONMENTS_DIRECTORY)
    front = []
    if env.endswith(".py") or (os.sep in env and os.path.isdir(env)):
        path = Path(env).resolve()
        if not path.exists():
            raise ConfigError(f"there is no file {env!r}; give a module's path, or an environment's name.")
        is_module = path.is_file() or (path / "__init__.py").is_file()
        front.append(str(path.parent if is_module else path))
        env = path.stem
    if os.path.isdir(root):
        packages = (entry.path for entry in os.scandir(root) if entry.is_dir() and entry.name[0] not in "._")
        front += [root, *sorted(packages)]
    sys.path[:] = [*front, *sys.path, os.getcwd(), *([last] if last else [])]
    return env


def module_name(env_name: str) -> str:
    """Return the module of an environment's name: underscores for hyphens."""
    return env_name.replace("-", "_")


DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of writes to an open file, for which Python names no file."""


class CommandFailedError(Error, RuntimeError):
    """Raised by a command whose task failed; never seen outside of the command line."""


def run_command(name: str, command: Callable[[], int]) -> int:
    """Run a command's body and turn what it raises into an exit code and one sentence."""
    try:
        return command()
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return USAGE
    except CommandFailedError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return FAILED
    except Error as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # the reader closed the pipe; Python would raise again when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        if error.filename is None and error.errno not in _FULL:
            # from the code of an environment: the traceback shows where
            raise
        print(f"{name}: {_sentence_of(error)}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _sentence_of(error: OSError) -> str:
    if error.strerror and error.filename is not None:
        return f"{error.filename!s}: {error.strerror}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Interruptible(Protocol):
    """Work that can be ended; `drain_s` is the time in seconds that `drain` gives."""

    drain_s: float
    requested: bool

    def drain(self) -> None: ...

    def abort(self) -> None: ...


@contextlib.contextmanager
def handle_interrupts(name: str, work: Interruptible) -> Iterator[None]:
    """Drain `work` on SIGINT and SIGTERM, and abort it on the second one.

    Used inside the event loop; does nothing outside of the main thread, which alone receives signals.

    Args:
        name: of the command, for the printed sentence.
        work: the work to end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def interrupt() -> None:
        if not work.requested:
            print(
                f"{name}: finishing the work in flight, for at most {work.drain_s:g} s; again to stop at once",
                file=sys.stderr,
            )
            work.drain()
        else:
            work.abort()

    for number in signals:
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number] or signal.SIG_DFL)
