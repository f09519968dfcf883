"""Held-out environments for the tests of evaluation, and what they look at."""

from __future__ import annotations

import asyncio
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
