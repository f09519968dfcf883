"""Passes: the parts of a micro-batch that go through the model one after another, and what they say of themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from verifiers.train.collate import TrainingRow, even_prompts, padding_row, rows_to_tensors
from verifiers.train.dealing import PADDING, Dealt
from verifiers.train.row_weights import num_items_in_batch, row_weights, weight_advantages

__all__ = ["MicroBatches", "Pass", "all_passes", "padded_tokens", "pass_metrics", "weighted_passes"]

Pass = dict[str, Tensor]
"""Tensors of the rows that go through the model together, under the names that TRL's loss reads."""

MicroBatches = list[list[list[Pass]]]
"""By [micro-batch][rank][pass]; the ranks of a micro-batch have equally many passes, of equally many rows."""


Filled = list[list[list[list[TrainingRow]]]]
"""Rows by [micro-batch][rank][pass], padding rows in their places."""


def weighted_passes(
    rows: Sequence[TrainingRow],
    dealt: Dealt,
    pad_token_id: int,
    *,
    loss_type: str,
    micro_batches: range,
    num_micro_batches: int,
    steps_per_generation: int,
    rollouts_elsewhere: int,
    tokens_elsewhere: float,
) -> MicroBatches:
    """The tensors of dealt rows, weighted as parts of the whole update.

    Args:
        rows: real rows.
        dealt: numbers of rows by [micro-batch][rank][pass], from `train.dealing`.
        pad_token_id: fills sequences and stands in padding rows.
        loss_type: see `row_weights`.
        micro_batches: numbers of the dealt micro-batches within the update.
        num_micro_batches: of the whole update, on each rank.
        steps_per_generation: of the block.
        rollouts_elsewhere, tokens_elsewhere: rollouts and sampled tokens of the update that are in none of `rows`.
    """
    filler = padding_row(pad_token_id)
    filled: Filled = [
        [[[filler if row == PADDING else rows[row] for row in held] for held in passes] for passes in by_rank]
        for by_rank in dealt
    ]
    sampled_R = torch.tensor([item.row.sampled_tokens for item in _rows(filled)])
    items = num_items_in_batch(
        sampled_R,
        num_micro_batches=num_micro_batches,
        steps_per_generation=steps_per_generation,
        tokens_without_rows=tokens_elsewhere,
    )
    num_ranks = len(dealt[0])
    per_token = num_ranks * num_micro_batches / max(1.0, float(sampled_R.sum()) + tokens_elsewhere)
    weights = _weights(filled, loss_type, micro_batches, num_micro_batches, rollouts_elsewhere)
    made: MicroBatches = []
    for by_rank in filled:
        calls = [_call_sizes(held) for held in zip(*by_rank, strict=True)]
        made.append([])
        for passes in by_rank:
            cell = [_tensors(held, [next(weights) for _ in held], pad_token_id) for held in passes]
            for batch, call in zip(cell, calls, strict=True):
                share = float(batch["sampled_tokens"].sum()) * per_token
                batch.update(call, num_items_in_batch=items, update_share=torch.tensor(share))
            made[-1].append(cell)
    return made


def _rows(filled: Filled) -> Iterator[TrainingRow]:
    return (item for by_rank in filled for passes in by_rank for held in passes for item in held)


def _weights(
    filled: Filled, loss_type: str, micro_batches: range, num_micro_batches: int, rollouts_elsewhere: int
) -> Iterator[float]:
    """The weight of each row, in order."""
    places_R3 = torch.tensor(
        [
            (number, rank, place)
            for number, by_rank in zip(micro_batches, filled, strict=True)
            for rank, passes in enumerate(by_rank)
            for place, held in enumerate(passes)
            for _ in held
        ]
    )
    weights_R = row_weights(
        loss_type,
        rollout_index_R=torch.tensor([item.rollout_index for item in _rows(filled)]),
        sampled_tokens_R=torch.tensor([item.row.sampled_tokens for item in _rows(filled)]),
        rollout_sampled_tokens_R=torch.tensor([item.rollout_sampled_tokens for item in _rows(filled)]),
        micro_batch_R=places_R3[:, 0],
        rank_R=places_R3[:, 1],
        pass_R=places_R3[:, 2],
        num_micro_batches=num_micro_batches,
        num_ranks=len(filled[0]),
        rollouts_without_rows=rollouts_elsewhere,
    )
    return iter(weights_R.tolist())


def _tensors(held: list[TrainingRow], weights: list[float], pad_token_id: int) -> Pass:
    batch = rows_to_tensors(even_prompts(held), pad_token_id)
    weights_R = torch.tensor(weights)
    return {**batch, "row_weights": weights_R, "advantages": weight_advantages(batch["advantages"], weights_R)}


def _call_sizes(by_rank: tuple[list[TrainingRow], ...]) -> Pass:
    """What all ranks together hold while they run one pass: TRL's means over a call are over this."""
    rows = list(chain.from_iterable(by_rank))
    return {
        "call_tokens": torch.tensor(sum(item.row.sampled_tokens for item in rows)),
        "call_rows": torch.tensor(len(rows)),
        "call_padding_rows": torch.tensor(sum(item.is_padding for item in rows)),
    }


def all_passes(batches: MicroBatches) -> Iterator[Pass]:
    """Every pass of every rank, in the order in which rank after rank runs them."""
    for by_rank in batches:
        for passes in by_rank:
            yield from passes


def padded_tokens(batch: Pass) -> int:
    """Tokens that the model computes in a pass, padding included."""
    return int(batch["prompt_ids"].numel() + batch["completion_ids"].numel())


def pass_metrics(batches: MicroBatches) -> dict[str, float]:
    """What the passes of a block cost: padding, number and size, over all ranks."""
    passes = list(all_passes(batches))
    computed = sum(map(padded_tokens, passes))
    real = sum(int(batch[name][~batch["is_padding"]].sum()) for batch in passes for name in _MASKS)
    return {
        "rows/padding_share": 1 - real / computed if computed else 0.0,
        "rows/passes": len(passes) / max(1, sum(map(len, batches))),
        "rows/largest_pass_tokens": float(max(map(padded_tokens, passes), default=0)),
    }


_MASKS = ("prompt_mask", "completion_mask")
