"""report.html of a training run: what it tells, at any length, and that nothing a model wrote runs or escapes."""

from __future__ import annotations

import json
import math
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from verifiers.cli import report as command
from verifiers.errors import ConfigError
from verifiers.train.watching.history import read_history
from verifiers.train.watching.record import METRICS, RUN, SAMPLES
from verifiers.train.watching.report import write_training_report

HOSTILE = "</script><script>globalThis.canary = 1</script><img src=x onerror='canary = 2'>\x1b[31m\u202e&"


def line(step: int, **metrics: Any) -> dict[str, Any]:
    known = {
        "step": step,
        "steps": 1,
        "at": 1.79e9 + step,
        "reward": 0.5 + 0.3 * math.sin(step / 50),
        "loss": 0.01 * math.cos(step),
        "staleness": 1.0,
        "mismatch_kl": 0.001,
        "time/step_s": 4.0,
        "time/wait_s": 2.84,
        "time/train_s": 1.16,
        "time/generator_s": 4.0,
        "time/overlapped_s": 1.16,
        "rollouts/server_busy": 1.0,
        "rollouts/in_flight_while_waiting": 60.0,
        "rollouts/most_in_flight": 64.0,
        "memory/train_gib": 11.5,
        "memory/wait_gib": 3.25,
        "rows/dropped/masked_truncated": 2.0,
    }
    return {**known, **metrics}


def sample(step: int, example: int, text: str = "forty", *, followed: bool = False) -> dict[str, Any]:
    rollout = {
        "generation": 0,
        "outcome": "truncated",
        "reward": 0.25,
        "advantage": -1.5,
        "tokens": 7,
        "error": None,
        "completion": [{"role": "assistant", "text": text}],
    }
    return {
        "step": step,
        "example": example,
        "followed": followed,
        "prompt": [{"role": "user", "text": f"question {example}"}],
        "answer": text,
        "generations": 16,
        "mean_reward": 0.25,
        "rollouts": [rollout],
    }


def write_run(directory: Path, lines: list[dict[str, Any]], samples: list[dict[str, Any]], **run: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in ((METRICS, lines), (SAMPLES, samples)):
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    known = {
        "env": "sums",
        "model": "small",
        "max_steps": 100,
        "status": "finished",
        "plan": "batch plan   prompts",
        "settings": {"learning_rate": 1e-6},
        "judged_by": {"num_batches_ahead": 1, "drains": False, "max_concurrent": 64},
        "memory": "torch's allocations on cuda:0",
    }
    (directory / RUN).write_text(json.dumps({**known, **run}))
    return directory


class Page(HTMLParser):
    """Tags with their attributes, and the text outside scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self._in: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._in.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._in and self._in[-1] == tag:
            self._in.pop()

    def handle_data(self, data: str) -> None:
        if not self._in:
            self.words += data

    def charts(self) -> list[str]:
        return [
            str(attrs.get("aria-label")) for tag, attrs in self.tags if tag == "svg" and attrs.get("role") == "img"
        ]


def page_of(directory: Path) -> Page:
    return Page(write_training_report(directory).read_text())


def test_the_page_tells_what_a_run_is_bound_by_and_where_time_and_memory_go(tmp_path: Path) -> None:
    steps = [line(step, failures={"SandboxError: no room": 2} if step == 7 else {}) for step in range(1, 31)]
    evaluations = [line(20, steps=0, eval_reward=0.625, eval_reward_stderr=0.05)]
    evaluations[0].pop("time/step_s")
    page = page_of(write_run(tmp_path, steps + evaluations, [sample(3, 12)]))
    for words in (
        "Rollout-bound: the trainer waited 71 % of the time",
        "max_concurrent above 64",
        "30 of 100",
        "0.625 ± 0.05",
        "11.50 GiB",
        "torch's allocations on cuda:0",
        "SandboxError: no room",
        "batch plan   prompts",
        "question 12",
        "advantage -1.50",
        "overlap ratio1.00",
    ):
        assert words in page.words, words
    assert {"Reward", "Loss", "Staleness", "A step's time", "Not trained on"} <= set(page.charts())


def test_what_a_model_wrote_is_text_and_nothing_else_may_run_or_load(tmp_path: Path) -> None:
    steps = [line(1, failures={HOSTILE: 1}, **{f"rewards/{HOSTILE}/mean": 0.5, "rewards/b/mean": 0.5})]
    page = page_of(write_run(tmp_path, steps, [sample(1, 1, HOSTILE)], env=HOSTILE, stopped_by=HOSTILE, plan=HOSTILE))
    scripts = [attrs.get("type") for tag, attrs in page.tags if tag == "script"]
    assert scripts.count("module") == 1
    assert set(scripts) == {"module", "application/json"}
    assert not [tag for tag, _ in page.tags if tag in ("img", "iframe", "object", "link")]
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on") or name in ("src", "style")]
    policy = next(str(attrs["content"]) for tag, attrs in page.tags if tag == "meta" and "http-equiv" in attrs)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    # control characters and turned text are spelled out where rollouts are read
    assert "⟨U+001B⟩" in page.words
    assert "⟨U+202E⟩" in page.words


def test_twenty_thousand_steps_are_a_small_page_that_is_quickly_made(tmp_path: Path) -> None:
    run = write_run(
        tmp_path, [line(step) for step in range(1, 20_001)], [sample(s, s) for s in range(1, 20_001, 500)]
    )
    started = time.process_time()
    written = write_training_report(run)
    assert time.process_time() - started < 8.0
    assert written.stat().st_size < 2_000_000
    longest = max(len(points) for points in re.findall(r'points="([^"]*)"', written.read_text()))
    assert longest < 12_000


def test_a_key_that_stands_in_the_environment_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-0123456789abcdefghij")
    run = write_run(tmp_path, [line(1)], [sample(1, 1, "the key is sk-0123456789abcdefghij")])
    text = write_training_report(run).read_text()
    assert "sk-0123456789" not in text
    assert "the key is ***" in text


def test_the_same_prompts_are_shown_over_time_held_out_and_trained(tmp_path: Path) -> None:
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
    page = page_of(run)
    for words in ("said at 1", "said at 21", "held-out answer at 10", "held-out answer at 20", "prompt 99"):
        assert words in page.words, words
    buttons = [attrs["title"] for tag, attrs in page.tags if tag == "button"]
    assert "step 10, mean reward 0.5" in buttons
    assert len(buttons) == 2 + 3


def test_every_curve_that_was_logged_is_on_the_page_and_held_out_ones_by_set(tmp_path: Path) -> None:
    logged = {f"sampling/importance_sampling_ratio/{name}": 1.0 for name in ("mean", "min", "max")}
    logged |= {"rows/dropped_tokens/too_long": 900.0, "time/straggler_mean_s": 30.0}
    logged |= {"time/block_generation_s": 4.0, "time/scoring_mean_s": 0.1}
    evaluation = {"step": 2, "steps": 0}
    for name, value in {
        "reward": 0.5,
        "easy_reward": 0.75,
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
    page = page_of(run)
    assert {
        "Importance ratio",
        "Length of dropped rows",
        "Dropped stragglers",
        "A block",
        "Held-out pass@k",
        "Held-out pass^k",
        "Held-out reward functions",
        "Held-out reward by environment",
    } <= set(page.charts())
    assert "Held-out best@k" not in page.charts()
    history = read_history(run)
    assert {kind: sorted(found) for kind, found in history.details.items()} == {
        "at_k": ["pass@2", "pass@2 easy", "pass^2"],
        "function": ["exact_reward", "exact_reward easy", "short"],
        "task": ["add"],
    }
    assert (history.details["at_k"]["pass@2"].rewards, history.details["at_k"]["pass@2"].errors) == (
        [0.625],
        [0.0625],
    )
    assert set(history.evaluations) == {"eval_reward", "eval_easy_reward"}


def test_the_stack_of_a_steps_time_adds_up_and_hardly_used_stages_are_one(tmp_path: Path) -> None:
    steps = [line(n, **{"time/sync_s": 0.003, "time/prepare_s": 0.002, "time/rest_s": 0.01}) for n in (1, 2)]
    text = write_training_report(write_run(tmp_path, steps, [])).read_text()
    (figure,) = re.findall(r"<figure[^>]*><figcaption><b>A step&#x27;s time.*?</figure>", text)
    names = re.findall(r"</i>([^<]*) <b", figure)
    assert names == ["train", "wait", "rest"]
    assert re.findall(r'class="value">([^<]*)', figure) == ["1.16", "2.84", "0.015"]
    # drawings begin at one height, however long the legends are
    assert figure.index("<svg") < figure.index('class="legend"')


def colours_of(directory: Path, *mean_rewards: float) -> list[str]:
    """The colours of the strip of one prompt, by its mean rewards."""
    samples = [
        {**sample(step, 7, followed=True), "mean_reward": mean} for step, mean in enumerate(mean_rewards, start=1)
    ]
    page = page_of(write_run(directory, [line(1)], samples))
    return [str(attrs["class"]) for tag, attrs in page.tags if tag == "button"]


def test_a_colour_of_the_strip_is_a_reward_also_where_all_are_equal(tmp_path: Path) -> None:
    assert colours_of(tmp_path / "wrong", 0.0, 0.0) == ["l0", "l0"]
    assert colours_of(tmp_path / "right", 1.0, 1.0) == ["l5", "l5"]
    assert colours_of(tmp_path / "both", 0.0, 0.5, 1.0) == ["l0", "l2", "l5"]
    assert colours_of(tmp_path / "below", -2.0, -1.0, 0.0) == ["l0", "l2", "l5"]


def test_all_strips_of_a_section_have_one_scale_whose_ends_are_told(tmp_path: Path) -> None:
    samples = [
        {**sample(step, example, followed=True), "mean_reward": mean}
        for example, mean in ((7, 0.25), (8, 2.0))
        for step in (1, 2)
    ]
    page = page_of(write_run(tmp_path, [line(1)], samples))
    assert [attrs["class"] for tag, attrs in page.tags if tag == "button"] == ["l1", "l1", "l5", "l5"]
    assert "its colour the mean reward: 0  2" in page.words


def test_a_run_without_a_step_yet_and_a_damaged_one_have_a_page(tmp_path: Path) -> None:
    assert "Nothing was logged yet" in page_of(write_run(tmp_path / "new", [], [], status="running")).words
    torn = write_run(tmp_path / "torn", [line(1)], [])
    with (torn / METRICS).open("a") as file:
        file.write('{"step": 2, "re')
    assert "1 of 100" in page_of(torn).words
    (torn / RUN).write_text("{")
    assert "torn" in page_of(torn).words


def test_settings_that_another_version_wrote_are_no_error(tmp_path: Path) -> None:
    run = write_run(tmp_path, [line(1)], [], judged_by={"max_concurrent": 64, "of_the_future": True})
    assert "Rollout-bound: the trainer waited 71 %" in page_of(run).words
    assert "Rollout-bound" not in page_of(write_run(tmp_path, [line(1)], [], judged_by=None)).words


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
    assert command.main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert command.main([str(run), "-o", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").read_text() == (run / "report.html").read_text()
    assert command.main([str(run), "-o", str(tmp_path)]) == 2
    assert "which is a directory; give a file" in capsys.readouterr().err
    assert command.main([str(run), "-o", str(run / "run.json" / "x.html")]) == 1
    (sentence,) = capsys.readouterr().err.splitlines()
    assert re.match(r"vf-report: .*run\.json.*: ", sentence)
    assert command.main([str(tmp_path)]) == 2
    assert "holds neither a training run" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"holds no run\.json"):
        write_training_report(tmp_path)
