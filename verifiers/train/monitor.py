"""The monitor of a run: its time by stage, its metrics and failures, its record on disk and its report."""

from __future__ import annotations

import importlib.metadata
import logging
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from verifiers.data.batch_plan import BatchPlan
from verifiers.errors import NothingScoredError
from verifiers.evals.store import versions
from verifiers.inference.endpoint import Backend
from verifiers.inference.server_pool import ServerPool, credentials
from verifiers.log import Redactor, secrets_of_run
from verifiers.monitoring.findings import Finding, LearningSignal, find_bottleneck
from verifiers.monitoring.run_log import (
    METRICS,
    SAMPLES,
    RunRecord,
    SampleChoice,
    commonest_errors,
    error_key,
    is_number,
    read_lines,
)
from verifiers.monitoring.stage_timer import RunTime, StageTimer, interval_metrics, peak_memory
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.rollouts.run import RolloutActivity
from verifiers.train.batching.block_metrics import block_metrics, curriculum_metrics
from verifiers.train.batching.micro_batches import all_micro_batches
from verifiers.train.batching.training_block import TrainingBlock
from verifiers.train.config import GRPOConfig

logger = logging.getLogger("verifiers.train")

_LOGS_KEPT = 1000
_ERRORS_A_LINE = 20
_MOST_CHARACTERS = 2000


class RunMonitor:
    """The measurements of a run: collected, logged, recorded and made into a report.

    Attributes:
        total: sums over the run so far, since its first start.
        reward: the mean reward of each log, since the run's first start.
        record: the files that are written, on rank 0 while a run is in progress.
    """

    def __init__(self, args: GRPOConfig, plan: BatchPlan, env: Any, model: Any, device: Any) -> None:
        self._args, self._env, self._model, self._device = args, env, model, device
        self.timer = StageTimer()
        self.plan = plan
        self.total = RunTime()
        self._signal, self._has_warned = LearningSignal(), False
        self.latest: dict[str, Any] = {}
        self.reward: list[float] = []
        self.record: RunRecord | None = None
        self._samples = SampleChoice(plan.max_steps)
        self._judged_by: dict[str, Any] = {"num_batches_ahead": 0}
        self._failures: Counter[str] = Counter()
        self._servers: Backend | None = None
        self._noted_step = 0
        self._logged_step = 0
        self._interval_steps = 0
        # tokens of the block in training, by optimizer step
        self._rate = (0.0, 0.0)
        self._tokens = (0.0, 0.0)

    # -- on rank 0 --------------------------------------------------------------------------------------------

    def begin(
        self,
        resume_step: int | None,
        *,
        servers: Backend,
        activity: RolloutActivity | None,
        drains: bool,
    ) -> None:
        """Open the record of a run.

        Args:
            resume_step: the step of the checkpoint that the run resumes; None for a new run.
            servers: what rollouts are sent to; its credentials are redacted.
        """
        args, self._servers = self._args, servers
        settings = args.to_dict()
        env_args = getattr(self._env, "env_args", None) or {}
        urls = list(args.server_urls or [args.server_url])
        key, headers = credentials(servers)
        secrets = [s for url in urls for s in secrets_of_run(url, key, headers, {"env": env_args, **settings})]
        directory = Path(str(args.output_dir))
        self.record = RunRecord(directory, resume_step=resume_step, redact=Redactor(secrets))
        self.timer.memory = peak_memory(self._device)
        self.timer.activity = activity
        self.total = RunTime()
        self._signal, self._has_warned = LearningSignal(), False
        self.reward = []
        for line in read_lines(directory / METRICS):
            self.total.take(line)
            self._note_reward(line)
            self._signal.take(line)
        self._samples = SampleChoice(self.plan.max_steps, read_lines(directory / SAMPLES))
        self._judged_by = {
            "num_batches_ahead": args.num_batches_ahead,
            "shared_device": args.shared_device,
            "drains": drains,
            "max_concurrent": args.max_concurrent,
            "max_staleness": args.max_staleness,
        }
        begun = {"at": time.time(), "step": resume_step or 0}
        self.record.describe(
            **self._run_description(settings),
            sessions=[*self.record.run.get("sessions", ()), begun],
            status="running",
            ended=None,
            stopped_by=None,
            judged_by=self._judged_by,
            memory=self.timer.memory.where if self.timer.memory is not None else None,
        )
        # of an earlier run of the same trainer
        self.latest, self._failures, self._tokens = {}, Counter(), (0.0, 0.0)
        self._logged_step = resume_step or 0
        self.timer.start()

    def _run_description(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return names, plan, settings and versions, as JSON."""
        args, plan, env, model, source = self._args, self.plan, self._env, self._model, self.plan.source
        packages = ("torch", "transformers", "trl", "accelerate")
        names, weights = env.rubric.get_reward_func_names(), env.rubric.get_reward_weights()
        return {
            "env": str(getattr(env, "env_id", "") or type(env).__name__),
            "env_args": dict(getattr(env, "env_args", None) or {}),
            # of a group of environments each member has its own
            "reward_weights": dict(zip(names, weights, strict=True)) if len(names) == len(weights) else None,
            "model": str(getattr(model.config, "_name_or_path", "") or type(model).__name__),
            "server_model": args.server_model,
            "run_name": args.run_name,
            "plan": plan.describe(),
            "max_steps": plan.max_steps,
            "updates_per_block": plan.updates_per_block,
            "completions_per_block": plan.completions_per_block,
            "stages": [source.stage_name(step) for step in (0, *source.until_steps)] if source is not None else [],
            "processes": plan.num_processes,
            "device": str(self._device),
            "settings": {name: value for name, value in settings.items() if value is not None},
            "versions": {**versions(), **{name: importlib.metadata.version(name) for name in packages}},
        }

    def note_block(self, block: ScoredBlock, trained: TrainingBlock, step: int) -> dict[str, float]:
        """Take in a block whose first update begins after `step` optimizer steps; return its metrics."""
        updates = self.plan.updates_per_block
        sampled = sum(row.sampled_tokens for rollout in block.launched for row in rollout.rows)
        rows = sum(int(batch["sampled_tokens"].sum()) for batch in all_micro_batches(trained.micro_steps))
        self._rate = (sampled / updates, rows * self.plan.num_iterations / updates)
        self._note_failures(block, step)
        if self.record is not None:
            is_last = step + updates >= self.plan.max_steps
            self.record.write_samples(self._samples.of_block(block, trained.advantages, step + 1, is_last=is_last))
        chunk_size = self._args.rollout_chunk_size if self._args.rollout_device is not None else None
        metrics = block_metrics(block, trained, self.plan, optimizer_step=step, chunk_size=chunk_size)
        return {**metrics, **curriculum_metrics(self.plan, block)}

    def _note_failures(self, block: ScoredBlock, step: int) -> None:
        # before texts are shortened: part of a secret would not be recognized
        redact = self.record.redact if self.record is not None else str
        failures = (redact(str(rollout.failure)) for rollout in block.launched if rollout.failure is not None)
        self._failures.update(map(error_key, failures))
        # a run that resumes from a checkpoint at `step` generates the block again
        self._noted_step = step + 1

    def note_step(self) -> None:
        """Count the tokens of a finished optimizer step."""
        self._tokens = (self._tokens[0] + self._rate[0], self._tokens[1] + self._rate[1])

    def interval(self, step: int) -> dict[str, float]:
        """Return the metrics of the time since the last call, after `step` optimizer steps; empty without a step."""
        steps, uses = step - self._logged_step, self.timer.take()
        self._logged_step, self._interval_steps = step, max(0, steps)
        (sampled, trained), self._tokens = self._tokens, (0.0, 0.0)
        if steps <= 0:
            return {}
        load = self._servers.take_load().metrics() if isinstance(self._servers, ServerPool) else {}
        return {**interval_metrics(uses, steps, sampled_tokens=sampled, trained_tokens=trained), **load}

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Take in what was logged."""
        self.latest.update(logs)
        self._note_reward(logs)
        is_step = "time/step_s" in logs
        # what transformers logs once at the end has no interval where the last step was logged
        is_kept = is_step or "train_runtime" in logs or any(name.startswith("eval_") for name in logs)
        if self.record is None or not is_kept:
            return
        steps = self._interval_steps if is_step else 0
        self.total.take({**logs, "steps": steps})
        if is_step:
            self._signal.take({**logs, "steps": steps})
            self._warn_where_nothing_is_learned()
        self.record.write_metrics(step, steps, logs, self._take_failures() if is_step else {})

    def write_failures(self) -> None:
        """Record failures that no log has told yet."""
        if self.record is not None and (errors := self._take_failures()):
            self.record.write_metrics(self._noted_step, 0, {}, errors)

    def _take_failures(self) -> dict[str, int]:
        counts, self._failures = self._failures, Counter()
        return commonest_errors(counts, _ERRORS_A_LINE)

    def _note_reward(self, logs: Mapping[str, Any]) -> None:
        if is_number(logs.get("reward")):
            self.reward.append(logs["reward"])

    def bottleneck(self) -> Finding | None:
        """Return what the run is bound by so far."""
        return find_bottleneck(self.total, **self._judged_by)

    def learning(self) -> Finding | None:
        """Return why the run learns nothing, where the newest blocks had no signal."""
        return self._signal.finding(self.plan.updates_per_block)

    def _warn_where_nothing_is_learned(self) -> None:
        finding = self.learning()
        if finding is not None and not self._has_warned:
            logger.warning("the run %s; try %s.", finding, finding.advice)
        self._has_warned = finding is not None

    def write_report(self) -> Path | None:
        """Write report.html from the record; a report that cannot be made is logged as a warning and ends no run."""
        if self.record is None:
            return None
        try:
            from verifiers.reports.training_run import write_training_report

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
            # the trainer has not counted this block
            self._note_failures(error.block, error.block.block_id * self.plan.updates_per_block)
            self.write_failures()
        if error is None:
            self.record.describe(status="finished", ended=time.time())
        else:
            self.record.describe(status="stopped", ended=time.time(), stopped_by=_stop_text(error))
        report = self.write_report()
        self.record, self.timer.memory, self.timer.activity = None, None, None
        return report


def _stop_text(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "Ctrl-C"
    text = str(error)[:_MOST_CHARACTERS]
    return text if isinstance(error, SystemExit) else f"{type(error).__name__}: {text}"


class MonitorCallback(TrainerCallback):
    """A callback that reports to the monitor the steps of transformers' loop, and what was logged.

    Args:
        device: where the model is; an accelerator works on after its calls returned, so it is waited for once a step.
    """

    def __init__(self, monitor: RunMonitor, device: Any) -> None:
        self._monitor = monitor
        self._device = device

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # what came before, such as loading an optimizer's state, is of no step
        self._monitor.timer.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._monitor.timer.switch("train")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._monitor.timer.switch("optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if getattr(self._device, "type", "cpu") == "cuda":
            import torch

            # not the device: a server in this process may be recording a pass on another stream of it
            torch.cuda.current_stream(self._device).synchronize()
        self._monitor.timer.switch("rest")
        self._monitor.note_step()
        # what resumes from a checkpoint does not meet the steps before it again
        may_save = control.should_evaluate and (args.load_best_model_at_end or args.save_strategy == "best")
        if (control.should_save or may_save) and args.logging_strategy != "no":
            control.should_log = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        # metrics.jsonl has all of them; in memory and in every checkpoint's trainer_state.json they would pile up
        del state.log_history[:-_LOGS_KEPT]
        if logs and state.is_world_process_zero:
            self._monitor.write(state.global_step, logs)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            with self._monitor.timer.stage("save"):
                # a kill before the next log would lose them, and what resumes from here does not meet them again
                self._monitor.write_failures()
                self._monitor.write_report()
