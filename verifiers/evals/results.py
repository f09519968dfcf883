"""The numbers of a run's rows, by prompt: what summaries and comparisons are made of, without any transcript."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from verifiers.errors import ConfigError
from verifiers.evals.store import metrics_of

__all__ = ["Counts", "RolloutResults"]

_SCORED = ("completed", "truncated")


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of rollouts by how they ended.

    Attributes:
        prompts: prompts with at least one rollout, scored or not.
        rollouts: rollouts in all; scored + unscored.
        scored: those with a reward.
        unscored: those without one, for whatever reason.
        failed: those that ended in a failure; all of them are unscored.
        truncated: those that ran out of tokens; they have a reward like any other.
        missing: planned rollouts of which there is no row; None where the plan is not known.
        outcomes: rollouts by outcome.
    """

    prompts: int
    rollouts: int
    scored: int
    unscored: int
    failed: int
    truncated: int
    missing: int | None
    outcomes: Mapping[str, int]


class RolloutResults:
    """Outcomes, rewards and reward functions' values of rollouts, in columns.

    A rollout counts as scored where it ended as completed or truncated and its reward is a finite number; nothing
    of any other rollout enters a mean. Where a rollout was done again, the later row counts, but the tokens of both
    were spent.

    Attributes:
        prompt_tokens, completion_tokens: of all rows.
        without_usage: rows of which the tokens are not known.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self.prompt_tokens = 0
        self.completion_tokens = self.without_usage = 0
        self._places: dict[Any, dict[Any, int]] = {}
        self._tasks: dict[Any, str] = {}
        self._outcomes: list[str] = []
        self._lengths = array("q")
        self._known_outcomes: dict[str, str] = {}
        self._values: dict[str, array[float]] = {"reward": array("d")}
        for row in rows:
            self.add(row)

    @property
    def metrics(self) -> list[str]:
        """Names of everything that was measured: "reward" first, then the reward functions, sorted."""
        return ["reward", *sorted(set(self._values) - {"reward"})]

    @property
    def examples(self) -> list[Any]:
        """The example ids of all prompts, scored or not, in the order in which they came."""
        return list(self._places)

    @property
    def sizes(self) -> dict[Any, int]:
        """Number of rollouts of each prompt, by example id, scored or not."""
        return {example: len(generations) for example, generations in self._places.items()}

    @property
    def mean_length(self) -> float:
        """Mean completion tokens of the rollouts that sampled any, scored or not; NaN where none did."""
        sampled = [length for length in self._lengths if length]
        return sum(sampled) / len(sampled) if sampled else math.nan

    @property
    def tasks(self) -> list[str]:
        """The tasks of the prompts, sorted."""
        return sorted(set(self._tasks.values()))

    def add(self, row: Mapping[str, Any]) -> None:
        """Take one row of results.jsonl.

        Raises:
            ConfigError: it has no example id.
        """
        try:
            example = row["example_id"]
            generations = self._places.setdefault(example, {})
        except (KeyError, TypeError):
            raise ConfigError(f"a row without an example_id belongs to no prompt: {str(dict(row))[:200]}.") from None
        place = generations.setdefault(row.get("generation", len(generations)), len(self._outcomes))
        if place == len(self._outcomes):
            self._outcomes.append("")
            self._lengths.append(0)
            for column in self._values.values():
                column.append(math.nan)
        else:
            for column in self._values.values():
                column[place] = math.nan
        self._tasks[example] = str(row.get("task") or "default")
        outcome = str(row.get("outcome"))
        self._outcomes[place] = self._known_outcomes.setdefault(outcome, outcome)
        self.prompt_tokens += int(row.get("prompt_tokens") or 0)
        self._lengths[place] = int(row.get("completion_tokens") or 0)
        self.completion_tokens += self._lengths[place]
        self.without_usage += "completion_tokens" in row and row["completion_tokens"] is None
        reward = row.get("reward")
        if outcome not in _SCORED or not isinstance(reward, int | float) or not math.isfinite(reward):
            return
        # the run's reward is "reward", whatever a reward function is called
        for name, value in {**metrics_of(row), "reward": float(reward)}.items():
            if name not in self._values:
                self._values[name] = array("d", [math.nan]) * len(self._outcomes)
            self._values[name][place] = value if math.isfinite(value) else math.nan

    def values(self, metric: str = "reward", *, task: str | None = None) -> dict[Any, list[float]]:
        """Return the values of each prompt's scored rollouts by example id; an empty list where there are none.

        Args:
            metric: "reward" or the name of a reward function.
            task: leave out the prompts of other tasks.
        """
        column = self._values.get(metric)
        found = {}
        for example, generations in self._places.items():
            if task is None or self._tasks[example] == task:
                values = () if column is None else (column[place] for place in generations.values())
                found[example] = [value for value in values if not math.isnan(value)]
        return found

    def counts(self, *, task: str | None = None, planned: int | None = None) -> Counts:
        """Return the numbers of rollouts by how they ended.

        Args:
            task: of the prompts of this task alone.
            planned: rollouts that there should be.
        """
        examples = [example for example in self._places if task is None or self._tasks[example] == task]
        places = [place for example in examples for place in self._places[example].values()]
        outcomes = Counter(self._outcomes[place] for place in places)
        scored = sum(not math.isnan(self._values["reward"][place]) for place in places)
        return Counts(
            prompts=len(examples),
            rollouts=len(places),
            scored=scored,
            unscored=len(places) - scored,
            failed=len(places) - sum(outcomes[name] for name in _SCORED),
            truncated=outcomes["truncated"],
            missing=None if planned is None else max(0, planned - len(places)),
            outcomes=dict(outcomes.most_common()),
        )
