"""Rollouts to row tensors, and row tensors to padded micro-batches.

Row i of every column is the same training row. Token ids come from the trace as they are: nothing is cut,
re-tokenized or realigned. A row that does not fit is dropped with a reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verifiers.errors import ConfigError
from verifiers.rollouts.rollout import Rollout, ScoredBlock, TokenSequence
from verifiers.train.batching.advantages import BlockAdvantages
from verifiers.train.batching.packing import MicroBatch, TensorDict
from verifiers.types import RolloutKey

__all__ = [
    "PADDING_INDEX",
    "Dropped",
    "TrainingSample",
    "append_padding",
    "block_samples",
    "pad_rows",
    "rollout_tokens",
    "row_lengths",
    "row_tensors",
]

PADDING_INDEX = -1
"""`rollout_index` of a padding row: it belongs to no rollout."""


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One training sequence and what the loss needs to know about it.

    Attributes:
        row: the tokens.
        advantage: one float, or one per sampled token of this row.
        rollout_index: place of its rollout in the block's plan order; `PADDING_INDEX` for a padding row.
        rollout_sampled_tokens: sampled tokens of the rollout, over all its rows that are trained on.
    """

    row: TokenSequence
    advantage: float | list[float]
    rollout_index: int
    rollout_sampled_tokens: int

    @property
    def has_gradient(self) -> bool:
        """True where the advantage of a sampled token is not 0."""
        return any(self.advantage) if isinstance(self.advantage, list) else bool(self.advantage)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A rollout, or one of its rows, that is not trained on.

    Attributes:
        key: the rollout.
        reason: why it got no advantage (see `BlockAdvantages.left_out`), "no_sampled_tokens", "stale",
            "longer_than_max_seq_len", "empty_prompt", "zero_advantage", "zero_variance", "not_finite" or "run_ended".
        row: place of the row in `Rollout.rows`; None where the whole rollout is meant.
        tokens: prompt and completion tokens of what is dropped.
    """

    key: RolloutKey
    reason: str
    row: int | None = None
    tokens: int = 0


def block_samples(
    block: ScoredBlock,
    advantages: Mapping[RolloutKey, float | list[float]],
    max_seq_len: int | None = None,
    oldest_version: int | None = None,
) -> tuple[list[TrainingSample], list[Dropped]]:
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
    """
    reasons = advantages.left_out if isinstance(advantages, BlockAdvantages) else {}
    samples: list[TrainingSample] = []
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
        samples += [TrainingSample(row, advantage, index, sampled) for row, advantage in kept]
        if not kept and not lost:
            lost = [Dropped(rollout.key, "no_sampled_tokens", tokens=rollout_tokens(rollout))]
        dropped += lost
    return samples, dropped


def _split_rollout(
    rollout: Rollout, advantage: float | list[float], max_seq_len: int | None
) -> tuple[list[tuple[TokenSequence, float | list[float]]], list[Dropped]]:
    """Split a rollout into rows to train on, each with its share of the advantage, and rows that are dropped."""
    kept: list[tuple[TokenSequence, float | list[float]]] = []
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


def row_tensors(samples: Sequence[TrainingSample]) -> TensorDict:
    """Turn R samples into row-aligned columns; nothing is padded yet.

    Returns:
        CPU columns by name. Lists of one tensor a row, of the length of its prompt or its completion:

        - `prompt_ids`, `completion_ids`: int64
        - `loss_mask`: int64, 1 on sampled tokens alone, for the loss
        - `sampler_logps`: float32, the sampler's, in nats; 0.0 off the sampled tokens
        - `advantages`: float32, of each sampled token; 0.0 off them

        Tensors (R,): `policy_versions` (oldest version of the row's sampled tokens; -1 for a padding row),
        `rollout_index`, `sampled_tokens`, `rollout_sampled_tokens`, and `is_padding`, which is bool.

    Raises:
        ConfigError: a row has an empty prompt or completion, or its lists have different lengths.
    """
    for sample in samples:
        _check_sample(sample)
    masks = [torch.tensor(sample.row.loss_mask) for sample in samples]
    return {
        "prompt_ids": [torch.tensor(sample.row.prompt_ids) for sample in samples],
        "completion_ids": [torch.tensor(sample.row.completion_ids) for sample in samples],
        "loss_mask": masks,
        "sampler_logps": [
            torch.where(mask.bool(), torch.tensor(sample.row.logprobs, dtype=torch.float32), 0.0)
            for sample, mask in zip(samples, masks, strict=True)
        ],
        "advantages": [
            torch.zeros(len(mask)).masked_scatter(mask.bool(), torch.tensor(sample.advantage).expand(int(mask.sum())))
            for sample, mask in zip(samples, masks, strict=True)
        ],
        "policy_versions": _counts(
            -1 if sample.rollout_index == PADDING_INDEX else sample.row.oldest_version for sample in samples
        ),
        "rollout_index": _counts(sample.rollout_index for sample in samples),
        "sampled_tokens": _counts(sample.row.sampled_tokens for sample in samples),
        "rollout_sampled_tokens": _counts(sample.rollout_sampled_tokens for sample in samples),
        "is_padding": torch.tensor([sample.rollout_index == PADDING_INDEX for sample in samples], dtype=torch.bool),
    }


def append_padding(rows: TensorDict, count: int, pad_token_id: int) -> TensorDict:
    """Append padding rows: one prompt and one completion token that attention sees and the loss does not.

    A row masked whole would give NaN in some attention kernels.

    Args:
        pad_token_id: token id of both; any id of the vocabulary does.
    """
    if not count:
        return rows
    row = TokenSequence([pad_token_id], [pad_token_id], loss_mask=[0], logprobs=[0.0], versions=[-1])
    padding = row_tensors([TrainingSample(row, 0.0, PADDING_INDEX, 0)] * count)
    joined: TensorDict = {}
    for name, column in rows.items():
        more = padding[name]
        if isinstance(column, list):
            assert isinstance(more, list)
            joined[name] = [*column, *more]
        else:
            assert isinstance(column, Tensor)
            assert isinstance(more, Tensor)
            joined[name] = torch.cat([column, more])
    return joined


def row_lengths(rows: TensorDict) -> list[int]:
    """Return the prompt and completion tokens of each row together."""
    prompts, completions = _ragged(rows, "prompt_ids"), _ragged(rows, "completion_ids")
    return [len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True)]


def pad_rows(rows: TensorDict, pad_token_id: int) -> MicroBatch:
    """Pad the rows of one micro-batch to rectangles, R rows of prompts (R, P) and completions (R, C).

    A prompt's tokens past the shortest prompt stand before the completion, masked out of the loss as an environment's
    tokens are, so a row is as long as the longest of them and nothing is padded on the left (but a padding row, whose
    prompt is shorter).

    Args:
        rows: columns of `row_tensors`, and any further ones of shape (R,).
        pad_token_id: fills prompts on the left and completions on the right.

    Returns:
        The columns as tensors, with `prompt_mask` (R, P) and `completion_mask` (R, C): 1 on every real token, for
        attention.

    Raises:
        ConfigError: there is no row.
    """
    prompts, completions = _ragged(rows, "prompt_ids"), _ragged(rows, "completion_ids")
    if not prompts:
        raise ConfigError("no rows to pad; `append_padding` gives what stands where a rank has nothing to train on")
    is_padding = rows["is_padding"]
    assert isinstance(is_padding, Tensor)
    # a padding row is shorter than any prompt need be
    real = [len(prompt) for prompt, padding in zip(prompts, is_padding.tolist(), strict=True) if not padding]
    shared = min(real or map(len, prompts))
    moved = [prompt[shared:] for prompt in prompts]
    kept = [prompt[:shared] for prompt in prompts]
    padded: MicroBatch = {
        "prompt_ids": _pad(kept, pad_token_id, "left"),
        "prompt_mask": _pad([torch.ones_like(prompt) for prompt in kept], 0, "left"),
    }
    whole = [torch.cat(parts) for parts in zip(moved, completions, strict=True)]
    padded["completion_ids"] = _pad(whole, pad_token_id)
    padded["completion_mask"] = _pad([torch.ones_like(ids) for ids in whole], 0)
    for name, column in rows.items():
        if isinstance(column, Tensor):
            padded[name] = column
        elif column is not None and name not in padded:
            # nothing of a prompt is sampled
            padded[name] = _pad(
                [
                    torch.cat([torch.zeros(len(before)).to(row), row])
                    for before, row in zip(moved, column, strict=True)
                ]
            )
    return padded


def rollout_tokens(rollout: Rollout) -> int:
    """Return the prompt and completion tokens of a rollout, over its rows."""
    return sum(map(_length, rollout.rows))


def _length(row: TokenSequence) -> int:
    return len(row.prompt_ids) + len(row.completion_ids)


def _check_sample(sample: TrainingSample) -> None:
    row = sample.row
    if not row.prompt_ids or not row.completion_ids:
        side = "completion" if row.prompt_ids else "prompt"
        raise ConfigError(f"a row of rollout {sample.rollout_index} has an empty {side}; leave such rows out")
    lengths = {
        "completion_ids": len(row.completion_ids),
        "loss_mask": len(row.loss_mask),
        "logprobs": len(row.logprobs),
    }
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"a row of rollout {sample.rollout_index} has lists of different lengths: {lengths}")


def _counts(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _ragged(rows: TensorDict, name: str) -> list[Tensor]:
    column = rows[name]
    assert isinstance(column, list)
    return column


def _pad(rows: list[Tensor], fill: float = 0, side: str = "right") -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=fill, padding_side=side)
