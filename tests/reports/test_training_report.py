"""The report of a training run: its data at any length, and that it holds no secret and nothing that could run."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from training_runs import HOSTILE, line, sample, write_run

from verifiers.cli.stored_runs import report
from verifiers.errors import ConfigError
from verifiers.monitoring.history import read_history
from verifiers.monitoring.run_log import METRICS, RUN
from verifiers.reports.training_run import run_version, training_data, write_training_report


def charts_of(directory: Path) -> dict[str, Any]:
    return {chart["title"]: chart for part in training_data(directory)["sections"] for chart in part["charts"]}


def test_the_page_has_the_bottleneck_the_time_the_memory_and_the_errors(tmp_path: Path) -> None:
    steps = [line(step, failures={"SandboxError: no room": 2} if step == 7 else {}) for step in range(1, 31)]
    evaluations = [{"step": at, "steps": 0, "eval_reward": reward, "eval_reward_stderr": 0.05}
                   for at, reward in ((10, 0.75), (20, 0.625))]  # fmt: skip
    data = training_data(write_run(tmp_path, steps + evaluations, [sample(3, 12)]))
    assert data["bottleneck"]["kind"] == "rollout-bound"
    assert data["bottleneck"]["text"] == "the trainer waited 71 % of the time"
    assert "max_concurrent above 64" in data["bottleneck"]["advice"]
    (evaluated,) = data["head"].pop("evaluations")
    assert evaluated["last"] == {"step": 20, "reward": 0.625, "error": 0.05}
    assert evaluated["best"]["step"] == 10
    assert (data["head"]["steps"], data["head"]["maxSteps"], data["head"]["failed"]) == (30, 100, 2)
    (train,) = (stage for stage in data["time"]["stages"] if stage["name"] == "train")
    assert (train["peakGib"], round(train["share"], 2), data["time"]["overlap"]) == (11.5, 0.29, 1.0)
    assert data["time"]["memory"] == "torch's allocations on cuda:0"
    assert data["errors"]["rows"] == [{"text": "SandboxError: no room", "count": 2, "first": 7, "last": 7}]
    assert {"Reward", "Loss", "Staleness", "A step's time", "Not trained on"} <= set(charts_of(tmp_path))


def test_what_a_model_wrote_is_data_that_ends_no_element(tmp_path: Path) -> None:
    steps = [line(1, failures={HOSTILE: 1}, **{f"rewards/{HOSTILE}/mean": 0.5, "rewards/b/mean": 0.5})]
    run = write_run(tmp_path, steps, [sample(1, 1, HOSTILE)], env=HOSTILE, stopped_by=HOSTILE, plan=HOSTILE)
    text = write_training_report(run).read_text()
    assert re.findall(r"<script[^>]*>", text) == [
        '<script type="application/json" id="vf-data">',
        '<script type="module">',
    ]
    assert not re.findall(r"<(img|iframe|object|link)\b", text)
    # what was written is there, whole
    assert training_data(run)["errors"]["rows"][0]["text"] == HOSTILE


@pytest.mark.slow
def test_twenty_thousand_steps_are_a_small_page_that_is_quickly_made(tmp_path: Path) -> None:
    samples = [sample(step, step) for step in range(1, 20_001, 500)]
    run = write_run(tmp_path, [line(step) for step in range(1, 20_001)], samples)
    started = time.process_time()
    written = write_training_report(run)
    assert time.process_time() - started < 30.0
    assert written.stat().st_size < 2_000_000
    assert max(len(series["x"]) for chart in charts_of(run).values() for series in chart["series"]) <= 240


def test_a_key_that_stands_in_the_environment_is_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-0123456789abcdefghij")
    run = write_run(tmp_path, [line(1)], [sample(1, 1, "the key is sk-0123456789abcdefghij")])
    text = write_training_report(run).read_text()
    assert "sk-0123456789" not in text
    assert "the key is ***" in text


def test_the_same_prompts_are_shown_over_time_evaluated_and_trained(tmp_path: Path) -> None:
    samples = [sample(step, 7, f"said at {step}", followed=True) for step in (1, 11, 21)] + [sample(11, 99)]
    run = write_run(tmp_path, [line(step) for step in range(1, 31)], samples)
    for step in (10, 20):
        stored = run / "evals" / f"step-{step}"
        stored.mkdir(parents=True)
        row = {
            "example_id": 5,
            "generation": 0,
            "prompt": [{"role": "user", "content": "held-out question"}],
            "completion": [{"role": "assistant", "content": f"held-out answer at {step}"}],
            "outcome": "completed",
            "reward": step / 20,
        }
        (stored / "results.jsonl").write_text(json.dumps(row) + "\n")
        (stored / "metadata.json").write_text("{}")
    evaluated, trained, others = training_data(run)["samples"]
    (card,) = evaluated["cards"]
    assert card["prompt"] == [{"role": "user", "text": "held-out question"}]
    assert [(step["step"], step["mean"]) for step in card["steps"]] == [(10, 0.5), (20, 1.0)]
    said = [step["groups"][0]["rollouts"][0]["completion"][0]["text"] for step in card["steps"]]
    assert said == ["held-out answer at 10", "held-out answer at 20"]
    assert [step["step"] for step in trained["cards"][0]["steps"]] == [1, 11, 21]
    assert others["cards"][0]["steps"][0]["groups"][0]["example"] == 99


def test_every_curve_that_was_logged_is_on_the_page_and_evaluated_ones_by_set(tmp_path: Path) -> None:
    logged = {f"sampling/importance_sampling_ratio/{name}": 1.0 for name in ("mean", "min", "max")}
    logged |= {"rows/dropped_tokens/too_long": 900.0}
    logged |= {"time/block_generation_s": 4.0, "time/scoring_mean_s": 0.1}
    evaluation = {"step": 2, "steps": 0}
    for name, value in {
        "reward": 0.5,
        "easy_reward": 0.75,
        "prompts_trained_on": 0.0,
        "easy_prompts_trained_on": 4.0,
        "pass_at_2": 0.625,
        "pass_at_2_stderr": 0.0625,
        "pass_hat_2": 0.25,
        "easy_pass_at_2": 0.875,
        "rewards/exact_reward": 0.5,
        "rewards/short": 0.3,
        "rewards/short_stderr": 0.01,
        "easy_rewards/exact_reward": 0.4,
        "tasks/add/reward": 0.1,
        "tasks/add/prompts": 3.0,
    }.items():
        evaluation[f"eval_{name}"] = value
    run = write_run(tmp_path, [line(1, **logged), line(2, **logged), evaluation], [])
    charts = charts_of(run)
    assert {
        "Importance ratio",
        "Length of dropped rows",
        "A block",
        "Evaluations: pass@k",
        "Evaluations: pass^k",
        "Evaluations: reward functions",
        "Evaluations: reward by environment",
    } <= set(charts)
    assert "Evaluations: best@k" not in charts
    pass_at = {
        series["name"]: (series["x"], series["y"], series["errors"])
        for series in charts["Evaluations: pass@k"]["series"]
    }
    assert pass_at == {"pass@2": ([2], [0.625], [0.0625]), "pass@2 easy": ([2], [0.875], [None])}
    names = [series["name"] for series in charts["Evaluations: reward functions"]["series"]]
    assert sorted(names) == ["exact_reward", "exact_reward easy", "short"]
    assert [series["name"] for series in charts["Reward"]["series"]] == ["training", "held out", "trained rows easy"]
    assert set(read_history(run).evaluations) == {"eval_reward", "eval_easy_reward"}


def test_the_stack_of_a_steps_time_adds_up_and_hardly_used_stages_are_one(tmp_path: Path) -> None:
    steps = [line(n, **{"time/sync_s": 0.003, "time/prepare_s": 0.002, "time/rest_s": 0.01}) for n in (1, 2)]
    chart = charts_of(write_run(tmp_path, steps, []))["A step's time"]
    shown = {series["name"]: series["y"][-1] for series in chart["series"]}
    assert shown == {"train": 1.16, "wait": 2.84, "rest": 0.015}
    assert chart["stacked"]


@pytest.mark.parametrize(("means", "scale"), [((1.0, 1.0), [0, 1]), ((-2.0, 0.0), [-2, 0])])
def test_all_strips_of_a_section_have_one_scale_which_begins_or_ends_at_zero(
    tmp_path: Path, means: tuple[float, float], scale: list[float]
) -> None:
    samples = [
        {**sample(step, example, followed=True), "mean_reward": mean}
        for example, mean in zip((7, 8), means, strict=True)
        for step in (1, 2)
    ]
    (section,) = training_data(write_run(tmp_path, [line(1)], samples))["samples"]
    assert section["scale"] == scale
    assert len(section["cards"]) == 2


def test_an_incomplete_line_and_settings_that_another_version_wrote_are_no_error(tmp_path: Path) -> None:
    run = write_run(tmp_path, [line(1)], [], judged_by={"max_concurrent": 64, "of_the_future": True})
    before = run_version(run)
    with (run / METRICS).open("a") as file:
        file.write('{"step": 2, "re')
    data = training_data(run)
    assert data["head"]["steps"] == 1
    assert data["bottleneck"]["kind"] == "rollout-bound"
    assert data["version"] == run_version(run) != before
    (run / RUN).write_text("{")
    assert (training_data(run)["bottleneck"], training_data(run)["title"]) == (None, run.name)


def test_the_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path, [line(1)], [])
    old = write_training_report(run).read_text()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_training_report(run)
    assert (run / "report.html").read_text() == old
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


def test_vf_report_makes_the_page_again_and_refuses_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", [line(1)], [])
    assert report([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert report([str(run), "-o", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").read_text() == (run / "report.html").read_text()
    assert report([str(run), "-o", str(tmp_path)]) == 2
    assert "which is a directory; give a file" in capsys.readouterr().err
    assert report([str(run), "-o", str(run / "run.json" / "x.html")]) == 1
    (sentence,) = capsys.readouterr().err.splitlines()
    assert re.match(r"vf-report: .*run\.json.*: ", sentence)
    assert report([str(tmp_path)]) == 2
    assert "holds neither a training run" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"holds no run\.json"):
        write_training_report(tmp_path)
