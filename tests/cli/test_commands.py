"""All commands: documented flag by flag, quick to say what they do, and declared where they are."""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from verifiers.cli.main import CommandFailedError, run_command
from verifiers.errors import ConfigError, GradingError

ROOT = Path(__file__).parents[2]
MODULES = {
    "vf-init": "verifiers.cli.init",
    "vf-install": "verifiers.cli.install",
    "vf-list": "verifiers.cli.list",
    "vf-play": "verifiers.cli.play",
    "vf-eval": "verifiers.cli.evaluate",
    "vf-regrade": "verifiers.cli.regrade",
    "vf-export": "verifiers.cli.export",
    "vf-compare": "verifiers.cli.compare",
    "vf-view": "verifiers.cli.view",
    "vf-train": "verifiers.cli.train",
    "vf-report": "verifiers.cli.report",
    "python -m verifiers.testing": "verifiers.testing.__main__",
}


class ParserSeen(Exception):
    """Carries the command's parser out of it."""


def parser_of(command: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    def stop(self: argparse.ArgumentParser, *_: Any) -> None:
        raise ParserSeen(self)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(ParserSeen) as caught:
        importlib.import_module(MODULES[command]).main([])
    parser = caught.value.args[0]
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def sections() -> dict[str, str]:
    page = (ROOT / "docs/reference/commands.md").read_text()
    _, *parts = re.split(r"^## ", page, flags=re.MULTILINE)
    return {part.partition("\n")[0].strip(): part for part in parts}


@pytest.mark.parametrize("command", MODULES)
def test_the_page_names_exactly_the_flags_that_the_command_has(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    actions = [action for action in parser_of(command, monkeypatch)._actions if action.dest != "help"]
    there = {tuple(action.option_strings) for action in actions if action.option_strings}
    rows = re.findall(r"^\| (`-.*?) \|", sections()[command], flags=re.MULTILINE)
    assert {tuple(re.findall(r"`(-[^`]+)`", row)) for row in rows} == there


@pytest.mark.parametrize("command", MODULES)
def test_the_defaults_on_the_page_are_those_of_the_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = {a.option_strings[-1]: a.default for a in parser_of(command, monkeypatch)._actions if a.option_strings}
    for row in re.findall(r"^\| `-.*", sections()[command], flags=re.MULTILINE):
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        flag, written = re.findall(r"`(--[\w-]+)`", cells[0])[-1], cells[2].strip("` |") if len(cells) > 2 else ""
        if written and written != "OpenAI's" and defaults[flag] is not None:
            number = re.fullmatch(r"\d+(\.\d+)?", written)
            assert float(written) == defaults[flag] if number else written == defaults[flag], row


def test_every_command_of_the_project_is_on_the_page_and_can_be_called() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) <= set(sections())
    for command, target in scripts.items():
        module, _, function = target.partition(":")
        assert module == MODULES[command]
        assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("command", MODULES)
def test_help_loads_nothing_that_is_slow(command: str) -> None:
    code = (
        "import contextlib, sys\n"
        f"from {MODULES[command]} import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "slow = {'aiohttp', 'datasets', 'numpy', 'openai', 'packaging', 'pydantic', 'rich', 'torch'}\n"
        "print(sorted(slow & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith(f"usage: {command} ")
    assert done.stderr == "[]\n"


@pytest.mark.parametrize(
    ("raised", "code", "sentence"),
    [
        (ConfigError("mend it."), 2, "vf-x: mend it."),
        (CommandFailedError("it failed."), 1, "vf-x: it failed."),
        (GradingError("no grade"), 1, "vf-x: GradingError: no grade"),
        (KeyboardInterrupt(), 130, "vf-x: interrupted"),
        (PermissionError(13, "Permission denied", "/x/y"), 1, "vf-x: /x/y: Permission denied"),
        (OSError(28, "No space left on device"), 1, "vf-x: OSError: [Errno 28] No space left on device"),
    ],
)
def test_what_a_command_raises_is_one_sentence_and_its_exit_code(
    raised: BaseException, code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> int:
        raise raised

    assert run_command("vf-x", command) == code
    assert capsys.readouterr().err == f"{sentence}\n"


@pytest.mark.parametrize("raised", [TimeoutError(), ConnectionResetError(104, "reset by peer"), ZeroDivisionError()])
def test_what_code_of_others_raises_keeps_its_traceback(raised: Exception) -> None:
    def command() -> int:
        raise raised

    with pytest.raises(type(raised)):
        run_command("vf-x", command)
