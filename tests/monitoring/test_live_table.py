"""The live table: drawn where there is a terminal, under whatever is said meanwhile; lines everywhere else."""

from __future__ import annotations

import io
import logging
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from verifiers.data.batch_plan import make_plan
from verifiers.monitoring.findings import Finding, find_bottleneck
from verifiers.monitoring.live_table import LiveTable, run_table
from verifiers.monitoring.number_text import rounded
from verifiers.monitoring.stage_timer import RunTime
from verifiers.train.console import ProgressLines, can_draw
from verifiers.train.monitor import RunMonitor


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Become standard output and standard error; in a test's body, since pytest sets its own before that."""
        monkeypatch.setattr(sys, "stdout", self)
        monkeypatch.setattr(sys, "stderr", self)


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def plain(text: str) -> list[str]:
    return [line.rstrip() for line in Text.from_ansi(text).plain.splitlines()]


WHOLE = {
    "steps": 1,
    "reward": 0.612,
    "eval_same_reward": 0.58,
    "eval_same_reward_stderr": 0.02,
    "time/step_s": 4.0,
    "time/wait_s": 2.84,
    "time/old_logprobs_s": 0.21,
    "time/train_s": 0.85,
    "time/sync_s": 0.1,
    "overlap_ratio": 0.98,
    "rollouts/server_busy": 0.99,
    "rollouts/in_flight": 231,
    "rollouts/queued": 25,
    "time/rollout_p50_s": 11.14,
    "time/rollout_p95_s": 26.1,
    "time/rollout_max_s": 149.0,
    "time/block_generation_s": 160,
    "time/scoring_mean_s": 0.01,
    "tokens/sampled_per_s": 20054,
    "tokens/trained_per_s": 15080,
    "staleness": 1,
    "mismatch_kl": 0.0012,
    "rollouts/failed": 0.5,
    "rollouts/in_flight_while_waiting": 200,
    "rollouts/most_in_flight": 256,
    "memory/train_gib": 11.5,
    "memory/old_logprobs_gib": 9.8,
}


def drawn(width: int, latest: dict[str, Any], total: RunTime, bottleneck: Finding | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    now = "now waiting for rollouts, for 0:03; 212 rollouts run, 44 queued, 3 scoring"
    console.print(run_table(title="step 1/2", now=now, latest=latest, total=total, bottleneck=bottleneck))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [100, 80, 40])
def test_every_number_is_whole_on_a_usual_terminal(width: int) -> None:
    total = RunTime()
    total.take(WHOLE)
    bottleneck = find_bottleneck(total, num_batches_ahead=1)
    assert bottleneck is not None
    lines = drawn(width, WHOLE, total, bottleneck)
    text = "\n".join(lines)
    numbers = "0.612|0.580 ± 0.020|4.00 s|2.84 s|0.21 s|0.85 s|0.10 s|71 %|11.5 G|9.8 G|0.98|99 %|231 / 25"
    numbers += "|11.1 / 26.1 / 149 s|160 s / 10.0 ms|20,054 / 15,080|1.0|0.0012|0.5"
    for number in numbers.split("|"):
        assert number in text, number
    assert "…" not in text
    assert max(map(len, lines)) <= width
    # whole sentences, on as many lines as they need
    assert " ".join(text.split()).endswith(f"{bottleneck} try: {bottleneck.advice}")
    assert any("whole run" in line and "newest log" in line for line in lines) == (width >= 80)
    if width >= 80:
        assert lines[1].endswith("3 scoring")
        assert len(lines) < 24


@pytest.mark.parametrize("width", [100, 60, 30])
def test_the_run_is_a_bar_and_the_reward_a_course(width: int) -> None:
    reward = [0.2 + 0.6 * step / 999 for step in range(1000)]
    console = Console(file=io.StringIO(), width=width)
    console.print(
        run_table(title="t", now="n", latest={}, total=RunTime(), bottleneck=None, done=0.25, reward=reward)
    )
    text = console.file.getvalue()
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert " 25 %" in text
    assert "━━╌╌╌" in text
    told = " ".join(text.split())
    assert "reward 0.200 first, 0.800 now ▁" in told
    if width >= 60:
        assert "▁▁▂▂▂▃▃▃▃▄▄▄▅▅▅▆▆▆▆▇▇▇██" in told
    if width >= 100:
        assert len(lines) == 3


@pytest.mark.parametrize(
    ("value", "stderr", "text"),
    [
        (2 / 3, 0.11, "0.67"), (2 / 3, 0.022, "0.667"), (2 / 3, 0.00031, "0.6667"), (1234.5678, 12.3, "1235"),
        (2 / 3, None, "0.667"), (1.0, 0.0, "1.000"), (float("nan"), 0.1, "-"), (None, 0.1, "-"), (0.5, 0.5, "0.50"),
    ],
)  # fmt: skip
def test_a_number_has_the_decimals_that_its_error_leaves(value: float, stderr: float, text: str) -> None:
    assert rounded(value, stderr) == text


def test_named_eval_sets_are_shown_the_first_two_of_many() -> None:
    total = RunTime(10.0, {"wait": 71.0, "train": 29.0})
    latest = {"reward": 0.5, "eval_easy_reward": 0.9, "eval_easy_reward_stderr": 0.01, "eval_tasks/a/reward": 0.7}
    latest |= {"eval_rewards/exact_reward": 0.3, "eval_of_a_very_long_name_reward": 0.25, "eval_third_reward": 0.1}
    latest["eval_easy_prompts_trained_on"] = 0.0
    text = "\n".join(drawn(80, latest, total))
    assert "held out easy" in text
    assert "0.900 ± 0.010" in text
    assert "not checked of_a_…  0.250" in text
    assert "and 1 more" in text
    assert "0.100" not in text
    assert "0.700" not in text


def test_what_is_printed_and_logged_stands_whole_above_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    terminal.install(monkeypatch)
    # made before the table, as those of libraries are
    handler = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger("verifiers.test-table")
    monkeypatch.setattr(logger, "handlers", [handler])
    table = LiveTable(lambda: Text("THE TABLE"), terminal)
    table.start()
    try:
        print("printed line")
        logger.warning("logged line")
        print("warned line", file=sys.stderr)
        table.print("a line of ours [not markup]")
    finally:
        table.stop()
        table.stop()
    assert sys.stdout is terminal
    lines = plain(terminal.getvalue())
    for said in ("printed line", "logged line", "warned line", "a line of ours [not markup]"):
        assert said in lines, said
    assert lines[-1] == "THE TABLE"
    # the cursor is shown again
    assert terminal.getvalue().rstrip().endswith("\x1b[?25h")
    assert handler.stream is terminal
    logger.warning("later")
    assert terminal.getvalue().endswith("later\n")


def test_what_goes_to_a_file_stays_there_while_the_table_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, log = Terminal(), io.StringIO()
    terminal.install(monkeypatch)
    monkeypatch.setattr(sys, "stderr", log)
    table = LiveTable(lambda: Text("THE TABLE"), terminal)
    table.start()
    print("for the file", file=sys.stderr)
    table.stop()
    assert log.getvalue() == "for the file\n"
    assert "for the file" not in terminal.getvalue()


def test_a_table_that_cannot_be_made_says_so_and_ends_nothing() -> None:
    terminal = Terminal()

    def breaks() -> Text:
        raise ZeroDivisionError("a figure")

    table = LiveTable(breaks, terminal)
    table.start()
    table.stop()
    assert "the table cannot be drawn: ZeroDivisionError: a figure" in plain(terminal.getvalue())


def test_pipes_files_and_dumb_terminals_get_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_draw(Terminal())
    assert not can_draw(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not can_draw(Terminal())


# -- the callback ----------------------------------------------------------------------------------------------


PLAN = make_plan(
    per_device_train_batch_size=4, steps_per_generation=1, num_generations=4, max_steps=10, num_prompts=16
)


def shown(stream: Any, *, rank: int = 0, disable_tqdm: bool = False) -> ProgressLines:
    """Three steps and an evaluation, as transformers tells a callback of them."""
    lines = ProgressLines(PLAN, stream)
    lines.show(RunMonitor(None, PLAN, None, None, None))
    args = types.SimpleNamespace(output_dir=".", disable_tqdm=disable_tqdm, save_strategy="no")
    state = types.SimpleNamespace(global_step=0, max_steps=10, is_world_process_zero=rank == 0)
    lines.on_train_begin(args, state, None)
    for step in (1, 2, 3):
        state.global_step = step
        staleness = 1.0 if step == 3 else None
        reward = None if step == 2 else 0.5
        lines.on_log(args, state, None, logs={"reward": reward, "loss": 0.1, "staleness": staleness})
    evaluation = {
        "eval_math_reward": 0.75,
        "eval_math_prompts": 4.0,
        "eval_math_prompts_trained_on": 0.0,
        "eval_rewards/exact_reward": 0.5,
    }
    lines.on_log(args, state, None, logs=evaluation)
    lines.on_log(args, state, None, logs={"eval_reward": 0.25, "eval_prompts_trained_on": 3.0})
    lines.on_log(args, state, None, logs={"eval_reward": 0.25})
    lines.end(None)
    return lines


def test_a_pipe_gets_one_line_a_log_step() -> None:
    stream = io.StringIO()
    shown(stream)
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("step ")]
    assert [line[:10] for line in lines] == ["step  1/10", "step  2/10", *["step  3/10"] * 4]
    assert "  reward 0.500  loss +0.1000  errors 0" in lines[0]
    assert "  reward -  " in lines[1]
    assert "  staleness -  " in lines[1]
    assert "  staleness 1  " in lines[2]
    assert "held-out reward of math 0.750  (4 prompts, 0 failed" in lines[3]
    assert "reward on trained rows 0.250" in lines[4]
    assert "reward on unchecked rows 0.250" in lines[5]
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_table_and_no_line_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    terminal.install(monkeypatch)
    shown(None)
    lines = plain(terminal.getvalue())
    assert any(re.match(r"step 3/10  elapsed \d:\d\d\b", line) for line in lines)
    assert not any(line.startswith("step  1/10") for line in lines)
    assert any("held-out reward of math" in line for line in lines)
    assert any(line.startswith("batch plan") for line in lines)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_a_run_was_bound_by_is_said_once_at_the_end(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    terminal = Terminal()
    terminal.install(monkeypatch)
    stream = None if is_terminal else io.StringIO()
    lines = ProgressLines(PLAN, stream)
    monitor = RunMonitor(None, PLAN, None, None, None)
    monitor.total.take(WHOLE)
    lines.show(monitor)
    args = types.SimpleNamespace(output_dir=".", disable_tqdm=False, save_strategy="no")
    lines.on_train_begin(args, types.SimpleNamespace(global_step=0, max_steps=10, is_world_process_zero=True), None)
    lines.end(Path("report.html"))
    after_refreshes = terminal.getvalue().rpartition("step 0/10")[2] if stream is None else stream.getvalue()
    assert after_refreshes.count("rollout-bound: the trainer waited") == 1
    assert "report: report.html" in after_refreshes


def test_only_rank_0_shows_anything_and_tqdm_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    terminal.install(monkeypatch)
    shown(None, rank=1)
    assert terminal.getvalue() == ""
    shown(None, disable_tqdm=True)
    assert "\x1b" not in terminal.getvalue()
    assert "step  3/10" in terminal.getvalue()
