"""Log-probabilities of the tokens of a prompt, as a teacher of another policy is asked for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verifiers_embedded.engine.decoding import upload
from verifiers_embedded.errors import BrokenLogits

_PIECE = 256
"""Tokens of one pass: what bounds its logits."""


@dataclass(frozen=True)
class PromptScore:
    """What a model says of each token of a prompt but the first, at temperature 1.

    `log_probs[i]` is that of token i + 1, and `likeliest[i]` the likeliest tokens there, as (id, log-probability).
    """

    log_probs: list[float]
    likeliest: list[list[tuple[int, float]]]


def score_prompt(model: Any, ids: Sequence[int], alternatives: int, cache_name: str) -> PromptScore:
    """Score a prompt piece by piece, with a cache of its own.

    Args:
        alternatives: how many of the likeliest tokens to return.
        cache_name: the name of the cache among the arguments of the model's forward.
    """
    from transformers import DynamicCache

    cache = {cache_name: DynamicCache(config=model.config)}
    log_probs: list[float] = []
    likeliest: list[list[tuple[int, float]]] = []
    for start in range(0, len(ids) - 1, _PIECE):
        piece, next_ids = ids[start : start + _PIECE], ids[start + 1 : start + 1 + _PIECE]
        given = {"input_ids": [list(piece)], "position_ids": [list(range(start, start + len(piece)))]}
        inputs = {name: upload(values, model.device) for name, values in given.items()}
        logits_TV = model(**inputs, **cache, use_cache=True).logits[0]
        logps_TV = logits_TV[: len(next_ids)].float().log_softmax(-1)
        chosen = upload(list(next_ids), model.device)[:, None]
        log_probs += logps_TV.gather(1, chosen)[:, 0].tolist()
        values, places = torch.topk(logps_TV, min(alternatives, logps_TV.shape[1]))
        pairs = zip(places.tolist(), values.tolist(), strict=True)
        likeliest += [list(zip(*pair, strict=True)) for pair in pairs]
    if not all(map(math.isfinite, log_probs)):
        raise BrokenLogits(
            "the model gave no valid distribution for a token of the prompt: push weights that are finite"
        )
    return PromptScore(log_probs, likeliest)
