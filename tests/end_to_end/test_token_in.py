"""Training on many turns, sent as messages or token ids: on exactly what was sampled, in as few rows as can be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import tool_world

from verifiers.inference.token_in import token_in_for
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.types import RolloutKey

TURNS = 50

THINKING_TEMPLATE = (
    "{% for m in messages %}{% set said = m.content or '' %}"
    # a turn's first word is its thought, which later prompts leave out
    "{% if m.role == 'assistant' and ' ' in said %}{% set said = said.split(' ', 1)[1] %}{% endif %}"
    "{{ m.role[0] + ':' + said + '<end>' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def train(new_trainer: Callable[..., tiny_world.ObservedTrainer]) -> Callable[..., tiny_world.ObservedTrainer]:
    """Train a policy against a server of its own, and return the trainer."""

    def run(directory: Path, env: Any, **overrides: Any) -> tiny_world.ObservedTrainer:
        with tiny_world.EmbeddedServer(directory) as server:
            trainer = new_trainer(directory, env, server.url, **overrides)
            trainer.keeps_logps = True
            trainer.train()
            trainer.close()
        return trainer

    return run


@pytest.mark.slow
def test_fifty_turns_with_tools_train_as_one_row_also_where_the_template_forgets(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    directory = tool_world.make_model(tmp_path / "policy", tool_world.FORGETFUL_TEMPLATE)
    trainer = train(directory, tool_world.environment(TURNS), max_steps=1)
    said = sorted(trainer.client.sampled())
    assert len(said) == 8 * TURNS
    # byte for byte: every trained span is an answer of the server, behind exactly the ids that it was sent
    assert trainer.trained_spans() == said
    assert len(list(trainer.rows())) == 8
    assert trainer.logged("rollouts/fork_rate") == [0.0]
    assert trainer.logged("rollouts/turns") == [float(TURNS)]
    assert trainer.largest_difference() < 1e-4
    sent = [body for body, _ in trainer.client.answers if "sampling_params" in body and "seed" in str(body)]
    assert len(sent) == 8 * (TURNS - 1)


def test_fifty_turns_of_tool_calls_train_as_one_row_each_token_exactly(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    directory = tool_world.make_model(tmp_path / "policy")
    trainer = train(directory, tool_world.environment(TURNS), max_steps=1, generation="messages")
    answers = sorted(trainer.client.sampled())
    assert len(answers) == 8 * TURNS
    assert trainer.trained_spans() == answers
    rows = list(trainer.rows())
    assert len(rows) == 8
    assert trainer.logged("rollouts/fork_rate") == [0.0]
    assert trainer.logged("rollouts/turns") == [float(TURNS)]
    # the tool's words between the calls are seen and carry no loss
    assert all(0 < sum(row[2]) < len(row[2]) for row in rows)
    assert trainer.largest_difference() < 1e-4


@pytest.mark.slow
def test_a_template_that_forgets_makes_forks_and_no_crash(train: Callable[..., Any], tmp_path: Path) -> None:
    turns = 12
    directory = tool_world.make_model(tmp_path / "policy", tool_world.FORGETFUL_TEMPLATE)
    trainer = train(directory, tool_world.environment(turns), max_steps=1, generation="messages")
    answers = sorted(trainer.client.sampled())
    assert len(answers) == 8 * turns
    assert trainer.trained_spans() == answers
    # turn two extends turn one, every later turn begins a row
    assert trainer.logged("rollouts/fork_rate") == [pytest.approx((turns - 2) / turns)]
    assert len(list(trainer.rows())) == 8 * (turns - 1)
    assert trainer.largest_difference() < 1e-4


@pytest.mark.parametrize("generation", ["messages", "auto"])
def test_a_template_that_strips_thoughts_forks_with_messages_alone(
    train: Callable[..., Any], tmp_path: Path, generation: str
) -> None:
    directory = tiny_world.make_model(tmp_path / "policy")
    tokenizer = tiny_world.make_tokenizer()
    tokenizer.chat_template = THINKING_TEMPLATE
    tokenizer.save_pretrained(directory)
    trainer = train(directory, tiny_world.Dialogue(), max_steps=2, generation=generation, max_completion_length=20)
    rates = trainer.logged("rollouts/fork_rate")
    if generation == "messages":
        assert min(rates) > 0.0
    else:
        assert rates == [0.0, 0.0]
        assert len(list(trainer.rows())) == 16
    assert trainer.trained_spans() == sorted(trainer.client.sampled())
    assert trainer.largest_difference() < 1e-4


def test_the_same_seeds_give_the_same_tokens_by_messages_and_by_ids(server: tiny_world.EmbeddedServer) -> None:
    by_way = {way: asyncio.run(_rollouts(server.url, way)) for way in ("messages", "auto", "tokens")}
    for one, two, three in zip(*by_way.values(), strict=True):
        assert one.failure is None
        assert [row.completion_ids for row in one.rows] == [row.completion_ids for row in two.rows]
        assert [row.completion_ids for row in one.rows] == [row.completion_ids for row in three.rows]
        assert one.completion == two.completion == three.completion
        assert [two.forks, three.forks] == [0, 0]
        assert one.rows[0].logprobs == pytest.approx(three.rows[0].logprobs, abs=1e-4)
        assert three.rows[0].versions == one.rows[0].versions


async def _rollouts(url: str, way: str) -> list[Rollout]:
    backend = tiny_world.RecordingBackend(url)
    token_in = token_in_for(way, backend, "policy", require_tokens=True)
    runner = Run(
        tiny_world.Dialogue(),
        backend,
        "policy",
        {"temperature": 1.0, "max_tokens": 12},
        require_tokens=True,
        token_in=token_in,
    )
    try:
        requests = [
            RolloutRequest(RolloutKey(0, n, 0), prompt=[{"role": "user", "content": row["question"]}], seed=n)
            for n, row in enumerate(tiny_world.rows(8))
        ]
        return [(await runner.play([request]))[0] for request in requests]
    finally:
        await backend.close()
