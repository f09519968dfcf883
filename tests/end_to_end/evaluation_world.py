"""Held-out environments for the tests of evaluation, and what they look at."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tiny_world

import verifiers as vf


def logged_evaluations(trainer: Any) -> list[dict[str, Any]]:
    """Return the log's entries of evaluations, in the order in which they were logged."""
    return [entry for entry in trainer.state.log_history if any(name.startswith("eval_") for name in entry)]


def stored(trainer: Any, step: int, *names: str) -> Path:
    """Return the directory of an evaluation."""
    return Path(trainer.args.output_dir).joinpath("evals", f"step-{step}", *names)


class Outlasting(tiny_world.Dialogue):
    """Held-out dialogues that do not end before the trainer waits for them, or has pushed newer weights.

    Attributes:
        sampled: for each evaluation, the server's weight versions around its answers.
        trained_meanwhile: for each, the optimizer steps that were trained until it was waited for.
    """

    def __init__(self, server: tiny_world.EmbeddedServer) -> None:
        super().__init__(eval_dataset=tiny_world.rows(4))
        self.server = server
        self.sampled: dict[int, set[str]] = {}
        self.trained_meanwhile: dict[int, int] = {}
        self._step = 0
        self._let_go = threading.Event()

    def watch(self, trainer: Any) -> None:
        """Look at this trainer's evaluations."""
        evaluator, push = trainer.evaluator, trainer.weight_sync.push
        begin, take = evaluator._begin_on_rank_0, evaluator._take_measured

        def beginning(*args: Any) -> None:
            self._step = trainer.state.global_step
            self.sampled[self._step] = set()
            self._let_go.clear()
            begin(*args)

        def taking(*args: Any) -> Any:
            self.trained_meanwhile[self._step] = trainer.state.global_step - self._step
            self._let_go.set()
            return take(*args)

        def pushing(parameters: Any, version: int) -> None:
            push(parameters, version)
            if version > self._step:
                self._let_go.set()

        evaluator._begin_on_rank_0, evaluator._take_measured = beginning, taking
        trainer.weight_sync.push = pushing

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        assert await asyncio.to_thread(self._let_go.wait, 120)
        return await super().env_response(messages, state, **kwargs)

    async def get_model_response(self, *args: Any, **kwargs: Any) -> Any:
        found = self.sampled[self._step]
        found.add(self.server.engine.weight_version)
        response = await super().get_model_response(*args, **kwargs)
        found.add(self.server.engine.weight_version)
        return response


class NeverEnds(tiny_world.Dialogue):
    """Held-out dialogues whose environment never answers."""

    def __init__(self) -> None:
        super().__init__(eval_dataset=tiny_world.rows(2))

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(600)


def scripted(scores: dict[int, float], version: Callable[[], int]) -> vf.SingleTurnEnv:
    """Held-out prompts whose rewards say how good each step's weights are."""

    def by_step(completion: Any, **kwargs: Any) -> float:
        return scores[version()]

    return vf.SingleTurnEnv(eval_dataset=tiny_world.rows(2), rubric=vf.Rubric(funcs=[by_step]))


def steps_of(found: Sequence[Path]) -> list[str]:
    """Return the names of directories, sorted as numbers."""
    return sorted((path.name for path in found), key=lambda name: int(name.split("-")[1]))
