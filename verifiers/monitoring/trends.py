"""Is a run learning what was meant? Findings where the reward rises and something else says that it should not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import correlation, fmean, variance
from typing import Any

from verifiers.monitoring.findings import Finding
from verifiers.monitoring.history import History, name_eval_reward

LEAST_POINTS = 9
"""Logs from which a curve is said to rise or fall: the means of its first and last third are compared."""

_NOTABLE, _LONGER, _TOGETHER, _ALIKE, _PAID = 0.05, 1.5, 0.6, 0.2, 0.1


@dataclass(frozen=True, slots=True)
class _Change:
    """Means of the first and the last third of a curve, and the standard error of their difference."""

    first: float
    last: float
    error: float

    @property
    def rises(self) -> bool:
        return self.last - self.first > max(2 * self.error, _NOTABLE * max(abs(self.first), abs(self.last)))

    @property
    def falls(self) -> bool:
        return _Change(self.last, self.first, self.error).rises

    def __str__(self) -> str:
        return f"from {self.first:.3g} to {self.last:.3g}"


def find_trends(history: History, samples: Iterable[Mapping[str, Any]] = ()) -> list[Finding]:
    """Return what speaks against a reward that rises; nothing where it does not, or after too few logs."""
    reward = _change(history.values("reward"))
    if reward is None or not reward.rises:
        return []
    return [
        *_not_held_out(history, reward),
        *_functions_apart(history),
        *_longer(history, reward),
        *_alike(history),
        *_paid_for_nothing(list(samples)),
    ]


def _change(values: Iterable[float]) -> _Change | None:
    found = [value for value in values if math.isfinite(value)]
    if len(found) < LEAST_POINTS:
        return None
    third = len(found) // 3
    first, last = found[:third], found[-third:]
    return _Change(fmean(first), fmean(last), math.sqrt((variance(first) + variance(last)) / third))


def _not_held_out(history: History, reward: _Change) -> Iterator[Finding]:
    middle = (history.steps[0] + history.steps[-1]) / 2
    for name, found in history.evaluations.items():
        if found.trained_on or len(found.steps) < 2 or not found.steps[0] <= middle < found.steps[-1]:
            continue
        errors = [error for error in (found.errors[0], found.errors[-1]) if math.isfinite(error)]
        if found.rewards[-1] - found.rewards[0] <= math.hypot(*errors):
            what = name_eval_reward(name, {f"{name.removesuffix('reward')}prompts_trained_on": found.trained_on})
            yield Finding(
                "not what is evaluated",
                f"the reward rose {reward}, the {what} did not ({found.rewards[0]:.3g} to {found.rewards[-1]:.3g})",
                "more prompts or fewer epochs; and see by vf-check what the reward pays for",
            )


def _functions_apart(history: History) -> Iterator[Finding]:
    changes = {
        name.removeprefix("rewards/").removesuffix("/mean"): change
        for name in history.names("rewards/", "/mean")
        if (change := _change(history.values(name))) is not None
    }
    rising = {name: change for name, change in changes.items() if change.rises}
    falling = {name: change for name, change in changes.items() if change.falls}
    if rising and falling:
        up = max(rising, key=lambda name: rising[name].last - rising[name].first)
        down = min(falling, key=lambda name: falling[name].last - falling[name].first)
        text = f"{up!r} rose {rising[up]} while {down!r} fell {falling[down]}"
        yield Finding("one reward for another", text, f"more weight for {down!r}, or one function that needs both")


def _longer(history: History, reward: _Change) -> Iterator[Finding]:
    lengths = history.values("completions/mean_length")
    change = _change(lengths)
    if change is None or not change.rises or change.last < _LONGER * change.first:
        return
    pairs = [pair for pair in zip(history.values("reward"), lengths, strict=True) if all(map(math.isfinite, pair))]
    if correlation(*zip(*pairs, strict=True)) >= _TOGETHER:
        text = f"completions grew {change} tokens as the reward rose {reward}"
        advice = (
            "reading samples: where longer is not better, vf.overlong_penalty or a reward that does not count words"
        )
        yield Finding("longer with the reward", text, advice)


def _alike(history: History) -> Iterator[Finding]:
    change = _change(history.values("completions/frac_identical_groups"))
    if change is not None and change.rises and change.last - change.first >= _ALIKE:
        text = f"the share of groups whose completions are all the same rose {change}"
        yield Finding("always the same", text, "a higher temperature, a lower learning_rate, or beta above 0")


# -- samples ---------------------------------------------------------------------------------------------------------


def _paid_for_nothing(samples: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Look for texts that `vf-check` would try, in the last third of the samples."""
    rollouts = [(line, one) for line in samples for one in line.get("rollouts") or () if _reward_of(one) is not None]
    best = max((_reward_of(one) or 0.0 for _, one in rollouts), default=0.0)
    last = rollouts[2 * len(rollouts) // 3 :]
    paid: dict[str, int] = {}
    for line, one in last:
        kind = _kind_of(line, one)
        if kind and best > 0 and (_reward_of(one) or 0.0) > 0.5 * best:
            paid[kind] = paid.get(kind, 0) + 1
    for kind, count in paid.items():
        if count >= max(3, _PAID * len(last)):
            text = f"{count} of the last {len(last)} sampled rollouts are {kind}, and got half of the best reward"
            yield Finding(
                "paid for nothing", text, "a reward that does not pay for it; vf-check says for what else it does"
            )


def _kind_of(line: Mapping[str, Any], rollout: Mapping[str, Any]) -> str:
    texts = [message.get("text", "") for message in rollout.get("completion") or () if isinstance(message, Mapping)]
    text = str(texts[-1]).strip() if texts else ""
    asked = [message.get("text", "") for message in line.get("prompt") or () if isinstance(message, Mapping)]
    if not text:
        return "empty"
    if "<think>" in text and "</think>" not in text:
        return "thoughts that never end"
    return "the question, said again" if asked and text == str(asked[-1]).strip() else ""


def _reward_of(rollout: Mapping[str, Any]) -> float | None:
    reward = rollout.get("reward")
    return float(reward) if isinstance(reward, int | float) and math.isfinite(reward) else None
