"""Sampling seeds and orders that depend on nothing but their arguments, not on what arrives when."""

from __future__ import annotations

import functools
import hashlib
import random
from array import array
from collections.abc import Iterable
from typing import TypeVar

from verifiers.errors import ConfigError
from verifiers.types import RolloutKey

__all__ = ["check_size", "epoch_order", "reorder_chunks", "rollout_seed"]

Item = TypeVar("Item")


def check_size(name: str, value: object, minimum: int) -> int:
    """Return `value` where it is a whole number of at least `minimum`.

    Raises:
        ConfigError: it is not; the message names the setting, the value and the bound.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} is {value!r}, but it must be a whole number of at least {minimum}.")
    return value


def rollout_seed(seed: int, key: RolloutKey) -> int:
    """Return the sampling seed sent to the server for one rollout.

    The seed depends on nothing but the arguments, so a retried or resumed rollout samples what it would have sampled,
    and no two rollouts of a group share a seed.

    Args:
        seed: the run's seed.
        key: block, example and generation of the rollout.

    Returns:
        An integer in 1 .. 2**63 - 1 (what signed 64-bit seed fields take), from BLAKE2b (RFC 7693) over the
        four numbers.
    """
    text = f"{seed}:{key.block_id}:{key.example_id}:{key.generation}"
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"vf-rollout").digest()
    return int.from_bytes(digest, "big") >> 1 or 1


@functools.lru_cache(maxsize=4)
def epoch_order(num_items: int, seed: int, epoch: int) -> array[int]:
    """Return the order in which epoch number `epoch` (from 0) visits rows 0 .. `num_items` - 1, by `seed` alone.

    The array is shared with other callers and must not be changed.
    """
    order = array("q", range(num_items))
    # a text key is hashed with SHA-512, so neighbouring seeds and epochs give unrelated permutations
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def reorder_chunks(chunks: Iterable[Iterable[tuple[tuple[int, int], Item]]], num_generations: int) -> list[Item]:
    """Put chunked generation back into prompt-major order, whatever the order of arrival.

    Args:
        chunks: items with their identity, ((prompt, generation), item); prompt is its place in the batch.
            Chunks may be uneven.
        num_generations: generations of each prompt.

    Returns:
        The items of prompt 0, generations 0 .. num_generations - 1, then those of prompt 1, and so on.

    Raises:
        ConfigError: where a generation is missing, doubled or out of range: order is never guessed.
    """
    items: dict[tuple[int, int], Item] = {}
    for chunk in chunks:
        for key, item in chunk:
            if key in items:
                raise ConfigError(f"generation {key[1]} of prompt {key[0]} arrived twice")
            items[key] = item
    wanted = {(prompt, generation) for prompt, _ in items for generation in range(num_generations)}
    if wanted != set(items):
        missing, unexpected = sorted(wanted - set(items)), sorted(set(items) - wanted)
        raise ConfigError(
            f"with {num_generations} generations a prompt, (prompt, generation) {missing} are missing "
            f"and {unexpected} do not belong"
        )
    return [items[key] for key in sorted(items)]
