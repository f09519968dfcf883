"""Rows to micro-batches: their tensors, which rows of an update share a micro-batch, and their padding.

A micro-batch is what goes through the model in one forward and backward pass; a micro-step (one of the update's
`gradient_accumulation_steps`) runs one or several of them. Row i of every column is the same training row. A column
is a tensor whose first dimension are the rows, or a list of one value a row; a value that is None stays None, and a
0-dim tensor (a count for the whole batch) is handed on unchanged. Padding comes last, once a micro-batch. Token ids
come from the trace as they are: nothing is cut, re-tokenized or realigned.

A micro-batch costs its rows times its longest row. With lengths falling along the micro-batches, each is padded no
further than to its own longest row, and no row of it is shorter than the next one's longest. So if none holds more
than B tokens, padding included, the padding of the rows that a rank gets from one packing is at most

    sum_k n_k (longest_k - longest_k+1)  <=  B sum_k ln(longest_k / longest_k+1)  =  B ln(longest / shortest)

whatever their number. Ranks hold equally many rows: one that has a row less than others gets a padding row, of two
tokens, and the shortest counts as that then. A micro-step that is one micro-batch, whatever its rows are, has no such
bound. Rows whose prompt is computed once (`loss.prefixes`) are packed by prompt instead, and not padded. Either way
every rank runs the same number of micro-batches, so that collectives meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verifiers.errors import ConfigError
from verifiers.rollouts.rollout import TokenSequence
from verifiers.train.loss.prefixes import SHARED_ROWS

TensorDict = dict[str, Any]
"""Row-aligned columns by name, before they are padded."""

MicroBatch = dict[str, Any]
"""Tensors of the rows that go through the model together, and the layout of the prefixes that they share."""

MicroSteps = list[list[list[MicroBatch]]]
"""By [micro-step][rank][micro-batch]; the ranks of a micro-step have equally many."""

Packing = list[list[list[list[int]]]]
"""Row numbers by [micro-step][rank][micro-batch]; numbers from the count of real rows on are padding rows."""

PADDING_LENGTH = 2
"""Tokens of a padding row."""

_FILL = 0
"""Any token id does: attention does not see it, and the loss does not count it."""

_PADDING = -1
"""`rollout_index` of a padding row, which belongs to no rollout; and its number until all are counted."""

DEMONSTRATION = -2
"""`rollout_index` of a demonstration."""


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One training sequence and what the loss needs to know about it.

    Attributes:
        advantage: one float, or one per sampled token of this row.
        rollout_index: place of its rollout in the block's plan order; below 0 for a row without one.
        rollout_sampled_tokens: sampled tokens of the rollout, over all its rows that are trained on.
        ce_mask: 1 on each completion token that is trained by cross-entropy; empty where none is.
    """

    row: TokenSequence
    advantage: float | list[float]
    rollout_index: int
    rollout_sampled_tokens: int
    ce_mask: Sequence[int] = ()

    @property
    def has_gradient(self) -> bool:
        """True where the advantage of a sampled token is not 0."""
        return any(self.advantage) if isinstance(self.advantage, list) else bool(self.advantage)

    @property
    def advantages(self) -> list[float]:
        """The advantage of each completion token; 0.0 where nobody sampled it."""
        given = iter(self.advantage) if isinstance(self.advantage, list) else itertools.repeat(self.advantage)
        return [next(given) if sampled else 0.0 for sampled in self.row.loss_mask]


PADDING = TrainingSample(
    TokenSequence([_FILL], [_FILL], loss_mask=[0], logprobs=[0.0], versions=[-1]), 0.0, _PADDING, 0
)
"""A padding row: one prompt and one completion token that attention sees and the loss does not.

A row masked whole would give NaN in some attention kernels.
"""


# -- tensors ---------------------------------------------------------------------------------------------------------


def pad_rows(samples: Sequence[TrainingSample]) -> MicroBatch:
    """Pad the R rows of one micro-batch, each a prompt with its completion, to the T tokens of the longest.

    Returns:
        CPU tensors by name, int64 where nothing else is said:

        - `input_ids` (R, T), and `attention_mask`: 1 on every real token
        - `loss_mask` (R, T): 1 on sampled tokens alone, for the loss
        - `sampler_logps` (R, T), float32: the sampler's, in nats; 0.0 off the sampled tokens
        - `advantages` (R, T), float32: of each sampled token; 0.0 off them
        - `teacher_logps` (R, T), float32: a teacher's, where there is one; and `teacher_ids` and `teacher_ids_logps`
          (R, T, K), where its K likeliest tokens were asked for; 0 off the sampled tokens
        - `kept_counts` (R, T), int32: how many ids each token was drawn from, 0 for all; and `kept_ids`, these of one
          token after another, row by row; only where the sampler left any out
        - `images`: the names of each row's images, as a list of R, where there are any
        - `ce_mask` (R, T): 1 on tokens that are trained by cross-entropy, where there are any
        - (R,): `policy_versions` (oldest version of the row's sampled tokens; -1 for a row without a rollout),
          `rollout_index`, `sampled_tokens`, and `is_padding`, which is bool

    Raises:
        ConfigError: a row has an empty prompt or completion, or lists of different lengths.
    """
    rows = [sample.row for sample in samples]
    for row in rows:
        lengths = [len(row.completion_ids), len(row.loss_mask), len(row.logprobs)]
        if not row.prompt_ids or not row.completion_ids or len({*lengths}) > 1:
            raise ConfigError(
                f"a row has {len(row.prompt_ids)} prompt tokens, and completion, mask and log-probs of {lengths} "
                "tokens; a row needs a prompt, and these in equal numbers"
            )
    is_padding = [sample.rollout_index == _PADDING for sample in samples]
    whole = [[*row.prompt_ids, *row.completion_ids] for row in rows]

    def of_completions(columns: Iterable[Sequence[float]], dtype: torch.dtype) -> Tensor:
        # nothing of a prompt is sampled
        return _pad([[*[0] * len(row.prompt_ids), *one] for row, one in zip(rows, columns, strict=True)], dtype)

    sampled_logps = (
        [logp if sampled else 0.0 for logp, sampled in zip(row.logprobs, row.loss_mask, strict=True)] for row in rows
    )
    versions = [sample.row.oldest_version if sample.rollout_index >= 0 else -1 for sample in samples]
    loss_mask_RT = of_completions((row.loss_mask for row in rows), torch.int64)
    given: MicroBatch = {}
    if any(sample.ce_mask for sample in samples):
        columns = (sample.ce_mask or [0] * len(sample.row.loss_mask) for sample in samples)
        given["ce_mask"] = of_completions(columns, torch.int64)
    if any(row.images for row in rows):
        given["images"] = [tuple(row.images) for row in rows]
    if any(row.teacher_logprobs for row in rows):
        logprobs = (row.teacher_logprobs or [0.0] * len(row.loss_mask) for row in rows)
        given["teacher_logps"] = of_completions(logprobs, torch.float32)
    if any(row.teacher_ids for row in rows):
        sampled = sum(row.sampled_tokens for row in rows)
        for name, kind in (("teacher_ids", torch.int64), ("teacher_ids_logps", torch.float32)):
            values = [value for row in rows for value in getattr(row, name.replace("logps", "logprobs"))]
            values_NK = torch.tensor(values, dtype=kind).view(sampled, -1)
            given[name] = values_NK.new_zeros(*loss_mask_RT.shape, values_NK.shape[1])
            given[name][loss_mask_RT.bool()] = values_NK
    if any(row.kept_ids for row in rows):
        counts = (row.kept_counts or [0] * len(row.loss_mask) for row in rows)
        given["kept_counts"] = of_completions(counts, torch.int32)
        given["kept_ids"] = torch.cat([torch.from_numpy(np.array(row.kept_ids, np.int32)) for row in rows])
    return given | {
        "input_ids": _pad(whole),
        "attention_mask": _pad([[1] * len(ids) for ids in whole]),
        "loss_mask": loss_mask_RT,
        "sampler_logps": of_completions(sampled_logps, torch.float32),
        "advantages": of_completions((sample.advantages for sample in samples), torch.float32),
        "policy_versions": torch.tensor(versions),
        "rollout_index": torch.tensor([sample.rollout_index for sample in samples]),
        "sampled_tokens": torch.tensor([row.sampled_tokens for row in rows]),
        "is_padding": torch.tensor(is_padding),
    }


def _pad(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.int64) -> Tensor:
    return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True, padding_value=_FILL)


# -- packing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MicroBatchLimit:
    """A bound of micro-batches: in tokens, in rows, or none.

    Attributes:
        tokens: rows times the longest of them, prompt and completion, are at most this; a row that is longer has a
            micro-batch of its own. None for no such budget.
        rows: without a budget, as many micro-batches as if each held at most so many rows; their sizes go by tokens,
            and none has more than this many of the longest row would have. None for one micro-batch a micro-step.
    """

    tokens: int | None = None
    rows: int | None = None


def balance_by_length(lengths: Sequence[int], micro_steps: int, ranks: int, limit: MicroBatchLimit) -> Packing:
    """Pack rows by length alone, so that micro-batches and ranks are alike and padding is bounded.

    Micro-batches go to the micro-step that has least to do so far, the largest first: the first micro-batch of an
    update needs the most memory. Where there are fewer than micro-steps, the others get one of padding rows.
    """
    order = _longest_first(range(len(lengths)), lengths)
    joint = _joint_micro_batches([order[rank::ranks] for rank in range(ranks)], lengths, micro_steps, limit)
    cost = [len(by_rank[0]) * max(_length(rows[0], lengths) for rows in by_rank) for by_rank in joint]
    packing: Packing = [[[] for _ in range(ranks)] for _ in range(micro_steps)]
    load = [0] * micro_steps
    for index in sorted(range(len(joint)), key=lambda index: (-cost[index], index)):
        lightest = load.index(min(load))
        load[lightest] += cost[index]
        for held, rows in zip(packing[lightest], joint[index], strict=True):
            held.append(rows)
    return _with_padding_numbered(packing, len(lengths))


def keep_micro_steps(lengths: Sequence[int], micro_steps: int, ranks: int, limit: MicroBatchLimit) -> Packing:
    """Divide rows over the micro-steps in the order they come in; lengths only decide who shares a micro-batch.

    For losses that depend on the rows that share a micro-step, which must then be a matter of chance: they do not
    depend on lengths, nor on the number of ranks.
    """
    cells = micro_steps * ranks
    packing: Packing = []
    for micro_step in range(micro_steps):
        held = [range(cell, len(lengths), cells) for cell in range(micro_step, cells, micro_steps)]
        joint = _joint_micro_batches([_longest_first(rows, lengths) for rows in held], lengths, 1, limit)
        packing.append([list(of_rank) for of_rank in zip(*joint, strict=True)])
    return _with_padding_numbered(packing, len(lengths))


def balance_by_prefix(
    lengths: Sequence[int],
    prompts: Sequence[tuple[Hashable, ...]],
    micro_steps: int,
    ranks: int,
    limit: MicroBatchLimit,
) -> Packing:
    """Pack rows so that those of one prompt share a micro-batch, which computes that prompt once and pads nothing.

    A prompt whose rows cost more than the limit, or than half of a rank's share of all, is divided. Each part goes,
    the most expensive first, where there is least to do so far; ranks of a micro-step run equally many micro-batches.

    Args:
        lengths: tokens of each row, its prompt included.
    """
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    rows_of: list[list[int]] = [[] for _ in numbers]
    number_of = [numbers[prompt] for prompt in prompts]
    for row, number in enumerate(number_of):
        rows_of[number].append(row)

    def cost(rows: Sequence[int]) -> int:
        own = sum(lengths[row] - len(prompts[row]) for row in rows)
        return own + sum(len(prompts[rows_of[number][0]]) for number in {number_of[row] for row in rows})

    most = limit.tokens or max(lengths, default=0) * (limit.rows or len(lengths))
    share = -(-cost(range(len(lengths))) // ranks)

    def divided(rows: Sequence[int]) -> list[list[int]]:
        # of two halves of its share each, a rank's work comes out even
        parts = min(len(rows), -(-2 * cost(rows) // share)) if ranks > 1 else 1
        while parts < len(rows) and max(cost(rows[part::parts]) for part in range(parts)) > most:
            parts += 1
        return [sorted(rows[part::parts]) for part in range(parts)]

    units = [unit for rows in rows_of for unit in divided(_longest_first(rows, lengths))]
    cells: list[list[list[int]]] = [[] for _ in range(micro_steps * ranks)]
    load = [0] * len(cells)
    for unit in sorted(units, key=lambda unit: (-cost(unit), unit)):
        lightest = load.index(min(load))
        load[lightest] += cost(unit)
        cells[lightest].append(unit)
    joined = [_filled_by(cost, held, most) for held in cells]
    packing: Packing = []
    for step in range(micro_steps):
        by_rank = joined[step * ranks : (step + 1) * ranks]
        count = max(1, *map(len, by_rank))
        packing.append([held + [[_PADDING]] * (count - len(held)) for held in by_rank])
    return _with_padding_numbered(packing, len(lengths))


def _filled_by(cost: Callable[[list[int]], int], parts: Sequence[list[int]], most: int) -> list[list[int]]:
    """Join parts one after another as far as their cost together goes."""
    joined: list[list[int]] = []
    for part in parts:
        if joined and cost([*joined[-1], *part]) <= most:
            joined[-1] = [*joined[-1], *part]
        else:
            joined.append(part)
    return joined


def _longest_first(rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(rows, key=lambda row: (-lengths[row], row))


def _length(row: int, lengths: Sequence[int]) -> int:
    return PADDING_LENGTH if row == _PADDING else lengths[row]


def _joint_micro_batches(
    lanes: list[list[int]], lengths: Sequence[int], at_least: int, limit: MicroBatchLimit
) -> list[list[list[int]]]:
    """Return rows by [micro-batch][rank], from each rank's rows, longest first; padding rows alone fill up."""
    places = list(itertools.zip_longest(*lanes, fillvalue=_PADDING))
    longest = [max(_length(row, lengths) for row in rows) for rows in places]
    joint: list[list[list[int]]] = []
    start = 0
    for size in micro_batch_sizes(longest, at_least, limit):
        joint.append([list(rows) for rows in zip(*places[start : start + size], strict=True)])
        start += size
    return joint + [[[_PADDING] for _ in lanes] for _ in range(at_least - len(joint))]


def _with_padding_numbered(packing: Packing, num_rows: int) -> Packing:
    number = itertools.count(num_rows)
    return [
        [[[next(number) if row == _PADDING else row for row in rows] for rows in held] for held in by_rank]
        for by_rank in packing
    ]


def micro_batch_sizes(lengths: Sequence[int], at_least: int, limit: MicroBatchLimit) -> list[int]:
    """Return how many rows each micro-batch takes, of rows that come longest first.

    There are as few micro-batches as the limit allows, or up to `at_least`; of the ways to have that many, one whose
    largest is small, so that they are of like size.
    """
    if not lengths:
        return []
    most = limit.tokens or lengths[0] * (limit.rows or len(lengths))
    needed = len(_filled(lengths, most)) if limit.rows is None else -(-len(lengths) // limit.rows)
    number = max(at_least, needed)
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if len(_filled(lengths, middle)) <= number:
            high = middle
        else:
            low = middle + 1
    return _filled(lengths, low)


def _filled(lengths: Sequence[int], tokens: int) -> list[int]:
    """Fill micro-batches one after another, each as far as the tokens go; return their sizes."""
    sizes: list[int] = []
    start = 0
    while start < len(lengths):
        size = min(len(lengths) - start, max(1, tokens // lengths[start]))
        sizes.append(size)
        start += size
    return sizes


# -- micro-batches of a block ----------------------------------------------------------------------------------------


def all_micro_batches(steps: MicroSteps) -> Iterator[MicroBatch]:
    """Yield every micro-batch of every rank, in the order in which rank after rank runs them."""
    for by_rank in steps:
        for micro_batches in by_rank:
            yield from micro_batches


def computed_tokens(batch: MicroBatch) -> int:
    """Return the tokens that the model computes for a micro-batch: with padding, or laid out with shared prefixes."""
    layout = batch.get(SHARED_ROWS)
    return batch["input_ids"].numel() if layout is None else len(layout.ids_N)


def packing_metrics(steps: MicroSteps) -> dict[str, float]:
    """Return the padding, number and size of a block's micro-batches, over all ranks."""
    batches = list(all_micro_batches(steps))
    sizes = [computed_tokens(batch) for batch in batches]
    real = sum(int(batch["attention_mask"][~batch["is_padding"]].sum()) for batch in batches)
    return {
        "rows/padding_share": max(0.0, 1 - real / sum(sizes)) if batches else 0.0,
        "rows/shared_share": max(0.0, 1 - sum(sizes) / real) if real else 0.0,
        "rows/micro_batches": len(batches) / max(1, sum(map(len, steps))),
        "rows/largest_micro_batch_tokens": float(max(sizes, default=0)),
    }


# -- columns ---------------------------------------------------------------------------------------------------------


def shuffle_tensor_dict(rows: Mapping[str, Any], order: Sequence[int] | Tensor) -> TensorDict:
    """Reorder the rows of all columns by one permutation.

    Args:
        order: the permutation of 0 .. R - 1 whose i-th entry is the old place of the new row i.

    Raises:
        ConfigError: where columns are misaligned or the order is not a permutation of their rows.
    """
    count, order_R = _num_rows(rows), torch.as_tensor(order, dtype=torch.long)
    if order_R.dim() != 1 or order_R.sort().values.tolist() != list(range(count)):
        raise ConfigError(f"the order is not a permutation of {count} rows: {order_R.tolist()}")
    places = order_R.tolist()

    def reorder(column: Any) -> Any:
        if not _has_rows(column):
            return column
        return [column[place] for place in places] if isinstance(column, list) else column[order_R.to(column.device)]

    return {name: reorder(column) for name, column in rows.items()}


def split_tensor_dict(rows: Mapping[str, Any], chunks_or_sizes: int | Sequence[int]) -> list[TensorDict]:
    """Split the rows of all columns into consecutive parts.

    Args:
        chunks_or_sizes: a number of equal parts, or the rows of each part, which sum to R.

    Raises:
        ConfigError: where columns are misaligned, or the parts do not make up the rows; a rest is never dropped.
    """
    count, sizes = _num_rows(rows), chunks_or_sizes
    if isinstance(sizes, int):
        size, rest = divmod(count, sizes)
        if rest:
            nearest = f"the nearest sizes that do are {size * sizes} and {(size + 1) * sizes}"
            raise ConfigError(f"{count} rows do not divide into {sizes} chunks; {nearest}")
        sizes = [size] * sizes
    ends = list(itertools.accumulate(sizes, initial=0))
    if ends[-1] != count or sorted(ends) != ends:
        raise ConfigError(f"parts of {sizes} rows sum to {ends[-1]}, but there are {count} rows")
    return [
        {name: column[start:end] if _has_rows(column) else column for name, column in rows.items()}
        for start, end in itertools.pairwise(ends)
    ]


def _num_rows(rows: Mapping[str, Any]) -> int:
    """Return the number of rows that all columns share."""
    sizes = {name: len(column) for name, column in rows.items() if _has_rows(column)}
    if not sizes:
        raise ConfigError(f"no tensor with rows among {sorted(rows)}")
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"tensors are not aligned: their first dimensions differ, {sizes}")
    return next(iter(sizes.values()))


def _has_rows(column: Any) -> bool:
    return column is not None and (isinstance(column, list) or column.dim() > 0)
