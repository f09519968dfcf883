"""Progress of an evaluation: numbers of each rollout alone, so that memory does not grow with transcripts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping
from typing import Any

from verifiers.evals.results import RolloutResults
from verifiers.evals.statistics import Estimate, mean_and_stderr_clustered
from verifiers.evals.summary import summarize
from verifiers.rollouts.rollout import Rollout

__all__ = ["Progress"]

_MOST_FAILURES = 1000


class Progress:
    """Rewards, metrics, outcomes and tokens of rollouts. Where one is done again, the later one counts.

    Args:
        redact: takes secrets out of the texts of failures.

    Attributes:
        results: the numbers of all rollouts.
        scored, failed: rollouts with a reward, and without.
        retries: model calls that were repeated.
        generation_s: wall-clock seconds of all rollouts, added up.
        failures: how often each failure text was seen in this process.
    """

    def __init__(self, redact: Callable[[str], str] | None = None) -> None:
        self._redact = redact or (lambda text: text)
        self.results = RolloutResults()
        self.scored = 0
        self.failed = 0
        self.retries = 0
        self.generation_s = 0.0
        self.failures: Counter[str] = Counter()
        self._reward_sum = 0.0
        self._replaceable: dict[tuple[Any, Any], float | None] = {}

    def __len__(self) -> int:
        return self.scored + self.failed

    @property
    def mean_reward(self) -> float:
        """Mean over the scored rollouts, for a live line; NaN where there is none."""
        return self._reward_sum / self.scored if self.scored else math.nan

    @property
    def outcomes(self) -> Mapping[str, int]:
        """Number of rollouts by outcome."""
        return self.results.counts().outcomes

    def add(self, rollout: Rollout) -> None:
        """Take a rollout that has just finished."""
        if rollout.failure is not None:
            text = self._redact(str(rollout.failure))
            # texts may all differ, and memory must not grow with them
            if text in self.failures or len(self.failures) < _MOST_FAILURES:
                self.failures[text] += 1
        self.retries += rollout.attempts - 1
        self.generation_s += rollout.timing.generation_s
        key = rollout.key.example_id, rollout.key.generation
        self._count(key, rollout.reward)
        self.results.add(
            {
                "example_id": key[0],
                "generation": key[1],
                "task": rollout.task,
                "outcome": str(rollout.outcome),
                "reward": rollout.reward,
                "metrics": rollout.metrics,
                "prompt_tokens": rollout.usage.prompt_tokens,
                "completion_tokens": rollout.usage.completion_tokens,
            }
        )

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Take a row of results.jsonl."""
        self.retries += int(row.get("attempts") or 1) - 1
        self.generation_s += float(row.get("generation_ms") or 0.0) / 1000
        key, reward = (row.get("example_id"), row.get("generation")), row.get("reward")
        self._count(key, reward)
        self._replaceable[key] = reward
        self.results.add(row)

    def mark_done(self, done: Mapping[Any, Container[Any]]) -> None:
        """Note which rollouts of `add_row` will not be done again, by example id and generation."""
        self._replaceable = {
            key: reward for key, reward in self._replaceable.items() if key[1] not in done.get(key[0], ())
        }

    def estimates(self) -> dict[str, Estimate]:
        """Return mean, clustered standard error and 95 % interval of "reward" and of each reward function."""
        return {
            name: mean_and_stderr_clustered(list(self.results.values(name).values())) for name in self.results.metrics
        }

    def commonest_failure(self) -> tuple[str, int] | None:
        """Return the failure text seen most often and its count, or None where nothing failed."""
        return self.failures.most_common(1)[0] if self.failures else None

    def summary(self, seconds: float, metadata: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        """Return the run in numbers, as metadata.json and `--json` have it; None stands for what cannot be told.

        Args:
            metadata: of the run.
            seconds: that the run took.
            **options: `right_from` and `prices` of `summarize`.
        """
        found = summarize(self.results, metadata, **options).as_json()
        return {**found, "retries": self.retries, "seconds": seconds}

    def _count(self, key: tuple[Any, Any], reward: float | None) -> None:
        if key in self._replaceable:
            before = self._replaceable.pop(key)
            self.scored -= before is not None
            self.failed -= before is None
            self._reward_sum -= before or 0.0
        self.scored += reward is not None
        self.failed += reward is None
        self._reward_sum += reward or 0.0
