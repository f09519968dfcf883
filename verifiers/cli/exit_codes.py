"""How every command ends: 0 done, 1 the task failed, 2 usage, 130 interrupted; one sentence on stderr."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

from verifiers.errors import ConfigError, Error

__all__ = ["DONE", "FAILED", "INTERRUPTED", "USAGE", "CommandFailedError", "run_command"]

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


_FULL = (errno.ENOSPC, errno.EDQUOT)
"""What a write to a file that is open fails with; Python then names no file."""


class CommandFailedError(Error, RuntimeError):
    """What a command was asked for did not work out; never seen outside of the command line."""


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
        # whoever read the output has seen enough; Python would complain again when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        if error.filename is None and error.errno not in _FULL:
            # of code that is played or trained, and told where
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
