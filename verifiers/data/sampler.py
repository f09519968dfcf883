"""RepeatSampler: the order in which rows are visited when each prompt is sampled several times."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Sequence, Sized

from verifiers.data.order import check_size, epoch_order
from verifiers.errors import ConfigError

__all__ = ["RepeatSampler"]

logger = logging.getLogger("verifiers.data")


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
        repeat_count: times each chunk is repeated (passes times micro-steps), default 1.
        shuffle: visit rows in an order drawn from (seed, epoch), default True. The permutation is that of
            `data.order`, not torch's: the structure is TRL's, the random order is not.
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
        """Make the next `iter()` epoch number `epoch` (from 0), as a resumed run does."""
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
