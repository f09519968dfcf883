"""The metrics of a block, under TRL's names where there is one.

A mean is always a mean over what exists: rewards over scored rollouts, lengths over rollouts with sampled
tokens that did not fail. Counts are counts, so that ranks and blocks can be added up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev, stdev
from typing import Any

import numpy as np

from verifiers.data.batch_plan import BatchPlan
from verifiers.data.row_source import ObservesBlocks
from verifiers.envs.tools import read_call
from verifiers.inference.wire import whole_characters
from verifiers.parsers.messages import message_to_printable
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock
from verifiers.train.batching.micro_batches import DEMONSTRATION, all_micro_batches
from verifiers.train.batching.training_block import TrainingBlock
from verifiers.types import Outcome, RolloutKey

_STANDS = ("num_tokens", "curriculum/", "sampling/probe_difference")
"""How metrics begin that tell where the run stands and not what a block was."""

_COUNT = re.compile("rows/dropped/.+|rows/demonstrations|tasks/.+/(prompts|failed)")
"""Counts that a block has only where they are not 0."""


def block_metrics(
    block: ScoredBlock,
    trained: TrainingBlock,
    plan: BatchPlan,
    *,
    optimizer_step: int | None = None,
    chunk_size: int | None = None,
) -> dict[str, float]:
    """Return every metric of one block, from its rollouts and what is trained of them.

    Args:
        chunk_size: sequences that a server in this process generates at once.
    """
    # those of filtered groups too: a mean over what is kept would show the filter, not the policy
    rollouts = list(block.launched)
    scored = [rollout for rollout in rollouts if rollout.is_scored]
    everything = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    of_rank_0 = _rewards_of_rank_0(block, trained, plan.num_processes)
    mean = fmean(everything) if everything else math.nan
    # not the mean of the ranks' means, which is wrong as soon as they hold different numbers of completions
    metrics = {
        "reward": mean,
        "reward/mean_per_completion_global": mean,
        "reward/denominator/completions_local": float(len(of_rank_0)),
        "reward/denominator/completions_global": float(len(everything)),
    }
    if of_rank_0:
        metrics["reward/mean_per_completion"] = fmean(of_rank_0)
    if everything:
        metrics |= {"reward/min": min(everything), "reward/max": max(everything)}
    metrics["rollouts/with_advantage"] = float(_with_advantage(block, trained))
    deviations = _deviations(block, trained)
    metrics.update(_spread([std for _, std in deviations]))
    metrics.update(_reward_functions(scored))
    metrics.update(_outcomes(rollouts))
    metrics.update(_drops(trained))
    metrics.update(_tasks(deviations))
    metrics.update(_roles(scored))
    metrics.update(_lengths(block))
    metrics.update(_rows(rollouts, trained))
    metrics.update(_timing(block))
    oldest = trained.oldest_version() if optimizer_step is not None else None
    if oldest is not None and optimizer_step is not None:
        metrics["staleness"] = float(optimizer_step - oldest)
    metrics["rollouts/groups_replaced"] = float(len(block.filtered))
    metrics["rollouts/completions_per_prompt"] = float(plan.num_generations)
    if chunk_size is not None:
        metrics["rollouts/chunk_size"] = float(chunk_size)
    metrics["rollouts/total_per_process"] = plan.completions_per_block / plan.num_processes
    return metrics


def _with_advantage(block: ScoredBlock, trained: TrainingBlock) -> int:
    """Return how many rollouts have an advantage, or a teacher's log-probs; the KL penalty's alone does not count."""
    without = {
        rollout.key
        for group, values in zip(block.groups, trained.advantages.result.advantages, strict=True)
        for rollout, value in zip(group.rollouts, values, strict=True)
        # a list is given, or of turns
        if value == 0.0 and rollout.advantage is None and not isinstance(trained.advantages.get(rollout.key), list)
    }
    taught = {rollout.key for rollout in block.rollouts if any(row.teacher_logprobs for row in rollout.rows)}
    return sum(
        key in taught or (_has_gradient(given) and key not in without) for key, given in trained.advantages.items()
    )


def _deviations(block: ScoredBlock, trained: TrainingBlock) -> list[tuple[Group, float | None]]:
    """Return each group with the deviation of its rewards; the ones that were replaced too, which had none."""
    kept = zip(block.groups, trained.advantages.result.group_stds, strict=True)
    return [*kept, *((group, 0.0) for group in block.filtered)]


def _spread(deviations: Iterable[float | None]) -> dict[str, float]:
    stds = [std for std in deviations if std is not None]
    if not stds:
        return {}
    return {"reward_std": fmean(stds), "frac_reward_zero_std": stds.count(0.0) / len(stds)}


def _has_gradient(advantage: float | list[float]) -> bool:
    return any(advantage) if isinstance(advantage, list) else bool(advantage)


def _rewards_of_rank_0(block: ScoredBlock, trained: TrainingBlock, ranks: int) -> list[float]:
    """Return the rewards of the rollouts that rank 0, which logs, trains a row of, and its share of the untrained.

    Which rows are left out, as for an advantage of 0, must not decide what the mean is over.
    """
    rollouts, by_rank = block.rollouts, [set[RolloutKey]() for _ in range(ranks)]
    for micro_step in trained.micro_steps:
        for keys, batches in zip(by_rank, micro_step, strict=True):
            places = (place for batch in batches for place in batch["rollout_index"].tolist() if place >= 0)
            keys |= {rollouts[place].key for place in places}
    scored = [(rollout.key, rollout.reward) for rollout in block.launched if rollout.reward is not None]
    untrained = [reward for key, reward in scored if not any(key in keys for keys in by_rank)]
    return [*(reward for key, reward in scored if key in by_rank[0]), *untrained[::ranks]]


def _reward_functions(scored: Sequence[Rollout]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name in sorted({name for rollout in scored for name in rollout.metrics}):
        values = [rollout.metrics[name] for rollout in scored if name in rollout.metrics]
        metrics[f"rewards/{name}/mean"] = fmean(values)
        metrics[f"rewards/{name}/std"] = stdev(values) if len(values) > 1 else 0.0
    return metrics


def _outcomes(rollouts: Sequence[Rollout]) -> dict[str, float]:
    counts = dict.fromkeys(Outcome, 0)
    for rollout in rollouts:
        counts[rollout.outcome] += 1
    metrics = {f"outcomes/{outcome}": float(count) for outcome, count in counts.items()}
    metrics["rollouts/launched"] = float(len(rollouts))
    metrics["rollouts/failed"] = float(sum(count for outcome, count in counts.items() if outcome.is_failure))
    metrics["rollouts/retries"] = float(sum(rollout.attempts - 1 for rollout in rollouts))
    return metrics


def _sampled(rollout: Rollout) -> int:
    return sum(row.sampled_tokens for row in rollout.rows)


def _sampled_ids(rollout: Rollout) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row.completion_ids) for row in rollout.rows)


def _lengths(block: ScoredBlock) -> dict[str, float]:
    # a failed rollout neither ended nor ran out of tokens: it was cut off, wherever it stood
    per_prompt = [[r for r in group.rollouts if r.rows and not r.outcome.is_failure] for group in block.groups]
    played = [rollout for rollouts in per_prompt for rollout in rollouts]
    if not played:
        return {}
    lengths = [_sampled(rollout) for rollout in played]
    ended = [_sampled(rollout) for rollout in played if not rollout.is_truncated]
    groups = [rollouts for rollouts in per_prompt if len(rollouts) > 1]
    identical = sum(len({_sampled_ids(rollout) for rollout in rollouts}) == 1 for rollouts in groups)
    by_prompt = [[_sampled(rollout) for rollout in rollouts] for rollouts in per_prompt if rollouts]
    means = [fmean(values) for values in by_prompt]
    cut = len(played) - len(ended)
    metrics = {
        "completions/mean_length": fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": cut / len(lengths),
        "completions/per_prompt/mean_length_min": min(means),
        "completions/per_prompt/mean_length_max": max(means),
        "completions/per_prompt/length_std": fmean([pstdev(values) for values in by_prompt]),
        "completions/frac_identical_groups": identical / max(1, len(groups)),
        "eos_stop_rate": len(ended) / len(lengths),
        "no_eos_max_length_rate": cut / len(lengths),
    }
    if ended:
        metrics["completions/mean_terminated_length"] = fmean(ended)
        metrics["completions/min_terminated_length"] = float(min(ended))
        metrics["completions/max_terminated_length"] = float(max(ended))
    return metrics


def _rows(rollouts: Sequence[Rollout], trained: TrainingBlock) -> dict[str, float]:
    turns = sum(rollout.turns for rollout in rollouts)
    batches = list(all_micro_batches(trained.micro_steps))
    real = sum(int((batch["sampled_tokens"] > 0).sum()) for batch in batches)
    padding = sum(int(batch["is_padding"].sum()) for batch in batches)
    shown = sum(int((batch["rollout_index"] == DEMONSTRATION).sum()) for batch in batches)
    return {
        "rollouts/turns": turns / max(1, len(rollouts)),
        "rollouts/fork_rate": sum(rollout.forks for rollout in rollouts) / max(1, turns),
        "rows/trained": float(real),
        "rows/padding": float(padding),
        **({"rows/demonstrations": float(shown)} if shown else {}),
        "rows/dropped": float(len(trained.dropped)),
    }


def _drops(trained: TrainingBlock) -> dict[str, float]:
    """Count what is not trained on by reason, with its mean length, which is seldom the usual one."""
    metrics: dict[str, float] = {}
    for reason in sorted({item.reason for item in trained.dropped}):
        tokens = [item.tokens for item in trained.dropped if item.reason == reason]
        metrics[f"rows/dropped/{reason}"] = float(len(tokens))
        metrics[f"rows/dropped_tokens/{reason}"] = fmean(tokens)
    return metrics


def _tasks(deviations: Sequence[tuple[Group, float | None]]) -> dict[str, float]:
    """Return the main metrics of each environment of a mixture, by the rollouts' `task`."""
    by_task: dict[str, list[tuple[Group, float | None]]] = {}
    for group, std in deviations:
        by_task.setdefault(group.rollouts[0].task, []).append((group, std))
    if set(by_task) == {"default"}:
        return {}
    metrics: dict[str, float] = {}
    for task, groups in sorted(by_task.items()):
        rollouts = [rollout for group, _ in groups for rollout in group.rollouts]
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        lengths = [_sampled(rollout) for rollout in rollouts if rollout.rows and not rollout.outcome.is_failure]
        spread = _spread([std for _, std in groups])
        metrics[f"tasks/{task}/prompts"] = float(len(groups))
        metrics[f"tasks/{task}/failed"] = float(sum(rollout.outcome.is_failure for rollout in rollouts))
        if rewards:
            metrics[f"tasks/{task}/reward"] = fmean(rewards)
        if lengths:
            metrics[f"tasks/{task}/mean_length"] = fmean(lengths)
        if spread:
            metrics[f"tasks/{task}/frac_reward_zero_std"] = spread["frac_reward_zero_std"]
    return metrics


def _roles(scored: Sequence[Rollout]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for role in sorted({role for rollout in scored for role in rollout.role_rewards or ()}):
        given = [one for one in scored if role in (one.role_rewards or ())]
        metrics[f"roles/{role}/reward"] = fmean((one.role_rewards or {})[role] for one in given)
        lengths = [sum(row.sampled_tokens for row in one.rows if row.role == role) for one in given]
        metrics[f"roles/{role}/mean_length"] = fmean(lengths)
    return metrics


def _timing(block: ScoredBlock) -> dict[str, float]:
    latencies = [rollout.timing.generation_s for rollout in block]
    metrics = {
        "time/block_generation_s": block.generation_s,
        "rollouts/sampled_tokens": float(sum(map(_sampled, block))),
        "rollouts/tokens_per_s": sum(map(_sampled, block)) / max(block.generation_s, 1e-9),
    }
    if latencies:
        for name, share in (("p50", 0.50), ("p95", 0.95), ("max", 1.0)):
            metrics[f"time/rollout_{name}_s"] = float(np.quantile(latencies, share, method="inverted_cdf"))
        metrics["time/scoring_mean_s"] = fmean(rollout.timing.scoring_s for rollout in block)
    return metrics


def curriculum_metrics(plan: BatchPlan, block: ScoredBlock) -> dict[str, float]:
    """Report a scored block to an adaptive curriculum and return where the curriculum stands.

    To be called on rank 0, in the order of the blocks.
    """
    source = plan.source
    if source is None:
        return {}
    if isinstance(source, ObservesBlocks):
        rewards = {
            group.example_id: [float(rollout.reward) for rollout in group.scored if rollout.reward is not None]
            for group in block.groups
        }
        source.observe(block.block_id, rewards)
        return source.metrics()
    first_update = block.block_id * plan.updates_per_block
    return {"curriculum/stage": float(sum(step <= first_update for step in source.until_steps))}


def note_values(noted: dict[str, list[float]], metrics: Mapping[str, float]) -> None:
    """Keep values for the next log, which takes their mean; of those that tell where the run stands, the newest."""
    for name, value in metrics.items():
        before = [] if name.startswith(_STANDS) else noted[name]
        noted[name] = [*before, value]


def fill_counts(noted: Mapping[str, list[float]]) -> None:
    """Add a 0 to each count for each block that has nothing of it, so that the mean is over all blocks."""
    blocks = len(noted.get("rows/dropped", ()))
    for name, values in noted.items():
        if _COUNT.fullmatch(name):
            values += [0.0] * (blocks - len(values))


def block_tokens(block: ScoredBlock) -> int:
    """Return the prompt and completion tokens of every call of a block's rollouts."""
    used = [rollout.usage for rollout in block.launched]
    return sum((each.prompt_tokens or 0) + (each.completion_tokens or 0) for each in used)


def fill_completions_table(table: Any, block: ScoredBlock, trained: TrainingBlock) -> None:
    """Put the scored rollouts of the newest block into the table that TRL shows and saves with `log_completions`.

    Its columns have one type and one length: messages are role and text, with tool calls as they were written, which
    TRL would parse; what a rollout has no value of is NaN.
    """
    rollouts = [rollout for rollout in block if rollout.is_scored]
    given = [trained.advantages.get(rollout.key, 0.0) for rollout in rollouts]
    columns = {
        "prompt": [_told(rollout.prompt, "user") for rollout in rollouts],
        "completion": [_told(rollout.completion, "assistant") for rollout in rollouts],
        "advantages": [fmean(each) if isinstance(each, list) else each for each in given],
    }
    for name, column in columns.items():
        table[name].clear()
        table[name].extend(column)
    table["rewards"].clear()
    for name in dict.fromkeys(name for rollout in rollouts for name in rollout.metrics):
        values = [rollout.metrics.get(name) for rollout in rollouts]
        table["rewards"][name].extend(math.nan if value is None else value for value in values)


def _told(messages: Any, role: str) -> list[dict[str, str]]:
    told = []
    for message in [{"role": role, "content": messages}] if isinstance(messages, str) else messages:
        shown = message_to_printable(message)
        calls = [f"{call.name}({call.arguments})" for call in map(read_call, shown.get("tool_calls") or ())]
        text = "\n".join(part for part in (shown["content"], *calls) if part)
        told.append({"role": str(shown["role"]), "content": whole_characters(text)})
    return told
