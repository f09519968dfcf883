"""Rows that begin alike go through the model as one: their common prefix once, and each row's rest as a branch of it.

The tokens of a micro-batch are laid end to end, without padding, each at its position in its row. Everything but
attention works token by token, so only attention must know the layout: a prefix attends to itself, and a branch to
its prefix and to itself, as in rows of their own. Log-probs and gradients are therefore those of separate rows, and
the model computes each prefix once (a "tree" of depth 2; compare Hydragen, arXiv:2402.05099, which does so for
inference).

Attention is torch's `scaled_dot_product_attention`, called for each prefix and for the branches of each: no mask of
all tokens by all is made, on any device, which FlexAttention would compile anew for every shape of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

LEAST_SAVED = 0.2
"""Share of a micro-batch's tokens, padding included, from which fewer tokens outweigh more calls of attention."""

LEAST_SAVED_ON_GPU = 0.5
"""The same on a GPU, where a call costs more beside a token (0.31 was slower on an H200, 0.83 twice as fast)."""

SHARED_ROWS = "shared_rows"
"""The layout's name in a micro-batch, and among the arguments of a model's forward."""

_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
_TOLERANCE_16_BIT = 0.05

_Ids = npt.NDArray[np.int64]


class Branches(NamedTuple):
    """Rows that share a prefix: tokens `[start, start + prefix)` of the layout, and the rests of the rows.

    Attributes:
        rows: their numbers, in the order in which their rests are laid.
        places_GC: place in the layout of each rest's tokens; shorter rests are filled up with places of any tokens,
            which no real token sees.
        real_B: the real ones among the G x C, row by row; a mask in its place would make the host wait for the GPU.
    """

    rows: tuple[int, ...]
    start: int
    prefix: int
    places_GC: Tensor
    real_B: Tensor


@dataclass(frozen=True, slots=True)
class SharedRows:
    """The layout of a micro-batch of R rows with T columns as N tokens.

    Attributes:
        positions_N: of each token in its row.
        place_RT: where each token of the rows is among the N; 0 for padding.
        groups: rows that share a prefix, in the layout's order.
    """

    ids_N: Tensor
    positions_N: Tensor
    place_RT: Tensor
    groups: tuple[Branches, ...]

    def to(self, device: Any) -> SharedRows:
        groups = tuple(
            one._replace(places_GC=one.places_GC.to(device), real_B=one.real_B.to(device)) for one in self.groups
        )
        return SharedRows(self.ids_N.to(device), self.positions_N.to(device), self.place_RT.to(device), groups)

    def sources(self, mask_RT: Tensor) -> Tensor:
        """Return where each of the N tokens is among the rows' R x T."""
        real = mask_RT.flatten().nonzero().squeeze(1)
        found_N: Tensor = torch.zeros_like(self.positions_N)
        found_N[self.place_RT.flatten()[real]] = real
        return found_N

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of a model's forward; attention that does not know the layout would see all tokens."""
        everything = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.ids_N.device)
        return {
            "input_ids": self.ids_N[None],
            "position_ids": self.positions_N[None],
            "attention_mask": everything,
            SHARED_ROWS: self,
        }


def share_prefixes(
    ids_RT: Tensor,
    mask_RT: Tensor,
    images: Sequence[tuple[str, ...]] | None = None,
    *,
    least_saved: float = LEAST_SAVED,
) -> SharedRows | None:
    """Lay rows out with their common prefixes once; None where that saves less than a share of R x T tokens.

    Args:
        ids_RT: on the CPU, as the mask and the layout are.
        mask_RT: 1 on real tokens, which are next to each other in each row.
        images: names of what each row shows: rows that show other images share nothing.
    """
    is_real_RT = mask_RT.numpy().astype(bool)
    rows = [ids[is_real] for ids, is_real in zip(ids_RT.numpy(), is_real_RT, strict=True)]
    groups = list(_groups(rows, images or [()] * len(rows)))
    tokens = sum(prefix + sum(len(rows[row]) - prefix for row in members) for members, prefix in groups)
    if tokens > (1 - least_saved) * ids_RT.numel():
        return None
    ids, positions = [], []
    place_RT = np.zeros(ids_RT.shape, np.int64)
    found: list[Branches] = []
    end = 0
    for members, prefix in groups:
        start, end = end, end + prefix
        ids.append(rows[members[0]][:prefix])
        positions.append(np.arange(prefix))
        longest = max(len(rows[row]) for row in members) - prefix
        # filled up by many places: a backward pass on a GPU adds what comes to one place one by one
        places_GC = (np.arange(len(members) * longest) % tokens).reshape(len(members), longest)
        for place, row in enumerate(members):
            rest = rows[row][prefix:]
            ids.append(rest)
            positions.append(np.arange(prefix, prefix + len(rest)))
            own = places_GC[place, : len(rest)] = np.arange(end, end + len(rest))
            place_RT[row, is_real_RT[row]] = np.concatenate([np.arange(start, start + prefix), own])
            end += len(rest)
        rests = np.array([[len(rows[row]) - prefix] for row in members])
        real_B = torch.from_numpy(np.flatnonzero(np.arange(longest) < rests))
        found.append(Branches(tuple(members), start, prefix, torch.from_numpy(places_GC), real_B))
    ids_N, positions_N = (torch.from_numpy(np.concatenate(parts)) for parts in (ids, positions))
    return SharedRows(ids_N, positions_N, torch.from_numpy(place_RT), tuple(found))


def _groups(rows: Sequence[_Ids], images: Sequence[tuple[str, ...]]) -> Iterator[tuple[list[int], int]]:
    """Yield the numbers of rows that share a prefix, and its length, so that few tokens are left.

    In the order of their bytes neighbours have most in common; a row joins those before it where the tokens saved
    do not become fewer, though the prefix of all may become shorter.
    """
    order = sorted(range(len(rows)), key=lambda row: (images[row], rows[row].tobytes()))
    members, prefix = [order[0]], len(rows[order[0]])
    for row in order[1:]:
        shows_alike = images[row] == images[members[0]]
        common = _common(rows[members[0]][:prefix], rows[row][:prefix]) if shows_alike else 0
        if common * len(members) > prefix * (len(members) - 1):
            members.append(row)
            prefix = common
        else:
            yield members, prefix
            members, prefix = [row], len(rows[row])
    yield members, prefix


def _common(one: _Ids, other: _Ids) -> int:
    """Return how many tokens two rows begin with in common."""
    most = min(len(one), len(other))
    differ = one[:most] != other[:most]
    return int(differ.argmax()) if differ.any() else most


# -- attention -------------------------------------------------------------------------------------------------------


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend as transformers' "sdpa" does, but where the tokens are laid out with shared prefixes."""
    layout: SharedRows | None = options.pop(SHARED_ROWS, None)
    # what images pass through sees their patches, not the rows
    if layout is None or not getattr(module, "is_causal", True):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    repeats = query.shape[1] // key.shape[1]
    given = {"scale": options.get("scaling"), "dropout_p": options.get("dropout", 0.0)}
    found = []
    for _, start, prefix, places_GC, real_B in layout.groups:
        own = slice(start, start + prefix)
        keys, values = repeat_kv(key[:, :, own], repeats), repeat_kv(value[:, :, own], repeats)
        found.append(scaled_dot_product_attention(query[:, :, own], keys, values, is_causal=True, **given)[0])
        count, longest = places_GC.shape
        if not longest:
            continue
        queries, own_keys, own_values = (whole[0][:, places_GC].transpose(0, 1) for whole in (query, key, value))
        keys, values = (
            torch.cat([of_prefix.expand(count, -1, -1, -1), repeat_kv(of_branch, repeats)], 2)
            for of_prefix, of_branch in ((keys, own_keys), (values, own_values))
        )
        sees = torch.ones(longest, prefix + longest, dtype=torch.bool, device=query.device).tril(prefix)
        branches = scaled_dot_product_attention(queries, keys, values, attn_mask=sees, **given)
        found.append(branches.transpose(1, 2).flatten(0, 1)[real_B].transpose(0, 1))
    return torch.cat(found, 1).transpose(0, 1)[None].contiguous(), None


# every model that attends by "sdpa" can be given a layout; without one it is transformers' own
AttentionInterface.register("sdpa", _attend)


def can_share(model: Any, longest_row: int | None) -> bool:
    """Return whether a model computes rows with a shared prefix as it computes them alone.

    Its config must name no layers that carry a state from token to token (linear attention, convolutions), whose
    error half precision may hide, and it is tried on a few tokens. A layer that sees a window would see another one.

    Args:
        longest_row: tokens that a row has at most; None for no limit.
    """
    text = model.config.get_text_config()
    windows = (getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size"))
    reach = min((width for width in windows if isinstance(width, int)), default=None)
    return (
        getattr(model.config, "_attn_implementation", None) == "sdpa"
        and not getattr(model, "_is_stateful", False)
        and _ATTENTION.issuperset(getattr(text, "layer_types", None) or ())
        and (reach is None or (longest_row is not None and longest_row <= reach))
        and _computes_alike(model)
    )


def _computes_alike(model: Any) -> bool:
    size = min(model.config.get_text_config().vocab_size, 1000)
    # falling, for a model may count its positions from the ids of padding, which are low
    ids_RT = torch.arange(3 * 9, 0, -1).view(3, 9).remainder(size)
    ids_RT[:, :5] = ids_RT[0, :5]
    mask_RT = torch.ones_like(ids_RT)
    mask_RT[0, 7:] = 0
    found = share_prefixes(ids_RT, mask_RT, least_saved=0.0)
    assert found is not None
    layout = found.to(model.device)
    ids_RT, mask_RT = ids_RT.to(model.device), mask_RT.to(model.device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            alone = model(input_ids=ids_RT, attention_mask=mask_RT, use_cache=False).logits
            shared = model(**layout.inputs(), use_cache=False).logits[0]
    except Exception:
        # whatever a model of its own kind makes of the layout, it does not know it
        return False
    finally:
        model.train(was_training)
    real = mask_RT.bool()
    difference = (shared[layout.place_RT][real].float() - alone[real].float()).norm() / alone[real].float().norm()
    return bool(difference <= _TOLERANCE.get(alone.dtype, _TOLERANCE_16_BIT))
