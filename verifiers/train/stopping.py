"""A stop that a callback asks for inside a block, held back until the block has been trained."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback

__all__ = ["StopsBetweenBlocks"]

logger = logging.getLogger("verifiers.train")


class StopsBetweenBlocks(TrainerCallback):
    """Lets a run that a callback stops end where it could go on, with every rollout trained that is said to be.

    It must come after all other callbacks. A save that is asked for with the stop comes with it.

    Args:
        updates_per_block: optimizer steps that a block serves.
    """

    def __init__(self, updates_per_block: int) -> None:
        self._updates = updates_per_block
        self._stops = self._saves = False
        # what an overlapped evaluation is told of, the state says the evaluation's own
        self._step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stops = self._saves = False
        self._step = state.global_step

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step = state.global_step
        self._hold_back(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step = state.global_step
        self._settle(state, control)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._settle(state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._settle(state, control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._settle(state, control)

    def _settle(self, state: Any, control: Any) -> None:
        if self._step >= state.max_steps:
            return
        if self._step % self._updates:
            self._hold_back(state, control)
        elif self._stops:
            control.should_training_stop = True
            control.should_save = control.should_save or self._saves
            self._stops = self._saves = False

    def _hold_back(self, state: Any, control: Any) -> None:
        if not control.should_training_stop:
            return
        if not self._stops and state.is_world_process_zero:
            logger.warning(
                "a callback stops the run inside a block: it ends at step %d, when the block has been trained.",
                (self._step // self._updates + 1) * self._updates,
            )
        self._saves = self._saves or control.should_save
        self._stops, control.should_training_stop, control.should_save = True, False, False
