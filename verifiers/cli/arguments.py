"""Command lines: groups of flags with their defaults, examples, and `--version`."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from verifiers.errors import ConfigError

__all__ = ["AddFlag", "CommandParser", "json_object"]

AddFlag = Callable[..., argparse.Action]
"""Add one argument to a group, as `add_argument` does."""


class CommandParser(argparse.ArgumentParser):
    """The parser of one command: its help has named groups, every default and examples; `--version` is there.

    Args:
        examples: command lines that work, at least two.
        version: of the command; None for that of verifiers.
    """

    def __init__(
        self,
        prog: str,
        description: str,
        *,
        examples: Sequence[str],
        epilog: str | None = None,
        version: str | None = None,
    ) -> None:
        super().__init__(prog=prog, description=description, epilog=epilog)
        self.examples = tuple(examples)
        self.add_argument("--version", action=_PrintVersion, const=version, help="show the version and exit")

    def format_help(self) -> str:
        """Return the help, with the examples last."""
        return super().format_help() + "\nexamples:\n" + textwrap.indent("\n".join(self.examples), "  ") + "\n"

    def group(self, title: str) -> AddFlag:
        """Return what adds arguments to a new group of the help; a flag's default is appended to its help."""
        group = self.add_argument_group(title)

        def add(*names: str, **settings: Any) -> argparse.Action:
            default = settings.get("default")
            if not (default is None or default is False or default in ("", "{}") or default == []):
                settings["help"] += (
                    f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
                )
            return group.add_argument(*names, **settings)

        return add

    def environment_group(self) -> AddFlag:
        """Return what adds to the group of the environment, which has ENV and where it is looked for."""
        add = self.group("environment")
        add(
            "env",
            metavar="ENV",
            help="name of an environment (installed, in ./environments or in ./), or a path such as my_env.py",
        )
        add("-a", "--env-args", default="{}", metavar="JSON", help="keyword arguments of its load_environment")
        add(
            "-p",
            "--env-dir-path",
            metavar="DIR",
            help="directory of environment packages (default: ./environments)",
        )
        return add


class _PrintVersion(argparse.Action):
    """An action that prints the command's name and its version; that of verifiers is looked up only here."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: str | None, help: str) -> None:  # noqa: A002
        super().__init__(option_strings, dest, nargs=0, const=const, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from verifiers import __version__

        print(f"{parser.prog} {self.const or __version__}")
        parser.exit()


def json_object(flag: str, text: str) -> dict[str, Any]:
    """Parse the JSON object given for a flag.

    Raises:
        ConfigError: the text is not JSON, or not an object.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{flag} is {text!r}, which is not valid JSON ({error}); give an object like '{{\"n\": 1}}'."
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} is {text!r}; give a JSON object like '{{\"n\": 1}}'.")
    return value
