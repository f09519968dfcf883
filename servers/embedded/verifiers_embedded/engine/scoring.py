"""Log-probabilities of the tokens of prompts, as a teacher of another policy is asked for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verifiers_embedded.engine.decoding import upload
from verifiers_embedded.errors import BrokenLogits

_LOGITS_AT_ONCE = 64 * 2**20
"""Logits of one pass: 256 MiB in float32, and as much again for their log-probabilities."""

_MOST_TOKENS = 4096

Prompt = tuple[Sequence[int], int]
"""Token ids, and how many of the likeliest tokens are to be told in each place."""


@dataclass(frozen=True)
class PromptScore:
    """What a model says of each token of a prompt but the first, at temperature 1.

    `log_probs[i]` is that of token i + 1, and `likeliest[i]` the likeliest tokens there, as (id, log-probability).
    """

    log_probs: list[float]
    likeliest: list[list[tuple[int, float]]]


def scored_together(model: Any, prompts: Sequence[Prompt]) -> int:
    """Return how many of the first prompts are scored in one pass, where at most a third of it is padding.

    One that is too long for a pass is scored alone.
    """
    longest = total = 0
    for count, (ids, _) in enumerate(prompts):
        longest, total = max(longest, len(ids)), total + len(ids)
        if (count + 1) * longest > min(1.5 * total, _tokens_at_once(model)):
            return max(1, count)
    return len(prompts)


def score_prompts(model: Any, prompts: Sequence[Prompt], cache_name: str) -> list[PromptScore | BrokenLogits]:
    """Score prompts side by side, a long one piece by piece, with a cache of its own.

    Nothing is masked: a shorter prompt is padded behind its end, where a causal model does not look.

    Args:
        cache_name: the name of the cache among the arguments of the model's forward.
    """
    from transformers import DynamicCache

    width, most = max(len(ids) for ids, _ in prompts), max(alternatives for _, alternatives in prompts)
    ids_NT = upload([[*ids, *[0] * (width - len(ids))] for ids, _ in prompts], model.device)
    piece = max(1, _tokens_at_once(model) // len(prompts))
    options: dict[str, Any] = {"use_cache": width - 1 > piece}
    if options["use_cache"]:
        options[cache_name] = DynamicCache(config=model.config)
    chosen, values, places = [], [], []
    for start in range(0, width - 1, piece):
        end = min(start + piece, width - 1)
        positions = torch.arange(start, end, device=model.device).expand(len(prompts), -1)
        logits_NTV = model(input_ids=ids_NT[:, start:end], position_ids=positions, **options).logits
        logps_NTV = logits_NTV.float().log_softmax(-1)
        chosen.append(logps_NTV.gather(2, ids_NT[:, start + 1 : end + 1, None])[..., 0].cpu())
        best = torch.topk(logps_NTV, min(most, logps_NTV.shape[2]))
        values.append(best.values.cpu())
        places.append(best.indices.cpu())
    if not chosen:
        return [PromptScore([], []) for _ in prompts]
    columns = (torch.cat(parts, dim=1).tolist() for parts in (chosen, values, places))
    return [_score(asked, *found) for asked, *found in zip(prompts, *columns, strict=True)]


def _score(
    asked: Prompt, log_probs: list[float], values: list[list[float]], places: list[list[int]]
) -> PromptScore | BrokenLogits:
    count, alternatives = len(asked[0]) - 1, asked[1]
    if not all(map(math.isfinite, log_probs[:count])):
        return BrokenLogits(
            "the model gave no valid distribution for a token of the prompt: push weights that are finite"
        )
    pairs = zip(places[:count], values[:count], strict=True)
    return PromptScore(
        log_probs[:count],
        [list(zip(ids[:alternatives], found[:alternatives], strict=True)) for ids, found in pairs],
    )


def _tokens_at_once(model: Any) -> int:
    return max(1, min(_MOST_TOKENS, _LOGITS_AT_ONCE // model.config.get_text_config().vocab_size))
