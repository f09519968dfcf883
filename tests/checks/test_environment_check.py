"""What a model's rollouts say: no variance, cut answers, unread formats, failures."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.checks.environment_check import check_policy
from verifiers.cli.check import main
from verifiers.evals.evaluation_run import iter_requests
from verifiers.inference.endpoint import Endpoint, HttpBackend
from verifiers.rollouts.run import Run
from verifiers.testing import FakeOpenAIServer, Fault

PARSER = vf.XMLParser(["answer"])
ROWS = [{"question": f"{n}?", "answer": str(n)} for n in range(8)]


def right(completion: Any, answer: str, parser: Any) -> float:
    return float(parser.parse_answer(completion) == answer)


def env_of(**options: Any) -> vf.Environment:
    funcs = options.pop("funcs", [right])
    rubric = vf.Rubric(funcs, options.pop("weights", None), parser=PARSER)
    return vf.SingleTurnEnv(dataset=ROWS, eval_dataset=ROWS, parser=PARSER, rubric=rubric, **options)


async def found_with(env: vf.Environment, answers: Any, **sampling: Any) -> tuple[dict[str, str], dict[str, Any]]:
    with FakeOpenAIServer(answers) as server:
        backend = HttpBackend(Endpoint(server.url))
        run = Run(env, backend, "m", {**env.sampling_args, **sampling})
        findings, numbers = await check_policy(env, run, list(iter_requests(env.get_eval_dataset(), 4, None)))
        await backend.close()
    return {found.kind: found.severity for found in findings}, numbers


def sometimes(body: dict[str, Any]) -> str:
    """Answer half of the rollouts of a prompt right."""
    sometimes.asked += 1  # type: ignore[attr-defined]
    said = body["messages"][-1]["content"].rstrip("?") if sometimes.asked % 2 else "99"  # type: ignore[attr-defined]
    return f"<answer>{said}</answer>"


async def test_a_model_that_is_sometimes_right_has_no_findings() -> None:
    sometimes.asked = 0  # type: ignore[attr-defined]
    findings, numbers = await found_with(env_of(), sometimes)
    assert findings == {}
    assert (numbers["prompts"], numbers["rollouts"], numbers["reward"], numbers["truncated"]) == (8, 32, 0.5, 0.0)
    # of as many as were played no more is known than what was seen, and of more nothing
    seen = numbers["groups_without_variance"]
    assert seen["expected_with_num_generations"] == {4: seen["share"]}


@pytest.mark.parametrize(
    ("answers", "options", "sampling", "kind", "severity"),
    [
        ("<answer>no</answer>", {}, {}, "one-reward", "error"),
        (lambda body: "<answer>3</answer>", {}, {}, "no-variance", "warning"),
        ("<answer>a very long answer</answer>", {}, {"max_tokens": 5}, "cut-off", "warning"),
        ("just words", {}, {}, "no-answer-read", "warning"),
        (
            "<answer>3</answer>",
            {"funcs": [right, PARSER.get_format_reward_func()], "weights": [1.0, 1.0]},
            {},
            "format-earns-most",
            "warning",
        ),
        ("3", {"funcs": [lambda completion: 1 / 0]}, {}, "rollouts-fail", "error"),
    ],
)
async def test_what_keeps_a_model_from_learning_is_named(
    answers: Any, options: dict[str, Any], sampling: dict[str, Any], kind: str, severity: str
) -> None:
    findings, _ = await found_with(env_of(**options), answers, **sampling)
    assert findings.get(kind) == severity


async def test_a_call_of_a_tool_is_no_answer_that_nobody_reads() -> None:
    async def look(word: str) -> str:
        """Look a word up.

        Args:
            word: the word.
        """
        return word

    env = vf.ToolEnv(
        tools=[look], max_turns=1, dataset=ROWS, eval_dataset=ROWS, rubric=vf.Rubric([lambda state: 1.0])
    )
    findings, _ = await found_with(env, {"tool_calls": [{"name": "look", "arguments": {"word": "a"}}]})
    assert "no-answer-read" not in findings


async def test_a_limit_that_cuts_is_answered_by_a_longer_one() -> None:
    _, numbers = await found_with(env_of(), "<answer>" + "9" * 300 + "</answer>", max_tokens=100)
    assert numbers["suggested_max_completion_length"] >= 200


# -- the command -----------------------------------------------------------------------------------------------------

SOURCE = """
import verifiers as vf

def load_environment(pays=False):
    rows = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(10, 30)]
    def right(completion, answer):
        return 1.0 if pays else float(completion[-1]["content"] == answer)
    return vf.SingleTurnEnv(dataset=rows[:12], eval_dataset=rows[12:], rubric=vf.Rubric([right]))
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("checked_env.py").write_text(SOURCE)
    return "checked_env.py"


def test_the_command_ends_with_1_where_something_is_wrong(
    environment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([environment]) == 0
    assert capsys.readouterr().out == "checked_env: 0 errors, 0 warnings, 0 notes\n"
    assert main([environment, "-a", '{"pays": true}', "--html", "page.html"]) == 1
    said = capsys.readouterr().out
    assert "error   paid-empty (rows " in said
    assert "an empty answer gets 1 of 1 in 8 of 8 rows" in said
    assert "paid-empty" in Path("page.html").read_text()


def test_the_command_asks_a_model_and_prints_json(environment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([environment, "-m", "fake", "-n", "4", "-r", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_right"] is True
    assert report["numbers"]["policy"]["rollouts"] == 12
    assert report["numbers"]["rewards"]["right"] == 1.0


def test_without_a_judges_key_the_rows_are_checked_all_the_same(
    environment: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    text = SOURCE.replace("vf.Rubric([right])", "vf.JudgeRubric(judge_model='j', funcs=[graded])")
    graded = (
        "    async def graded(judge, prompt, completion, answer, state):\n        return 1.0\n    return vf.Single"
    )
    Path("judged_env.py").write_text(text.replace("    return vf.Single", graded).replace("rows[:12]", "rows"))
    main(["judged_env.py", "-m", "fake"])
    printed = capsys.readouterr().out
    assert "judge-not-asked" in printed
    assert "eval-trained-on" in printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-r", "1"], "--rollouts-per-example is 1"),
        (["--rows", "0"], "--rows is 0"),
        (["--max-model-len", "5"], "--max-model-len needs --tokenizer"),
        (["--tokenizer", "."], "'.' cannot be loaded"),
    ],
)
def test_flags_that_cannot_be_are_one_sentence(
    environment: str, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert main([environment, *arguments]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("other", [Fault(status=404), Fault.hang()], ids=["404", "404 or nothing"])
def test_a_model_that_never_answered_is_no_environment_that_is_right(
    other: Fault, environment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = itertools.cycle([Fault(status=404), other])
    with FakeOpenAIServer("yes", faults=lambda _: next(faults)) as server:
        command = [environment, "-m", "m", "-b", server.url, "-n", "2", "-r", "2", "--rollout-timeout", "1"]
        assert main(command) == 1
    assert re.search(r"error   rollouts-fail \(provider_error\): [1-4] of 4 rollouts", capsys.readouterr().out)


def test_a_page_that_cannot_be_written_is_told_before_a_model_is_asked(
    environment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeOpenAIServer("yes") as server:
        assert main([environment, "-m", "m", "-b", server.url, "--html", "nowhere/page.html"]) == 2
        assert server.requests == []
    assert "vf-check: --html is 'nowhere/page.html', and no file can be written there" in capsys.readouterr().err


def test_an_environment_without_rows_is_not_called_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("empty_env.py").write_text(SOURCE.replace("rows[:12]", "[]").replace("rows[12:]", "[]"))
    assert main(["empty_env.py"]) == 2
    assert "no dataset of the environment has rows" in capsys.readouterr().err
