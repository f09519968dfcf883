"""Levels of difficulty: up when the policy passes often enough on the present one, down when it seldom does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from verifiers.data.adaptive import Prompt, number_between
from verifiers.data.draws import row_in_turn
from verifiers.data.sizes import check_size
from verifiers.errors import ConfigError

__all__ = ["Levels"]


@dataclass
class Levels:
    """Trains on one dataset at a time, from the easiest to the hardest.

    After `window` prompts of the present level the mean of their pass rates decides: at least `raise_at` goes one
    level up, at most `lower_at` one down, and counting begins anew; anything between keeps the level and looks at the
    newest `window` prompts again after the next block.

    Args:
        datasets: the levels, the easiest first.
        window: prompts that are looked at.
        raise_at, lower_at: pass rates at which the level changes.
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
                raise ConfigError(f"the level {name!r} is no dataset with rows; there are: {there}.")
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
        rows = [row_in_turn(size, f"{self.seed}:{name}", place, count) for place in range(first, first + count)]
        return [(name, row) for row in rows]

    def learn(self, rates: Mapping[Prompt, float]) -> None:
        # blocks in flight while the level changed say nothing about the new one
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
