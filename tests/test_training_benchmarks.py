"""The benchmarks of whole trainings: what they count as right, lost and biased, and the small form of GSM8K's."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verifiers.train.run_file import load_run_file

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of the benchmarks' folders as the scripts do."""
    for folder in ("gpu", "gsm8k", "trl_sides"):
        monkeypatch.syspath_prepend(str(BENCHMARKS / folder))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("#### 41 is wrong.\n#### $1,042.00 apples", True),
        (r"so \boxed{1042}", True),
        ("the answer is 1042", False),
        ("#### 1042/5", False),
        (r"\boxed{1042} or #### 43", False),
    ],
)
def test_a_gsm8k_answer_is_the_number_after_the_mark_or_in_the_box(load: Any, completion: str, right: bool) -> None:
    environment = load("gsm8k_env")
    assert environment.same_number(environment.number_in(completion), "1042") is right


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "gsm8k").glob("*.toml")), ids=lambda path: path.stem)
def test_each_gsm8k_run_file_is_one_that_vf_train_reads_also_when_written_again(
    load: Any, path: Path, tmp_path: Path
) -> None:
    suites = load("suites")
    [suite] = [suite for suite in suites.SUITES.values() if suite.run_file == path.name]
    assert load_run_file(suites.write_run_file(tmp_path / "run.toml", suite.settings())) == load_run_file(path)


def test_a_trainer_that_counts_failures_as_zero_is_found_biased(load: Any, tmp_path: Path) -> None:
    grades = load("grades")
    noted = grades.Grades(tmp_path / "grades.jsonl", fail_share=0.05, seed=1)
    failed = [noted.note("question", float(index % 2)) for index in range(4000)]
    rewards = [float(index % 2) for index in range(4000)]
    as_zero = sum(reward for reward, fails in zip(rewards, failed, strict=True) if not fails) / 4000
    scored = as_zero * 4000 / (4000 - sum(failed))
    found = grades.read_grades(tmp_path / "grades.jsonl")
    biased, honest = grades.reward_bias([as_zero], found), grades.reward_bias([scored], found)
    assert biased["bias"] == pytest.approx(biased["zero_bias"], abs=1e-5)
    assert biased["bias"] < biased["chance_low"]
    assert honest["chance_low"] < honest["bias"] < honest["chance_high"]
    assert honest["failed"] == sum(failed)
    assert 0.03 < honest["failed"] / honest["graded"] < 0.07


def log_line(step: int, *, eval_s: float = 0.0) -> dict[str, Any]:
    """Return the log of two steps of 5 s, with a wait for an evaluation in each, and 300 sampled tokens in all."""
    seconds = 5.0 + eval_s
    times = {"time/step_s": seconds, "time/eval_s": eval_s, "tokens/sampled_per_s": 150 / seconds}
    return {"step": step, "steps": 2, "reward": 0.5, "num_tokens": 200 * step, "memory/train_gib": step / 2, **times}


LOGS = [
    log_line(2),
    {"step": 2, "eval_reward": 0.4},
    log_line(4, eval_s=3.0),
    {"step": 4, "eval_reward": 0.6},
    log_line(6, eval_s=1.0),
    {"step": 6, "eval_reward": 0.5},
]


@pytest.mark.parametrize(("operations", "mfu"), [(6, 0.4737), (4, 0.3158)])
def test_rates_and_mfu_are_over_the_whole_clock_and_all_gpus(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operations: int, mfu: float
) -> None:
    measurements, statistics = load("measurements"), load("verifiers.evals.statistics")
    score = statistics.mean_and_stderr_clustered([[1.0], [0.0]])
    monkeypatch.setattr(measurements, "last_eval", lambda directory: (score, {}))
    path = tmp_path / measurements.METRICS
    path.write_text("".join(json.dumps(line) + "\n" for line in LOGS))
    found = measurements.read_measurements(tmp_path, [0.5], gpus=2, parameters=1e9, peak=2e11, operations=operations)
    # 30 s of steps and 8 s of waits; 900 sampled tokens, 1,200 with the prompts
    assert (found["seconds"], found["steps"]) == (38.0, 6)
    assert (found["tokens_per_s"], found["tokens_per_s_and_gpu"]) == (23.7, 11.8)
    assert found["mfu"] == mfu
    assert found["seconds_to"] == {"0.5": 26.0}
    assert (found["peak_memory_gib"], found["eval_score"], found["problems"]) == (3.0, 0.5, 2)


def test_a_ratio_over_seeds_is_paired_and_its_interval_is_student_s(load: Any) -> None:
    # logs of the ratios are log 2 + (-0.1, 0, 0.1): standard error 0.1 / sqrt(3), and t is 4.302653 with 2 degrees
    ours, theirs = {0: [2 * math.exp(-0.1)], 1: [20.0], 2: [200 * math.exp(0.1)]}, {0: [1.0], 1: [10.0], 2: [100.0]}
    width = 4.302653 * 0.1 / math.sqrt(3)
    found = load("intervals").ratio_over_seeds(ours, theirs)
    assert (found["mean"], found["seeds"]) == (2.0, 3)
    assert found["low"] == pytest.approx(2 * math.exp(-width), rel=1e-3)
    assert found["high"] == pytest.approx(2 * math.exp(width), rel=1e-3)


@pytest.mark.parametrize("values", [{0: [3.0]}, {0: [3.0], 1: [3.0]}])
def test_one_seed_or_seeds_that_agree_have_no_interval(load: Any, values: dict[int, list[float]]) -> None:
    assert load("intervals").mean_over_seeds(values) == {"mean": 3.0, "low": None, "high": None, "seeds": len(values)}


@pytest.mark.parametrize(
    ("gpu", "flops"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 NVL", 835e12), ("none", None)],
)
def test_forms_of_a_gpu_have_their_own_peak(load: Any, gpu: str, flops: float | None) -> None:
    assert load("peak_flops").peak_flops_of(gpu) == flops


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_way_of_a_rollout_and_of_a_block_is_short() -> None:
    command = [sys.executable, str(BENCHMARKS / "walk.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, check=True)
    walk = json.loads(done.stdout.splitlines()[-1])
    assert walk["rollout_files"] <= 19
    assert walk["rollout_moves"] <= 138
    assert walk["block_files"] <= 55
    assert walk["evaluation_files"] <= 38


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_gsm8k_benchmark_runs_end_to_end_on_ten_problems(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # test_warm_start.py trains until a model is right: this one is as it is after the first look at its answers
    warm_start = importlib.import_module("verifiers.train.tiny_model.warm_start")
    train = warm_start.warm_start
    monkeypatch.setattr(warm_start, "warm_start", lambda *of, **told: train(*of, **{**told, "window": (0.0, 1.0)}))
    load("suites").make_tiny_start(tmp_path / "tiny" / "model")
    command = [
        sys.executable,
        str(BENCHMARKS / "gsm8k.py"),
        "--model",
        "tiny",
        "--seeds",
        "1",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2900)
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    [seed] = result["by_seed"]
    assert (seed["steps"], seed["problems"]) == (10, 10)
    assert min(seed["seconds"], seed["tokens_per_s"], seed["peak_memory_gib"]) > 0
    assert (seed["mfu"], seed["tokens_per_s_and_gpu"]) == (None, None)
    assert 0 <= result["eval_score"]["low"] <= seed["eval_score"] <= result["eval_score"]["high"] <= 1


SCRIPT = """
import json, pathlib, sys, time
asked = json.loads(sys.argv[1])
directory, steps = pathlib.Path(asked["output_dir"]), 6
kept = directory / "checkpoint"
first = int(kept.read_text()) if kept.exists() else 0
for step in range(first + 1, steps + 1):
    with open(directory / "grades.jsonl", "a") as grades:
        for _ in range(2):
            grades.write(json.dumps({"prompt": f"p{step}", "reward": 1.0, "failed": False}) + "\\n")
    print(json.dumps({"step": step}), flush=True)
    if step == 2:
        kept.write_text("2")
    if step == 3 and asked["waits"] and not first:
        time.sleep(600)
"""


def test_what_a_kill_costs_is_what_was_graded_again(load: Any, tmp_path: Path) -> None:
    faults = load("faults")
    script = tmp_path / "steps.py"
    script.write_text(SCRIPT)
    # the one that is killed waits at step 3, half of its steps
    whole, killed = (
        faults.Attempt(script, {"output_dir": str(tmp_path / name), "waits": name == "killed"}, tmp_path / name)
        for name in ("whole", "killed")
    )
    found = faults.kill_and_resume(whole, killed, steps=6, group=2)
    assert (found["killed_at_step"], found["steps"]) == (3, 6)
    # step 3 was graded twice, since the checkpoint was of step 2
    assert (found["prompts_again"], found["prompts_skipped"], found["prompts"]) == (1.0, 0, 6.0)
