"""Evaluation beside training: of one step's weights, within its share of the rollouts, and in nobody's way."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_world
from evaluation_world import NeverEnds, Outlasting, logged_evaluations
from transformers import TrainerCallback

import verifiers as vf


@pytest.mark.parametrize(
    "settings",
    [
        {"num_batches_ahead": 2, "drain_before_sync": True},
        pytest.param({"num_batches_ahead": 1, "streaming": True, "num_iterations": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_overlapped_evaluation_is_of_one_steps_weights_while_training_continues(
    make_trainer: Callable[..., Any], server: tiny_world.EmbeddedServer, settings: dict[str, Any]
) -> None:
    evaluated, updates = Outlasting(server), settings.get("num_iterations", 1)
    trainer = make_trainer(
        tiny_world.single_turn(),
        eval_env=evaluated,
        max_steps=5 * updates,
        eval_strategy="steps",
        eval_steps=2 * updates,
        eval_overlap=True,
        **settings,
    )
    evaluated.watch(trainer)
    trainer.train()
    steps = [updates * block for block in (2, 4, 5)]
    assert [entry["step"] for entry in logged_evaluations(trainer)] == steps
    assert evaluated.sampled == {step: {str(step)} for step in steps}
    # at the last step nothing is left to train beside it
    assert evaluated.trained_meanwhile == {step: updates if step < steps[-1] else 0 for step in steps}
    trained = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    assert trained == list(range(1, 5 * updates + 1))


def test_training_continues_beside_an_evaluation_that_begins_where_an_epoch_ends(
    make_trainer: Callable[..., Any], server: tiny_world.EmbeddedServer
) -> None:
    evaluated = Outlasting(server)
    trainer = make_trainer(
        tiny_world.single_turn(count=4),
        eval_env=evaluated,
        max_steps=5,
        eval_strategy="steps",
        eval_steps=2,
        eval_overlap=True,
        save_strategy="epoch",
    )
    evaluated.watch(trainer)
    trainer.train()
    assert [entry["step"] for entry in logged_evaluations(trainer)] == [2, 4, 5]
    assert evaluated.trained_meanwhile == {2: 1, 4: 1, 5: 0}
    assert (Path(trainer.args.output_dir) / "checkpoint-2").is_dir()


class Sees(TrainerCallback):
    """Writes down what loggers see."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, bool]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.steps.append((state.global_step, "eval_reward" in logs))


def test_loggers_see_an_overlapped_evaluation_at_the_step_that_it_is_of(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(
        tiny_world.single_turn(), max_steps=4, eval_strategy="steps", eval_steps=2, eval_overlap=True
    )
    sees = Sees()
    trainer.add_callback(sees)
    trainer.train()
    # the metrics of step 2 come when step 3 is trained
    assert sees.steps[:-1] == [(1, False), (2, False), (2, True), (3, False), (4, False), (4, True)]
    first = logged_evaluations(trainer)[0]
    assert (first["step"], first["epoch"]) == (2, 0.25)
    # TRL's own metrics of training are not taken for those of an evaluation
    assert not any(name.startswith("eval_rollouts") for name in first)
    assert len(trainer.logged("frac_reward_zero_std")) == 4


class Counts(tiny_world.Dialogue):
    """Knows how many of its rollouts run at once, and how many of all that share its count."""

    def __init__(self, together: list[int], **options: Any) -> None:
        super().__init__(**options)
        self.together, self.running, self.most, self.most_together = together, 0, 0, 0

    async def rollout(self, *args: Any, **kwargs: Any) -> Any:
        self.running += 1
        self.together[0] += 1
        self.most = max(self.most, self.running)
        self.most_together = max(self.most_together, self.together[0])
        try:
            return await super().rollout(*args, **kwargs)
        finally:
            self.running -= 1
            self.together[0] -= 1


def test_an_evaluation_keeps_to_its_share_and_all_rollouts_to_the_one_limit(
    make_trainer: Callable[..., Any],
) -> None:
    together = [0]
    training, evaluated = Counts(together), Counts(together, eval_dataset=tiny_world.rows(12))
    trainer = make_trainer(
        training,
        eval_env=evaluated,
        max_steps=2,
        max_concurrent=6,
        eval_strategy="steps",
        eval_steps=1,
        eval_overlap=True,
    )
    seen = []

    class Notes(TrainerCallback):
        def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
            seen.append(evaluated.most)
            evaluated.most = 0

    trainer.add_callback(Notes())
    trainer.train()
    # half the limit; nothing is trained beside the last one
    assert seen == [3, 6]
    assert training.most == 6
    assert max(training.most_together, evaluated.most_together) == 6
    assert [entry["eval_prompts"] for entry in logged_evaluations(trainer)] == [12, 12]


def test_no_push_overtakes_an_evaluation_in_flight(make_trainer: Callable[..., Any]) -> None:
    with tiny_world.closing(make_trainer(tiny_world.single_turn())) as trainer:
        push, ended = trainer.weight_sync.push, []

        def pushing(parameters: Any, version: int) -> None:
            running = trainer.evaluator.running
            ended.append(running is None or running._task.done())
            push(parameters, version)

        trainer.weight_sync.push = pushing
        trainer.eval_schedule.begin(trainer.evaluator.sets, trainer.state)
        trainer.session.prefetcher.sync(1)
        assert ended == [True, True]
        metrics, _ = trainer.eval_schedule.finish(trainer.state)
        assert metrics["eval_prompts"] == 4


class BreaksLater(tiny_world.Dialogue):
    """A mistake that shows in the second block."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = 0

    async def rollout(self, *args: Any, **kwargs: Any) -> Any:
        self._begun += 1
        if self._begun > 8:
            raise vf.ConfigError("the second block shows the mistake")
        return await super().rollout(*args, **kwargs)


def test_a_failure_of_training_is_not_kept_waiting_by_an_evaluation(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(
        BreaksLater(),
        eval_env=NeverEnds(),
        num_batches_ahead=1,
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        eval_timeout=60.0,
    )
    started = time.monotonic()
    with pytest.raises(vf.ConfigError, match="the second block shows the mistake"):
        trainer.train()
    assert time.monotonic() - started < 40
