"""Evaluation: roll out every prompt of a dataset some times, score, and sum up honestly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verifiers.data.plan import rollout_seed
from verifiers.envs.dataset_format import row_fields
from verifiers.errors import NothingScoredError
from verifiers.evals.statistics import Estimate, mean_and_stderr_clustered
from verifiers.rollouts.rollout import Rollout, RolloutRequest, ScoredBlock
from verifiers.rollouts.run import RolloutRunner
from verifiers.types import RolloutKey

__all__ = ["EVALUATION_BLOCK", "estimates", "evaluation_requests", "run_evaluation"]

EVALUATION_BLOCK = 2**31
"""Block id of evaluation rollouts: far from any training block's, so that their sampling seeds differ."""


def evaluation_requests(dataset: Any, rollouts_per_example: int, seed: int | None) -> list[list[RolloutRequest]]:
    """The rollouts of an evaluation, one list a prompt.

    Args:
        seed: each rollout's sampling seed is derived from it; None sends no seed.
    """
    groups = []
    for example_id in range(len(dataset)):
        prompt, answer, task, info = row_fields(dataset[example_id])
        keys = [RolloutKey(EVALUATION_BLOCK, example_id, generation) for generation in range(rollouts_per_example)]
        groups.append(
            [
                RolloutRequest(key, prompt, answer, task, info, None if seed is None else rollout_seed(seed, key))
                for key in keys
            ]
        )
    return groups


async def run_evaluation(
    runner: RolloutRunner,
    groups: Sequence[Sequence[RolloutRequest]],
    on_rollout: Callable[[Rollout], None] | None = None,
) -> ScoredBlock:
    """Run and score all groups under the runner's limiter.

    Args:
        on_rollout: called with every finished rollout, as it finishes.

    Raises:
        NothingScoredError: no rollout got a reward; the message has the commonest cause.
    """
    if on_rollout is not None:
        runner.on_rollout = on_rollout
    scored = await runner.run_groups(groups)
    block = ScoredBlock(EVALUATION_BLOCK, scored)
    if not any(rollout.is_scored for rollout in block):
        commonest = block.commonest_failure()
        cause = f"; most often: {commonest[0]} ({commonest[1]} times)" if commonest else ""
        raise NothingScoredError(f"none of {len(block.rollouts)} evaluation rollouts got a reward{cause}")
    return block


def estimates(block: ScoredBlock) -> dict[str, Estimate]:
    """Mean, clustered standard error and 95 % interval of "reward" and of each reward function."""
    names = sorted({name for rollout in block for name in rollout.metrics})
    found = {"reward": _estimate([[r.reward for r in group.scored] for group in block.groups])}
    for name in names:
        found[name] = _estimate([[r.metrics.get(name) for r in group.scored] for group in block.groups])
    return found


def _estimate(values: Sequence[Sequence[float | None]]) -> Estimate:
    groups = [[value for value in group if value is not None] for group in values]
    return mean_and_stderr_clustered([group for group in groups if group])
