"""Seeds and orders that depend on nothing but their arguments: of rollouts, of epochs, of micro-batches."""

from __future__ import annotations

import functools
import hashlib
import random
from array import array

from verifiers.data.sizes import check_size
from verifiers.types import RolloutKey

__all__ = ["epoch_order", "epoch_rows", "micro_batch_order", "rollout_seed"]


def rollout_seed(seed: int, key: RolloutKey) -> int:
    """The sampling seed sent to the server for one rollout.

    It depends on nothing but its arguments, so a retried or resumed rollout samples what it would have sampled,
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
def epoch_rows(num_items: int, seed: int, epoch: int) -> array[int]:
    """As `epoch_order`, shared with other callers: not to be changed."""
    order = array("q", range(num_items))
    # A text key is hashed with SHA-512, so neighbouring seeds and epochs give unrelated permutations.
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def epoch_order(num_items: int, seed: int, epoch: int) -> array[int]:
    """The order in which epoch number `epoch` (from 0) visits rows 0 .. `num_items` - 1, by `seed` alone."""
    return array("q", epoch_rows(num_items, seed, epoch))


def micro_batch_order(
    num_micro_batches: int, micro_batches_per_block: int, num_iterations: int = 1
) -> tuple[list[int], list[int]]:
    """The order in which micro-batches are trained: each full block is passed over `num_iterations` times.

    Args:
        num_micro_batches: micro-batches of data there are.
        micro_batches_per_block: K, micro-batches in a block.
        num_iterations: mu, passes over each block, default 1.

    Returns:
        The trained order, and the micro-batches at the end that make no full block and are not trained.

    Raises:
        ConfigError: a size is not a whole number, or too small.
    """
    check_size("num_micro_batches", num_micro_batches, 0)
    check_size("micro_batches_per_block", micro_batches_per_block, 1)
    check_size("num_iterations", num_iterations, 1)
    whole = num_micro_batches - num_micro_batches % micro_batches_per_block
    order = [
        start + micro_batch
        for start in range(0, whole, micro_batches_per_block)
        for _ in range(num_iterations)
        for micro_batch in range(micro_batches_per_block)
    ]
    return order, list(range(whole, num_micro_batches))
