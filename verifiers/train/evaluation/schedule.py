"""The steps at which a run's evaluations begin and end: while training waits, or beside the block that follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from verifiers.monitoring.stage_timer import in_stage
from verifiers.train.config import GRPOConfig
from verifiers.train.evaluation.eval_sets import EvalSet
from verifiers.train.evaluation.evaluator import Evaluator
from verifiers.train.validation.eval_settings import needs_the_metric

__all__ = ["EvaluationSchedule"]


class EvaluationSchedule(TrainerCallback):
    """A schedule that begins and ends evaluations at the same steps in every run; on every rank.

    transformers runs an evaluation that is due after the callbacks of a step. With `eval_overlap` it begins here
    instead, and ends with the block that is trained beside it, or before a save, the next evaluation or the end of
    the run. So this callback must come after all that may ask for an evaluation, a save or a stop.

    Args:
        evaluator: of the run.
        args: settings of the run.
        updates_per_block: optimizer steps that a block serves.
        report: logs the metrics of an evaluation and calls the callbacks for it; gives the trainer's control.
        is_best: returns True where metrics are the best so far, and notes that in the trainer's state.

    Attributes:
        owed: the step whose evaluation was in flight when the checkpoint was written that the run resumes.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        args: GRPOConfig,
        updates_per_block: int,
        *,
        report: Callable[[dict[str, float]], Any],
        is_best: Callable[[dict[str, float]], bool],
    ) -> None:
        self._evaluator, self._args, self._updates = evaluator, args, updates_per_block
        self._report, self._is_best = report, is_best
        self.timer = evaluator.timer
        self.owed: int | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        owed, self.owed = self.owed, None
        if owed is None or owed != state.global_step:
            return control
        overlaps = self._args.eval_overlap
        self.begin(self._evaluator.sets, state, overlaps=overlaps, resumes=True)
        return control if overlaps else self.finish_in_flight(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        step, flight = state.global_step, self._evaluator.in_flight
        ends = control.should_training_stop or control.should_epoch_stop or step >= state.max_steps
        # a step that ends an epoch comes twice
        begun_before = flight is not None and flight.step < step
        between_blocks = step % self._updates == 0
        if ends or control.should_evaluate or (begun_before and (between_blocks or control.should_save)):
            control = self.finish_in_flight(state, control)
        # a callback may have stopped the run because of the metrics
        ends = ends or control.should_training_stop
        # at the end nothing is left to train beside it, and a search for hyperparameters reads the result at once
        if control.should_evaluate and self._args.eval_overlap and not ends and not state.is_hyper_param_search:
            control.should_evaluate = False
            self.begin(self._evaluator.sets, state, overlaps=True)
        return control

    on_epoch_end = on_step_end

    def begin(self, sets: Sequence[EvalSet], state: Any, *, in_train: bool = True, **options: Any) -> None:
        """Submit the rollouts of an evaluation of the present weights.

        Args:
            sets: the prompts.
            state: the trainer's.
            in_train: a run trains.
            options: of `Evaluator.begin`.
        """
        step = weights_step = state.global_step
        if not in_train and self._args.load_best_model_at_end and state.best_model_checkpoint:
            # after a run its best weights are loaded
            weights_step = state.best_global_step or step
        self._evaluator.begin(sets, step=step, epoch=state.epoch, weights_step=weights_step, **options)

    @in_stage("eval")
    def finish(self, state: Any, *, in_train: bool = True) -> tuple[dict[str, float], Any]:
        """Wait for the evaluation in flight and report it under its own step; return its metrics and the control.

        Raises:
            NothingScoredError: no rollout of a set got a reward, and training cannot continue without the metric.
        """
        flight, metrics = self._evaluator.finish(required=not in_train or needs_the_metric(self._args))
        with flight.as_now(state):
            control = self._report(metrics)
        return metrics, control

    def finish_in_flight(self, state: Any, control: Any) -> Any:
        """Finish the evaluation in flight, if there is one, and note the best checkpoint; return the control."""
        flight = self._evaluator.in_flight
        if flight is None:
            return control
        asked = {name: getattr(control, name) for name in ("should_log", "should_evaluate", "should_save")}
        metrics, control = self.finish(state)
        with flight.as_now(state):
            is_best = self._is_best(metrics)
        checkpoint = Path(str(self._args.output_dir)) / f"checkpoint-{flight.step}"
        if is_best and checkpoint.is_dir():
            state.best_model_checkpoint = str(checkpoint)
        # logging and evaluating cleared what was asked for at the present step
        for name, value in asked.items():
            setattr(control, name, value or getattr(control, name))
        return control
