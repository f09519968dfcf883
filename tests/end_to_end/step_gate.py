"""Holds an engine in the middle of its answers, so that a test comes in time however late its thread runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class StepGate:
    """Keeps an engine from its next step once every sequence has some tokens and nobody waits for a free slot.

    It opens, for good, when `until()` is true: by default with the next command, such as a pause or new weights.

    Args:
        engine: before its requests come, or while it is paused.
        tokens: that each sequence is given first.
        until: called by the engine's thread.

    Attributes:
        held: sequences that are held at this moment.
    """

    def __init__(self, engine: Any, *, tokens: int = 5, until: Callable[[], bool] | None = None) -> None:
        self._engine, self._tokens = engine, tokens
        self._until = until or (lambda: bool(engine._commands))
        self._open = False
        self._step = engine._batch.step
        self.held = 0
        engine._batch.step = self._gated_step

    def _gated_step(self) -> Any:
        while self._holds():
            self.held = len(self._engine._batch.sequences)
            time.sleep(0.001)
        self.held = 0
        return self._step()

    def _holds(self) -> bool:
        engine, rows = self._engine, self._engine._batch.sequences
        if self._open or engine._stopping or any(len(row.log_probs) < self._tokens for row in rows):
            return False
        self._open = self._until()
        return not self._open and not (engine._waiting and len(rows) < engine.slots)
