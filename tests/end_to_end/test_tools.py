"""Fifty turns with native tool calls, trained on exactly what was sampled, also where the template forgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import tool_world

TURNS = 50


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., tiny_world.ObservedTrainer]]:
    """Trains one policy of `tool_world` against a server of its own, and gives the trainer."""
    made: list[tiny_world.ObservedTrainer] = []

    def run(template: str, turns: int, **overrides: Any) -> tiny_world.ObservedTrainer:
        directory = tool_world.make_model(tmp_path / "policy", template)
        with tiny_world.EmbeddedServer(directory) as server:
            args = tiny_world.config(tmp_path / "run", server.url, max_steps=1, **overrides)
            client = tiny_world.RecordingBackend(server.url)
            env = tool_world.environment(turns)
            trainer = tiny_world.ObservedTrainer(str(directory), env, args, client=client)
            made.append(trainer)
            trainer.keeps_logps = True
            trainer.train()
            trainer.close()
        return trainer

    yield run
    for trainer in made:
        trainer.close()


def sampled_spans(trainer: tiny_world.ObservedTrainer) -> list[tuple[list[int], list[int], list[float]]]:
    """Return what was trained, span by span, in the order of the ids."""
    return sorted(span for row in trainer.rows() for span in tiny_world.spans(row))


def largest_difference(trainer: tiny_world.ObservedTrainer) -> float:
    """Between the trainer's log-probs and the sampler's, over trained tokens of on-policy micro-steps."""
    worst = 0.0
    for batch in trainer.seen:
        trained = (batch["completion_mask"] * batch["tool_mask"]).bool()
        gap = (batch["current_logps"] - batch["sampling_per_token_logps"]).abs()[trained]
        if gap.numel():
            worst = max(worst, gap.max().item())
    return worst


def test_fifty_turns_of_tool_calls_train_as_one_row_each_token_exactly(train: Callable[..., Any]) -> None:
    trainer = train(tool_world.TEMPLATE, TURNS, generation="messages")
    answers = sorted(trainer.client.sampled())
    assert len(answers) == 8 * TURNS
    assert sampled_spans(trainer) == [(prompt, ids, logps) for prompt, ids, logps in answers]
    rows = list(trainer.rows())
    assert len(rows) == 8
    assert trainer.logged("rollouts/fork_rate") == [0.0]
    assert trainer.logged("rollouts/turns") == [float(TURNS)]
    # the tool's words between the calls are seen and carry no loss
    assert all(0 < sum(row[2]) < len(row[2]) for row in rows)
    assert largest_difference(trainer) < 1e-4


def test_a_template_that_forgets_makes_forks_and_no_crash(train: Callable[..., Any]) -> None:
    turns = 12
    trainer = train(tool_world.FORGETFUL_TEMPLATE, turns, generation="messages")
    answers = sorted(trainer.client.sampled())
    assert len(answers) == 8 * turns
    assert sampled_spans(trainer) == [(prompt, ids, logps) for prompt, ids, logps in answers]
    # turn two extends turn one, every later turn begins a row
    assert trainer.logged("rollouts/fork_rate") == [pytest.approx((turns - 2) / turns)]
    assert len(list(trainer.rows())) == 8 * (turns - 1)
    assert largest_difference(trainer) < 1e-4
