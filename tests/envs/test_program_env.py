"""ProgramEnv: its settings, placeholders and result files; programs themselves are run by tests/sandbox."""

from __future__ import annotations

import errno
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.envs.program_env import _Program, _read_result, _ResultRubric, filled, placeholder_values
from verifiers.types import RolloutInput

ROWS = [{"question": "6 times 7?", "answer": "42"}]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"command": "my-agent {prompt}"}, "give a list of words"),
        ({"command": ["agent", "{promt}"]}, "no placeholder {promt}; did you mean {prompt}"),
        ({"command": ["agent", "{answer}"]}, "would tell the program the row's answer"),
        ({"command": ["agent"], "stdin": "{answer}"}, "would tell the program the row's answer"),
        ({"command": ["agent"], "score": ["grade", "{answer}"]}, "score= needs result="),
        ({"command": ["agent"], "score_files": {"a": "b"}}, "which is not given"),
        ({"command": ["agent", "{prompt}"], "system_prompt": "Be brief."}, "by {messages} alone"),
        ({"command": ["agent"], "files": {"a": Path("/nowhere/a")}}, "'/nowhere/a': No such file"),
        ({"command": ["agent"], "sandbox": "jail"}, "no isolation level 'jail'"),
        ({"command": ["agent"], "failed_program": "half"}, "give 'zero' or 'unscored'"),
        ({"command": ["agent"], "resutl": "reward.json"}, "did you mean 'result'"),
    ],
)
def test_settings_that_cannot_work_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(vf.ConfigError, match=text):
        vf.ProgramEnv(dataset=ROWS, **arguments)


def test_placeholders_have_the_row_and_nothing_is_replaced_twice() -> None:
    row: RolloutInput = {
        "prompt": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "no"},
            {"role": "user", "content": [{"type": "text", "text": "{model} says 'hi'"}]},
        ],
        "answer": "42",
        "task": "sums",
        "example_id": 7,
        "info": {"repo": "a/b", "tags": ["x"]},
    }
    values = placeholder_values(row, "policy", "http://127.0.0.1:1")

    def fill(text: str) -> str:
        return filled(text, values, row)

    assert fill("--task={prompt}") == "--task={model} says 'hi'"
    line = filled("a {prompt} --task={task} {a}", values, row, shlex.quote)
    assert shlex.split(line) == ["a", "{model} says 'hi'", "--task=sums", "{a}"]
    assert fill("{model} {base_url} {task} {example_id}") == "policy http://127.0.0.1:1/v1 sums 7"
    assert fill('{info.repo} {info.tags} ${model} {"a": {}} {answer}') == 'a/b ["x"] ${model} {"a": {}} {answer}'
    assert [message["role"] for message in json.loads(fill("{messages}"))] == [
        *("system", "user", "assistant", "user")
    ]
    with pytest.raises(vf.ConfigError, match=r"info of row 7 has no 'rep' for \{info.rep\}: \['repo', 'tags'\]"):
        fill("{info.rep}")


class _Disk:
    """The files of a sandbox."""

    def __init__(self, content: bytes | OSError) -> None:
        self._content = content

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        if isinstance(self._content, OSError):
            raise self._content
        return self._content


async def read(content: bytes | OSError) -> dict[str, Any]:
    disk: Any = _Disk(content)
    return await _read_result(disk, "reward.json", _Program(disk, ["agent"]))


@pytest.mark.parametrize(
    ("content", "reward", "metrics"),
    [
        (b"0.5\n", 0.5, {}),
        (b'{"reward": 1, "passed": 3, "note": "fine", "all": true}', 1.0, {"passed": 3.0, "all": 1.0}),
    ],
)
async def test_a_result_is_a_reward_with_metrics(content: bytes, reward: float, metrics: dict[str, float]) -> None:
    state = vf.State(result=await read(content), completion=[], answer="")
    score = (await _ResultRubric().score_group([state]))[0]
    assert (score.reward, score.metrics) == (reward, metrics)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is not JSON"),
        (b"0.5 good", "is not JSON"),
        (b"NaN", "has reward=nan, not a finite number"),
        (b'{"reward": "1"}', "has reward='1', not a finite number"),
        (b'{"reward": null}', "has reward=None"),
        (b"1" + b"0" * 400, "not a finite number"),
        (b'{"score": 1}', r"has no 'reward', only \['score'\]"),
        (b'{"reward": 1, "loss": Infinity}', "has loss=inf"),
        (b"[" * 100_000, "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (FileNotFoundError(errno.ENOENT, "No such file"), "left no file 'reward.json' with a reward"),
        (OSError(errno.EFBIG, "the file is longer than 1048576 bytes"), "cannot be read: the file is longer"),
    ],
)
async def test_a_result_that_is_no_reward_is_the_agents_error(content: Any, text: str) -> None:
    with pytest.raises(vf.AgentError, match=text):
        await read(content)


def test_files_are_read_once_and_keep_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "tool").write_bytes(b"\x00tool")
    env = vf.ProgramEnv(["agent"], files={"a": tmp_path / "tool", "b": "é", "c": b"\xff"}, dataset=ROWS)
    assert env.files == {"a": b"\x00tool", "b": "é".encode(), "c": b"\xff"}


async def test_a_failed_program_is_zero_whatever_rubrics_say_of_it() -> None:
    env = vf.ProgramEnv(["agent"], result="r", failed_program="zero", dataset=ROWS)
    env.add_rubric(vf.Rubric(funcs=[lambda completion: 1.0]))
    ended = vf.State(result={"reward": 0.5}, completion=[], answer="")
    failed = vf.State(result={"reward": 0.0, "failed_program": "exit code 3"}, completion=[], answer="")
    scores = await env.rubric.score_group([failed, ended, failed])
    assert [score.reward for score in scores] == [0.0, 1.5, 0.0]
    assert [score.metrics["failed_program"] for score in scores] == [1.0, 0.0, 1.0]
