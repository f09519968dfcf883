"""Curricula that adapt: levels of difficulty, pools of prompts by pass rate, and the row source around them.

What block k draws depends on blocks 0 .. k - 1 - lag alone, where lag is the number of blocks generated ahead: those
are scored whenever block k is submitted. So a run that is resumed, or slower, draws what another would.

A further policy is a class here that has the methods of `CurriculumPolicy`, and a line in `POLICIES`, which gives it
its table in run files.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar, Protocol

from verifiers.data.curriculum import Curriculum, from_table, staged_curriculum_from
from verifiers.data.row_source import PlannedBlock
from verifiers.data.sampler import check_size, interleave, row_without_replacement, whole_weights
from verifiers.errors import CheckpointError, ConfigError, GenerationError

Prompt = tuple[str, int]
"""A dataset's name and one of its rows."""


class CurriculumPolicy(Protocol):
    """A rule that chooses prompts by how earlier ones went. Called in the order of blocks, never from two threads."""

    passes_at: float
    """A rollout passes when its reward is at least this."""

    @property
    def name(self) -> str:
        """The part of the curriculum that is drawn from now, in a word."""
        ...

    def begin(self, sizes: Mapping[str, int]) -> None:
        """Start from nothing on datasets with so many rows; refuse a name that is not among them."""
        ...

    def check_block(self, count: int) -> None:
        """Refuse blocks of `count` prompts before the run, where some of them could not be drawn."""
        ...

    def draw(self, block_id: int, count: int) -> list[Prompt]:
        """Return `count` different prompts for a block, by seed, block and what was learned."""
        ...

    def learn(self, rates: Mapping[Prompt, float]) -> None:
        """Take the pass rate of each prompt: the part of its scored rollouts that passed."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what was learned and drawn, as JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        ...

    def settings(self) -> dict[str, Any]:
        """Return the policy's own settings, as JSON."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the present state as metrics for the log."""
        ...


class AdaptiveRows:
    """The row source of a curriculum policy: example ids by dataset, drawn `lag` blocks ahead of what is trained."""

    def __init__(self, policy: CurriculumPolicy, datasets: Mapping[str, Sequence[int]], *, lag: int) -> None:
        self.policy = policy
        self.lag = check_size("lag", lag, 0)
        self.datasets = {name: list(rows) for name, rows in datasets.items()}
        self._prompts = {row: (name, n) for name, rows in self.datasets.items() for n, row in enumerate(rows)}
        self._observed = -1
        self._waiting: list[tuple[int, dict[int, float]]] = []
        self._drawn: dict[int, list[int]] = {}
        self._names: dict[int, str] = {}
        policy.begin({name: len(rows) for name, rows in self.datasets.items()})

    @property
    def until_steps(self) -> tuple[int, ...]:
        return ()

    def example_ids(self, block: PlannedBlock) -> list[int]:
        known = self._drawn.get(block.block_id)
        if known is None:
            if block.block_id <= self._observed:
                raise GenerationError(f"block {block.block_id} was observed; what it drew is not kept.")
            self._learn_before(block.block_id)
            known = [self.datasets[name][row] for name, row in self.policy.draw(block.block_id, block.prompts)]
            self._drawn[block.block_id], self._names[block.block_id] = known, self.policy.name
        return list(known)

    def observe(self, block_id: int, rewards: Mapping[int, Sequence[float]]) -> None:
        if block_id != self._observed + 1:
            raise GenerationError(f"block {block_id} was observed after block {self._observed}: they come in order.")
        # a prompt of which nothing was scored has no pass rate
        rates = {
            example_id: sum(reward >= self.policy.passes_at for reward in given) / len(given)
            for example_id, given in rewards.items()
            if given
        }
        self._waiting.append((block_id, rates))
        self._observed = block_id
        self._drawn = {block: rows for block, rows in self._drawn.items() if block >= block_id}
        self._names = {block: name for block, name in self._names.items() if block >= block_id}

    def state(self) -> dict[str, Any]:
        ahead = {str(block): rows for block, rows in self._drawn.items() if block > self._observed}
        return {
            "observed": self._observed,
            "waiting": [[block, list(rates.items())] for block, rates in self._waiting],
            # blocks in flight were drawn by an older state; they are drawn again as they were
            "drawn": ahead,
            "names": {block: self._names[int(block)] for block in ahead},
            "rule": self.policy.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        try:
            self._observed = int(state["observed"])
            self._waiting = [
                (int(block), {int(row): float(r) for row, r in rates}) for block, rates in state["waiting"]
            ]
            self._drawn = {int(block): [int(row) for row in rows] for block, rows in state["drawn"].items()}
            self._names = {int(block): str(name) for block, name in state["names"].items()}
            self.policy.restore(state["rule"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state of the curriculum in the checkpoint cannot be read ({type(error).__name__}: {error})."
            ) from error

    def stage_name(self, optimizer_step: int) -> str:
        return self._names.get(self._observed, self.policy.name)

    def describe(self, max_steps: int, updates_per_block: int) -> list[tuple[str, str]]:
        lists = (list, tuple)
        shown = {
            name: " < ".join(map(str, value)) if isinstance(value, lists) else value
            for name, value in self.policy.settings().items()
        }
        settings = ", ".join(f"{name} {value}" for name, value in shown.items())
        seen = f"blocks up to {self.lag + 1} before" if self.lag else "the block before"
        return [("curriculum", f"{settings}; decides by {seen}")]

    def fingerprint(self, optimizer_step: int) -> dict[str, Any]:
        sizes = {name: len(rows) for name, rows in self.datasets.items()}
        return {"rule": self.policy.settings(), "sizes": sizes}

    def metrics(self) -> dict[str, float]:
        return self.policy.metrics()

    def _learn_before(self, block_id: int) -> None:
        """Pass the policy every block that block `block_id` may depend on, and no later one."""
        last = block_id - 1 - self.lag
        if last > self._observed:
            raise GenerationError(
                f"block {block_id} was asked for before block {last} was observed; at most {self.lag} blocks are "
                "generated ahead."
            )
        while self._waiting and self._waiting[0][0] <= last:
            _, rates = self._waiting.pop(0)
            self.policy.learn({self._prompts[row]: rate for row, rate in rates.items()})


def _check_number(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; give a number from {low:g} to {high:g}.")


@dataclass
class LevelsPolicy:
    """A policy that trains on one dataset at a time, from the easiest to the hardest.

    After `window` prompts of the present level the mean of their pass rates decides: at least `raise_at` goes one
    level up, at most `lower_at` one down, and counting restarts; anything between keeps the level and looks at the
    newest `window` prompts again after the next block.

    Attributes:
        datasets: the levels, the easiest first; every row of one is drawn once before any is drawn twice.
        passes_at: a rollout passes when its reward is at least this.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    datasets: tuple[str, ...]
    window: int = 64
    raise_at: float = 0.7
    lower_at: float = 0.2
    passes_at: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.datasets or len(set(self.datasets)) < len(self.datasets):
            raise ConfigError(f"the levels are {list(self.datasets)!r}; give different datasets, the easiest first.")
        check_size("window", self.window, 1)
        _check_number("raise_at", self.raise_at, 0, 1)
        _check_number("lower_at", self.lower_at, 0, 1)
        _check_number("passes_at", self.passes_at, -math.inf, math.inf)
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
        self._level, self._draws = 0, dict.fromkeys(self.datasets, 0)
        self._rates: list[float] = []

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
        settings = dataclasses.asdict(self)
        return {"levels": list(settings.pop("datasets")), **settings}

    def metrics(self) -> dict[str, float]:
        return {"curriculum/level": float(self._level)}


@dataclass(frozen=True, slots=True)
class Pool:
    """Prompts whose newest pass rate is at most `up_to`, and above that of the pool before.

    Its part of a block is its weight over the sum of the weights of the pools that hold prompts.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    name: str
    up_to: float
    weight: float = 1.0

    def __post_init__(self) -> None:
        _check_number(f"up_to of pool {self.name!r}", self.up_to, 0, 1)
        _check_number(f"weight of pool {self.name!r}", self.weight, 0, 1e9)


DEFAULT_POOLS = (Pool("hard", 0.2, 1.0), Pool("medium", 0.8, 4.0), Pool("easy", 1.0, 1.0))


@dataclass
class PoolsPolicy:
    """A policy that draws most from the prompts that are neither solved nor hopeless.

    Attributes:
        datasets: names of datasets whose rows are taken; all there are when left out.
        pools: in order of their `up_to`, the last of which is 1.
        unseen: the pool that prompts stand in until they were observed.
        passes_at: a rollout passes when its reward is at least this.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    datasets: tuple[str, ...] = ()
    pools: tuple[Pool, ...] = DEFAULT_POOLS
    unseen: str = "medium"
    passes_at: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if len(set(self.datasets)) < len(self.datasets):
            raise ConfigError(f"the pools take rows of {list(self.datasets)!r}; give names of different datasets.")
        edges = [pool.up_to for pool in self.pools]
        if not edges or edges != sorted(set(edges)) or edges[-1] != 1:
            raise ConfigError(f"the pools end at {edges!r}; give rising pass rates, of which the last is 1.")
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            raise ConfigError(f"the pools are called {', '.join(names)}; give each a name of its own.")
        if self.unseen not in names:
            raise ConfigError(f"unseen is {self.unseen!r}; name one of the pools {', '.join(names)}.")
        _check_number("passes_at", self.passes_at, -math.inf, math.inf)
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
        self._pool_of: dict[int, int] = {}

    def check_block(self, count: int) -> None:
        if count > len(self._prompts):
            raise ConfigError(
                f"a block takes {count} different prompts, and the pools hold {len(self._prompts)}; make blocks "
                "smaller."
            )

    def draw(self, block_id: int, count: int) -> list[Prompt]:
        self.check_block(count)
        chance = random.Random(f"{self.seed}:{block_id}")
        members = self._members()
        wanted = self._wanted([*map(len, members)], block_id, count)
        picked = [chance.sample(held, part) for held, part in zip(members, wanted, strict=True)]
        return [self._prompts[number] for number in itertools.chain(*picked)]

    def learn(self, rates: Mapping[Prompt, float]) -> None:
        for prompt, rate in rates.items():
            number = self._numbers.get(prompt)
            if number is not None:
                self._pool_of[number] = bisect.bisect_left([pool.up_to for pool in self.pools], rate)

    def state(self) -> dict[str, Any]:
        return {"pools": sorted(self._pool_of.items())}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._pool_of = {int(number): int(pool) for number, pool in state["pools"]}

    def settings(self) -> dict[str, Any]:
        return {
            "datasets": list(self.datasets),
            "pools": [f"{pool.name} to {pool.up_to:g} x {pool.weight:g}" for pool in self.pools],
            "unseen": self.unseen,
            "passes_at": self.passes_at,
            "seed": self.seed,
        }

    def metrics(self) -> dict[str, float]:
        held = Counter(self._pool_of.values())
        held[self._unseen] += len(self._prompts) - len(self._pool_of)
        counts = {f"curriculum/pool/{pool.name}": float(held[place]) for place, pool in enumerate(self.pools)}
        return {**counts, "curriculum/prompts_seen": float(len(self._pool_of))}

    @property
    def _unseen(self) -> int:
        return [pool.name for pool in self.pools].index(self.unseen)

    def _members(self) -> list[list[int]]:
        """Return the numbers of each pool's prompts, in their order, whenever each came there."""
        unseen = self._unseen
        members: list[list[int]] = [[] for _ in self.pools]
        for number in range(len(self._prompts)):
            members[self._pool_of.get(number, unseen)].append(number)
        return members

    def _wanted(self, held: Sequence[int], block_id: int, count: int) -> list[int]:
        """Return how many prompts each pool gives: by weight among those that still have some."""
        wanted = [0] * len(self.pools)
        while (missing := count - sum(wanted)) > 0:
            free = [number - part for number, part in zip(held, wanted, strict=True)]
            weights = [pool.weight if left else 0.0 for pool, left in zip(self.pools, free, strict=True)]
            # where only pools without weight hold prompts, they count alike
            whole = whole_weights(tuple(weights)) if any(weights) else [int(left > 0) for left in free]
            # the place in the sequence rises with the blocks, so that some of them draw from a pool of small weight
            for index in interleave(whole, block_id * count, block_id * count + missing):
                if free[index]:
                    wanted[index], free[index] = wanted[index] + 1, free[index] - 1
        return wanted


POLICIES: Mapping[str, type[Any]] = {"levels": LevelsPolicy, "pools": PoolsPolicy}


def curriculum_from(mapping: Mapping[str, Any], seed: int = 0) -> Curriculum | CurriculumPolicy:
    """Return the curriculum, or the curriculum policy, that a table describes.

    Args:
        mapping: {"stages": ...} as for `staged_curriculum_from`, or {"levels": {...}} with the fields of
            `LevelsPolicy`, or {"pools": {...}} with those of `PoolsPolicy`; beside them "seed".

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
    given = mapping[kind]
    if isinstance(given, Mapping):
        given = {"seed": mapping.get("seed", seed), **given}
    policy: CurriculumPolicy = from_table(POLICIES[kind], given, f"the curriculum.{kind}")
    return policy
