"""vf-play: a person in the place of the policy, the environment's own loop and rewards around."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verifiers.cli.play import main

SOURCE = '''
import verifiers as vf


class Echo(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "you said " + repr(messages[-1]["content"])}]


class Farewell(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        state["final_env_response"] = [{"role": "user", "content": "farewell"}]
        return []


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def right(completion, answer):
    last = completion if isinstance(completion, str) else completion[-1]["content"]
    return float(last.strip() == answer)


def said(completion):
    return float(len(completion))


def broken(completion):
    raise ZeroDivisionError("no ground to stand on")


def load_environment(kind="echo"):
    rows = [{"question": f"question {i}", "answer": str(i)} for i in range(5)]
    rubric = vf.Rubric([right, said], weights=[1.0, 0.0])
    if kind == "echo":
        return Echo(dataset=rows, eval_dataset=rows[:3], rubric=rubric, max_turns=2)
    if kind == "farewell":
        return Farewell(eval_dataset=rows, rubric=vf.Rubric([said]))
    if kind == "tools":
        return vf.ToolEnv(tools=[add], eval_dataset=rows, rubric=rubric)
    if kind == "completion":
        texts = [{"prompt": "Once upon a", "answer": "time"}]
        return vf.SingleTurnEnv(eval_dataset=texts, rubric=vf.Rubric([right]), message_type="completion")
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([broken]))
'''

Type = Callable[[str], None]


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Type]:
    """Return what writes to the standard input, a pipe; the current directory has an environment `zz-game`."""
    game = tmp_path / "environments/zz_game/zz_game.py"
    game.parent.mkdir(parents=True)
    game.write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    reader, writer = os.pipe()
    stdin = os.fdopen(reader)
    monkeypatch.setattr(sys, "stdin", stdin)

    def write(text: str) -> None:
        os.write(writer, text.encode())
        os.close(writer)

    yield write
    stdin.close()
    sys.modules.pop("zz_game", None)


def test_the_environment_answers_every_turn_and_the_score_has_each_reward(
    typed: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("hello\nworld\n/done\n2\n/done\nnever read\n")
    assert main(["zz-game", "-i", "2"]) == 0
    shown = capsys.readouterr().out
    order = [
        "[user]\nquestion 2\n",
        "[you]",
        "[user]\nyou said 'hello\\nworld'",
        "[you]",
        "[score]",
    ]
    places = [shown.find(text) for text in order[:3]] + [shown.rfind(text) for text in order[3:]]
    assert -1 not in places
    assert places == sorted(places)
    assert shown.count("question 2") == 1, "what was shown is not shown again"
    assert "outcome  completed (max_turns_reached)" in shown
    assert "answer   2" in shown
    assert "reward   1" in shown
    assert "  right  1\n" in shown
    assert "  said  3\n" in shown


def test_an_input_that_ends_too_early_has_no_score(typed: Type, capsys: pytest.CaptureFixture[str]) -> None:
    typed("nonsense\n/done\n")
    assert main(["zz-game"]) == 1
    shown = capsys.readouterr()
    assert "reward" not in shown.out
    assert shown.err == "vf-play: the input ended before the rollout did, so there is no score.\n"


def test_a_line_may_be_of_any_length(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(SOURCE.replace('kind="echo"', 'kind="farewell"'))
    command = [sys.executable, "-m", "verifiers.cli.play", "game.py"]
    done = subprocess.run(command, input="x" * 200_000, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, "outcome  completed" in done.stdout) == (0, True), done.stderr


def test_tools_are_shown_and_called_and_mistakes_are_answered_as_a_models_are(
    typed: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    typed('/tool add {"a": 1, "b": 2}\n/tool add {"a": 3, "b": 1}\n/done\n/tool add {1}\n/done\n4\n/done\n')
    assert main(["zz-game", "-a", '{"kind": "tools"}', "-i", "4"]) == 0
    shown = capsys.readouterr().out
    assert '[tools]\n{"name": "add", "description": "Add two numbers."' in shown
    assert "[tool]\n3\n\n[tool]\n4\n" in shown, "both calls of the one turn were answered"
    assert "JSON" in shown[shown.rindex("[tool]") :]
    assert "reward   1" in shown


def test_what_the_environment_says_after_the_last_answer_is_shown_too(
    typed: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("x\n/done\n")
    assert main(["zz-game", "-a", '{"kind": "farewell"}']) == 0
    shown = capsys.readouterr().out
    assert shown.count("[user]\nfarewell") == 1
    assert "[assistant]" not in shown, "the person's own words are on the screen already"


def test_text_is_continued_in_completion_mode(typed: Type, capsys: pytest.CaptureFixture[str]) -> None:
    typed("time\n/done\n")
    assert main(["zz-game", "-a", '{"kind": "completion"}']) == 0
    shown = capsys.readouterr().out
    assert "Once upon a" in shown
    assert "reward   1" in shown


def test_a_grading_error_is_shown_as_such_and_is_no_zero(typed: Type, capsys: pytest.CaptureFixture[str]) -> None:
    typed("x\n/done\n")
    assert main(["zz-game", "-a", '{"kind": "broken"}']) == 1
    shown = capsys.readouterr().out
    assert "outcome  grading_error" in shown
    assert "reward   none: " in shown
    assert "no ground to stand on" in shown
    assert "reward   0" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["zz-gone"], "There is no environment 'zz-gone'"),
        (["zz-game", "-i", "3"], "--example is 3, but the eval dataset has 3 rows"),
        (["zz-game", "-i", "-1"], "--example is -1"),
        (["zz-game", "-a", "[1]"], "--env-args is '[1]'; give a JSON object"),
        (["zz-game", "-a", '{"kind": "tools"}', "--split", "train"], "has no training dataset"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_user_can_mend_is_one_sentence_and_exit_code_2(
    typed: Type, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    (sentence,) = shown.err.strip().splitlines()
    assert sentence.startswith("vf-play: ")
    assert message in sentence
    assert "[user]" not in shown.out


def test_ctrl_c_while_waiting_for_a_line_ends_at_once_with_130(typed: Type) -> None:
    command = [sys.executable, "-u", "-m", "verifiers.cli.play", "zz-game"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        # the thread reads from the first line that it waits for
        while "/done on a line" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        # the input stays open: the thread that waits for it must not keep the process
        assert process.wait(timeout=15) == 130
        assert process.stderr is not None
        errors = process.stderr.read()
    finally:
        process.kill()
        process.communicate()
    assert errors == "vf-play: interrupted\n"
