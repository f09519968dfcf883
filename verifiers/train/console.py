"""The console view of a run: the batch plan, then a live table on a terminal, a line a log step elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from transformers import TrainerCallback

from verifiers.data.batch_plan import BatchPlan
from verifiers.monitoring.history import EVAL_REWARD, name_eval_reward
from verifiers.monitoring.live_table import LiveTable, run_table
from verifiers.monitoring.number_text import format_seconds
from verifiers.monitoring.stage_timer import STAGES
from verifiers.train.monitor import RunMonitor


@contextlib.contextmanager
def shown(monitor: RunMonitor, callbacks: Sequence[Any]) -> Iterator[None]:
    """Show a run by the `ProgressLines` among its callbacks, and close its record, however it ends."""
    views = [callback for callback in callbacks if isinstance(callback, ProgressLines)]
    for view in views:
        view.show(monitor)
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        for view in views:
            view.end_table()
        report = monitor.end(failure)
        for view in views:
            view.end(report)


def can_draw(stream: TextIO) -> bool:
    """Return whether the stream is a terminal on which a table can be refreshed."""
    if not stream.isatty():
        return False
    return not Console(file=stream).is_dumb_terminal


class ProgressLines(TrainerCallback):
    """The display of where a run is and where its time goes; rank 0 only.

    On a terminal a table that is refreshed in place, unless `disable_tqdm` is set; elsewhere a line a log step with
    mean reward, failed rollouts, tokens per second and time left.
    """

    def __init__(self, plan: BatchPlan, stream: TextIO | None = None) -> None:
        self.plan, self._stream = plan, stream
        self._monitor: RunMonitor | None = None
        self._table: LiveTable | None = None
        self._had_table = False
        self._started = self._tokens = self._failed = 0.0
        self._first_step = self._logged_step = 0
        self._state: Any = None

    def show(self, monitor: RunMonitor) -> None:
        self._monitor = monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started, self._first_step = time.perf_counter(), state.global_step
        self._logged_step, self._tokens, self._failed = state.global_step, 0.0, 0.0
        self._state = state
        if not state.is_world_process_zero:
            return
        self._print(self.plan.describe() + "\n")
        for line in _about_checkpoints(args, state):
            self._print(line)
        stream = self._stream or sys.stdout
        if self._monitor is not None and not args.disable_tqdm and can_draw(stream):
            self._table = LiveTable(self._drawn, stream)
            self._had_table = True
            self._table.start()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **kwargs: Any
    ) -> None:
        if not logs or not state.is_world_process_zero:
            return
        for prefix in [name.removesuffix("_reward") for name in logs if EVAL_REWARD.fullmatch(name)]:
            self._print(self._evaluation_line(state, logs, prefix))
        if "reward" in logs:
            self._count(state, logs)
            if self._table is None:
                self._print(self._training_line(state, logs))

    def end(self, report: Path | None) -> None:
        """Leave the last table on the terminal, which says what the run was bound by; say where its report is."""
        self.end_table()
        if self._monitor is not None and report is not None and not self._had_table:
            for finding in (self._monitor.learning(), self._monitor.bottleneck()):
                if finding is not None:
                    self._print(f"{finding}; try {finding.advice}")
        if report is not None:
            self._print(f"report: {report}")

    def end_table(self) -> None:
        """Stop drawing. May be called twice."""
        table, self._table = self._table, None
        if table is not None:
            table.stop()

    def _count(self, state: Any, logs: Mapping[str, float]) -> None:
        # logged values are means over the blocks since the last log
        blocks = (state.global_step - self._logged_step) / self.plan.updates_per_block
        self._logged_step = state.global_step
        self._failed += (logs.get("rollouts/failed") or 0.0) * blocks
        self._tokens += (logs.get("rollouts/sampled_tokens") or 0.0) * blocks

    def _training_line(self, state: Any, logs: Mapping[str, float]) -> str:
        elapsed, left = self._elapsed_and_left(state)
        reward, staleness = logs["reward"], logs.get("staleness")
        return (
            f"step {state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}{self._stage(state)}"
            f"  reward {'-' if reward is None else f'{reward:.3f}'}"
            f"  loss {logs.get('loss', 0.0):+.4f}"
            f"  errors {self._failed:.0f}"
            f"  tok/s {self._tokens / max(elapsed, 1e-9):,.0f}"
            f"  staleness {'-' if staleness is None else f'{staleness:.0f}'}"
            f"  elapsed {format_seconds(elapsed)}  ETA {format_seconds(left)}"
        )

    def _evaluation_line(self, state: Any, logs: Mapping[str, float], prefix: str) -> str:
        error = logs.get(f"{prefix}_reward_stderr")
        return (
            f"step {state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}"
            f"  {name_eval_reward(f'{prefix}_reward', logs)} {logs[f'{prefix}_reward']:.3f}"
            + (f" ± {error:.3f}" if error is not None else "")
            + f"  ({logs.get(f'{prefix}_prompts', 0):.0f} prompts, {logs.get(f'{prefix}_failed', 0):.0f} failed,"
            f" {logs.get(f'{prefix}_seconds', 0.0):.1f} s)"
        )

    def _drawn(self) -> Any:
        """Return the table; called in the thread that draws it."""
        assert self._monitor is not None
        state, timer = self._state, self._monitor.timer
        elapsed, left = self._elapsed_and_left(state)
        known = state.global_step > self._first_step
        title = (
            f"step {state.global_step}/{state.max_steps}{self._stage(state)}  elapsed {format_seconds(elapsed)}"
            f"  ETA {format_seconds(left) if known else '?'}  errors {self._failed:.0f}"
        )
        now = f"now {STAGES[timer.current]}, for {format_seconds(timer.now() - timer.since)}"
        activity = timer.activity
        if activity is not None:
            now += f"; {activity.running} rollouts run, {activity.queued} queued, {activity.scoring} scoring"
        return run_table(
            title=title,
            now=now,
            latest=self._monitor.latest,
            total=self._monitor.total,
            learning=self._monitor.learning(),
            bottleneck=self._monitor.bottleneck(),
            done=state.global_step / max(1, state.max_steps),
            reward=self._monitor.reward,
        )

    def _elapsed_and_left(self, state: Any) -> tuple[float, float]:
        elapsed = time.perf_counter() - self._started
        done = state.global_step - self._first_step
        return elapsed, (state.max_steps - state.global_step) * elapsed / max(1, done)

    def _stage(self, state: Any) -> str:
        stage = self.plan.stage_name(max(0, state.global_step - 1))
        return f"  stage {stage}" if stage else ""

    def _print(self, text: str) -> None:
        if self._table is not None:
            self._table.print(text)
        else:
            print(text, file=self._stream or sys.stdout, flush=True)


def _about_checkpoints(args: Any, state: Any) -> Iterator[str]:
    """Yield the step that a run resumes from, and when its first checkpoint comes where that is late."""
    if state.global_step:
        yield f"resumes from step {state.global_step}"
    if (
        args.save_strategy == "steps"
        and state.max_steps > state.global_step
        and not 0 < state.save_steps <= state.max_steps
    ):
        yield f"no checkpoint before step {state.max_steps} (save_steps={state.save_steps}): set save_steps"
