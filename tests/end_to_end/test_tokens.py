"""Invariant 1: what is trained is what was sampled, byte for byte, in as few rows as can be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import tool_world
import torch

from verifiers.errors import ConfigError

ENVIRONMENTS = {"single": tiny_world.single_turn, "multi": tiny_world.Dialogue, "forking": tiny_world.Rewriting}


@pytest.mark.parametrize(("kind", "temperature"), [("single", 0.7), ("multi", 1.0), ("forking", 0.7)])
def test_trained_ids_and_log_probs_are_the_servers_own(
    make_trainer: Callable[..., Any], kind: str, temperature: float
) -> None:
    trainer = make_trainer(ENVIRONMENTS[kind](), temperature=temperature)
    trainer.train()
    trained = [span for row in trainer.rows() for span in tiny_world.spans(row)]
    answers = trainer.client.sampled()
    assert len(answers) == 2 * 8 * (1 if kind == "single" else 3)
    key = lambda item: (item[0], item[1])  # noqa: E731
    trained.sort(key=key)
    answers.sort(key=key)
    assert [key(item) for item in trained] == [key(item) for item in answers]
    for (_, _, ours), (_, _, theirs) in zip(trained, answers, strict=True):
        assert torch.equal(torch.tensor(ours), torch.tensor(theirs))


def test_a_rewritten_history_starts_a_new_row_and_is_counted(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(tiny_world.Rewriting(), max_steps=1)
    trainer.train()
    rows = list(trainer.rows())
    # turns one and two extend each other; what the third sees was rewritten
    assert len(rows) == 16
    assert sorted(len(tiny_world.spans(row)) for row in rows) == [1] * 8 + [2] * 8
    assert trainer.logged("rollouts/fork_rate") == [pytest.approx(8 / 24)]
    assert trainer.logged("rows/trained") == [16.0]
    by_rollout: dict[int, list[float]] = {}
    for *_, batch, place in rows:
        sampled, weight = int(batch["sampled_tokens"][place]), float(batch["token_weights"][place])
        by_rollout.setdefault(int(batch["rollout_index"][place]), []).append(sampled)
        assert weight > 0.0
    assert sorted(by_rollout) == list(range(8))
    assert all(len(row_sizes) == 2 for row_sizes in by_rollout.values())


def test_a_ratio_over_whole_rows_is_refused_where_a_rollout_forks(make_trainer: Callable[..., Any]) -> None:
    settings = {"importance_sampling_level": "sequence", "loss_type": "grpo", "max_steps": 1}
    trainer = make_trainer(tiny_world.Rewriting(), **settings)
    with pytest.raises(ConfigError, match=r"became \d rows, .* compares policies over each whole row"):
        trainer.train()
    assert trainer.state.global_step == 0
    trainer = make_trainer(tiny_world.Dialogue(), **settings)
    trainer.train()
    assert trainer.state.global_step == 1


# -- many turns, sent as messages or token ids --------------------------------------------------------------------


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
@pytest.mark.parametrize(
    ("template", "generation"),
    [
        (tool_world.TEMPLATE, "messages"),
        # sent as token ids, also where the template forgets
        (tool_world.FORGETFUL_TEMPLATE, "auto"),
    ],
    ids=["messages", "a template that forgets"],
)
def test_fifty_turns_of_tool_calls_train_as_one_row_each_token_exactly(
    train: Callable[..., Any], tmp_path: Path, template: str, generation: str
) -> None:
    directory = tool_world.make_model(tmp_path / "policy", template)
    trainer = train(directory, tool_world.environment(TURNS), max_steps=1, generation=generation)
    answers = sorted(trainer.client.sampled())
    assert len(answers) == 8 * TURNS
    # byte for byte: every trained span is an answer of the server, behind exactly the ids that it was sent
    assert trainer.trained_spans() == answers
    rows = list(trainer.rows())
    assert len(rows) == 8
    assert trainer.logged("rollouts/fork_rate") == [0.0]
    assert trainer.logged("rollouts/turns") == [float(TURNS)]
    # the tool's words between the calls are seen and carry no loss
    assert all(0 < sum(row[2]) < len(row[2]) for row in rows)
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
