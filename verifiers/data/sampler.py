"""Orders of rows and sampling seeds that depend on nothing but their arguments, not on what arrives when."""

from __future__ import annotations

import functools
import hashlib
import logging
import random
import secrets
from array import array
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import TypeVar

from verifiers.errors import ConfigError
from verifiers.types import RolloutKey

__all__ = ["RepeatSampler", "check_size", "epoch_order", "reorder_chunks", "rollout_seed"]

logger = logging.getLogger("verifiers.data")


Item = TypeVar("Item")


class RepeatSampler:
    """Row numbers in the order of TRL's sampler of the same name, without torch.

    Rows are taken in chunks of `batch_size`. Within a chunk each row comes `mini_repeat_count` times in a row,
    and the whole chunk comes `repeat_count` times before the next one begins. Each `iter()` is an epoch. Rows
    that make no full chunk are left out of that epoch, which is logged once, as a warning, at the first `iter()`.

    The batch plan takes each block from `chunk`, so that a resumed run begins with any block.

    Args:
        data_source: anything with a length, or the number of rows.
        mini_repeat_count: times each row is repeated within its chunk (the trainer's num_generations).
        batch_size: distinct rows in a chunk, default 1.
        repeat_count: times each chunk is repeated (iterations times micro-steps), default 1.
        shuffle: visit rows in an order drawn from (seed, epoch), default True. The permutation is that of
            `epoch_order`, not torch's: the structure is TRL's, the random order is not.
        seed: default None draws one, which `seed` then holds.

    Raises:
        ConfigError: a size that is not a whole number of at least 1, or a data source without a length.
    """

    def __init__(
        self,
        data_source: Sized | int,
        mini_repeat_count: int,
        batch_size: int = 1,
        repeat_count: int = 1,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        self.data_source = data_source
        self.num_samples = _length(data_source)
        self.mini_repeat_count = check_size("mini_repeat_count", mini_repeat_count, 1)
        self.batch_size = check_size("batch_size", batch_size, 1)
        self.repeat_count = check_size("repeat_count", repeat_count, 1)
        self.shuffle = shuffle
        self.seed = secrets.randbits(32) if seed is None else seed
        self.epoch = 0
        self._warned = False

    @property
    def chunks_per_epoch(self) -> int:
        """Whole chunks in one epoch."""
        return self.num_samples // self.batch_size

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        self._warn_of_dropped_rows()
        return (row for number in range(self.chunks_per_epoch) for row in self.chunk(epoch, number))

    def chunk(self, epoch: int, number: int) -> list[int]:
        """Return the row numbers of one chunk of an epoch, with all their repetitions.

        Args:
            epoch: from 0.
            number: of the chunk in its epoch, from 0.
        """
        start = check_size("number", number, 0) * self.batch_size
        order: Sequence[int] = range(self.num_samples)
        if self.shuffle:
            order = epoch_order(self.num_samples, self.seed, epoch)
        rows = [row for row in order[start : start + self.batch_size] for _ in range(self.mini_repeat_count)]
        return rows * self.repeat_count

    def __len__(self) -> int:
        """Return how many row numbers one epoch yields."""
        return self.chunks_per_epoch * self.batch_size * self.mini_repeat_count * self.repeat_count

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter()` epoch number `epoch` (from 0).

        accelerate calls it on the sampler of a DataLoader that it prepared, before each epoch.
        """
        self.epoch = check_size("epoch", epoch, 0)

    def _warn_of_dropped_rows(self) -> None:
        dropped = self.num_samples % self.batch_size
        if dropped and not self._warned:
            self._warned = True
            logger.warning(
                "%d of %d rows are left out of each epoch: they do not fill a batch of %d distinct rows.",
                dropped,
                self.num_samples,
                self.batch_size,
            )


def _length(data_source: Sized | int) -> int:
    if isinstance(data_source, int):
        return check_size("data_source", data_source, 0)
    try:
        return len(data_source)
    except TypeError:
        raise ConfigError(
            f"data_source is a {type(data_source).__name__}, which has no length: "
            "pass a dataset, a list or the number of rows."
        ) from None


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
