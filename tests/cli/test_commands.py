"""All commands: documented flag by flag, quick to say what they do, and declared where they are."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verifiers.cli.evaluate import main as evaluate
from verifiers.cli.main import COMMANDS, Command, CommandFailedError, run_command, tui
from verifiers.cli.main import main as umbrella
from verifiers.errors import ConfigError, GradingError

ROOT = Path(__file__).parents[2]
OWN = {f"vf-{name}": target for name, (target, _) in COMMANDS.items()}
OWN["python -m verifiers.testing"] = "verifiers.testing.__main__:main"
SERVERS = {
    "vf-serve": "verifiers_embedded.cli:main",
    "vf-dataserver": "verifiers_dataserver.cli:main",
    "vf-vllm": "verifiers_vllm.cli:main",
}
ALL = {**OWN, **SERVERS, "vf": "verifiers.cli.main:main"}


def parser_of(command: str) -> argparse.ArgumentParser:
    found = pkgutil.resolve_name(ALL[command])
    if not isinstance(found, Command):
        found = importlib.import_module(found.__module__)
    parser = found.parser()
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def flags_of(command: str) -> list[argparse.Action]:
    """Return the flags of a command's own that its help shows."""
    shown = [action for action in parser_of(command)._actions if action.help != argparse.SUPPRESS]
    return [action for action in shown if action.option_strings and action.dest not in ("help", "version")]


def sections() -> dict[str, str]:
    page = (ROOT / "docs/reference/commands.md").read_text()
    _, *parts = re.split(r"^## ", page, flags=re.MULTILINE)
    return {part.partition("\n")[0].strip(): part for part in parts}


@pytest.mark.parametrize("command", [*OWN, "vf-serve", "vf-dataserver"])
def test_the_page_names_exactly_the_flags_that_the_command_has_with_their_defaults(command: str) -> None:
    there = {tuple(action.option_strings) for action in flags_of(command)}
    rows = re.findall(r"^\| (`-.*?) \|", sections()[command], flags=re.MULTILINE)
    assert {tuple(re.findall(r"`(-[^`]+)`", row)) for row in rows} == there
    defaults = {action.option_strings[-1]: action.default for action in flags_of(command)}
    for row in re.findall(r"^\| `-.*", sections()[command], flags=re.MULTILINE):
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        flag, written = re.findall(r"`(--[\w-]+)`", cells[0])[-1], cells[2].strip("` |") if len(cells) > 2 else ""
        if written and written != "OpenAI's" and defaults[flag] is not None:
            number = re.fullmatch(r"\d+(\.\d+)?", written)
            assert float(written) == defaults[flag] if number else written == defaults[flag], row


@pytest.mark.parametrize("command", ALL)
def test_the_examples_of_the_help_parse(command: str) -> None:
    parser = parser_of(command)
    for example in parser.format_help().rpartition("examples:\n")[2].strip("\n").splitlines():
        given = shlex.split(re.split(r" [|>] |\)\"$", example)[0])
        assert " ".join(given).startswith(command)
        if command != "vf":
            parser.parse_known_args(given[len(command.split()) :])


# -- vf --------------------------------------------------------------------------------------------------------


def test_vf_runs_every_command_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    for command in [*OWN, *SERVERS]:
        if command.startswith("vf-") and command != "vf-vllm":
            with pytest.raises(SystemExit) as ended:
                umbrella([command.removeprefix("vf-"), "--help"])
            assert ended.value.code == 0
            assert capsys.readouterr().out == parser_of(command).format_help()
    assert umbrella(["compare", "a", "b", "--confidence", "7"]) == 2
    assert capsys.readouterr().err.startswith("vf-compare: --confidence is 7.0")


def test_a_command_of_another_package_is_called_as_its_script_is(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    point = SimpleNamespace(load=lambda: lambda: called.append(sys.argv[:]))
    monkeypatch.setattr("verifiers.cli.main._commands_of_other_packages", lambda: {"foo": point})
    monkeypatch.setattr(sys, "argv", ["vf", "foo", "--bar"])
    assert umbrella() == 0
    assert called == [["vf-foo", "--bar"]]


def test_vf_lists_the_installed_commands_and_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert umbrella([]) == 0
    text = capsys.readouterr().out
    assert set(re.findall(r"^    ([\w-]+)", text, flags=re.MULTILINE)) >= {
        *COMMANDS,
        "serve",
        "dataserver",
    }
    assert umbrella(["evla"]) == 2
    assert capsys.readouterr().err == "vf: there is no command 'evla'; did you mean 'eval'?\n"


@pytest.mark.parametrize(
    ("name", "package"), [("serve", "verifiers-embedded"), ("dataserver", "verifiers-dataserver")]
)
def test_a_server_that_is_not_installed_is_told_which_package_has_it(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("verifiers.cli.main._commands_of_other_packages", dict)
    assert umbrella([name]) == 2
    assert f"vf-{name} comes with the package {package}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (tui, "there is no command 'tui'; 'vf view' shows runs in a browser."),
        (lambda: umbrella(["vllm"]), "vf-vllm comes with the package verifiers-vllm"),
        (
            lambda: evaluate(["toy", "-m", "fake", "--save-every", "3"]),
            "--save-every: each rollout is stored as it ends",
        ),
    ],
)
def test_what_the_classic_package_had_is_told_what_there_is_instead(
    call: Any, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert call() == 2
    assert instead in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "vf-eval my-env --right-from nan",
        "vf-eval my-env -T inf",
        "vf-export run -f sft --threshold nan",
        "vf-compare a b --right-from nan",
    ],
)
def test_a_number_that_is_not_finite_is_refused_by_every_flag(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *given = words.split()
    with pytest.raises(SystemExit) as caught:
        parser_of(command).parse_args(given)
    assert caught.value.code == 2
    assert "is not a finite number" in capsys.readouterr().err


def test_every_command_of_the_project_is_on_the_page_and_can_be_called() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    # the classic package's, which says what there is instead
    assert scripts.pop("vf-tui") == "verifiers.cli.main:tui"
    assert set(scripts) <= set(sections())
    assert {f"vf-{name}" for name in COMMANDS} == {*scripts} - {"vf"}
    for command, target in scripts.items():
        assert target == ALL[command]
        assert callable(pkgutil.resolve_name(target))


def test_help_loads_nothing_that_is_slow() -> None:
    code = (
        "import contextlib, pkgutil, sys\n"
        f"for target in {list(OWN.values())!r}:\n"
        "    with contextlib.suppress(SystemExit): pkgutil.resolve_name(target)(['--help'])\n"
        "slow = {'aiohttp', 'datasets', 'numpy', 'openai', 'packaging', 'pydantic', 'rich', 'torch'}\n"
        "print(sorted(slow & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert re.findall(r"^usage: (python -m \S+|\S+)", done.stdout, flags=re.MULTILINE) == [*OWN]
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
