"""Results on disk: every line whole, incomplete last lines forgiven, failures in full beside."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verifiers.errors import ConfigError
from verifiers.evals.store import ResultStore, metrics_of, new_run_directory, read_metadata, read_run, result_row
from verifiers.log import Redactor
from verifiers.rollouts.rollout import Rollout
from verifiers.types import Failure, Outcome, RolloutKey


def rollout(example: int = 0, generation: int = 0, reward: float | None = 1.0, **more: Any) -> Rollout:
    failed = reward is None
    fields: dict[str, Any] = {
        "outcome": Outcome.PROVIDER_ERROR if failed else Outcome.COMPLETED,
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "completion": [{"role": "assistant", "content": "4"}],
        "answer": "4",
        "metrics": {} if failed else {"good": 1.0},
        "failure": Failure("ProviderError", "no") if failed else None,
    }
    return Rollout(RolloutKey(0, example, generation), reward=reward, **{**fields, **more})


def stored(directory: Path, *rollouts: Rollout) -> Path:
    with ResultStore(directory, {"model": "m"}) as store:
        for one in rollouts:
            store.append(one)
    return directory


def test_a_run_is_read_as_it_was_written_in_order_of_prompts(tmp_path: Path) -> None:
    directory = stored(tmp_path, rollout(1, 0), rollout(0, 1, 0.5), rollout(0, 0))
    run = read_run(directory)
    assert read_run(Path(directory) / "results.jsonl") == run
    assert [(row["example_id"], row["generation"]) for row in run.rows] == [(0, 0), (0, 1), (1, 0)]
    assert (run.metadata["model"], run.rows[1]["reward"], metrics_of(run.rows[0])) == ("m", 0.5, {"good": 1.0})


def test_an_incomplete_last_line_is_left_out_and_cut_off_before_the_next_is_written(tmp_path: Path) -> None:
    stored(tmp_path, rollout(0), rollout(1))
    file = tmp_path / "results.jsonl"
    whole = file.read_bytes()
    for cut in (1, 20, len(whole) // 2 - 1):
        file.write_bytes(whole[:-cut])
        kept = [row["example_id"] for row in read_run(tmp_path).rows]
        stored(tmp_path, rollout(2))
        # a line that lacks nothing but its end is finished
        assert kept == ([0, 1] if cut == 1 else [0])
        assert [row["example_id"] for row in read_run(tmp_path).rows] == [*kept, 2]


def test_generations_of_other_types_do_not_stop_a_run_from_being_read(tmp_path: Path) -> None:
    lines = [*['{"example_id": 0}'] * 3, '{"example_id": 0, "generation": null}']
    lines += ['{"example_id": 0, "generation": 1}', '{"example_id": 0, "generation": "a"}']
    (tmp_path / "results.jsonl").write_text("\n".join(lines) + "\n")
    assert len(read_run(tmp_path).rows) == 6


@pytest.mark.parametrize(
    "odd",
    [
        '{"example_id": 1, "reward": "high"}',
        '{"example_id": 1, "reward": 1' + "0" * 400 + "}",
        '{"example_id": 1, "reward": 1e999}',
        '{"example_id": 1, "reward": true}',
        '{"example_id": [1], "reward": 1.0}',
        '{"example_id": 1, "generation": {}}',
        '{"example_id": 1, "completion_tokens": "12"}',
        '{"example_id": 1, "completion_tokens": 1e300}',
        '{"example_id": 1, "outcome": "solved"}',
        '{"example_id": 1, "info": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"exam',
    ],
    ids=["text", "huge", "infinite", "boolean", "list", "object", "tokens", "many tokens", "outcome", "deep", "cut"],
)
def test_a_row_with_an_odd_value_is_named_by_file_and_line(odd: str, tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text(f'{{"example_id": 0}}\n{odd}\n{{"example_id": 2}}\n')
    with pytest.raises(ConfigError, match=r"line 2 of .*results.jsonl' is damaged"):
        read_run(tmp_path)


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_metadata_that_is_no_regular_file_is_not_read(kind: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"env": "secret"}')
    path = tmp_path / "metadata.json"
    path.symlink_to("secret") if kind == "link" else os.mkfifo(path)
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_metadata(tmp_path)


def test_the_last_of_several_lines_for_a_rollout_counts(tmp_path: Path) -> None:
    run = read_run(stored(tmp_path, rollout(0, 0, None), rollout(0, 0, 0.25)))
    assert [(row["reward"], row["error"]) for row in run.rows] == [(0.25, None)]


def test_failures_are_short_in_the_row_and_whole_beside_it(tmp_path: Path) -> None:
    try:
        raise ValueError("the cause")
    except ValueError as error:
        failure = Failure("ValueError", "x" * 5000, exception=error)
    stored(tmp_path, rollout(3, 1, None, failure=failure), rollout(4))
    (row, _) = read_run(tmp_path).rows
    assert len(row["error"]) < 1100
    (beside,) = map(json.loads, (tmp_path / "failures.jsonl").read_text().splitlines())
    assert (beside["example_id"], beside["generation"], beside["kind"]) == (3, 1, "ValueError")
    assert beside["text"] == "x" * 5000
    assert 'raise ValueError("the cause")' in beside["traceback"]


def test_every_line_is_strict_json_whatever_an_environment_wrote(tmp_path: Path) -> None:
    cycle: dict[str, Any] = {"score": math.nan, (1, 2): {3}, "half": "\ud83d", "line": "a\nb\u2028c"}
    cycle["self"] = cycle

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    stored(tmp_path, rollout(0, info=cycle), rollout(1))
    first, second = (tmp_path / "results.jsonl").read_bytes().split(b"\n")[:2]
    info = json.loads(first, parse_constant=refuse)["info"]
    assert (info["score"], info["half"], info["line"]) == (None, "\ud83d", "a\nb\u2028c")
    assert json.loads(second)["example_id"] == 1


def test_reward_functions_have_columns_but_never_ours(tmp_path: Path) -> None:
    row = result_row(rollout(metrics={"good": 0.5, "reward": 7.0, "metrics": 8.0}))
    assert (row["reward"], row["good"]) == (1.0, 0.5)
    assert metrics_of(row) == {"good": 0.5, "reward": 7.0, "metrics": 8.0}


def test_secrets_are_in_no_file(tmp_path: Path) -> None:
    secret = 'sk-"quoted"-é-0123456789'
    bad = rollout(0, 0, None, failure=Failure("E", f"refused {secret}", exception=ValueError(secret)))
    with ResultStore(tmp_path, {"env_args": {"key": secret}}, Redactor([secret])) as store:
        store.append(bad)
        store.append(rollout(1, completion=[{"role": "assistant", "content": secret}]))
    for file in tmp_path.iterdir():
        text = file.read_text()
        assert "0123456789" not in text
        assert "***" in text or file.name == ".lock"


def test_two_processes_never_write_to_one_run(tmp_path: Path) -> None:
    with (
        ResultStore(tmp_path, {}),
        pytest.raises(ConfigError, match="another process is writing to"),
        ResultStore(tmp_path, {}),
    ):
        pass
    stored(tmp_path, rollout())
    assert len(read_run(tmp_path).rows) == 1


def test_runs_of_one_environment_and_model_stand_beside_each_other(tmp_path: Path) -> None:
    first, second = (new_run_directory("a/env", "org/model", tmp_path) for _ in range(2))
    assert first.parent == second.parent == tmp_path / "a--env--org--model"
    assert first != second


def test_rows_hold_what_they_hold_also_where_it_is_long_or_a_picture(tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo" * 400}}
    one = rollout(
        prompt=[{"role": "system", "content": "rules " * 1000}, {"role": "user", "content": [image]}],
        info={"deep": [[{"a": "x" * 5000}]], "$content": "a name like any other", "half": "\ud83d" * 5},
    )
    (row,) = read_run(stored(tmp_path, one)).rows
    assert (row["prompt"], row["info"]) == (one.prompt, json.loads(json.dumps(one.info)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "metadata.json", "results.jsonl"]


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_store import rollout
from verifiers.evals.store import ResultStore

begin = int(sys.argv[3])
with ResultStore(Path(sys.argv[2]), {}) as store:
    print("ready", flush=True)
    for number in range(begin, begin + 100_000):
        store.append(rollout(number, 0, prompt=f"{number} " + "long " * 3000))
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_whole_rows(tmp_path: Path) -> None:
    chance = random.Random(3)
    count = 0
    for _ in range(4):
        command = [sys.executable, "-c", WRITER, str(Path(__file__).parent), str(tmp_path), str(count)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert process.stdout is not None
        process.stdout.readline()
        wanted = count + chance.randrange(1, 300)
        while (tmp_path / "results.jsonl").read_bytes().count(b"\n") < wanted:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
        rows = read_run(tmp_path).rows
        assert len(rows) >= wanted
        assert all(row["prompt"] == f"{row['example_id']} " + "long " * 3000 for row in rows)
        count = len(rows)
