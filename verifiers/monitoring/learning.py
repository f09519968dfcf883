"""Detection of a run that learns nothing, from its logs, with the cause and what to try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["LearningSignal", "NothingLearned"]

LEAST_BLOCKS = 3
"""Blocks in a row without a signal before a run is said to learn nothing."""

NEARLY_ALL = 0.9
"""Share of completions, or of groups, from which something is the cause."""

_INSTEAD_OF_DROPPING = {
    "stale": "a larger max_staleness, or a smaller num_batches_ahead",
    "longer_than_max_seq_len": "a larger max_seq_len",
    "group_incomplete": "require_full_groups=False, or rollout_retries",
}


@dataclass(frozen=True, slots=True)
class NothingLearned:
    """The reason why a run learns nothing.

    Attributes:
        text: the cause, with the number of blocks: "every reward was 0 over the last 3 blocks".
        advice: what to change.
    """

    text: str
    advice: str

    def __str__(self) -> str:
        return f"learns nothing: {self.text}"


@dataclass(slots=True)
class LearningSignal:
    """A count of the blocks since one had a row with an advantage; give it each log of training."""

    _logs: int = 0
    _steps: float = 0.0
    _newest: Mapping[str, Any] = field(default_factory=dict)

    def take(self, log: Mapping[str, Any]) -> None:
        """Take in a log: its metrics, and in `steps` the optimizer steps since the one before."""
        steps = float(log.get("steps") or 0.0)
        trained, advantages = log.get("rows/trained"), log.get("rollouts/with_advantage")
        if trained is None or advantages is None:
            # the updates after a block's first log no block of their own
            self._steps += steps if self._logs else 0.0
        elif trained == 0.0 or advantages == 0.0:
            self._logs, self._steps, self._newest = self._logs + 1, self._steps + steps, log
        else:
            self._logs, self._steps, self._newest = 0, 0.0, {}

    def finding(self, updates_per_block: int = 1) -> NothingLearned | None:
        """Return why the run learns nothing; None while it may, or after fewer than `LEAST_BLOCKS` blocks."""
        blocks = max(self._logs, int(self._steps // max(1, updates_per_block)))
        if blocks < LEAST_BLOCKS:
            return None
        text, advice = _cause(self._newest)
        return NothingLearned(f"{text} over the last {blocks} blocks", advice)


def _cause(log: Mapping[str, Any]) -> tuple[str, str]:
    clipped = log.get("completions/clipped_ratio") or 0.0
    if clipped >= NEARLY_ALL:
        cut = f"{100 * clipped:.0f} % of the completions were cut off at their limit, and no advantage was left"
        return cut, "a larger max_completion_length (and max_seq_len), or prompts with shorter answers"
    if log.get("rollouts/with_advantage"):
        prefix = "rows/dropped/"
        counts = {name.removeprefix(prefix): log[name] or 0.0 for name in log if name.startswith(prefix)}
        reason = max(counts, key=counts.__getitem__, default="unknown")
        advice = _INSTEAD_OF_DROPPING.get(reason, "see the reasons in docs/concepts/async.md")
        return f"every row was left out, most as {reason},", advice
    if (log.get("completions/frac_identical_groups") or 0.0) >= NEARLY_ALL:
        collapsed = "the completions of each group were all the same (the policy has collapsed)"
        return collapsed, "a higher temperature, an earlier checkpoint, a lower learning_rate, or beta above 0"
    low, high = log.get("reward/min"), log.get("reward/max")
    if low == high == 0.0:
        advice = (
            "easier prompts first (a curriculum), a reward with partial credit, more num_generations; and the rubric "
            "on an answer that is known to be right"
        )
        return "every reward was 0 (the reward was never met)", advice
    if low == high == 1.0:
        return "every reward was 1 (the prompts are solved)", "harder prompts, or an end of the run"
    same = "the rewards of each group were all equal"
    return same, "a finer reward, a higher temperature, or prompts that the policy answers in several ways"
