"""The command `vf`, which holds all others, and what they share: import paths, exit codes.

`vf eval` is `vf-eval`, and so on; commands of other packages (`vf-serve`) are there where these are installed.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verifiers.cli.arguments import CommandParser
from verifiers.errors import ConfigError, Error
from verifiers.interrupt import EndedBySignal

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "COMMANDS",
    "DONE",
    "ENVIRONMENTS_DIRECTORY",
    "FAILED",
    "INTERRUPTED",
    "USAGE",
    "CommandFailedError",
    "hide_library_bars",
    "main",
    "make_importable",
    "module_name",
    "run_command",
]

ENVIRONMENTS_DIRECTORY = "./environments"


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


def hide_library_bars() -> None:
    """Keep libraries' bars for reading and writing models out of a command's output."""
    import datasets
    import transformers

    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


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
    _open_closed_streams()
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
    except EndedBySignal as ended:
        print(f"{name}: {ended}", file=sys.stderr)
        raise


def _open_closed_streams() -> None:
    """Put /dev/null where a standard stream is closed: the next file that is opened would get its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            if null != number:
                os.close(null)
            setattr(sys, name, open(number, "r" if number == 0 else "w"))  # noqa: SIM115


def _sentence_of(error: OSError) -> str:
    if error.strerror and error.filename is not None:
        return f"{error.filename!s}: {error.strerror}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# -- vf --------------------------------------------------------------------------------------------------------

COMMANDS = {
    "init": ("verifiers.cli.init", "start a new environment package"),
    "install": ("verifiers.cli.install", "install an environment package"),
    "list": ("verifiers.cli.list", "list the installed environments"),
    "play": ("verifiers.cli.play", "answer in place of the model"),
    "eval": ("verifiers.cli.evaluate", "evaluate a model on an environment"),
    "gateway": ("verifiers.cli.gateway", "record programs that are started elsewhere"),
    "regrade": ("verifiers.cli.regrade", "grade a stored evaluation again"),
    "merge": ("verifiers.cli.merge", "join the shards of an evaluation"),
    "export": ("verifiers.cli.export", "write an evaluation in another form"),
    "compare": ("verifiers.cli.compare", "compare two evaluations"),
    "view": ("verifiers.cli.view", "look at runs in a browser"),
    "train": ("verifiers.cli.train", "train a policy as a run file says"),
    "launch": ("verifiers.cli.cluster.launch", "start a run on a cluster"),
    "report": ("verifiers.cli.report", "write the report of a run again"),
}
"""Commands of this package: module and summary, by the name without "vf-"."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of `vf` that the first argument names; return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or given[0].startswith("-"):
        parser().parse_args(given)
        parser().print_help()
        return DONE
    name, *rest = given
    if name in COMMANDS:
        code = importlib.import_module(COMMANDS[name][0]).main(rest)
    elif name in (others := _commands_of_other_packages()):
        # the convention of console scripts: no arguments, and sys.argv has those of the command line
        sys.argv = [f"vf-{name}", *rest]
        code = others[name].load()()
    else:
        import difflib

        near = difflib.get_close_matches(name, [*COMMANDS, *others], n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`vf --help` lists the commands that are installed."
        print(f"vf: there is no command {name!r}; {hint}", file=sys.stderr)
        code = USAGE
    return int(code or DONE)


def parser() -> CommandParser:
    """Return the parser of `vf`, for its help."""
    vf = CommandParser(
        "vf",
        "Environments, evaluations and training: `vf eval` is `vf-eval`, and so on.",
        examples=("vf eval reverse-text -m fake", "vf train --help"),
    )
    commands = vf.add_subparsers(title="commands", metavar="COMMAND", parser_class=argparse.ArgumentParser)
    others = {
        name: point.dist.metadata["Summary"] for name, point in _commands_of_other_packages().items() if point.dist
    }
    for name, summary in ({name: summary for name, (_, summary) in COMMANDS.items()} | others).items():
        commands.add_parser(name, help=summary, add_help=False)
    return vf


def _commands_of_other_packages() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points

    scripts = {point.name: point for point in entry_points(group="console_scripts") if point.name.startswith("vf-")}
    found = {name.removeprefix("vf-"): point for name, point in scripts.items()}
    return {name: point for name, point in sorted(found.items()) if name not in COMMANDS}


if __name__ == "__main__":
    sys.exit(main())
