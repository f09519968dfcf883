"""What a person sees while a run trains: the batch plan first, then a line a log step."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from transformers import TrainerCallback

from verifiers.data.plan import BatchPlan

__all__ = ["ProgressLines", "format_seconds"]


def format_seconds(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


class ProgressLines(TrainerCallback):
    """Prints step, mean reward, failed rollouts, tokens per second and time left; rank 0 only.

    Attributes:
        history: every logged dict with its step, for reports.
    """

    def __init__(self, plan: BatchPlan, stream: TextIO | None = None) -> None:
        self.plan = plan
        self.history: list[dict[str, float]] = []
        self._stream = stream
        self._started = 0.0
        self._first_step = 0
        self._tokens = 0.0
        self._failed = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started, self._first_step = time.perf_counter(), state.global_step
        if state.is_world_process_zero:
            self._print(self.plan.describe() + "\n")

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **kwargs: Any
    ) -> None:
        if not logs or not state.is_world_process_zero:
            return
        self.history.append({"step": float(state.global_step), **logs})
        if "eval_reward" in logs:
            self._print(self._evaluation_line(state, logs))
        elif "reward" in logs:
            self._print(self._training_line(state, logs))

    def _training_line(self, state: Any, logs: Mapping[str, float]) -> str:
        elapsed = time.perf_counter() - self._started
        done = state.global_step - self._first_step
        left = (state.max_steps - state.global_step) * elapsed / max(1, done)
        # logged values are means over the blocks since the last log
        blocks = self._steps_since_last() / self.plan.updates_per_block
        self._failed += logs.get("rollouts/failed", 0.0) * blocks
        self._tokens += logs.get("rollouts/sampled_tokens", 0.0) * blocks
        stage = self.plan.source.stage_name(state.global_step - 1) if self.plan.source is not None else ""
        return (
            f"step {state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}"
            + (f"  stage {stage}" if stage else "")
            + f"  reward {logs['reward']:.3f}"
            f"  loss {logs.get('loss', 0.0):+.4f}"
            f"  errors {self._failed:.0f}"
            f"  tok/s {self._tokens / max(elapsed, 1e-9):,.0f}"
            f"  staleness {logs.get('staleness', 0.0):.0f}"
            f"  elapsed {format_seconds(elapsed)}  ETA {format_seconds(left)}"
        )

    def _evaluation_line(self, state: Any, logs: Mapping[str, float]) -> str:
        return (
            f"step {state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}"
            f"  held-out reward {logs['eval_reward']:.3f} ± {logs['eval_reward_stderr']:.3f}"
            f"  ({logs['eval_prompts']:.0f} prompts, {logs['eval_failed']:.0f} failed, {logs['eval_seconds']:.1f} s)"
        )

    def _steps_since_last(self) -> float:
        steps = [entry["step"] for entry in self.history if "reward" in entry]
        return steps[-1] - steps[-2] if len(steps) > 1 else float(self.plan.updates_per_block)

    def _print(self, text: str) -> None:
        print(text, file=self._stream or sys.stdout, flush=True)
