"""A checkpoint gives back the blocks in flight as they were, to the last bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from verifiers.errors import CheckpointError
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock, TokenSequence
from verifiers.train.checkpoint.checkpoint import PENDING_BLOCKS, load_pending_blocks, save_pending_blocks
from verifiers.types import Failure, Outcome, RolloutKey, Timing, Usage

DRAW = random.Random(0)


def a_rollout(block_id: int, generation: int, example_id: int = 3) -> Rollout:
    logprobs = [-DRAW.random() * 10 ** DRAW.randint(-20, 2) for _ in range(4)]
    return Rollout(
        RolloutKey(block_id, example_id, generation),
        Outcome.TRUNCATED,
        prompt=[{"role": "user", "content": "où"}],
        completion=[{"role": "assistant", "content": "\U0001f600 \u2028 x"}],
        answer="a",
        task="math",
        reward=DRAW.random() / 3,
        metrics={"f": DRAW.random()},
        rows=[
            TokenSequence(
                [1, 2], [3, 4, 5, 6], [1, 1, 0, 1], logprobs, [7, 8, -1, 8], True, 9, turn_lengths={0: 2, 1: 1}
            )
        ],
        forks=1,
        turns=2,
        attempts=3,
        timing=Timing(0.1, 0.2, 0.3),
        usage=Usage(4, 5),
    )


def test_blocks_come_back_as_they_were(tmp_path: Path) -> None:
    failed = Rollout(
        RolloutKey(5, 3, 1), Outcome.TIMED_OUT, "p", "", failure=Failure("TimeoutError", "late", TimeoutError("late"))
    )
    per_token = a_rollout(5, 2)
    per_token.advantage = [0.1, 1 / 3, -2.0]
    per_token.turn_rewards, per_token.turn_advantages = [0.1, 1 / 3], [None, 2.5]
    per_token.role_rewards, row = {"solver": 1 / 3}, per_token.rows[0]
    row.role, row.teacher_logprobs = "solver", [-0.1, -1 / 3, 0.0, -2.0]
    row.teacher_ids, row.teacher_ids_logprobs = [3, 1, 4], [-0.1, -1.0, -1 / 3]
    row.kept_counts, row.kept_ids = [2, 0, 0, 1], [3, 9, 4]
    blocks = [
        ScoredBlock(5, [Group(3, [a_rollout(5, 0), failed, per_token])], 4, 1.5),
        ScoredBlock(6, [Group(8, [a_rollout(6, 0, 8)])], 5, 2.5, filtered=[Group(9, [a_rollout(6, 0, 9)])]),
    ]
    save_pending_blocks(tmp_path, blocks)
    assert load_pending_blocks(tmp_path) == blocks


def test_advantages_given_as_tensors_come_back_as_numbers(tmp_path: Path) -> None:
    one, other = a_rollout(5, 0), a_rollout(5, 1)
    one.advantage, other.advantage = torch.tensor([0.5, 0.25, 1.0]), torch.tensor(2.0)  # type: ignore[assignment]
    save_pending_blocks(tmp_path, [ScoredBlock(5, [Group(3, [one, other])])])
    (block,) = load_pending_blocks(tmp_path)
    assert [rollout.advantage for rollout in block] == [[0.5, 0.25, 1.0], 2.0]


def test_what_an_environment_put_into_its_messages_is_kept_as_text(tmp_path: Path) -> None:
    rollout = a_rollout(5, 0)
    rollout.answer = Path("/somewhere")
    save_pending_blocks(tmp_path, [ScoredBlock(5, [Group(3, [rollout])])])
    (block,) = load_pending_blocks(tmp_path)
    assert block.rollouts[0].answer == "/somewhere"
    assert block.rollouts[0].rows == rollout.rows


def test_a_checkpoint_without_blocks_has_none(tmp_path: Path) -> None:
    assert load_pending_blocks(tmp_path) == []
    save_pending_blocks(tmp_path, [])
    assert load_pending_blocks(tmp_path) == []


@pytest.mark.parametrize("content", ["{", "[]\n", '{"block_id": 1}\n'], ids=["cut off", "list", "incomplete"])
def test_a_file_that_is_not_ours_is_refused_with_what_to_do(tmp_path: Path, content: str) -> None:
    (tmp_path / PENDING_BLOCKS).write_text(content)
    with pytest.raises(
        CheckpointError, match=r"blocks_in_flight\.jsonl cannot be read .* remove the file to generate"
    ):
        load_pending_blocks(tmp_path)


def test_a_token_takes_some_thirty_bytes(tmp_path: Path) -> None:
    count = 5_000
    row = TokenSequence([1] * 10, [151_000] * count, [1] * count, [-1 / 3] * count, [1_000] * count)
    rollout = Rollout(RolloutKey(0, 0, 0), Outcome.COMPLETED, "p", "", reward=1.0, rows=[row])
    save_pending_blocks(tmp_path, [ScoredBlock(0, [Group(0, [rollout])])])
    assert 25 < (tmp_path / PENDING_BLOCKS).stat().st_size / count < 45
