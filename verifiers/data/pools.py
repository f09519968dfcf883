"""Pools of difficulty: prompts move between them by how often the policy passed, and blocks draw by pool."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifiers.data.adaptive import Prompt, number_between
from verifiers.data.draws import turns, whole_weights
from verifiers.errors import ConfigError

__all__ = ["PassRatePools", "Pool"]


@dataclass(frozen=True, slots=True)
class Pool:
    """Prompts whose newest pass rate is at most `up_to`, and above that of the pool before.

    Attributes:
        name: for messages and metrics.
        up_to: the highest pass rate in it.
        weight: its part of a block is its weight over the sum of the weights of the pools that hold prompts.
    """

    name: str
    up_to: float
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"a pool has the name {self.name!r}; give it one.")
        number_between(f"up_to of pool {self.name!r}", self.up_to, 0, 1)
        number_between(f"weight of pool {self.name!r}", self.weight, 0, 1e9)


DEFAULT_POOLS = (Pool("hard", 0.2, 1.0), Pool("medium", 0.8, 4.0), Pool("easy", 1.0, 1.0))


@dataclass
class PassRatePools:
    """Draws most from the prompts that are neither solved nor hopeless.

    Args:
        datasets: names of datasets whose rows are taken; all there are when left out.
        pools: in order of their `up_to`, the last of which is 1.
        unseen: the pool that prompts stand in until they were observed.
        passes_at: a rollout passes when its reward is at least this.
        seed: of the draws.
    """

    datasets: tuple[str, ...] = ()
    pools: tuple[Pool, ...] = DEFAULT_POOLS
    unseen: str = "medium"
    passes_at: float = 1.0
    seed: int = 0
    _prompts: list[Prompt] = field(default_factory=list, init=False, repr=False)
    _numbers: dict[Prompt, int] = field(default_factory=dict, init=False, repr=False)
    _pool_of: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _members: list[list[int]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self.datasets, self.pools = tuple(self.datasets), tuple(self.pools)
        if not all(isinstance(name, str) for name in self.datasets) or len(set(self.datasets)) < len(self.datasets):
            raise ConfigError(f"the pools take rows of {list(self.datasets)!r}; give names of different datasets.")
        edges = [pool.up_to for pool in self.pools]
        if not edges or edges != sorted(set(edges)) or edges[-1] != 1:
            raise ConfigError(f"the pools end at {edges!r}; give rising pass rates, of which the last is 1.")
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            raise ConfigError(f"the pools are called {', '.join(names)}; give each a name of its own.")
        if self.unseen not in names:
            raise ConfigError(f"unseen is {self.unseen!r}; name one of the pools {', '.join(names)}.")
        number_between("passes_at", self.passes_at, -math.inf, math.inf)
        if not any(pool.weight for pool in self.pools):
            raise ConfigError("the weights of the pools sum to 0; give one of them a weight above 0.")

    @property
    def name(self) -> str:
        return "pools"

    def begin(self, sizes: Mapping[str, int]) -> None:
        for name in self.datasets:
            if name not in sizes:
                there = ", ".join(sorted(sizes)) or "none"
                raise ConfigError(f"the pools take rows of dataset {name!r}, which is not there; there are: {there}.")
        names = self.datasets or tuple(sizes)
        self._prompts = [(name, row) for name in names for row in range(sizes[name])]
        self._numbers = {prompt: number for number, prompt in enumerate(self._prompts)}
        self._restart({})

    def check_block(self, count: int) -> None:
        if count > len(self._prompts):
            raise ConfigError(
                f"a block takes {count} different prompts, and the pools hold {len(self._prompts)}; make blocks "
                "smaller."
            )

    def draw(self, block_id: int, count: int) -> list[Prompt]:
        self.check_block(count)
        chance = random.Random(f"{self.seed}:{block_id}")
        wanted = self._wanted(block_id, count)
        picked = [
            number
            for members, part in zip(self._members, wanted, strict=True)
            for number in chance.sample(members, part)
        ]
        return [self._prompts[number] for number in picked]

    def learn(self, rates: Mapping[Prompt, float]) -> None:
        for prompt, rate in rates.items():
            number = self._numbers.get(prompt)
            if number is not None:
                self._move(number, bisect.bisect_left([pool.up_to for pool in self.pools], rate))

    def state(self) -> dict[str, Any]:
        return {"pools": sorted(self._pool_of.items())}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._restart({int(number): int(pool) for number, pool in state["pools"]})

    def settings(self) -> dict[str, Any]:
        return {
            "datasets": list(self.datasets),
            "pools": [f"{pool.name} to {pool.up_to:g} x {pool.weight:g}" for pool in self.pools],
            "unseen": self.unseen,
            "passes_at": self.passes_at,
            "seed": self.seed,
        }

    def metrics(self) -> dict[str, float]:
        held = {
            f"curriculum/pool/{pool.name}": float(len(members))
            for pool, members in zip(self.pools, self._members, strict=True)
        }
        return {**held, "curriculum/prompts_seen": float(len(self._pool_of))}

    def _restart(self, pool_of: dict[int, int]) -> None:
        unseen = next(index for index, pool in enumerate(self.pools) if pool.name == self.unseen)
        self._pool_of = pool_of
        self._members = [[] for _ in self.pools]
        # sorted, so that what is drawn depends on who is in a pool and not on when each came
        for number in range(len(self._prompts)):
            self._members[pool_of.get(number, unseen)].append(number)

    def _move(self, number: int, pool: int) -> None:
        unseen = next(index for index, known in enumerate(self.pools) if known.name == self.unseen)
        old = self._pool_of.get(number, unseen)
        self._pool_of[number] = pool
        if old != pool:
            members = self._members[old]
            del members[bisect.bisect_left(members, number)]
            bisect.insort(self._members[pool], number)

    def _wanted(self, block_id: int, count: int) -> list[int]:
        """How many prompts each pool gives: by weight among those that still have some."""
        wanted = [0] * len(self.pools)
        while (missing := count - sum(wanted)) > 0:
            free = [len(members) - part for members, part in zip(self._members, wanted, strict=True)]
            weights = _weights(
                [pool.weight if left else 0.0 for pool, left in zip(self.pools, free, strict=True)], free
            )
            # the place in the sequence goes on with the blocks, so that a small weight gets its turn in some of them
            for index in turns(weights, block_id * count, block_id * count + missing):
                if free[index]:
                    wanted[index], free[index] = wanted[index] + 1, free[index] - 1
        return wanted


def _weights(weights: Sequence[float], free: Sequence[int]) -> tuple[int, ...]:
    """Whole weights; where only pools without weight hold prompts, they count alike."""
    if any(weights):
        return whole_weights(tuple(weights))
    return tuple(int(left > 0) for left in free)
