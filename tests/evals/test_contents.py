"""Large contents are stored once, are there before the row that names them, and come back wherever a run is read."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.errors import ConfigError
from verifiers.evals.compared_run import prompt_digest, read_compared_run
from verifiers.evals.contents import CONTENTS, LARGE, ContentReader
from verifiers.evals.export import export_run, save_dataset
from verifiers.evals.hiding import Hider
from verifiers.evals.regrade import regrade
from verifiers.evals.resume import finished_rollouts
from verifiers.evals.store import ResultStore, iter_rows, read_run, result_row
from verifiers.evals.viewer.runs import GrowingRun
from verifiers.evals.viewer.writing import write_evaluation_report
from verifiers.rollouts.rollout import Rollout
from verifiers.types import Outcome, RolloutKey

IMAGE = "data:image/png;base64," + "iVBORw0KGgo" * 400
RULES = "Follow all of these rules. " * 100
PAGE = "a page that a tool found " * 80
ESSAY = "what the policy wrote " * 100


def rollout(example: int = 0, generation: int = 0, **more: Any) -> Rollout:
    user = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": IMAGE}}]
    fields: dict[str, Any] = {
        "prompt": [{"role": "system", "content": RULES}, {"role": "user", "content": user}],
        "completion": [
            {"role": "assistant", "content": f"{example}.{generation}: {ESSAY}"},
            {"role": "tool", "tool_call_id": "c", "content": PAGE},
            {"role": "assistant", "content": "a cat"},
        ],
        "answer": "a cat",
        "info": {"source": {"page": PAGE}},
    }
    return Rollout(RolloutKey(0, example, generation), Outcome.COMPLETED, reward=1.0, **{**fields, **more})


def stored(directory: Path, *rollouts: Rollout) -> Path:
    directory.mkdir(exist_ok=True)
    with ResultStore(directory, {"env": "e", "model": "m"}) as store:
        for one in rollouts:
            store.append(one)
    return directory


def contents_of(directory: Path) -> list[Any]:
    return [json.loads(line)["content"] for line in (directory / CONTENTS).read_text().splitlines()]


def test_what_comes_again_in_every_rollout_is_stored_once(tmp_path: Path) -> None:
    stored(tmp_path, *(rollout(example, generation) for example in range(3) for generation in range(8)))
    assert contents_of(tmp_path) == [RULES, IMAGE, PAGE]
    lines = (tmp_path / "results.jsonl").read_text()
    assert IMAGE[:100] not in lines + RULES
    # a rollout's own answer is read where it stands
    assert f'"2.3: {ESSAY}"' in lines
    assert len(lines) < 24 * (len(ESSAY) + 1200)


def test_rows_are_read_as_they_were_given(tmp_path: Path) -> None:
    made = [rollout(0, 0), rollout(0, 1, prompt=f"complete: {RULES}", completion=ESSAY), rollout(0, 2, answer=PAGE)]
    made.append(rollout(1, 0, info={"deep": [[{"a": (IMAGE, {"b": RULES})}]], "half": "\ud83d" * LARGE}))
    made.append(rollout(1, 1, completion=[{"role": "assistant", "content": ESSAY}] * 3))
    rows = read_run(stored(tmp_path, *made)).rows
    for row, one in zip(rows, made, strict=True):
        assert row["prompt"] == one.prompt
        assert row["completion"] == one.completion
        assert row["answer"] == one.answer
        assert row["info"] == json.loads(json.dumps(one.info))


def test_what_the_policy_said_twice_is_stored_apart_from_then_on(tmp_path: Path) -> None:
    stored(tmp_path, *(rollout(0, g, prompt="?", info={}, completion=ESSAY) for g in range(5)))
    assert contents_of(tmp_path) == [ESSAY]
    assert (tmp_path / "results.jsonl").read_text().count(ESSAY) == 1
    assert [row["completion"] for row in iter_rows(tmp_path)] == [ESSAY] * 5


def test_small_rows_need_no_second_file(tmp_path: Path) -> None:
    stored(tmp_path, rollout(prompt="a" * (LARGE - 1), completion="4", info={}))
    assert not (tmp_path / CONTENTS).exists()


def test_data_that_looks_like_a_reference_is_none(tmp_path: Path) -> None:
    false = {"$content": "0" * 32}
    infos = [{"x": false}, false, {"$content": {"$content": 1}, "more": RULES}]
    rows = read_run(stored(tmp_path, *(rollout(0, g, info=info) for g, info in enumerate(infos)))).rows
    assert [row["info"] for row in rows] == infos


def test_a_run_that_goes_on_writes_no_content_again(tmp_path: Path) -> None:
    stored(tmp_path, rollout(0, 0))
    before = (tmp_path / CONTENTS).read_bytes()
    stored(tmp_path, rollout(0, 1))
    assert (tmp_path / CONTENTS).read_bytes() == before
    finished = finished_rollouts(tmp_path, 2, whole_groups=False)
    assert finished.done == {0: {0, 1}}


@pytest.mark.parametrize("cut", [1, 30, 2000])
def test_a_torn_last_content_is_cut_off_and_written_again(tmp_path: Path, cut: int) -> None:
    """The row that needed it was never written: it comes after."""
    stored(tmp_path, rollout(0, 0, info={}, completion="4"))
    rows = (tmp_path / "results.jsonl").read_bytes()
    with (tmp_path / CONTENTS).open("ab") as file:
        line = json.dumps({"id": "a" * 32, "content": PAGE}).encode() + b"\n"
        file.write(line[: -min(cut, len(line) - 1)])
    assert [row["prompt"][0]["content"] for row in iter_rows(tmp_path)] == [RULES]
    stored(tmp_path, rollout(0, 1))
    assert (tmp_path / "results.jsonl").read_bytes().startswith(rows)
    assert [row["prompt"] for row in iter_rows(tmp_path)] == [rollout().prompt] * 2
    assert read_run(tmp_path).rows[1]["completion"][1]["content"] == PAGE


def test_runs_of_before_are_read_as_ever(tmp_path: Path) -> None:
    row = {"example_id": 0, "generation": 0, "prompt": RULES, "completion": [], "info": {"$content": "mine"}}
    (tmp_path / "results.jsonl").write_text(json.dumps(row) + "\n")
    assert read_run(tmp_path).rows == [row]


def test_a_run_of_before_goes_on(tmp_path: Path) -> None:
    inline = {**result_row(rollout(0, 0)), "info": {"$content": "mine"}}
    (tmp_path / "results.jsonl").write_text(json.dumps(inline) + "\n")
    stored(tmp_path, rollout(0, 1))
    assert contents_of(tmp_path) == [RULES, IMAGE, PAGE]
    first, second = read_run(tmp_path).rows
    assert first == inline
    assert second["prompt"] == rollout().prompt


def test_a_content_that_is_missing_is_told_and_never_taken_for_the_text(tmp_path: Path) -> None:
    stored(tmp_path, rollout())
    (tmp_path / CONTENTS).unlink()
    with pytest.raises(ConfigError, match=r"contents\.jsonl' lacks the content .*; copy a run with all of its files"):
        read_run(tmp_path)
    # numbers need no contents
    assert len(list(iter_rows(tmp_path, contents=False))) == 1
    run = GrowingRun(tmp_path)
    assert run.refresh() == 1
    assert "is missing]" in run.block(0)


def test_secrets_are_in_no_content(tmp_path: Path) -> None:
    secret = 'sk-"quoted"-é-0123456789'
    with ResultStore(tmp_path, {}, Hider([secret])) as store:
        for generation in range(2):
            store.append(rollout(0, generation, answer=f"{RULES}{secret}", info={"$content": secret, "x": PAGE}))
    assert "0123456789" not in "".join(path.read_text() for path in tmp_path.iterdir())
    assert [row["answer"] for row in iter_rows(tmp_path)] == [f"{RULES}***"] * 2
    # an id is a hash of what is stored, and tells nothing of what was taken out
    for line in map(json.loads, (tmp_path / CONTENTS).read_text().splitlines()):
        if isinstance(line["content"], str):
            assert line["id"] == hashlib.blake2b(line["content"].encode(), digest_size=16).hexdigest()


async def test_every_reader_of_a_run_sees_the_whole_texts(tmp_path: Path) -> None:
    run_directory = stored(tmp_path / "run", *(rollout(0, generation) for generation in range(3)))
    run = read_run(run_directory)
    for kind in ("csv", "jsonl", "sft", "inspect"):
        path, _ = export_run(run, tmp_path / kind, kind)
        if kind != "inspect":
            assert RULES[:-1] in path.read_text()
    assert [json.loads(line) for line in (tmp_path / "jsonl").read_text().splitlines()] == run.rows
    import datasets

    saved = datasets.load_from_disk(str(save_dataset(run_directory, tmp_path / "hf")))
    assert saved[0]["prompt"][0]["content"] == RULES
    assert RULES[:-1] in write_evaluation_report(run_directory).read_text()
    growing = GrowingRun(run_directory)
    growing.refresh()
    shown = json.loads(growing.block(0))
    assert shown["prompts"][0][0]["text"] == RULES
    assert shown["prompts"][0][1]["images"] == [IMAGE]
    as_given = {"prompt": rollout().prompt, "answer": "a cat", "task": "default"}
    assert read_compared_run(run_directory).asked == {0: prompt_digest(as_given)}

    def read_it(prompt: Any, completion: Any, info: Any) -> float:
        whole = (prompt[0]["content"], completion[1]["content"], info["source"]["page"])
        return float(whole == (RULES, PAGE, PAGE))

    env = vf.SingleTurnEnv(eval_dataset=[{"question": "?", "answer": ""}], rubric=vf.Rubric([read_it]))
    regraded = await regrade(env, run)
    assert regraded.after.mean_reward == 1.0
    assert contents_of(regraded.directory) == [RULES, IMAGE, PAGE]
    assert [row["prompt"] for row in iter_rows(regraded.directory)] == [rollout().prompt] * 3


def test_a_run_that_grows_is_followed_with_its_contents(tmp_path: Path) -> None:
    reader = ContentReader(tmp_path)
    growing = GrowingRun(tmp_path)
    with ResultStore(tmp_path, {}) as store:
        for number in range(3):
            text = f"{number} {RULES}"
            store.append(rollout(number, 0, prompt=text))
            assert growing.refresh() == number + 1
            last = (tmp_path / "results.jsonl").read_text().splitlines()[-1]
            assert reader.restored(json.loads(last))["prompt"] == text
    assert [message[0]["text"] for message in json.loads(growing.block(0))["prompts"]] == [
        f"{number} {RULES}" for number in range(3)
    ]


def test_a_run_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    growing = GrowingRun(tmp_path)
    for texts in ([f"{n} {RULES}" for n in range(4)], [f"{n} {PAGE}" for n in range(2)]):
        for path in (tmp_path / "results.jsonl", tmp_path / CONTENTS):
            path.write_text("")
        stored(tmp_path, *(rollout(n, 0, prompt=text, info={}) for n, text in enumerate(texts)))
        assert growing.refresh() == len(texts)
        assert [message[0]["text"] for message in json.loads(growing.block(0))["prompts"]] == texts


def test_memory_holds_few_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifiers.evals.contents._KEPT_CHARACTERS", 3 * LARGE)
    texts = [str(number) * LARGE for number in range(10)]
    stored(tmp_path, *(rollout(n, 0, prompt=text, info={}, completion="") for n, text in enumerate(texts)))
    reader = ContentReader(tmp_path)
    rows = list(iter_rows(tmp_path, contents=False))
    for _ in range(2):
        assert [reader.restored(row)["prompt"] for row in rows] == texts
        assert len(reader._kept) == 3


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_contents import RULES, rollout
from verifiers.evals.store import ResultStore

directory = Path(sys.argv[2])
begin = int(sys.argv[3])
with ResultStore(directory, {}) as store:
    print("ready", flush=True)
    for number in range(begin, begin + 100_000):
        store.append(rollout(number, 0, prompt=f"{number // 2} {RULES}", completion="4", info={"page": RULES * 20}))
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_no_row_without_its_contents(tmp_path: Path) -> None:
    chance = random.Random(3)
    run = tmp_path / "run"
    run.mkdir()
    count = 0
    for _ in range(6):
        command = [sys.executable, "-c", WRITER, str(Path(__file__).parent), str(run), str(count)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert process.stdout is not None
        process.stdout.readline()
        wanted = count + chance.randrange(1, 300)
        results = run / "results.jsonl"
        while not results.exists() or results.read_bytes().count(b"\n") < wanted:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
        rows = list(iter_rows(run))
        assert len(rows) >= wanted
        assert all(row["prompt"] == f"{row['example_id'] // 2} {RULES}" for row in rows)
        assert all(row["info"] == {"page": RULES * 20} for row in rows)
        count = len(rows)
    contents = contents_of(run) if (run / CONTENTS).read_bytes().endswith(b"\n") else None
    assert contents is None or len(contents) == len(set(contents))
