"""Invariant 1: what is trained is what was sampled, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_world
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


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, "importance_sampling_level='sequence'"),
        (
            {"importance_sampling_level": "sequence", "loss_type": "luspo", "streaming": True},
            "importance_sampling_level='sequence'",
        ),
        ({"loss_type": "vespo"}, "loss_type='vespo'"),
        ({"vllm_importance_sampling_mode": "sequence_mask"}, "vllm_importance_sampling_mode='sequence_mask'"),
        ({"off_policy_mask_threshold": 0.5}, r"off_policy_mask_threshold=0\.5"),
    ],
)
def test_a_ratio_over_whole_rows_is_refused_where_a_rollout_forks(
    make_trainer: Callable[..., Any], settings: dict[str, Any], named: str
) -> None:
    trainer = make_trainer(tiny_world.Rewriting(), max_steps=1, **settings)
    with pytest.raises(ConfigError, match=rf"became \d rows, .*{named} compares policies over each whole row"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_ratio_over_whole_rows_is_taken_where_no_rollout_forks(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(tiny_world.Dialogue(), max_steps=1, importance_sampling_level="sequence")
    trainer.train()
    assert trainer.state.global_step == 1


def test_prompts_have_unequal_lengths_so_that_padding_is_really_exercised(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(
        tiny_world.single_turn(), max_steps=3, per_device_train_batch_size=8, gradient_accumulation_steps=1
    )
    trainer.train()
    prompts = {len(row[0]) for row in trainer.rows()}
    completions = {len(row[1]) for row in trainer.rows()}
    assert len(prompts) > 2
    assert len(completions) > 2
    # prompts of unequal length share a pass: the end of the longer ones stands before their completions
    assert any(not batch["loss_mask"][:, 0].all() for batch in trainer.seen)
    assert any(not batch["completion_mask"].all() for batch in trainer.seen)
