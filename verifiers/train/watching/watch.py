"""One run, watched on rank 0: what is measured is logged, recorded and made into a report."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from verifiers.data.plan import BatchPlan
from verifiers.errors import NothingScoredError
from verifiers.evals.hiding import Hider, secrets_of_run
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.train.block import TrainingBlock
from verifiers.train.loss import CorrectedLoss
from verifiers.train.passes import all_passes
from verifiers.train.servers import credentials
from verifiers.train.watching.causes import CauseCounts
from verifiers.train.watching.clock import StageClock
from verifiers.train.watching.description import description
from verifiers.train.watching.figures import RunTime, lap_metrics
from verifiers.train.watching.memory import peak_memory
from verifiers.train.watching.record import METRICS, SAMPLES, RunRecord, read_lines
from verifiers.train.watching.samples import SampleChoice
from verifiers.train.watching.verdict import Verdict, judge

__all__ = ["RunWatch", "WatchedTrainer"]

logger = logging.getLogger("verifiers.train")

_LOGS_KEPT = 1000
_CAUSES_A_LINE = 20
_MOST_CHARACTERS = 2000


class RunWatch:
    """What is seen of a run.

    Attributes:
        clock: the trainer's time by stage.
        total: sums over the run so far, since its first start.
        latest: the newest value of every metric.
        record: the files that are written, on rank 0 while a run goes on.
    """

    def __init__(self, plan: BatchPlan, clock: StageClock) -> None:
        self.clock = clock
        self.plan = plan
        self.total = RunTime()
        self.latest: dict[str, Any] = {}
        self.record: RunRecord | None = None
        self._samples = SampleChoice(plan.max_steps)
        self._judged_by: dict[str, Any] = {"num_batches_ahead": 0}
        self._failures = CauseCounts()
        self._noted_step = 0
        self._lap_step = 0
        self._lap_steps = 0
        # tokens of the block in training, by optimizer step
        self._rate = (0.0, 0.0)
        self._tokens = (0.0, 0.0)

    # -- on rank 0 --------------------------------------------------------------------------------------------

    def begin(self, trainer: Any, resume_step: int | None, *, owes_evaluation: bool = False) -> None:
        """Open the record of a run that begins, or goes on from a step, whose evaluation it may owe."""
        args = trainer.args
        settings = args.to_dict()
        env_args = getattr(trainer.env, "env_args", None) or {}
        urls = list(args.server_urls or [args.server_url])
        key, headers = credentials(trainer._servers)
        secrets = [s for url in urls for s in secrets_of_run(url, key, headers, {"env": env_args, **settings})]
        directory = Path(str(args.output_dir))
        self.record = RunRecord(
            directory, resume_step=resume_step, owes_evaluation=owes_evaluation, hide=Hider(secrets)
        )
        self.clock.memory = peak_memory(trainer.accelerator.device)
        self.clock.meter = trainer.generator.meter
        self.total = RunTime()
        for line in read_lines(directory / METRICS):
            self.total.take(line)
        self._samples = SampleChoice(self.plan.max_steps, read_lines(directory / SAMPLES))
        self._judged_by = {
            "num_batches_ahead": args.num_batches_ahead,
            "drains": trainer.feed.drains,
            "max_concurrent": args.max_concurrent,
            "max_staleness": args.max_staleness,
        }
        begun = {"at": time.time(), "step": resume_step or 0}
        self.record.describe(
            **description(trainer, settings),
            sessions=[*self.record.run.get("sessions", ()), begun],
            status="running",
            ended=None,
            stopped_by=None,
            judged_by=self._judged_by,
            memory=self.clock.memory.where if self.clock.memory is not None else None,
        )
        # of an earlier run of the same trainer
        self.latest, self._failures, self._tokens = {}, CauseCounts(), (0.0, 0.0)
        self._lap_step = resume_step or 0
        self.clock.start()

    def note_block(self, block: ScoredBlock, trained: TrainingBlock, step: int) -> None:
        """Take in a block whose first update begins after `step` optimizer steps."""
        updates = self.plan.updates_per_block
        sampled = sum(row.sampled_tokens for rollout in block.launched for row in rollout.rows)
        rows = sum(int(batch["sampled_tokens"].sum()) for batch in all_passes(trained.batches))
        self._rate = (sampled / updates, rows * self.plan.num_iterations / updates)
        self._note_failures(block, step)
        if self.record is not None:
            is_last = step + updates >= self.plan.max_steps
            self.record.write_samples(self._samples.of_block(block, trained.advantages, step + 1, is_last=is_last))

    def _note_failures(self, block: ScoredBlock, step: int) -> None:
        # half a secret is none that could be recognized
        hide = self.record.hide if self.record is not None else str
        self._failures.add(hide(str(rollout.failure)) for rollout in block.launched if rollout.failure is not None)
        # what goes on from a checkpoint at `step` generates the block again
        self._noted_step = step + 1

    def note_step(self) -> None:
        """An optimizer step is done."""
        self._tokens = (self._tokens[0] + self._rate[0], self._tokens[1] + self._rate[1])

    def interval(self, step: int) -> dict[str, float]:
        """The metrics of the time since the last call, after `step` optimizer steps; empty where none was made."""
        steps, uses = step - self._lap_step, self.clock.lap()
        self._lap_step, self._lap_steps = step, max(0, steps)
        (sampled, trained), self._tokens = self._tokens, (0.0, 0.0)
        if steps <= 0:
            return {}
        return lap_metrics(uses, steps, sampled_tokens=sampled, trained_tokens=trained)

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Take in what was logged."""
        self.latest.update(logs)
        is_step = "time/step_s" in logs
        # what transformers logs once at the end has no interval where the last step was logged
        is_kept = is_step or "train_runtime" in logs or any(name.startswith("eval_") for name in logs)
        if self.record is None or not is_kept:
            return
        steps = self._lap_steps if is_step else 0
        self.total.take({**logs, "steps": steps})
        failures = self._failures.take(_CAUSES_A_LINE) if is_step else {}
        self.record.write_metrics(step, steps, logs, failures)

    def write_failures(self) -> None:
        """Record failures that no log has told yet."""
        if self.record is not None and (causes := self._failures.take(_CAUSES_A_LINE)):
            self.record.write_metrics(self._noted_step, 0, {}, causes)

    def verdict(self) -> Verdict | None:
        """What the run is bound by so far."""
        return judge(self.total, **self._judged_by)

    def write_report(self) -> Path | None:
        """Write report.html from the record; a report that cannot be made is warned of and ends no run."""
        if self.record is None:
            return None
        try:
            from verifiers.train.watching.report import write_training_report

            return write_training_report(self.record.directory)
        except Exception as error:
            logger.warning("report.html cannot be written: %s: %s", type(error).__name__, error)
            return None

    def end(self, error: BaseException | None) -> Path | None:
        """Close the record and write the last report."""
        if self.record is None:
            return None
        self.write_failures()
        if isinstance(error, NothingScoredError) and isinstance(error.block, ScoredBlock):
            # it never came to the trainer
            self._note_failures(error.block, error.block.block_id * self.plan.updates_per_block)
            self.write_failures()
        if error is None:
            self.record.describe(status="finished", ended=time.time())
        else:
            self.record.describe(status="stopped", ended=time.time(), stopped_by=_cause_of(error))
        report = self.write_report()
        self.record, self.clock.memory, self.clock.meter = None, None, None
        return report


def _cause_of(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "Ctrl-C"
    text = str(error)[:_MOST_CHARACTERS]
    return text if isinstance(error, SystemExit) else f"{type(error).__name__}: {text}"


class WatchedTrainer(CorrectedLoss):
    """The part of the trainer that says where its time goes."""

    clock: StageClock
    watch: RunWatch
    plan: BatchPlan

    def __init__(self, **kwargs: Any) -> None:
        self.clock = StageClock()
        self.watch = RunWatch(self.plan, self.clock)
        super().__init__(**kwargs)
        self.add_callback(WatchCallback(self.watch, self.accelerator.device))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As TRL's, with the trainer's time by stage and what the generator did meanwhile."""
        # the log of a run's end has the steps since the last one
        if self.model.training and ("loss" in logs or "train_runtime" in logs):
            logs.update(self.watch.interval(self.state.global_step))
        super().log(logs, start_time)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Show a run while it goes on, and close its record, however it ends."""
        for lines in self._progress():
            lines.watch = self.watch
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            self._end_watch(failure)

    def _end_watch(self, failure: BaseException | None) -> None:
        progress = self._progress()
        for lines in progress:
            lines.end_table()
        report = self.watch.end(failure)
        for lines in progress:
            lines.end(report)

    def _progress(self) -> list[Any]:
        return [callback for callback in self.callback_handler.callbacks if hasattr(callback, "end_table")]


class WatchCallback(TrainerCallback):
    """Tells the clock what transformers' loop does, and the record what was logged.

    Args:
        device: where the model is; an accelerator works on after its calls returned, so it is waited for once a step.
    """

    def __init__(self, watch: RunWatch, device: Any) -> None:
        self._watch = watch
        self._device = device

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # what came before, such as loading an optimizer's state, is of no step
        self._watch.clock.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.clock.switch("train")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.clock.switch("optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if getattr(self._device, "type", "cpu") == "cuda":
            import torch

            torch.cuda.synchronize(self._device)
        self._watch.clock.switch("rest")
        self._watch.note_step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        # metrics.jsonl has all of them; in memory and in every checkpoint's trainer_state.json they would pile up
        del state.log_history[:-_LOGS_KEPT]
        if logs and state.is_world_process_zero:
            self._watch.write(state.global_step, logs)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            with self._watch.clock.stage("save"):
                # a kill before the next log would lose them, and what goes on from here does not meet them again
                self._watch.write_failures()
                self._watch.write_report()
