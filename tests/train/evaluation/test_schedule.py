"""The steps at which evaluations begin and end, without a trainer or a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from verifiers.monitoring.stage_timer import StageTimer
from verifiers.train.evaluation.evaluator import EvaluationInFlight
from verifiers.train.evaluation.schedule import EvaluationSchedule


class Evaluations:
    """Stands for the evaluator, and writes down what is asked of it."""

    def __init__(self) -> None:
        self.timer = StageTimer()
        self.sets = ("the set",)
        self.in_flight: EvaluationInFlight | None = None
        self.events: list[tuple[str, int]] = []

    def begin(self, sets: Any, *, step: int, epoch: float, weights_step: int, **options: Any) -> None:
        self.events.append(("begin", weights_step))
        self.in_flight = EvaluationInFlight(step, epoch, "eval")

    def finish(self, *, required: bool) -> tuple[EvaluationInFlight, dict[str, float]]:
        flight, self.in_flight = self.in_flight, None
        assert flight is not None
        self.events.append(("finish", flight.step))
        return flight, {"eval_reward": 0.5}


class Run:
    """Ten steps of a run in blocks of two, whose callbacks ask for what a test says."""

    def __init__(self, output_dir: Any, *, overlap: bool = True, stops: bool = False) -> None:
        self.evaluations = Evaluations()
        self.control, self.state = TrainerControl(), TrainerState(global_step=0, max_steps=10, epoch=0.0)
        args = SimpleNamespace(
            eval_overlap=overlap, load_best_model_at_end=True, lr_scheduler_type="constant", output_dir=output_dir
        )
        self.reported: list[int] = []

        def report(metrics: dict[str, float]) -> TrainerControl:
            # logging and evaluating take back what was asked for
            self.reported.append(self.state.global_step)
            self.control.should_log = self.control.should_evaluate = False
            self.control.should_training_stop |= stops
            return self.control

        self.schedule = EvaluationSchedule(
            self.evaluations, args, updates_per_block=2, report=report, is_best=lambda metrics: True
        )

    def end_step(self, step: int, **asked: bool) -> TrainerControl:
        self.state.global_step = step
        for name in ("should_log", "should_evaluate", "should_save"):
            setattr(self.control, name, asked.get(name, False))
        return self.schedule.on_step_end(None, self.state, self.control)


def test_an_evaluation_beside_training_ends_with_the_next_block_and_counts_for_its_own_step(tmp_path: Any) -> None:
    run = Run(tmp_path)
    (tmp_path / "checkpoint-2").mkdir()
    assert not run.end_step(2, should_evaluate=True).should_evaluate
    # an epoch ends with the same step
    run.schedule.on_epoch_end(None, run.state, run.control)
    run.end_step(3)
    assert (run.evaluations.events, run.reported) == ([("begin", 2)], [])
    control = run.end_step(4, should_log=True)
    assert run.evaluations.events[1:] == [("finish", 2)]
    assert (run.reported, run.state.global_step, control.should_log) == ([2], 4, True)
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")


@pytest.mark.parametrize(
    ("step", "asked"), [(3, {"should_save": True}), (3, {"should_evaluate": True}), (10, {})], ids=str
)
def test_a_save_the_next_evaluation_and_the_end_of_a_run_wait_for_the_one_in_flight(
    tmp_path: Any, step: int, asked: dict[str, bool]
) -> None:
    run = Run(tmp_path)
    run.end_step(2, should_evaluate=True)
    control = run.end_step(step, **asked)
    again = [("begin", 3)] if asked.get("should_evaluate") else []
    assert run.evaluations.events == [("begin", 2), ("finish", 2), *again]
    assert control.should_save == asked.get("should_save", False)


def test_transformers_evaluates_itself_without_overlap_and_where_the_run_ends(tmp_path: Any) -> None:
    for run in (Run(tmp_path, overlap=False), Run(tmp_path)):
        assert run.end_step(10, should_evaluate=True).should_evaluate
        assert run.evaluations.events == []
    stopped = Run(tmp_path, stops=True)
    stopped.end_step(2, should_evaluate=True)
    control = stopped.end_step(4, should_evaluate=True)
    assert (control.should_training_stop, control.should_evaluate) == (True, True)
    assert stopped.evaluations.events == [("begin", 2), ("finish", 2)]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_evaluation_that_a_checkpoint_owes_is_begun_once_and_only_at_its_step(
    tmp_path: Any, overlap: bool
) -> None:
    run = Run(tmp_path, overlap=overlap)
    run.schedule.owed, run.state.global_step = 2, 2
    for _ in range(2):
        run.schedule.on_step_begin(None, run.state, run.control)
    assert run.evaluations.events == [("begin", 2), ("finish", 2)][: 1 if overlap else 2]
    other = Run(tmp_path, overlap=overlap)
    other.schedule.owed = 2
    for step in (0, 2):
        other.state.global_step = step
        other.schedule.on_step_begin(None, other.state, other.control)
    assert other.evaluations.events == []


def test_after_a_run_the_weights_are_those_of_the_best_step(tmp_path: Any) -> None:
    run = Run(tmp_path)
    run.state = TrainerState(global_step=10, best_global_step=6, best_model_checkpoint="checkpoint-6")
    run.schedule.begin(run.evaluations.sets, run.state, in_train=False)
    run.schedule.begin(run.evaluations.sets, run.state)
    assert run.evaluations.events == [("begin", 6), ("begin", 10)]
