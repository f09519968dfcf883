"""A stop that a callback asks for inside a block comes when the block has been trained."""

from __future__ import annotations

import pytest
from transformers import TrainerControl, TrainerState

from verifiers.train.data_loop import StopsBetweenBlocks


@pytest.fixture
def at() -> StopsBetweenBlocks:
    return StopsBetweenBlocks(updates_per_block=4)


def after(callback: StopsBetweenBlocks, event: str, step: int, **asked: bool) -> tuple[bool, bool]:
    """Return whether the run stops, and saves, after an event at which a callback asked for it."""
    control = TrainerControl(**asked)
    state = TrainerState(global_step=step, max_steps=10)
    getattr(callback, event)(None, state, control)
    return control.should_training_stop, control.should_save


def test_a_stop_between_blocks_is_left_alone(at: StopsBetweenBlocks) -> None:
    assert after(at, "on_step_end", 4, should_training_stop=True) == (True, False)
    assert after(at, "on_step_end", 8) == (False, False)


@pytest.mark.parametrize(
    ("event", "step"), [("on_step_end", 2), ("on_log", 3), ("on_evaluate", 1), ("on_save", 1), ("on_substep_end", 0)]
)
def test_a_stop_inside_a_block_waits_for_its_end_and_a_save_comes_with_it(
    at: StopsBetweenBlocks, event: str, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    at.on_train_begin(None, TrainerState(global_step=step, max_steps=10), None)
    assert after(at, event, step, should_training_stop=True, should_save=True) == (False, False)
    assert after(at, event, step, should_training_stop=True) == (False, False)
    assert after(at, "on_step_end", 3) == (False, False)
    assert after(at, "on_step_end", 4) == (True, True)
    assert [record.getMessage() for record in caplog.records] == [
        "a callback stops the run inside a block: it ends at step 4, when the block has been trained."
    ]


def test_a_run_may_end_inside_its_last_block_and_a_new_one_knows_nothing_of_it(at: StopsBetweenBlocks) -> None:
    assert after(at, "on_step_end", 10, should_training_stop=True, should_save=True) == (True, True)
    after(at, "on_step_end", 9, should_training_stop=True)
    at.on_train_begin(None, TrainerState(), None)
    assert after(at, "on_step_end", 4) == (False, False)
