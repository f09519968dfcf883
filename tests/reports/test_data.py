from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verifiers.evals.results import RolloutResults
from verifiers.evals.summary import summarize
from verifiers.notebook import MOST_CHARACTERS, as_text, messages_of
from verifiers.reports.evaluation import (
    columns_of,
    difference_of,
    entry_of,
    json_block,
    last_words,
    sampled_groups,
    summary_of,
    write_comparison_report,
    write_evaluation_report,
)
from verifiers.reports.server import GrowingRun, find_runs

Rows = Callable[..., dict[str, Any]]


def counted(rows: list[dict[str, Any]]) -> RolloutResults:
    return RolloutResults(entry_of(row).counted() for row in rows)


def test_messages_keep_calls_reasoning_and_the_call_that_is_answered() -> None:
    call = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    shown = messages_of(
        [
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        "completion",
    )
    assert shown == [
        {
            "role": "assistant",
            "text": "",
            "think": "hm",
            "calls": [{"id": "c1", "name": "add", "arguments": '{"a": 1}'}],
        },
        {"role": "tool", "text": "2", "answers": "c1"},
    ]


@pytest.mark.parametrize(
    "completion",
    [None, 7, "text", ["text", 3, None], {"role": "assistant"}, [{"content": {"a": math.nan}, "tool_calls": "x"}],
     [{"role": ["x"], "content": [1, {"type": 5}, {"type": "image_url", "image_url": 3}], "tool_calls": [None, {}]}]],
)  # fmt: skip
def test_messages_of_any_shape_are_shown_and_never_raise(completion: Any, rows: Rows) -> None:
    row = rows(0, 0, completion=completion)
    block = json.loads(json_block([row]))
    assert all(isinstance(message["text"], str) for message in block["rows"][0]["completion"])
    json.dumps(columns_of([entry_of(row)]), allow_nan=False)


def test_only_embedded_pictures_are_shown_as_pictures() -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,AAAA"}},
    ]
    (shown,) = messages_of([{"role": "user", "content": parts}], "prompt")
    assert shown["images"] == ["data:image/png;base64,AAAA"]
    assert "[image https://example.org/x.png]" in shown["text"]
    assert "svg+xml" in shown["text"]


def test_a_huge_text_says_how_much_of_it_is_left_out() -> None:
    text = as_text("a" * MOST_CHARACTERS + "b" * 12_345)
    assert len(text) < MOST_CHARACTERS + 100
    assert "12,345 characters left out" in text
    assert text.startswith("a")
    assert text.endswith("b")


def test_last_words_come_after_the_reasoning(rows: Rows) -> None:
    assert last_words({"completion": "<think>long thought</think>\nit is\n\n4"}) == "it is 4"
    assert last_words({"completion": "x", "error": "ProviderError: down"}) == "ProviderError: down"
    assert (
        last_words({"completion": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}) == "calls f"
    )


def test_a_prompt_stands_once_in_a_block(rows: Rows) -> None:
    block = json.loads(json_block([rows(3, generation) for generation in range(4)] + [rows(4, 0)]))
    assert len(block["prompts"]) == 2
    assert [row["prompt"] for row in block["rows"]] == [0, 0, 0, 0, 1]


def test_a_sample_holds_whole_prompts_spread_over_all() -> None:
    groups = [[(example, generation) for generation in range(4)] for example in range(100)]
    kept = sampled_groups(groups, 40)
    assert [group[0][0] for group in kept] == list(range(0, 100, 10))
    assert all(len(group) == 4 for group in kept)
    assert sampled_groups(groups, 400) == groups
    assert sampled_groups([list(range(50))], 7) == [list(range(7))]


def test_the_summary_counts_failures_beside_the_means(rows: Rows) -> None:
    made = [rows(e, g, reward=float((e + g) % 2), right=1.0) for e in range(4) for g in range(4)]
    made[0] = rows(0, 0, reward=None, outcome="provider_error", right=1.0)
    summary = summary_of(counted(made), {"num_examples": 5, "rollouts_per_example": 4}, "x/y")
    reward, _, right = summary["measures"]
    assert (summary["rollouts"], summary["scored"], summary["expected"], summary["finished"]) == (16, 15, 20, False)
    assert summary["outcomes"] == {"completed": 15, "provider_error": 1}
    assert (reward["name"], reward["rollouts"], reward["prompts"]) == ("reward", 15, 4)
    assert reward["mean"] == pytest.approx((2 / 3 + 0.5 * 3) / 4, abs=1e-5)
    # a value of a rollout that was not scored is in no mean
    assert (right["name"], right["rollouts"]) == ("right", 15)
    points = {point["k"]: point for point in summary["passAtK"]}
    assert set(points) == {1, 2, 4}
    assert points[2]["mean"] == pytest.approx((1.0 + 3 * (1 - 1 / 6)) / 4, abs=1e-5)
    assert points[4]["prompts"] == 3
    assert all(0 <= point["low"] <= point["high"] <= 1 for point in points.values() if point["low"] is not None)


def test_differences_are_those_of_shared_prompts(rows: Rows) -> None:
    before = [entry_of(rows(e, 0, reward=0.0), 0) for e in range(5)]
    after = [entry_of(rows(e, 0, reward=1.0 if e == 4 else 0.25), 1) for e in range(2, 8)]
    difference = difference_of(before, after)
    assert (difference["shared"], difference["onlyBefore"], difference["onlyAfter"]) == (3, 2, 3)
    assert difference["measures"]["reward"]["mean"] == pytest.approx(0.5)
    assert difference["measures"]["reward"]["prompts"] == 3


def test_a_growing_run_reads_what_was_appended_and_waits_for_incomplete_lines(tmp_path: Path, rows: Rows) -> None:
    path = tmp_path / "results.jsonl"
    lines = [json.dumps(rows(0, generation)).encode() + b"\n" for generation in range(3)]
    path.write_bytes(lines[0] + lines[1][:20])
    run = GrowingRun(tmp_path)
    assert run.refresh() == 1
    with path.open("ab") as file:
        file.write(lines[1][20:] + b"not json\n" + lines[2])
    assert run.refresh() == 3
    assert [entry.generation for entry in run.entries] == [0, 1, 2]
    said = [row["completion"][0]["text"] for row in json.loads(run.block(0))["rows"]]
    assert said == [rows(0, generation)["completion"][0]["content"] for generation in range(3)]
    assert json.loads(run.block(1))["rows"] == []
    assert run.epoch == 0


def test_runs_are_found_below_a_folder_but_not_beyond_it(tmp_path: Path) -> None:
    root, outside = tmp_path / "evals", tmp_path / "secret"
    for directory in (root / "a--m" / "1", root / ".hidden" / "2", outside):
        directory.mkdir(parents=True)
        (directory / "results.jsonl").write_text("")
    (root / "link").symlink_to(outside)
    (root / "b").mkdir()
    (root / "b" / "results.jsonl").symlink_to(outside / "results.jsonl")
    assert list(find_runs(root)) == ["a--m/1"]
    assert find_runs(root / "a--m" / "1") == {"1": root / "a--m" / "1"}


def test_prompts_that_ask_something_else_under_the_same_id_are_named_and_never_compared(rows: Rows) -> None:
    before = [entry_of(rows(e, 0, reward=0.0), 0, asked=f"{e}") for e in range(5)]
    after = [entry_of(rows(e, 0, reward=1.0), 1, asked=f"{e}{'!' if e < 2 else ''}") for e in range(5)]
    settings = [{"env": "a", "env_args": {"n": 1}, "model": "x"}, {"env": "a", "env_args": {"n": 2}, "model": "y"}]
    difference = difference_of(before, after, settings)
    assert difference["askedOtherwise"] == ["0", "1"]
    assert (difference["shared"], difference["measures"]["reward"]["prompts"]) == (3, 3)
    (told,) = difference["settings"]
    assert (told["name"], json.loads(told["before"]), json.loads(told["after"])) == ("env_args", {"n": 1}, {"n": 2})


def test_pass_at_k_is_that_of_the_summary_also_for_another_threshold(rows: Rows) -> None:
    made = [rows(e, g, reward=[0.0, 0.5, 1.0][(e + g) % 3]) for e in range(6) for g in range(6)]
    for right_from in (None, 0.5):
        metadata = {} if right_from is None else {"summary": {"right_from": right_from}}
        shown = summary_of(counted(made), metadata, "x/y")
        told = summarize(made, right_from=right_from or 1.0).as_json()
        assert shown["rightFrom"] == (right_from or 1.0)
        assert [point["k"] for point in shown["passAtK"]] == [1, 2, 4, 6]
        for point in shown["passAtK"]:
            of_k = told["pass_at_k"][str(point["k"])]
            assert [point[name] for name in ("mean", "low", "high")] == pytest.approx(
                [of_k[name] for name in ("mean", "low", "high")], rel=1e-5
            )


def test_a_report_takes_a_run_by_its_file_of_results_too(tmp_path: Path, rows: Rows) -> None:
    (tmp_path / "results.jsonl").write_text(json.dumps(rows(0, 0)) + "\n")
    named = tmp_path / "results.jsonl"
    assert write_evaluation_report(named) == tmp_path / "report.html"
    assert write_comparison_report(named, tmp_path, tmp_path / "both.html").is_file()
