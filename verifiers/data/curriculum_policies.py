"""The curriculum policies: levels of difficulty, and pools of prompts by pass rate.

A further policy is a class here that has the methods of `CurriculumPolicy`, and a line in `POLICIES`, which gives it
its table in run files.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from verifiers.data.adaptive_curriculum import CurriculumPolicy, Prompt, number_between
from verifiers.data.curriculum import Curriculum, staged_curriculum_from
from verifiers.data.sampler import check_size
from verifiers.data.weighted_sampling import interleave, row_without_replacement, whole_weights
from verifiers.errors import ConfigError

__all__ = ["LevelsPolicy", "Pool", "PoolsPolicy", "curriculum_from"]


@dataclass
class LevelsPolicy:
    """A policy that trains on one dataset at a time, from the easiest to the hardest.

    After `window` prompts of the present level the mean of their pass rates decides: at least `raise_at` goes one
    level up, at most `lower_at` one down, and counting restarts; anything between keeps the level and looks at the
    newest `window` prompts again after the next block.

    Args:
        datasets: the levels, the easiest first.
        window: prompts that are looked at.
        raise_at: pass rate at which the level rises.
        lower_at: pass rate at which the level falls.
        passes_at: a rollout passes when its reward is at least this.
        seed: of the order of each level's rows; every row is drawn once before any is drawn twice.
    """

    datasets: tuple[str, ...]
    window: int = 64
    raise_at: float = 0.7
    lower_at: float = 0.2
    passes_at: float = 1.0
    seed: int = 0
    _level: int = field(default=0, init=False, repr=False)
    _rates: list[float] = field(default_factory=list, init=False, repr=False)
    _draws: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _sizes: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.datasets = tuple(self.datasets)
        named = all(isinstance(name, str) for name in self.datasets)
        if not self.datasets or not named or len(set(self.datasets)) < len(self.datasets):
            raise ConfigError(f"the levels are {list(self.datasets)!r}; give different datasets, the easiest first.")
        check_size("window", self.window, 1)
        number_between("raise_at", self.raise_at, 0, 1)
        number_between("lower_at", self.lower_at, 0, 1)
        number_between("passes_at", self.passes_at, -math.inf, math.inf)
        if self.lower_at >= self.raise_at:
            raise ConfigError(f"lower_at is {self.lower_at!r}, raise_at {self.raise_at!r}; lower_at must be smaller.")

    @property
    def name(self) -> str:
        return self.datasets[self._level]

    def begin(self, sizes: Mapping[str, int]) -> None:
        for name in self.datasets:
            if sizes.get(name, 0) < 1:
                there = ", ".join(sorted(sizes)) or "none"
                raise ConfigError(f"the level {name!r} is not a dataset with rows; there are: {there}.")
        self._sizes = {name: sizes[name] for name in self.datasets}
        self._level, self._rates, self._draws = 0, [], dict.fromkeys(self.datasets, 0)

    def check_block(self, count: int) -> None:
        for name, size in self._sizes.items():
            if count > size:
                raise ConfigError(
                    f"a block takes {count} different rows of level {name!r}, which has {size}; make blocks smaller, "
                    "or give that level more rows."
                )

    def draw(self, block_id: int, count: int) -> list[Prompt]:
        self.check_block(count)
        name = self.name
        size, first = self._sizes[name], self._draws[name]
        self._draws[name] += count
        key, places = f"{self.seed}:{name}", range(first, first + count)
        return [(name, row_without_replacement(size, key, place, count)) for place in places]

    def learn(self, rates: Mapping[Prompt, float]) -> None:
        # blocks in flight while the level changed are not about the new one
        self._rates += [rate for (name, _), rate in rates.items() if name == self.name]
        self._rates = self._rates[-self.window :]
        if len(self._rates) < self.window:
            return
        mean = fmean(self._rates)
        step = (mean >= self.raise_at) - (mean <= self.lower_at)
        if 0 <= self._level + step < len(self.datasets) and step:
            self._level, self._rates = self._level + step, []

    def state(self) -> dict[str, Any]:
        return {"level": self._level, "rates": list(self._rates), "draws": dict(self._draws)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._level = int(state["level"])
        self._rates = [float(rate) for rate in state["rates"]]
        self._draws = {name: int(state["draws"][name]) for name in self.datasets}

    def settings(self) -> dict[str, Any]:
        return {
            "levels": list(self.datasets),
            "window": self.window,
            "raise_at": self.raise_at,
            "lower_at": self.lower_at,
            "passes_at": self.passes_at,
            "seed": self.seed,
        }

    def metrics(self) -> dict[str, float]:
        return {"curriculum/level": float(self._level)}


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
class PoolsPolicy:
    """A policy that draws most from the prompts that are neither solved nor hopeless.

    Args:
        datasets: names of datasets whose rows are taken; all there are when left out.
        pools: in order of their `up_to`, the last of which is 1.
        unseen: the pool that prompts stand in until they were observed.
        passes_at: a rollout passes when its reward is at least this.
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
        """Return how many prompts each pool gives: by weight among those that still have some."""
        wanted = [0] * len(self.pools)
        while (missing := count - sum(wanted)) > 0:
            free = [len(members) - part for members, part in zip(self._members, wanted, strict=True)]
            weights = _weights(
                [pool.weight if left else 0.0 for pool, left in zip(self.pools, free, strict=True)], free
            )
            # the place in the sequence rises with the blocks, so that some of them draw from a pool of small weight
            for index in interleave(weights, block_id * count, block_id * count + missing):
                if free[index]:
                    wanted[index], free[index] = wanted[index] + 1, free[index] - 1
        return wanted


def _weights(weights: Sequence[float], free: Sequence[int]) -> tuple[int, ...]:
    """Return whole weights; where only pools without weight hold prompts, they count alike."""
    if any(weights):
        return whole_weights(tuple(weights))
    return tuple(int(left > 0) for left in free)


POLICIES: Mapping[str, type[LevelsPolicy] | type[PoolsPolicy]] = {"levels": LevelsPolicy, "pools": PoolsPolicy}


def curriculum_from(mapping: Mapping[str, Any], seed: int = 0) -> Curriculum | CurriculumPolicy:
    """Return the curriculum, or the curriculum policy, that a table describes.

    Args:
        mapping: {"stages": ...} as for `staged_curriculum_from`, or {"levels": {...}} with the arguments of
            `LevelsPolicy`, or {"pools": {...}} with those of `PoolsPolicy`, whose pools are a list of
            {"name", "up_to", "weight"}.

    Raises:
        ConfigError: not exactly one kind, a key that is unknown or missing, or a value that cannot be.
    """
    kinds = [kind for kind in ("stages", *POLICIES) if kind in mapping]
    if len(kinds) != 1:
        raise ConfigError(
            f"the curriculum has {' and '.join(kinds) or 'neither stages, levels nor pools'}; give one of stages, "
            "levels and pools."
        )
    kind = kinds[0]
    if kind == "stages":
        return staged_curriculum_from({"seed": seed, **mapping})
    for key in mapping:
        if key not in (kind, "seed"):
            raise ConfigError(f"the curriculum has an unknown key {key!r} beside {kind!r}; it takes {kind} and seed.")
    given = _arguments(kind, POLICIES[kind], mapping[kind])
    if kind == "pools" and "pools" in given:
        given["pools"] = tuple(Pool(**_arguments("a pool", Pool, pool)) for pool in given["pools"])
    given["seed"] = mapping.get("seed", seed)
    if isinstance(given["seed"], bool) or not isinstance(given["seed"], int):
        raise ConfigError(f"seed of the curriculum is {given['seed']!r}; give a whole number.")
    policy: CurriculumPolicy = POLICIES[kind](**given)
    return policy


def _arguments(where: str, kind: type[Any], given: Any) -> dict[str, Any]:
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init and field.name != "seed"}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} of the curriculum is {given!r}; give a table with {', '.join(fields)}.")
    for key, value in given.items():
        if key not in fields:
            raise ConfigError(f"{where} of the curriculum has an unknown key {key!r}; it takes {', '.join(fields)}.")
        if key in ("datasets", "pools") and not isinstance(value, list):
            raise ConfigError(f"{key} of the curriculum's {where} is {value!r}; give a list.")
    for name, each in fields.items():
        needed = each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        if needed and name not in given:
            raise ConfigError(f"{where} of the curriculum has no {name!r}; it takes {', '.join(fields)}.")
    return dict(given)
