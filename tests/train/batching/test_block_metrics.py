"""Examples 14, 16 and 17, and what a block says about itself."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import Any

import pytest
import torch

from verifiers.data.batch_plan import make_plan
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock, TokenSequence
from verifiers.train.batching.advantages import rollout_advantages
from verifiers.train.batching.block_metrics import block_metrics, fill_completions_table
from verifiers.train.batching.training_block import TrainingBlock
from verifiers.types import Failure, Outcome, RolloutKey

RANK_0 = [1, 0.8, 0.9, 1, 0.2, 0.3, 0.1, 0.4]
RANK_1 = [0.7, 0.6, 0.8, 0.5, 0.9, 1, 0.8, 0.7]


def rollout(
    example: int, generation: int, reward: float | None, outcome: Outcome = Outcome.COMPLETED, tokens: int = 3
) -> Rollout:
    row = TokenSequence(
        [1, 2], [3] * tokens, [1] * tokens, [-0.5] * tokens, [0] * tokens, outcome is Outcome.TRUNCATED
    )
    failure = Failure("SomeError", "it failed") if outcome.is_failure else None
    return Rollout(
        RolloutKey(0, example, generation),
        outcome,
        prompt="p",
        completion="c",
        reward=reward,
        rows=[] if outcome.is_failure else [row],
        turns=0 if outcome.is_failure else 1,
        failure=failure,
    )


def block_of(groups: list[list[Rollout]]) -> ScoredBlock:
    return ScoredBlock(0, [Group(index, group) for index, group in enumerate(groups)], generation_s=2.0)


def metrics_of(block: ScoredBlock, generations: int, ranks: int = 1) -> dict[str, float]:
    advantages = rollout_advantages(block)
    size = len(block.rollouts) // ranks
    by_rank = []
    for first in range(0, len(block.rollouts), size):
        on = [index for index in range(first, first + size) if block.rollouts[index].key in advantages]
        sampled = torch.tensor([sum(r.sampled_tokens for r in block.rollouts[index].rows) for index in on] + [0])
        ones = torch.ones(len(sampled), 1)
        one_pass = {"input_ids": ones, "attention_mask": ones}
        one_pass |= {"sampled_tokens": sampled, "is_padding": sampled == 0}
        by_rank.append([one_pass | {"rollout_index": torch.tensor([*on, -1])}])
    trained = TrainingBlock(0, [by_rank], advantages, [])
    plan = make_plan(
        per_device_train_batch_size=len(block.rollouts) // ranks,
        num_processes=ranks,
        num_generations=generations,
        max_steps=1,
        num_prompts=99,
    )
    return block_metrics(block, trained, plan, chunk_size=64)


def test_example_16_through_a_block_of_two_ranks() -> None:
    block = block_of([[rollout(i, g, (RANK_0 + RANK_1)[4 * i + g]) for g in range(4)] for i in range(4)])
    metrics = metrics_of(block, 4, ranks=2)
    assert metrics["reward/mean_per_completion"] == pytest.approx(0.5875)
    assert metrics["reward"] == metrics["reward/mean_per_completion_global"] == pytest.approx(0.66875)
    assert metrics["rollouts/total_per_process"] == 8
    assert metrics["rollouts/chunk_size"] == 64


def test_example_17_each_reward_function_has_its_own_mean() -> None:
    f1, f2 = [1, 1, 0, 1, 0, 1, 0, 0], [0.8, 0.9, 0.3, 0.7, 0.2, 0.6, 0.1, 0.3]
    groups = [[rollout(i, g, f1[4 * i + g] + f2[4 * i + g]) for g in range(4)] for i in range(2)]
    for index, one in enumerate(one for group in groups for one in group):
        one.metrics = {"f1": f1[index], "f2": f2[index]}
    metrics = metrics_of(block_of(groups), 4)
    assert metrics["reward/mean_per_completion"] == pytest.approx(0.9875)
    assert metrics["rewards/f1/mean"] == pytest.approx(0.5)
    assert metrics["rewards/f2/mean"] == pytest.approx(0.4875)
    assert metrics["rewards/f1/std"] == pytest.approx(math.sqrt(2 / 7))


def test_example_14_groups_without_variance_are_counted() -> None:
    rewards = [[1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]
    block = block_of([[rollout(i, g, reward) for g, reward in enumerate(group)] for i, group in enumerate(rewards)])
    metrics = metrics_of(block, 4)
    assert metrics["frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert metrics["reward"] == pytest.approx(5 / 12)


def test_failed_rollouts_are_counted_and_take_part_in_no_mean() -> None:
    group = [
        rollout(0, 0, 1.0, tokens=2),
        rollout(0, 1, 0.0, Outcome.TRUNCATED, tokens=8),
        rollout(0, 2, None, Outcome.PROVIDER_ERROR),
        rollout(0, 3, None, Outcome.TIMED_OUT),
    ]
    metrics = metrics_of(block_of([group]), 4)
    assert metrics["reward"] == 0.5
    assert metrics["reward/denominator/completions_global"] == 2
    assert metrics["rollouts/launched"] == 4
    assert metrics["rollouts/failed"] == 2
    assert {outcome: metrics[f"outcomes/{outcome}"] for outcome in Outcome if metrics[f"outcomes/{outcome}"]} == {
        "completed": 1,
        "truncated": 1,
        "provider_error": 1,
        "timed_out": 1,
    }
    assert metrics["completions/mean_length"] == 5
    assert metrics["completions/mean_terminated_length"] == 2
    assert metrics["completions/clipped_ratio"] == 0.5
    assert metrics["rollouts/tokens_per_s"] == 5
    assert metrics["rows/trained"] == 2
    assert metrics["rows/padding"] == 1


def failed_on_the_way(generation: int, outcome: Outcome, tokens: int) -> Rollout:
    """Return a rollout that had sampled some tokens when it failed."""
    made = rollout(0, generation, None, outcome)
    made.rows = rollout(0, generation, 0.0, tokens=tokens).rows
    return made


def test_a_failed_rollout_neither_ended_by_itself_nor_ran_out_of_tokens() -> None:
    group = [
        rollout(0, 0, 1.0, tokens=2),
        rollout(0, 1, 0.0, Outcome.TRUNCATED, tokens=8),
        failed_on_the_way(2, Outcome.TIMED_OUT, tokens=5),
        failed_on_the_way(3, Outcome.GRADING_ERROR, tokens=9),
    ]
    metrics = metrics_of(block_of([group]), 4)
    assert (
        metrics["eos_stop_rate"] == metrics["no_eos_max_length_rate"] == metrics["completions/clipped_ratio"] == 0.5
    )
    assert metrics["completions/max_terminated_length"] == metrics["completions/min_length"] == 2
    assert metrics["completions/max_length"] == 8
    assert metrics["completions/per_prompt/mean_length_max"] == 5
    # the server sampled them all the same
    assert metrics["rollouts/sampled_tokens"] == 24
    only_failed = metrics_of(block_of([[failed_on_the_way(g, Outcome.TIMED_OUT, tokens=5) for g in range(2)]]), 2)
    assert "eos_stop_rate" not in only_failed
    assert [name for name in only_failed if name.startswith("completions/")] == []
    assert only_failed["rollouts/sampled_tokens"] == 10


def test_the_spread_of_rewards_is_that_of_all_launched_groups_as_their_mean_is() -> None:
    block = block_of([[rollout(0, g, float(g)) for g in range(2)], [rollout(1, g, float(g)) for g in range(2)]])
    block.filtered = [Group(2, [rollout(2, g, 1.0) for g in range(2)])]
    for group in (*block.groups, *block.filtered):
        for one in group.rollouts:
            one.task = "sums" if group.example_id else "words"
    metrics = metrics_of(block, 2)
    assert metrics["reward"] == pytest.approx((1 + 1 + 2) / 6)
    assert metrics["frac_reward_zero_std"] == pytest.approx(1 / 3)
    assert metrics["reward_std"] == pytest.approx((math.sqrt(0.5) + math.sqrt(0.5) + 0) / 3)
    assert metrics["tasks/words/frac_reward_zero_std"] == 0.0
    assert metrics["tasks/sums/frac_reward_zero_std"] == 0.5


def test_a_block_without_a_score_has_no_mean_reward() -> None:
    metrics = metrics_of(block_of([[rollout(0, g, None, Outcome.GRADING_ERROR) for g in range(2)]]), 2)
    assert math.isnan(metrics["reward"])
    assert not {"reward_std", "frac_reward_zero_std"} & set(metrics)


def test_the_table_of_completions_takes_what_models_write() -> None:
    functions = [{"name": "find", "arguments": '{"text": '}, {"name": "add", "arguments": None}]
    calls = [*({"function": function} for function in functions), '{"name": "as_text"}', {"function": None}]
    parts = [{"type": "text", "text": "half \ud83d"}]
    first, second, third = (rollout(0, number, float(number)) for number in range(3))
    first.completion = [{"role": "assistant", "content": None, "tool_calls": calls}]
    second.completion = [{"role": "assistant", "content": parts, "tool_calls": None}]
    first.metrics, second.metrics = {"one": 1.0}, {"two": 2.0, "none": None}  # type: ignore[dict-item]
    columns: dict[str, Any] = {name: deque(["an earlier block's"], maxlen=3) for name in ("prompt", "completion")}
    columns |= {"advantages": deque(maxlen=3), "rewards": defaultdict(lambda: deque(maxlen=3), gone=deque([1.0]))}
    block = block_of([[first, second, third]])
    fill_completions_table(columns, block, TrainingBlock(0, [], {first.key: [0.5, 1.5]}, []))
    told = [messages[-1]["content"] for messages in columns["completion"]]
    assert told == ['find({"text": )\nadd(None)\nas_text(None)\n(None)', "half \ufffd", "c"]
    assert list(columns["advantages"]) == [1.0, 0.0, 0.0]
    assert list(columns["rewards"]) == ["one", "two", "none"]
    assert [str(value) for value in columns["rewards"]["one"]] == ["1.0", "nan", "nan"]
    assert len(columns["prompt"]) == 3


def test_each_role_has_its_reward_and_length() -> None:
    pair = [rollout(0, generation, 0.5) for generation in range(2)]
    for one, rewards in zip(pair, ({"proposer": 1.0, "solver": 0.25}, {"solver": 0.75}), strict=True):
        one.role_rewards = rewards
        one.rows = [TokenSequence([1], [3] * n, [1] * n, [-0.5] * n, [0] * n, role="solver") for n in (2, 3)]
    pair[0].rows.append(TokenSequence([1], [3], [1], [-0.5], [0], role="proposer"))
    found = metrics_of(block_of([pair]), 2)
    assert {name: value for name, value in found.items() if name.startswith("roles/")} == {
        "roles/proposer/reward": 1.0,
        "roles/proposer/mean_length": 1.0,
        "roles/solver/reward": 0.5,
        "roles/solver/mean_length": 5.0,
    }
