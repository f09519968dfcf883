"""Sampling seeds and epoch orders that depend on nothing but their arguments."""

from __future__ import annotations

import functools
import hashlib
import random
from array import array

from verifiers.errors import ConfigError
from verifiers.types import RolloutKey

__all__ = ["check_size", "epoch_order", "rollout_seed"]


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
