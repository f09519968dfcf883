"""Runs in other forms: nothing failed is trained on, nothing overwritten, every reader gets what it expects."""

from __future__ import annotations

import csv
import json
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest

from verifiers.cli.stored_runs import export
from verifiers.errors import ConfigError, HubError
from verifiers.evals.export import export_run, preference_rows, push_dataset, save_dataset, sft_rows, to_dataset
from verifiers.evals.store import StoredRun, read_run


def row(example: int, generation: int, reward: float | None, text: str = "x", **more: Any) -> dict[str, Any]:
    fields = {
        "example_id": example,
        "generation": generation,
        "prompt": [{"role": "user", "content": f"question {example}"}],
        "completion": [{"role": "assistant", "content": text}],
        "answer": "4",
        "task": "default",
        "info": {"level": example},
        "outcome": "provider_error" if reward is None else "completed",
        "reward": reward,
        "error": "ProviderError: no" if reward is None else None,
        "generation_ms": 1500.0,
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "metrics": {} if reward is None else {"good": reward},
    }
    return {**fields, **more}


ROWS = [
    row(0, 0, 0.0, "bad"),
    row(0, 1, 1.0, "right"),
    row(0, 2, 1.0, "right too"),
    row(1, 0, 0.5, "half"),
    row(1, 1, 2.0, "cut", outcome="truncated"),
    row(2, 0, None),
    row(2, 1, 1.0, "=SUM(A1)", completion=[{"role": "assistant", "content": '=A1"\n\ud83d'}]),
]


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ROWS))
    metadata = {"env": "sums", "model": "org/m", "started": "2026-01-02T03:04:05+0000", "base_url": "http://h/v1"}
    (directory / "metadata.json").write_text(json.dumps(metadata))
    return read_run(directory)


def test_sft_has_the_best_completed_rollout_of_each_prompt(run: StoredRun) -> None:
    said = {line["example_id"]: line["messages"][-1]["content"] for line in sft_rows(run)}
    assert said == {0: "right", 2: '=A1"\n\ud83d'}
    assert {line["example_id"] for line in sft_rows(run, 0.5)} == {0, 1, 2}
    assert [message["role"] for message in next(sft_rows(run))["messages"]] == ["user", "assistant"]


def test_preferences_are_best_against_worst_where_they_differ(run: StoredRun) -> None:
    (line,) = preference_rows(run)
    assert (line["chosen"][0]["content"], line["rejected"][0]["content"]) == ("right", "bad")
    assert (line["chosen_reward"], line["rejected_reward"]) == (1.0, 0.0)
    assert list(preference_rows(run, 1.0)) == []


@pytest.mark.parametrize("changed", [{"prompt": None}, {"completion": 5}, {"example_id": None}])
@pytest.mark.parametrize("kind", ["sft", "preference", "inspect"])
def test_a_row_that_no_example_can_be_made_of_is_named(
    run: StoredRun, tmp_path: Path, kind: str, changed: dict[str, Any]
) -> None:
    odd = StoredRun(run.directory, run.metadata, [*run.rows, row(4, 0, 1.0, **changed)])
    if kind == "inspect" and "example_id" not in changed:
        return
    with pytest.raises(ConfigError, match=r"a row of '.*results.jsonl' has "):
        export_run(odd, tmp_path / "out", kind)


def test_completion_mode_gives_text(run: StoredRun) -> None:
    text = StoredRun(run.directory, {}, [row(0, 0, 1.0, prompt="2 + 2 =", completion=" 4")])
    (line,) = sft_rows(text)
    assert (line["prompt"], line["completion"]) == ("2 + 2 =", " 4")


def test_csv_has_a_line_a_rollout_and_no_formulas(run: StoredRun, tmp_path: Path) -> None:
    lines = [row(0, 0, 1.0, answer="-5"), row(0, 1, 1.0, answer="=HYPERLINK(1)"), *run.rows[3:]]
    path, count = export_run(StoredRun(run.directory, {}, lines), tmp_path / "out" / "x.csv", "csv")
    with path.open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert count == len(found) == 6
    assert [line["answer"] for line in found[:2]] == ["-5", "'=HYPERLINK(1)"]
    assert (found[0]["good"], found[4]["error"], found[4]["reward"]) == ("1.0", "ProviderError: no", "")
    assert json.loads(found[0]["completion"])[0]["content"] == "x"


def test_a_dataset_has_messages_metrics_and_failures(run: StoredRun, tmp_path: Path) -> None:
    import datasets

    path, _ = export_run(run, tmp_path / "x", "hf")
    loaded = datasets.load_from_disk(str(path))
    assert loaded.num_rows == 7
    assert loaded[1]["completion"][0]["content"] == "right"
    assert (loaded[1]["good"], loaded[5]["good"], loaded[5]["outcome"]) == (1.0, None, "provider_error")
    assert json.loads(loaded[3]["info"]) == {"level": 1}
    # saved again beside the results, it takes the place of the older one
    for _ in range(2):
        save_dataset(run.directory, tmp_path / "again")
    assert datasets.load_from_disk(str(tmp_path / "again")).num_rows == 7
    assert {entry.name for entry in tmp_path.iterdir()} == {"run", "x", "again"}


def test_the_whole_run_is_pushed_under_the_name_that_was_given(
    run: StoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[Any] = []
    monkeypatch.setattr(type(to_dataset(run)), "push_to_hub", lambda self, name: pushed.append((name, self.num_rows)))
    push_dataset(run.directory, "me/x")
    assert pushed == [("me/x", 7)]


def test_a_run_that_was_stopped_is_no_success_for_inspect(run: StoredRun, tmp_path: Path) -> None:
    for status, told in (
        (None, "success"),
        ("finished", "success"),
        ("stopped", "cancelled"),
        ("running", "cancelled"),
    ):
        stored = StoredRun(run.directory, {**run.metadata, "status": status}, run.rows)
        path, _ = export_run(stored, tmp_path / f"{status}.eval", "inspect")
        with zipfile.ZipFile(path) as archive:
            assert json.loads(archive.read("header.json"))["status"] == told


def test_odd_values_of_a_run_do_not_stop_inspects_log(run: StoredRun, tmp_path: Path) -> None:
    odd = [{"role": "assistant", "content": 3, "tool_calls": 3}]
    lines = [row(0, 0, 1.0, completion=odd), row(1, 0, 1.0, completion=3) | {"generation": "a"}]
    stored = StoredRun(run.directory, {**run.metadata, "versions": "3"}, lines)
    assert export_run(stored, tmp_path / "x.eval", "inspect")[0].is_file()


def test_a_hub_that_refuses_is_one_sentence(run: StoredRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError("log in first")

    monkeypatch.setattr(type(to_dataset(run)), "push_to_hub", refuse)
    with pytest.raises(HubError, match=r"did not take 'me/x' .*log in first.*results are in"):
        push_dataset(run.directory, "me/x")


def test_inspects_log_has_its_files_and_fields(run: StoredRun, tmp_path: Path) -> None:
    """The fields that inspect_ai 0.3 requires; its own reader was shown such a file."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{"}}
    turns = [
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "assistant", "content": [{"type": "text", "text": "done"}]},
    ]
    lines = [*run.rows, row(3, 0, 1.0, completion=turns)]
    path, _ = export_run(StoredRun(run.directory, run.metadata, lines), tmp_path / "x.eval", "inspect")
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        read = {name: json.loads(archive.read(name)) for name in names}
    assert {"header.json", "summaries.json", "_journal/start.json", "_journal/summaries/1.json"} <= names
    assert {f"samples/0_epoch_{epoch}.json" for epoch in (1, 2, 3)} <= names
    header = read["header.json"]
    assert (header["version"], header["status"], header["eval"]["task"]) == (2, "success", "sums")
    assert (header["eval"]["model"], header["eval"]["dataset"]["samples"]) == ("org/m", 4)
    assert (header["results"]["total_samples"], header["results"]["completed_samples"]) == (8, 7)
    means = {score["name"]: score["metrics"]["mean"]["value"] for score in header["results"]["scores"]}
    assert means["reward"] == pytest.approx((2 / 3 + 1.25 + 1 + 1) / 4)
    failed, tool = read["samples/2_epoch_1.json"], read["samples/3_epoch_1.json"]
    assert failed["error"]["message"] == "ProviderError: no"
    assert failed["scores"] == {}
    first = tool["messages"][1]
    assert first["tool_calls"][0] == {"id": "c1", "function": "add", "type": "function", "arguments": {"a": 1}}
    assert first["tool_calls"][1]["parse_error"].startswith("no JSON object")
    assert [part["type"] for part in first["content"]] == ["reasoning", "text"]
    assert tool["messages"][2]["tool_call_id"] == "c1"
    assert tool["output"]["choices"][0]["message"]["content"] == [{"type": "text", "text": "done"}]
    assert read["samples/1_epoch_2.json"]["output"]["choices"][0]["stop_reason"] == "max_tokens"
    assert len(read["summaries.json"]) == 8


@pytest.mark.parametrize("kind", ["csv", "hf", "sft", "preference", "inspect"])
def test_what_is_there_is_never_overwritten(run: StoredRun, tmp_path: Path, kind: str) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        export_run(run, tmp_path / "taken", kind)
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize("kind", ["csv", "hf", "sft", "preference", "inspect"])
def test_a_disk_that_takes_no_more_leaves_nothing_that_is_half_there(
    run: StoredRun, tmp_path: Path, kind: str
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(ConfigError, match="cannot be written"):
            export_run(run, tmp_path / "x", kind)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_nothing_to_write_says_why(run: StoredRun, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no completed rollout has a reward of 9; set --threshold"):
        export_run(run, tmp_path / "x", "sft", threshold=9)
    with pytest.raises(ConfigError, match="whose rewards differ enough"):
        export_run(run, tmp_path / "x", "preference", threshold=9)
    assert not (tmp_path / "x").exists()


def test_the_command_writes_beside_the_results_unless_told(
    run: StoredRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export([str(run.directory), "--format", "sft", "--threshold", "0.5"]) == 0
    assert capsys.readouterr().out == f"3 rows: {run.directory / 'sft.jsonl'}\n"
    assert len((run.directory / "sft.jsonl").read_text().splitlines()) == 3
    assert export([str(run.directory), "-f", "csv", "-o", str(tmp_path / "a.csv")]) == 0
    assert export([str(tmp_path), "-f", "csv"]) == 2
