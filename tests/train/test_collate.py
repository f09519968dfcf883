from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from verifiers.errors import ConfigError
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock
from verifiers.rollouts.trace import Row, Turn, rows_from_turns
from verifiers.train.advantages import rollout_advantages
from verifiers.train.buffers import shuffle_tensor_dict, split_tensor_dict
from verifiers.train.collate import Dropped, TrainingRow, block_rows, even_prompts, padding_row, rows_to_tensors
from verifiers.types import Outcome, RolloutKey

PAD = 0


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


def mixed_rows() -> list[TrainingRow]:
    scored = mixed_block()
    return block_rows(scored, rollout_advantages(scored, scale_rewards="none"))[0]


def test_rows_are_stacked_under_trls_names() -> None:
    batch = rows_to_tensors(mixed_rows(), PAD)
    assert batch["prompt_ids"].tolist() == [[0, 0, 1, 2], [0, 0, 1, 2], [1, 8, 2, 7]]
    assert batch["prompt_mask"].tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1]]
    assert batch["completion_ids"].tolist() == [[3, 4, 9, 5, 6], [3, 4, 5, 0, 0], [6, 0, 0, 0, 0]]
    assert batch["completion_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
    assert batch["advantages"].tolist() == [0.5, -0.5, -0.5]
    assert batch["policy_versions"].tolist() == [7, 0, 0]
    assert batch["rollout_index"].tolist() == [0, 2, 2]
    assert batch["sampled_tokens"].tolist() == [4, 3, 1]
    assert batch["rollout_sampled_tokens"].tolist() == [4, 4, 4]
    assert batch["is_padding"].tolist() == [False] * 3


def test_the_loss_mask_covers_sampled_tokens_alone() -> None:
    batch = rows_to_tensors(mixed_rows(), PAD)
    assert batch["tool_mask"].tolist() == [[1, 1, 0, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
    logps = batch["sampling_per_token_logps"]
    assert logps[0].tolist() == [-0.75, -1.0, 0.0, -1.25, -1.5]
    assert (logps[batch["tool_mask"] == 0] == 0).all()


def test_trained_ids_are_the_sampled_ids() -> None:
    batch = rows_to_tensors([*mixed_rows(), padding_row(PAD)], PAD)
    for index, item in enumerate(mixed_rows()):
        prompt = batch["prompt_ids"][index][batch["prompt_mask"][index].bool()]
        completion = batch["completion_ids"][index][batch["completion_mask"][index].bool()]
        assert prompt.tolist() == item.row.prompt_ids
        assert completion.tolist() == item.row.completion_ids


def test_a_list_of_advantages_is_split_over_the_rollouts_rows() -> None:
    scored = block(rollout(0, TWO_TURNS, 1.0), rollout(1, FORKED, 0.0, advantage=[0.1, 0.2, 0.3, 0.4]))
    rows, _ = block_rows(scored, rollout_advantages(scored, scale_rewards="none"))
    assert [item.advantage for item in rows] == [0.5, [0.1, 0.2, 0.3], [0.4]]
    advantages_rc = rows_to_tensors(rows, PAD)["advantages"]
    expected = [[0.5, 0.5, 0, 0.5, 0.5], [0.1, 0.2, 0.3, 0, 0], [0.4, 0, 0, 0, 0]]
    torch.testing.assert_close(advantages_rc, torch.tensor(expected))


def test_a_list_of_advantages_skips_the_environments_tokens() -> None:
    scored = block(rollout(0, TWO_TURNS, 1.0, advantage=[1.0, 2.0, 3.0, 4.0]))
    rows, _ = block_rows(scored, rollout_advantages(scored))
    assert rows_to_tensors(rows, PAD)["advantages"].tolist() == [[1, 2, 0, 3, 4]]


def test_a_row_that_is_too_long_is_dropped_with_its_reason_and_never_cut() -> None:
    scored = mixed_block()
    rows, dropped = block_rows(scored, rollout_advantages(scored), max_seq_len=5)
    assert [item.row.completion_ids for item in rows] == [[3, 4, 5], [6]]
    key = scored.rollouts[0].key
    assert Dropped(key, "longer_than_max_seq_len", row=0, tokens=7) in dropped
    assert Dropped(scored.rollouts[1].key, "provider_error") in dropped
    assert len(dropped) == 2


def test_the_rest_of_a_rollout_counts_as_the_whole_of_it() -> None:
    scored = block(rollout(0, FORKED, 1.0), rollout(1, FORKED, 0.0, advantage=[1.0, 2.0, 3.0, 4.0]))
    longer = scored.rollouts[1].rows[0]
    longer.prompt_ids = [1, 2, 2, 2]
    rows, dropped = block_rows(scored, rollout_advantages(scored), max_seq_len=6)
    assert [(item.rollout_index, item.rollout_sampled_tokens) for item in rows] == [(0, 4), (0, 4), (1, 1)]
    assert rows[-1].advantage == [4.0]
    assert [(item.key.generation, item.row) for item in dropped] == [(1, 0)]


def test_every_rollout_is_trained_on_or_recorded_as_dropped() -> None:
    empty = Row([1, 2], [9], [0], [0.0], [-1])
    scored = block(
        rollout(0, TWO_TURNS, 1.0),
        rollout(1, [], None),
        rollout(2, [], 0.5),
        rollout(3, [], 0.0, rows=[empty]),
        rollout(4, [turn([], [3])], 0.0),
    )
    rows, dropped = block_rows(scored, rollout_advantages(scored))
    assert [item.rollout_index for item in rows] == [0]
    assert [item.reason for item in dropped] == [
        "provider_error",
        "no_sampled_tokens",
        "no_sampled_tokens",
        "empty_prompt",
    ]


def test_a_row_without_sampled_tokens_is_skipped_beside_one_that_has_them() -> None:
    empty = Row([1, 2], [9], [0], [0.0], [-1])
    scored = block(rollout(0, TWO_TURNS, 1.0), rollout(1, FORKED, 0.0))
    scored.rollouts[1].rows.insert(0, empty)
    rows, dropped = block_rows(scored, rollout_advantages(scored))
    assert len(rows) == 3
    assert dropped == []


def test_a_padding_row_is_seen_by_attention_and_not_by_the_loss() -> None:
    batch = rows_to_tensors([padding_row(5), padding_row(5)], PAD)
    assert batch["prompt_ids"].tolist() == batch["completion_ids"].tolist() == [[5], [5]]
    for name, value in (("prompt_mask", 1), ("completion_mask", 1), ("tool_mask", 0)):
        assert (batch[name] == value).all()
    for name, value in (("advantages", 0), ("sampled_tokens", 0), ("rollout_index", -1), ("policy_versions", -1)):
        assert batch[name].tolist() == [value] * 2
    assert batch["is_padding"].all()


def test_each_tensor_row_stays_one_row_through_shuffle_and_split() -> None:
    # The shuffle is undone by what identifies a row, so any misalignment shows.
    whole = rows_to_tensors([*mixed_rows(), padding_row(PAD)], PAD)
    chunks = split_tensor_dict(shuffle_tensor_dict(whole, (2, 3, 0, 1)), 2)
    for chunk in chunks:
        present = {name: value for name, value in chunk.items() if value is not None}
        for index in range(2):
            lengths = present["completion_mask"][index].sum().item(), present["tool_mask"][index].sum().item()
            assert (present["rollout_index"][index].item(), lengths) in [
                (0, (5, 4)),
                (2, (3, 3)),
                (2, (1, 1)),
                (-1, (1, 0)),
            ]


def test_rows_of_one_pass_stack_to_the_longest_of_them_without_padding_on_the_left() -> None:
    rows = [row for row in mixed_rows() if row.rollout_index == 2]
    batch = rows_to_tensors(even_prompts(rows), PAD)
    assert batch["prompt_ids"].tolist() == [[1, 2], [1, 8]]
    assert batch["completion_ids"].tolist() == [[3, 4, 5], [2, 7, 6]]
    assert batch["tool_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch["completion_mask"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert batch["sampling_per_token_logps"].tolist() == [[-0.75, -1.0, -1.25], [0.0, 0.0, -1.5]]
    for name in ("policy_versions", "sampled_tokens", "rollout_sampled_tokens", "advantages"):
        assert batch[name].tolist() == rows_to_tensors(rows, PAD)[name].tolist()


def test_even_prompts_move_no_token_of_a_sequence_and_no_loss() -> None:
    rows = [*mixed_rows(), padding_row(PAD)]
    for one, other in zip(rows, even_prompts(rows), strict=True):
        assert one.row.prompt_ids + one.row.completion_ids == other.row.prompt_ids + other.row.completion_ids
        for fill, name in ((0, "loss_mask"), (0.0, "logprobs"), (-1, "versions")):
            moved = [fill] * (len(one.row.prompt_ids) - len(other.row.prompt_ids))
            assert getattr(other.row, name) == moved + getattr(one.row, name)
        assert (one.advantage, one.rollout_index) == (other.advantage, other.rollout_index)


def test_completions_of_one_token_keep_a_second_column() -> None:
    rows = [TrainingRow(Row([1, 2, 3], [4], [1], [-0.5], [0]), 1.0, 0, 1)] * 2
    assert rows_to_tensors(even_prompts(rows), PAD)["completion_ids"].tolist() == [[3, 4], [3, 4]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, "empty prompt"),
        ({"completion_ids": []}, "empty completion"),
        ({"logprobs": [-1.0]}, "different lengths"),
    ],
)
def test_a_row_that_cannot_be_trained_is_refused(change: dict[str, Any], message: str) -> None:
    item = mixed_rows()[0]
    with pytest.raises(ConfigError, match=message):
        rows_to_tensors([dataclasses.replace(item, row=dataclasses.replace(item.row, **change))], PAD)


def test_no_rows_at_all_are_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="padding_row"):
        rows_to_tensors([], PAD)


def test_a_list_of_advantages_of_the_wrong_length_is_refused() -> None:
    item = dataclasses.replace(mixed_rows()[0], advantage=[1.0])
    with pytest.raises(ConfigError, match="1 advantages for 4 sampled tokens"):
        rows_to_tensors([item], PAD)
    scored = mixed_block()
    with pytest.raises(ConfigError, match="1 advantages for 4 sampled tokens"):
        block_rows(scored, {scored.rollouts[0].key: [1.0]})
