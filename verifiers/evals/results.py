"""The numbers of a run's rollouts, by prompt: what summaries and comparisons are made of, without any transcript."""

from __future__ import annotations

import math
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from verifiers.errors import ConfigError
from verifiers.evals.store import metrics_of, result_row
from verifiers.rollouts.rollout import Rollout

_SCORED = ("completed", "truncated")
_MOST_FAILURES = 1000


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of rollouts by how they ended.

    Attributes:
        failed: those that ended in a failure; all of them are unscored.
        truncated: those that ran out of tokens; they have a reward like any other.
        missing: planned rollouts of which there is no row; None where the plan is not known.
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
    """Outcomes, rewards and reward functions' values of rollouts, in columns: memory does not grow with transcripts.

    A rollout counts as scored where it ended as completed or truncated and its reward is a finite number; nothing
    of any other rollout enters a mean. Where a rollout was done again, the later row counts, but the tokens, retries,
    failed tool calls and seconds of both add up.

    Attributes:
        without_usage: rows of which the tokens are not known.
        tool_call_errors: tool calls that failed, as the policy was told.
        first_tool_call_error: the text of the first of them; None where there is none.
        refusals, first_refusal: likewise, of rollouts that ended with a refusal or a filtered answer.
        failures: how often each failure text was seen in this process.
    """

    def __init__(
        self, rows: Iterable[Mapping[str, Any]] = (), *, redact: Callable[[str], str] = lambda text: text
    ) -> None:
        self.prompt_tokens = self.completion_tokens = self.without_usage = 0
        self.scored = self.retries = self.tool_call_errors = self.refusals = 0
        self.first_tool_call_error: str | None = None
        self.first_refusal: str | None = None
        self.generation_s = 0.0
        self.failures: Counter[str] = Counter()
        self._redact = redact
        self._reward_sum = 0.0
        self._places: dict[Any, dict[Any, int]] = {}
        self._tasks: dict[Any, str] = {}
        self._outcomes: list[str] = []
        self._lengths = array("q")
        self._values: dict[str, array[float]] = {"reward": array("d")}
        for row in rows:
            self.add(row)

    def __len__(self) -> int:
        return len(self._outcomes)

    @property
    def metrics(self) -> list[str]:
        """Names of everything that was measured: "reward" first, then the reward functions, sorted."""
        return ["reward", *sorted(set(self._values) - {"reward"})]

    @property
    def mean_reward(self) -> float:
        """Mean over the scored rollouts, for a live line; NaN where there is none."""
        return self._reward_sum / self.scored if self.scored else math.nan

    @property
    def mean_length(self) -> float:
        """Mean completion tokens of the rollouts that sampled any, scored or not; NaN where none did."""
        sampled = [length for length in self._lengths if length]
        return sum(sampled) / len(sampled) if sampled else math.nan

    @property
    def tasks(self) -> list[str]:
        return sorted(set(self._tasks.values()))

    def add_rollout(self, rollout: Rollout) -> None:
        if rollout.failure is not None:
            text = self._redact(str(rollout.failure))
            # texts may all differ, and memory must not grow with them
            if text in self.failures or len(self.failures) < _MOST_FAILURES:
                self.failures[text] += 1
        self.add(result_row(rollout))

    def add(self, row: Mapping[str, Any]) -> None:
        """Take one row of results.jsonl; raise ConfigError where it has no example id."""
        try:
            example = row["example_id"]
            generations = self._places.setdefault(example, {})
        except (KeyError, TypeError):
            raise ConfigError(f"a row without an example_id belongs to no prompt: {str(dict(row))[:200]}.") from None
        number = row.get("generation")
        place = self._cleared_place(generations, (len(generations),) if number is None else number)
        self._tasks[example] = str(row.get("task") or "default")
        outcome = self._outcomes[place] = sys.intern(str(row.get("outcome")))
        self.prompt_tokens += int(row.get("prompt_tokens") or 0)
        self._lengths[place] = int(row.get("completion_tokens") or 0)
        self.completion_tokens += self._lengths[place]
        self.without_usage += "completion_tokens" in row and row["completion_tokens"] is None
        self.retries += int(row.get("attempts") or 1) - 1
        if isinstance(errors := row.get("tool_call_errors"), list) and errors:
            self.tool_call_errors += len(errors)
            self.first_tool_call_error = self.first_tool_call_error or self._redact(str(errors[0]))
        if refusal := row.get("refusal"):
            self.refusals += 1
            self.first_refusal = self.first_refusal or self._redact(str(refusal))
        self.generation_s += float(row.get("generation_ms") or 0.0) / 1000
        reward = row.get("reward")
        if outcome not in _SCORED or not isinstance(reward, int | float) or not math.isfinite(reward):
            return
        self.scored += 1
        self._reward_sum += reward
        # the run's reward is "reward", whatever a reward function is called
        for name, value in {**metrics_of(row), "reward": float(reward)}.items():
            if name not in self._values:
                self._values[name] = array("d", [math.nan]) * len(self._outcomes)
            self._values[name][place] = value if math.isfinite(value) else math.nan

    def _cleared_place(self, generations: dict[Any, int], generation: Any) -> int:
        """Return a rollout's place in the columns; what an earlier row put there is gone."""
        place = generations.setdefault(generation, len(self._outcomes))
        if place == len(self._outcomes):
            self._outcomes.append("")
            self._lengths.append(0)
            for column in self._values.values():
                column.append(math.nan)
            return place
        before = self._values["reward"][place]
        if not math.isnan(before):
            self.scored -= 1
            self._reward_sum -= before
        for column in self._values.values():
            column[place] = math.nan
        return place

    def values(self, metric: str = "reward", *, task: str | None = None) -> dict[Any, list[float]]:
        """Return the values of each prompt's scored rollouts by example id; an empty list where there are none."""
        column = self._values.get(metric)
        found = {}
        for example, generations in self._places.items():
            if task is None or self._tasks[example] == task:
                values = () if column is None else (column[place] for place in generations.values())
                found[example] = [value for value in values if not math.isnan(value)]
        return found

    def counts(self, *, task: str | None = None, planned: int | None = None) -> Counts:
        """Return the numbers of rollouts by how they ended, of one task or of all; `planned` gives the missing."""
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

    def commonest_failure(self) -> tuple[str, int] | None:
        """Return the failure text seen most often and its count, or None where nothing failed."""
        return self.failures.most_common(1)[0] if self.failures else None
