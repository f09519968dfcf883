"""Orders of rows, shares of datasets and sampling seeds, by their arguments alone and not by what arrives when."""

from __future__ import annotations

import functools
import hashlib
import heapq
import math
import random
import re
import secrets
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from verifiers.errors import ConfigError
from verifiers.keywords import warn_once
from verifiers.types import RolloutKey

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
        shuffle: visit rows in an order drawn from (seed, epoch), default True. The permutation is not torch's: the
            structure is TRL's, the random order is not.
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

    @property
    def chunks_per_epoch(self) -> int:
        """Whole chunks in one epoch."""
        return self.num_samples // self.batch_size

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        if dropped := self.num_samples % self.batch_size:
            warn_once(
                "verifiers.data",
                f"{dropped} of {self.num_samples} rows are left out of each epoch: they do not fill a batch of "
                f"{self.batch_size} distinct rows.",
            )
        return (row for number in range(self.chunks_per_epoch) for row in self.chunk(epoch, number))

    def chunk(self, epoch: int, number: int) -> list[int]:
        """Return the row numbers of chunk `number` of an epoch, both from 0, with all their repetitions."""
        start = check_size("number", number, 0) * self.batch_size
        order: Sequence[int] = range(self.num_samples)
        if self.shuffle:
            order = _shuffled(self.num_samples, f"{self.seed}:{epoch}")
        rows = [row for row in order[start : start + self.batch_size] for _ in range(self.mini_repeat_count)]
        return rows * self.repeat_count

    def __len__(self) -> int:
        """Return how many row numbers one epoch yields."""
        return self.chunks_per_epoch * self.batch_size * self.mini_repeat_count * self.repeat_count

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter()` epoch number `epoch` (from 0); accelerate calls it before each epoch."""
        self.epoch = check_size("epoch", epoch, 0)


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
    """Return `value` where it is a whole number of at least `minimum`; refuse it otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} is {value!r}, but it must be a whole number of at least {minimum}.")
    return value


def rollout_seed(seed: int, key: RolloutKey) -> int:
    """Return the sampling seed sent to the server for one rollout.

    A resumed rollout samples what it would have sampled, and no two rollouts of a group share a seed. It
    is an integer in 1 .. 2**63 - 1, from BLAKE2b (RFC 7693) over the four numbers.
    """
    text = f"{seed}:{key.block_id}:{key.example_id}:{key.generation}"
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"vf-rollout").digest()
    return int.from_bytes(digest, "big") >> 1 or 1


def reorder_chunks(chunks: Iterable[Iterable[tuple[tuple[int, int], Item]]], num_generations: int) -> list[Item]:
    """Put chunks of ((prompt, generation), item) into prompt-major order, whatever the order of arrival.

    One that is missing, doubled or out of range is refused: order is never guessed.
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


# -- weights of datasets ------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def whole_weights(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return whole numbers in the proportions of `weights`, which are read as they are written: 0.1 is a tenth."""
    fractions = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    return tuple(int(fraction * scale) for fraction in fractions)


def shares(weights: Sequence[int], total: int) -> list[int]:
    """Return how many of the first `total` draws go to each dataset, of which one has a weight above 0.

    Webster's method (Sainte-Laguë), because its shares never shrink as `total` grows, so that they are prefix counts
    of one sequence; after each sum(weights) draws they stand exactly in the proportions of the weights.
    """
    whole = sum(weights)
    counts = [(2 * total * weight + whole) // (2 * whole) for weight in weights]
    surplus = sum(counts) - total
    for _ in range(surplus):
        # the place given last: the lowest priority, and of equal ones the last dataset's
        held = [index for index, count in enumerate(counts) if count]
        counts[min(held, key=lambda i: (Fraction(weights[i], 2 * counts[i] - 1), -i))] -= 1
    for _ in range(-surplus):
        counts[max(range(len(counts)), key=lambda i: (Fraction(weights[i], 2 * counts[i] + 1), -i))] += 1
    return counts


def interleave(weights: Sequence[int], start: int, stop: int) -> list[int]:
    """Return the index of the dataset that each of the draws `start` .. `stop` - 1 goes to; see `shares`."""
    counts = shares(weights, start)
    waiting = [(-Fraction(weight, 2 * counts[i] + 1), i) for i, weight in enumerate(weights) if weight]
    heapq.heapify(waiting)
    drawn = []
    for _ in range(start, stop):
        _, index = waiting[0]
        counts[index] += 1
        drawn.append(index)
        heapq.heapreplace(waiting, (-Fraction(weights[index], 2 * counts[index] + 1), index))
    return drawn


def row_without_replacement(size: int, key: str, place: int, window: int) -> int:
    """Return the row that draw number `place` of a dataset gets, without replacement.

    Draws 0 .. size - 1 are the first epoch and get every row once, and so on. Any `window` draws in succession get
    different rows, also across the border of two epochs. A dataset of fewer than three windows keeps the order of its
    first epoch; a larger one has another order in each.
    """
    epoch, index = divmod(place, size)
    if size < 3 * window:
        return _shuffled(size, f"{key}:0")[index]
    if epoch and index < 2 * window:
        return _head(size, key, epoch, window)[index]
    return _shuffled(size, f"{key}:{epoch}")[index]


def rows_at_random(size: int, key: str, count: int) -> list[int]:
    """Return `count` different rows, each drawn at random from the others; fewer are the beginning of more."""
    chance, drawn = random.Random(key), dict[int, None]()
    while len(drawn) < count:
        drawn[chance.randrange(size)] = None
    return list(drawn)


@functools.lru_cache(maxsize=64)
def _shuffled(size: int, key: str) -> array[int]:
    order = array("I", range(size))
    # a text key is hashed with SHA-512, so neighbouring keys give unrelated permutations
    random.Random(key).shuffle(order)
    return order


@functools.lru_cache(maxsize=256)
def _head(size: int, key: str, epoch: int, window: int) -> list[int]:
    """Return the first two windows of an epoch; rows that ended the epoch before come in the second window."""
    # of `size` >= 3 windows the last is never moved by this, so no epoch depends on more than its predecessor
    recent = set(_shuffled(size, f"{key}:{epoch - 1}")[size - window :])
    first = list(_shuffled(size, f"{key}:{epoch}")[: 2 * window])
    return [row for row in first if row not in recent] + [row for row in first if row in recent]


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard `number` of `of`, written "3/8", numbered from 1.

    Its prompts are those whose example id leaves the remainder `number - 1` when divided by `of`. Datasets that are
    sorted by difficulty or length so give shards that take about as long.
    """

    number: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.of:
            raise ConfigError(f"there is no shard {self}; shards are numbered from 1, so of 8 they are 1/8 to 8/8.")

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Return the shard that a text such as "3/8" names; refuse one that names none."""
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip())
        if found is None:
            raise ConfigError(f"{text!r} is not a shard: write K/N, such as 3/8.")
        return cls(int(found[1]), int(found[2]))

    @classmethod
    def of_run(cls, metadata: Mapping[str, Any]) -> Shard | None:
        """Return the shard that a run's metadata names; None for a whole run."""
        text = metadata.get("shard")
        return None if text is None else cls.parse(str(text))

    def examples(self, num_examples: int) -> range:
        """Return the example ids of this shard's prompts; refuse fewer prompts than shards."""
        if num_examples < self.of:
            raise ConfigError(
                f"{num_examples} prompts cannot be split into {self.of} shards; give at most {num_examples}."
            )
        return range(self.number - 1, num_examples, self.of)
