"""Blocks that are generated but not yet trained, as a checkpoint keeps them.

They were sampled from weights that are gone, and a resumed run trains on what the uninterrupted one would have.
The sampled tokens are exact for any server, deterministic or not, and smaller than the weights: some 30 bytes a
token, against 2 bytes a parameter and version.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verifiers.errors import CheckpointError
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock, TokenSequence
from verifiers.train.batching.advantages import plain_advantage
from verifiers.types import Failure, Outcome, RolloutKey, Timing, Usage

__all__ = ["PENDING_BLOCKS", "load_pending_blocks", "save_pending_blocks"]

PENDING_BLOCKS = "blocks_in_flight.jsonl"
"""The name of the file in a checkpoint, with one line a block."""


def save_pending_blocks(directory: Path, blocks: Iterable[ScoredBlock]) -> None:
    """Write blocks into a checkpoint that is not marked complete yet."""
    with open(directory / PENDING_BLOCKS, "w") as file:
        for block in blocks:
            json.dump(_block(block), file, default=str)
            file.write("\n")


def load_pending_blocks(directory: str | Path) -> list[ScoredBlock]:
    """Return the blocks that a checkpoint keeps; none for a run without blocks in flight.

    Raises:
        CheckpointError: the file is not what `save_pending_blocks` wrote.
    """
    path = Path(directory) / PENDING_BLOCKS
    if not path.is_file():
        return []
    try:
        with open(path) as file:
            return [_block_from(json.loads(line)) for line in file]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}); resume from an older checkpoint, or remove "
            "the file to generate these blocks again."
        ) from error


def _block(block: ScoredBlock) -> dict[str, Any]:
    return {
        "block_id": block.block_id,
        "policy_version": block.policy_version,
        "generation_s": block.generation_s,
        "groups": [[_rollout(rollout) for rollout in group.rollouts] for group in block.groups],
        "filtered": [[_rollout(rollout) for rollout in group.rollouts] for group in block.filtered],
    }


def _block_from(saved: dict[str, Any]) -> ScoredBlock:
    block_id = int(saved["block_id"])

    def groups(name: str) -> list[Group]:
        found = [[_rollout_from(block_id, one) for one in group] for group in saved[name]]
        return [Group(rollouts[0].key.example_id, rollouts) for rollouts in found]

    return ScoredBlock(
        block_id, groups("groups"), saved["policy_version"], saved["generation_s"], filtered=groups("filtered")
    )


def _rollout(rollout: Rollout) -> dict[str, Any]:
    failure = rollout.failure
    timing, usage = rollout.timing, rollout.usage
    return {
        "key": [rollout.key.example_id, rollout.key.generation],
        "outcome": rollout.outcome.value,
        "prompt": rollout.prompt,
        "completion": rollout.completion,
        "answer": rollout.answer,
        "task": rollout.task,
        "reward": rollout.reward,
        "metrics": rollout.metrics,
        "rows": [
            [
                list(row.prompt_ids),
                list(row.completion_ids),
                list(row.loss_mask),
                list(row.logprobs),
                list(row.versions),
                row.is_truncated,
            ]
            for row in rollout.rows
        ],
        "forks": rollout.forks,
        "turns": rollout.turns,
        "advantage": plain_advantage(rollout.advantage),
        "failure": [failure.kind, failure.text] if failure is not None else None,
        "attempts": rollout.attempts,
        "timing": [timing.queued_s, timing.generation_s, timing.scoring_s],
        "usage": [usage.prompt_tokens, usage.completion_tokens],
    }


def _rollout_from(block_id: int, saved: dict[str, Any]) -> Rollout:
    failure = saved["failure"]
    return Rollout(
        key=RolloutKey(block_id, *saved["key"]),
        outcome=Outcome(saved["outcome"]),
        prompt=saved["prompt"],
        completion=saved["completion"],
        answer=saved["answer"],
        task=saved["task"],
        reward=saved["reward"],
        metrics=saved["metrics"],
        rows=[TokenSequence(*row) for row in saved["rows"]],
        forks=saved["forks"],
        turns=saved["turns"],
        advantage=saved["advantage"],
        failure=Failure(*failure) if failure is not None else None,
        attempts=saved["attempts"],
        timing=Timing(*saved["timing"]),
        usage=Usage(*saved["usage"]),
    )
