"""Rollouts to tensors: rows are picked, padded and stacked under the names that TRL's loss reads.

Row i of every tensor is the same training row. Token ids come from the trace as they are: nothing is cut,
re-tokenized or realigned. A row that does not fit is dropped with a reason.

Not promised here: weights that make each rollout count once (see `train.row_weights`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verifiers.errors import ConfigError
from verifiers.rollouts.rollout import Rollout, ScoredBlock
from verifiers.rollouts.trace import Row
from verifiers.train.advantages import BlockAdvantages
from verifiers.types import RolloutKey

__all__ = [
    "COMPLETION_COLUMNS",
    "PADDING_INDEX",
    "PROMPT_COLUMNS",
    "Dropped",
    "TrainingRow",
    "block_rows",
    "even_prompts",
    "padding_row",
    "rollout_tokens",
    "row_length",
    "rows_to_tensors",
]

PADDING_INDEX = -1
"""`rollout_index` of a padding row: it belongs to no rollout."""

PROMPT_COLUMNS = ("prompt_ids", "prompt_mask")
"""Tensors of shape (R, P), padded on the left."""

COMPLETION_COLUMNS = (
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "sampling_per_token_logps",
    "old_per_token_logps",
    "ref_per_token_logps",
    "importance_sampling_ratio",
    "advantages",
)
"""Tensors that, where they are two-dimensional, have shape (R, C), padded on the right."""


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One training sequence and what the loss needs to know about it.

    Attributes:
        row: the tokens.
        advantage: one float, or one per sampled token of this row.
        rollout_index: place of its rollout in the block's plan order; `PADDING_INDEX` for a padding row.
        rollout_sampled_tokens: sampled tokens of the rollout, over all its rows that are trained on.
    """

    row: Row
    advantage: float | list[float]
    rollout_index: int
    rollout_sampled_tokens: int

    @property
    def is_padding(self) -> bool:
        return self.rollout_index == PADDING_INDEX


@dataclass(frozen=True, slots=True)
class Dropped:
    """A rollout, or one of its rows, that is not trained on.

    Attributes:
        key: the rollout.
        reason: why it got no advantage (see `BlockAdvantages.left_out`), "no_sampled_tokens", "stale",
            "longer_than_max_seq_len", "empty_prompt", "zero_advantage", "zero_variance" or "run_ended".
        row: place of the row in `Rollout.rows`; None where the whole rollout is meant.
        tokens: prompt and completion tokens of what is dropped.
    """

    key: RolloutKey
    reason: str
    row: int | None = None
    tokens: int = 0


def block_rows(
    block: ScoredBlock,
    advantages: Mapping[RolloutKey, float | list[float]],
    max_seq_len: int | None = None,
    oldest_version: int | None = None,
) -> tuple[list[TrainingRow], list[Dropped]]:
    """Pick the rows of a block that are trained on, in plan order.

    Args:
        block: the scored block.
        advantages: of the rollouts to train on, from `rollout_advantages`.
        max_seq_len: most prompt and completion tokens of a row together; None for no limit.
        oldest_version: rollouts with a token of an older policy version are dropped whole; None for no limit.

    Returns:
        The rows, and what was dropped: whole rollouts (one entry each), and rows that are too long. Rows of a
        rollout without a sampled token carry no loss; they are skipped silently as long as another row of
        the rollout is trained on. Where a row is dropped, the rollout's other rows make up the whole of it.

    Raises:
        ConfigError: where a list of advantages has not one value per sampled token of its rollout.
    """
    reasons = advantages.left_out if isinstance(advantages, BlockAdvantages) else {}
    rows: list[TrainingRow] = []
    dropped: list[Dropped] = []
    for index, rollout in enumerate(block.rollouts):
        if rollout.key not in advantages:
            default = rollout.outcome.value if rollout.outcome.is_failure else "no_advantage"
            tokens = rollout_tokens(rollout)
            dropped.append(Dropped(rollout.key, reasons.get(rollout.key, default), tokens=tokens))
            continue
        if oldest_version is not None and any(row.oldest_version < oldest_version for row in rollout.rows):
            dropped.append(Dropped(rollout.key, "stale", tokens=rollout_tokens(rollout)))
            continue
        kept, lost = _split_rollout(rollout, advantages[rollout.key], max_seq_len)
        sampled = sum(row.sampled_tokens for row, _ in kept)
        rows += [TrainingRow(row, advantage, index, sampled) for row, advantage in kept]
        if not kept and not lost:
            lost = [Dropped(rollout.key, "no_sampled_tokens", tokens=rollout_tokens(rollout))]
        dropped += lost
    return rows, dropped


def _split_rollout(
    rollout: Rollout, advantage: float | list[float], max_seq_len: int | None
) -> tuple[list[tuple[Row, float | list[float]]], list[Dropped]]:
    """Rows of a rollout that are trained on, each with its share of the advantage, and those that cannot be."""
    sampled = sum(row.sampled_tokens for row in rollout.rows)
    if isinstance(advantage, list) and len(advantage) != sampled:
        raise ConfigError(f"{rollout.key} has {len(advantage)} advantages for {sampled} sampled tokens")
    kept: list[tuple[Row, float | list[float]]] = []
    lost: list[Dropped] = []
    start = 0
    for place, row in enumerate(rollout.rows):
        end = start + row.sampled_tokens
        if end == start:
            continue
        share = advantage[start:end] if isinstance(advantage, list) else advantage
        start = end
        if max_seq_len is not None and _length(row) > max_seq_len:
            lost.append(Dropped(rollout.key, "longer_than_max_seq_len", place, _length(row)))
        elif not row.prompt_ids:
            # The first completion token is predicted from the token before it; without one the
            # trainer would score it from padding.
            lost.append(Dropped(rollout.key, "empty_prompt", place, _length(row)))
        else:
            kept.append((row, share))
    return kept, lost


def padding_row(pad_token_id: int) -> TrainingRow:
    """What fills up a pass: one prompt and one completion token that attention sees and the loss does not.

    A row masked whole would give NaN in some attention kernels, and an empty completion an IndexError in TRL.

    Args:
        pad_token_id: token id of both; any id of the vocabulary does.
    """
    row = Row([pad_token_id], [pad_token_id], loss_mask=[0], logprobs=[0.0], versions=[-1])
    return TrainingRow(row, 0.0, PADDING_INDEX, 0)


def even_prompts(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """The same sequences, cut into prompt and completion at one place, so that they stack to the longest of them.

    TRL pads prompts on the left and completions on the right, to the longest prompt plus the longest completion.
    Here the prompts' tokens past the shortest prompt stand before the completion, masked out of the loss as an
    environment's tokens are, and nothing is padded on the left (but a padding row, whose prompt is shorter).
    """
    real = [item.row for item in rows if not item.is_padding]
    if not real:
        return list(rows)
    shared = min(len(row.prompt_ids) for row in real)
    # TRL takes a tensor of one column for values of whole rows
    if shared > 1 and max(map(_length, real)) == shared + 1:
        shared -= 1
    return [item if item.is_padding else replace(item, row=_cut_at(item.row, shared)) for item in rows]


def _cut_at(row: Row, place: int) -> Row:
    moved = row.prompt_ids[place:]
    return replace(
        row,
        prompt_ids=row.prompt_ids[:place],
        completion_ids=[*moved, *row.completion_ids],
        loss_mask=[*[0] * len(moved), *row.loss_mask],
        logprobs=[*[0.0] * len(moved), *row.logprobs],
        versions=[*[-1] * len(moved), *row.versions],
    )


def rows_to_tensors(rows: Sequence[TrainingRow], pad_token_id: int) -> dict[str, Tensor]:
    """Stack R rows; P is the longest prompt, C the longest completion.

    Args:
        rows: at least one row.
        pad_token_id: fills prompts on the left and completions on the right.

    Returns:
        CPU tensors by name; ids, masks, versions and counts are int64, log-probs and advantages float32:

        - `prompt_ids`, `prompt_mask` (R, P)
        - `completion_ids` (R, C); `completion_mask` (R, C): 1 on every real token, for attention
        - `tool_mask` (R, C): 1 on sampled tokens alone, for the loss
        - `sampling_per_token_logps` (R, C): the sampler's, in nats; 0.0 off the sampled tokens
        - `advantages` (R,), or (R, C) as soon as one row has an advantage per token; then 0.0 off those
        - `policy_versions` (R,): oldest version of the row's sampled tokens; -1 for a padding row
        - `rollout_index`, `sampled_tokens`, `rollout_sampled_tokens` (R,); `is_padding` (R,) bool

    Raises:
        ConfigError: where there is no row, a row has an empty prompt or completion, or a row's lists have
            different lengths.
    """
    if not rows:
        raise ConfigError("no rows to stack; `padding_row` gives what stands where a block has nothing to train on")
    for item in rows:
        _check_row(item)
    prompts = [item.row.prompt_ids for item in rows]
    completions = [item.row.completion_ids for item in rows]
    width = max(map(len, completions))
    tool_mask_RC = _right([item.row.loss_mask for item in rows], width, 0)
    return {
        "prompt_ids": _left(prompts, pad_token_id),
        "prompt_mask": _left([[1] * len(ids) for ids in prompts], 0),
        "completion_ids": _right(completions, width, pad_token_id),
        "completion_mask": _right([[1] * len(ids) for ids in completions], width, 0),
        "tool_mask": tool_mask_RC,
        "sampling_per_token_logps": _right([_sampler_logps(item.row) for item in rows], width, 0.0),
        "advantages": _advantages(rows, tool_mask_RC),
        "policy_versions": torch.tensor([-1 if item.is_padding else item.row.oldest_version for item in rows]),
        "rollout_index": torch.tensor([item.rollout_index for item in rows]),
        "sampled_tokens": torch.tensor([item.row.sampled_tokens for item in rows]),
        "rollout_sampled_tokens": torch.tensor([item.rollout_sampled_tokens for item in rows]),
        "is_padding": torch.tensor([item.is_padding for item in rows]),
    }


def rollout_tokens(rollout: Rollout) -> int:
    """Prompt and completion tokens of a rollout, over its rows."""
    return sum(map(_length, rollout.rows))


def row_length(item: TrainingRow) -> int:
    """Prompt and completion tokens of a training row."""
    return _length(item.row)


def _length(row: Row) -> int:
    return len(row.prompt_ids) + len(row.completion_ids)


def _check_row(item: TrainingRow) -> None:
    row = item.row
    if not row.prompt_ids or not row.completion_ids:
        side = "completion" if row.prompt_ids else "prompt"
        raise ConfigError(f"a row of rollout {item.rollout_index} has an empty {side}; leave such rows out")
    lengths = {
        "completion_ids": len(row.completion_ids),
        "loss_mask": len(row.loss_mask),
        "logprobs": len(row.logprobs),
    }
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"a row of rollout {item.rollout_index} has lists of different lengths: {lengths}")
    if isinstance(item.advantage, list) and len(item.advantage) != row.sampled_tokens:
        raise ConfigError(
            f"a row of rollout {item.rollout_index} has {len(item.advantage)} advantages "
            f"for {row.sampled_tokens} sampled tokens"
        )


def _sampler_logps(row: Row) -> list[float]:
    return [logp if sampled else 0.0 for logp, sampled in zip(row.logprobs, row.loss_mask, strict=True)]


def _advantages(rows: Sequence[TrainingRow], tool_mask_RC: Tensor) -> Tensor:
    if not any(isinstance(item.advantage, list) for item in rows):
        return torch.tensor([item.advantage for item in rows], dtype=torch.float32)
    advantages_RC = torch.zeros(tool_mask_RC.shape, dtype=torch.float32)
    for index, item in enumerate(rows):
        advantages_RC[index, tool_mask_RC[index].bool()] = torch.as_tensor(item.advantage, dtype=torch.float32)
    return advantages_RC


def _left(values: Sequence[Sequence[int]], fill: int) -> Tensor:
    width = max(map(len, values))
    return torch.tensor([[fill] * (width - len(row)) + list(row) for row in values])


def _right(values: Sequence[Sequence[float]], width: int, fill: float) -> Tensor:
    dtype = torch.float32 if isinstance(fill, float) else torch.int64
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in values], dtype=dtype)
