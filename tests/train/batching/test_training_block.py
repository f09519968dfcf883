from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from verifiers.data.batch_plan import make_plan
from verifiers.errors import ConfigError
from verifiers.rollouts.recording_client import rows_from_turns
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock, TokenSequence, Turn
from verifiers.train.batching.advantages import rollout_advantages
from verifiers.train.batching.micro_batches import PADDING, TrainingSample, pad_rows
from verifiers.train.batching.training_block import Dropped, block_samples, build_training_block
from verifiers.train.config import GRPOConfig
from verifiers.types import Outcome, RolloutKey


def turn(prompt: list[int], completion: list[int], version: int = 0) -> Turn:
    return Turn(prompt, completion, [-0.25 * token for token in completion], [version] * len(completion))


# Two turns, the second extending the first by the environment's token 9: one row of 5 completion tokens.
TWO_TURNS = [turn([1, 2], [3, 4], version=7), turn([1, 2, 3, 4, 9], [5, 6], version=8)]
# The second prompt rewrites history: two rows.
FORKED = [turn([1, 2], [3, 4, 5]), turn([1, 8, 2, 7], [6])]


def rollout(generation: int, turns: list[Turn], reward: float | None, **extra: object) -> Rollout:
    rows, forks = rows_from_turns(turns)
    outcome = Outcome.PROVIDER_ERROR if reward is None else Outcome.COMPLETED
    made = Rollout(RolloutKey(0, 0, generation), outcome, "p", "c", reward=reward, rows=rows, forks=forks)
    for name, value in extra.items():
        setattr(made, name, value)
    return made


def block(*rollouts: Rollout) -> ScoredBlock:
    return ScoredBlock(0, [Group(0, list(rollouts))])


def mixed_block() -> ScoredBlock:
    return block(rollout(0, TWO_TURNS, 1.0), rollout(1, [], None), rollout(2, FORKED, 0.0))


def mixed_samples() -> list[TrainingSample]:
    scored = mixed_block()
    return block_samples(scored, rollout_advantages(scored, scale_rewards="none"))[0]


def test_rows_are_padded_to_the_longest_of_them() -> None:
    batch = pad_rows(mixed_samples())
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 9, 5, 6], [1, 2, 3, 4, 5, 0, 0], [1, 8, 2, 7, 6, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1] * 7, [1] * 5 + [0] * 2, [1] * 5 + [0] * 2]
    assert batch["advantages"].tolist() == [
        [0, 0, 0.5, 0.5, 0, 0.5, 0.5],
        [0, 0, -0.5, -0.5, -0.5, 0, 0],
        [0, 0, 0, 0, -0.5, 0, 0],
    ]
    assert batch["policy_versions"].tolist() == [7, 0, 0]
    assert batch["rollout_index"].tolist() == [0, 2, 2]
    assert batch["sampled_tokens"].tolist() == [4, 3, 1]
    assert batch["is_padding"].tolist() == [False] * 3


def test_the_loss_mask_covers_sampled_tokens_alone() -> None:
    batch = pad_rows(mixed_samples())
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 1, 0, 1, 1], [0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0, 0]]
    logps = batch["sampler_logps"]
    assert logps[0].tolist() == [0.0, 0.0, -0.75, -1.0, 0.0, -1.25, -1.5]
    assert (logps[batch["loss_mask"] == 0] == 0).all()


def test_a_list_of_advantages_is_split_over_the_rollouts_rows_and_skips_the_environments_tokens() -> None:
    scored = block(rollout(0, TWO_TURNS, 1.0), rollout(1, FORKED, 0.0, advantage=[0.1, 0.2, 0.3, 0.4]))
    samples, _ = block_samples(scored, rollout_advantages(scored, scale_rewards="none"))
    assert [item.advantage for item in samples] == [0.5, [0.1, 0.2, 0.3], [0.4]]
    advantages_rc = pad_rows(samples)["advantages"]
    expected = [[0, 0, 0.5, 0.5, 0, 0.5, 0.5], [0, 0, 0.1, 0.2, 0.3, 0, 0], [0, 0, 0, 0, 0.4, 0, 0]]
    torch.testing.assert_close(advantages_rc, torch.tensor(expected))
    scored = block(rollout(0, TWO_TURNS, 1.0, advantage=[1.0, 2.0, 3.0, 4.0]))
    samples, _ = block_samples(scored, rollout_advantages(scored))
    assert pad_rows(samples)["advantages"].tolist() == [[0, 0, 1, 2, 0, 3, 4]]


def test_a_row_that_is_too_long_is_dropped_with_its_reason_and_never_cut() -> None:
    scored = mixed_block()
    samples, dropped = block_samples(scored, rollout_advantages(scored), max_seq_len=5)
    assert [item.row.completion_ids for item in samples] == [[3, 4, 5], [6]]
    key = scored.rollouts[0].key
    assert Dropped(key, "longer_than_max_seq_len", row=0, tokens=7) in dropped
    assert Dropped(scored.rollouts[1].key, "provider_error") in dropped
    assert len(dropped) == 2


def test_the_rest_of_a_rollout_counts_as_the_whole_of_it() -> None:
    scored = block(rollout(0, FORKED, 1.0), rollout(1, FORKED, 0.0, advantage=[1.0, 2.0, 3.0, 4.0]))
    longer = scored.rollouts[1].rows[0]
    longer.prompt_ids = [1, 2, 2, 2]
    samples, dropped = block_samples(scored, rollout_advantages(scored), max_seq_len=6)
    assert [(item.rollout_index, item.rollout_sampled_tokens) for item in samples] == [(0, 4), (0, 4), (1, 1)]
    assert samples[-1].advantage == [4.0]
    assert [(item.key.generation, item.row) for item in dropped] == [(1, 0)]


def test_every_rollout_is_trained_on_or_recorded_as_dropped() -> None:
    empty = TokenSequence([1, 2], [9], [0], [0.0], [-1])
    scored = block(
        rollout(0, TWO_TURNS, 1.0),
        rollout(1, [], None),
        rollout(2, [], 0.5),
        rollout(3, [], 0.0, rows=[empty]),
        rollout(4, [turn([], [3])], 0.0),
    )
    samples, dropped = block_samples(scored, rollout_advantages(scored))
    assert [item.rollout_index for item in samples] == [0]
    assert [item.reason for item in dropped] == [
        "provider_error",
        "no_sampled_tokens",
        "no_sampled_tokens",
        "empty_prompt",
    ]


def test_a_row_without_sampled_tokens_is_skipped_beside_one_that_has_them() -> None:
    empty = TokenSequence([1, 2], [9], [0], [0.0], [-1])
    scored = block(rollout(0, TWO_TURNS, 1.0), rollout(1, FORKED, 0.0))
    scored.rollouts[1].rows.insert(0, empty)
    samples, dropped = block_samples(scored, rollout_advantages(scored))
    assert len(samples) == 3
    assert dropped == []


def test_a_padding_row_is_seen_by_attention_and_not_by_the_loss() -> None:
    batch = pad_rows([PADDING] * 2)
    assert batch["input_ids"].tolist() == [[0, 0], [0, 0]]
    for name, value in (("attention_mask", 1), ("loss_mask", 0)):
        assert (batch[name] == value).all()
    for name, value in (("sampled_tokens", 0), ("rollout_index", -1), ("policy_versions", -1)):
        assert batch[name].tolist() == [value] * 2
    assert batch["advantages"].tolist() == [[0.0, 0.0]] * 2
    assert batch["is_padding"].all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, "0 prompt tokens"),
        ({"completion_ids": []}, "completion, mask and log-probs of .0, 5, 5."),
        ({"logprobs": [-1.0]}, "of .5, 5, 1. tokens"),
    ],
)
def test_a_row_that_cannot_be_trained_is_refused(change: dict[str, Any], message: str) -> None:
    sample = mixed_samples()[0]
    with pytest.raises(ConfigError, match=message):
        pad_rows([dataclasses.replace(sample, row=dataclasses.replace(sample.row, **change))])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, "importance_sampling_level='sequence'"),
        ({"loss_type": "vespo"}, "loss_type='vespo'"),
        ({"vllm_importance_sampling_mode": "sequence_mask"}, "vllm_importance_sampling_mode='sequence_mask'"),
        ({"off_policy_mask_threshold": 0.5}, r"off_policy_mask_threshold=0\.5"),
    ],
)
def test_a_ratio_over_whole_rows_is_refused_for_a_rollout_of_several(settings: dict[str, Any], named: str) -> None:
    args = GRPOConfig("unused", use_cpu=True, bf16=False, **settings)
    plan = make_plan(
        num_prompts=4, num_generations=2, per_device_train_batch_size=2, gradient_accumulation_steps=1, max_steps=1
    )
    whole, forked = (block(rollout(0, turns, 0.0), rollout(1, turns, 1.0)) for turns in (TWO_TURNS, FORKED))
    assert build_training_block(whole, plan, args).micro_steps
    with pytest.raises(ConfigError, match=rf"became 2 rows, .*{named} compares policies over each whole row"):
        build_training_block(forked, plan, args)
