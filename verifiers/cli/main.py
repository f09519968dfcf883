"""The command `vf`, which holds all others, and what they share: command lines, import paths, exit codes.

`vf eval` is `vf-eval`, and so on; commands of other packages (`vf-serve`) are there where these are installed.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import gc
import io
import json
import math
import os
import pkgutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from verifiers.errors import ConfigError, Error
from verifiers.interrupt import EndedBySignal

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# -- command lines -------------------------------------------------------------------------------------------------

AddFlag = Callable[..., argparse.Action]
"""Add one argument to a group, as `add_argument` does."""


class CommandParser(argparse.ArgumentParser):
    """The parser of one command: its help has named groups, every default and examples; `--version` is there.

    Args:
        version: of the command; None for that of verifiers.
        gone: flags of the classic command, and what to do instead.
    """

    def __init__(
        self,
        prog: str,
        description: str,
        *,
        examples: Sequence[str],
        epilog: str | None = None,
        version: str | None = None,
        gone: Mapping[str, str] | None = None,
    ) -> None:
        from verifiers import __version__

        super().__init__(prog=prog, description=description, epilog=epilog)
        self.examples = tuple(examples)
        self._bounds: list[tuple[argparse.Action, float | None, float | None]] = []
        self._gone = gone or {}
        # a comparison with NaN is never true, so a limit or threshold of NaN would switch itself off
        self.register("type", float, _finite)
        told = f"%(prog)s {version or __version__}"
        self.add_argument("--version", action="version", version=told, help="show the version and exit")

    def parsed(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parse a command line; raise ConfigError for a number that its flag cannot have."""
        args = self.parse_args(argv)
        for action, least, above in self._bounds:
            flag, value = action.option_strings[-1], getattr(args, action.dest)
            if value is not None and least is not None and not value >= least:
                raise ConfigError(f"{flag} is {value:g}; give {least:g} or more.")
            if value is not None and above is not None and not value > above:
                unit = " of seconds" if action.metavar == "S" else ""
                raise ConfigError(f"{flag} is {value:g}; give a number{unit} above {above:g}.")
        return args

    def error(self, message: str) -> NoReturn:
        instead = [f"{flag}: {self._gone[flag]}" for flag in message.split() if flag in self._gone]
        super().error("; ".join([message, *instead]))

    def format_help(self) -> str:
        return super().format_help() + "\nexamples:\n" + textwrap.indent("\n".join(self.examples), "  ") + "\n"

    def group(self, title: str) -> AddFlag:
        """Return what adds arguments to a new group of the help; a flag's default is appended to its help.

        Of numbers it takes `at_least` and `above` beside argparse's own settings.
        """
        group = self.add_argument_group(title)

        def add(
            *names: str, at_least: float | None = None, above: float | None = None, **settings: Any
        ) -> argparse.Action:
            default = settings.get("default")
            if not (default is None or default is False or default in ("", "{}") or default == []):
                settings["help"] += (
                    f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
                )
            action = group.add_argument(*names, **settings)
            if at_least is not None or above is not None:
                self._bounds.append((action, at_least, above))
            return action

        return add

    def environment_group(self) -> Callable[..., argparse.Action]:
        """Add the group of the environment: ENV, its arguments, and where it is looked for."""
        add = self.group("environment")
        add(
            "env",
            metavar="ENV",
            help="name of an environment (installed, in ./environments or in ./), a path such as my_env.py, "
            "or harbor:PATH for Harbor's task folders",
        )
        add("-a", "--env-args", default="{}", metavar="JSON", help="keyword arguments of its load_environment")
        packages = "directory of environment packages (default: ./environments)"
        add("-p", "--env-dir-path", metavar="DIR", help=packages)
        return add


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return number


def json_object(flag: str, text: str) -> dict[str, Any]:
    """Return the JSON object given for a flag; raise ConfigError where the text is none."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{flag} is {text!r}, which is not valid JSON ({error}); give an object like '{{\"n\": 1}}'."
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} is {text!r}; give a JSON object like '{{\"n\": 1}}'.")
    return value


# -- import paths -------------------------------------------------------------------------------------------------

ENVIRONMENTS_DIRECTORY = "./environments"


def make_importable(env: str, directory: str | None = None, *, last: str | None = None) -> str:
    """Put where an environment may be on the import path, and return the environment's name.

    `env` is a name, the path of a module or of a package's directory, or "harbor:" and a path, which is made
    absolute. In front are the directory of a path and the packages of `directory` (default ./environments, where
    there is one); at the end, so that nothing installed is shadowed, are the working directory and `last`, which need
    not exist.
    """
    from verifiers.envs.registry import HARBOR

    if directory is not None and not os.path.isdir(directory):
        raise ConfigError(f"--env-dir-path is {directory!r}, and there is no such directory.")
    # absolute, because worker processes that inherit it run elsewhere
    root = os.path.abspath(directory or ENVIRONMENTS_DIRECTORY)
    front = []
    if os.sep in env and os.path.isfile(f"{env}.py"):
        env += ".py"
    if env.startswith(HARBOR):
        env = HARBOR + os.path.abspath(os.path.expanduser(env.removeprefix(HARBOR)))
    elif env.endswith(".py") or (os.sep in env and os.path.isdir(env)):
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
    import datasets
    import transformers

    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


# -- errors and exit codes -----------------------------------------------------------------------------------------

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of writes to an open file, for which Python names no file."""
_NO_PROCESS = "no further process or thread can be started; raise the limit (`ulimit -u`, or pids of the cgroup)."


class CommandFailedError(Error, RuntimeError):
    """Raised by a command whose task failed; never seen outside of the command line."""


class Command:
    """A console script: its parser, and a function of what was parsed; see `run_command` for what that raises."""

    def __init__(self, parser: Callable[[], CommandParser], run: Callable[[argparse.Namespace], int]) -> None:
        self.parser, self._run = parser, run

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        parser = self.parser()
        return run_command(parser.prog, lambda: self._run(parser.parsed(argv)))


def run_command(name: str, command: Callable[[], int]) -> int:
    """Run a command's body and turn what it raises into an exit code and one sentence."""
    _prepare_streams()
    # Python looks for garbage as it ends: a second, with torch
    atexit.register(gc.freeze)
    try:
        try:
            os.getcwd()
        except FileNotFoundError:
            raise ConfigError("the working directory was deleted; change to one that is there.") from None
        code = command()
        sys.stdout.flush()
        return code
    except Error as error:
        own = isinstance(error, ConfigError | CommandFailedError)
        tell(f"{name}: {error}" if own else f"{name}: {type(error).__name__}: {error}")
        return USAGE if isinstance(error, ConfigError) else FAILED
    except BrokenPipeError:
        # the reader closed the pipe
        _drop_output()
        return FAILED
    except OSError as error:
        if not is_of_writing(error):
            tell(f"{name}: {_NO_PROCESS}")
            return FAILED
        if error.filename is None and error.errno not in _FULL:
            # from the code of an environment: the traceback shows where
            raise
        where = error.filename or ("standard output" if _drop_output() else None)
        told = f"{type(error).__name__}: {error}" if where is None else f"{where}: {error.strerror}"
        tell(f"{name}: {told}")
        return FAILED
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        tell(f"{name}: {_NO_PROCESS}")
        return FAILED
    except KeyboardInterrupt:
        tell(f"{name}: interrupted")
        return INTERRUPTED
    except EndedBySignal as ended:
        tell(f"{name}: {ended}")
        raise


_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {*b"\t\n"}, "?")


def tell(text: str) -> None:
    """Print a line on standard error; one that takes no more changes no exit code."""
    with contextlib.suppress(OSError):
        print(shown(text), file=sys.stderr, flush=True)


def shown(text: str) -> str:
    """Return a text as a terminal may have it: what others said could clear it, or write elsewhere."""
    return text.translate(_CONTROLS)


def is_of_writing(error: OSError) -> bool:
    """Return whether an error may come from a file, and is not that of a process that could not be started."""
    return error.errno != errno.EAGAIN or hasattr(error, "characters_written")


def _drop_output() -> bool:
    """Send standard output to /dev/null where it takes no more; return whether that was so."""
    try:
        # what could not be written is dropped, so a flush alone would succeed
        print(flush=True)
    except OSError:
        # Python would raise again when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _prepare_streams() -> None:
    """Let a stream take every character, and put /dev/null where one is closed, whose number a file would get."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            if null != number:
                os.close(null)
            setattr(sys, name, open(number, "r" if number == 0 else "w"))  # noqa: SIM115


@contextlib.contextmanager
def writing_results(directory: Path) -> Iterator[None]:
    """Say of a failed write where it should have gone."""
    try:
        yield
    except OSError as error:
        if isinstance(error, Error) or not is_of_writing(error):
            raise
        # rollouts turn their own into outcomes: this one came from writing
        raise CommandFailedError(f"results cannot be written to {str(directory)!r}: {error}.") from error


# -- vf --------------------------------------------------------------------------------------------------------

COMMANDS = {
    "init": ("verifiers.cli.init:main", "start a new environment package"),
    "install": ("verifiers.cli.install:main", "install an environment package"),
    "list": ("verifiers.cli.list:main", "list the installed environments"),
    "play": ("verifiers.cli.play:main", "answer in place of the model"),
    "check": ("verifiers.cli.check:main", "say what is wrong with an environment"),
    "serve-env": ("verifiers.cli.serve_env:main", "serve an environment as OpenEnv"),
    "eval": ("verifiers.cli.evaluate:main", "evaluate a model on an environment"),
    "gateway": ("verifiers.cli.gateway:main", "record programs that are started elsewhere"),
    "regrade": ("verifiers.cli.regrade:main", "grade a stored evaluation again"),
    "merge": ("verifiers.cli.stored_runs:merge", "join the shards of an evaluation"),
    "export": ("verifiers.cli.stored_runs:export", "write an evaluation in another form"),
    "compare": ("verifiers.cli.compare:main", "compare two evaluations"),
    "view": ("verifiers.cli.stored_runs:view", "look at runs in a browser"),
    "train": ("verifiers.cli.train:main", "train a policy as a run file says"),
    "launch": ("verifiers.cli.launch:main", "start a run on a cluster"),
    "report": ("verifiers.cli.stored_runs:report", "write the report of a run again"),
}
"""Commands of this package: where each is and what it does, by the name without "vf-"."""

_MISSING = {
    "dataserver": "vf-dataserver comes with the package verifiers-dataserver, in servers/dataserver.",
    "rl": "'vf train' trains.",
    "serve": "vf-serve comes with the package verifiers-embedded, in servers/embedded.",
    "tui": "'vf view' shows runs in a browser.",
    "vllm": "vf-vllm comes with the package verifiers-vllm, in servers/vllm.",
}
"""Commands of the classic package and of servers that are not installed, and what there is instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of `vf` that the first argument names; return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or given[0].startswith("-"):
        parser().parse_args(given)
        parser().print_help()
        return DONE
    name, *rest = given
    if name in COMMANDS:
        code = pkgutil.resolve_name(COMMANDS[name][0])(rest)
    elif name in (others := _commands_of_other_packages()):
        # the convention of console scripts: no arguments, and sys.argv has those of the command line
        sys.argv = [f"vf-{name}", *rest]
        code = others[name].load()()
    else:
        import difflib

        near = difflib.get_close_matches(name, [*COMMANDS, *others], n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`vf --help` lists the commands that are installed."
        hint = _MISSING.get(name, hint)
        print(f"vf: there is no command {name!r}; {hint}", file=sys.stderr)
        code = USAGE
    return int(code or DONE)


def tui() -> int:
    """Say what there is instead of the classic command vf-tui."""
    return main(["tui"])


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
    return {name: point for name, point in sorted(found.items()) if name not in {*COMMANDS, "tui"}}


if __name__ == "__main__":
    sys.exit(main())
