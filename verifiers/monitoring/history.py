"""The numbers of a run over its steps, read from metrics.jsonl in one pass, and made few enough to draw.

Their trends are findings where the reward rises and something else says that it should not.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import correlation, fmean, variance
from typing import Any

from verifiers.evals.store import finite
from verifiers.monitoring.findings import Finding, LearningSignal
from verifiers.monitoring.run_log import METRICS, OTHER_ERRORS, read_lines
from verifiers.monitoring.stage_timer import RunTime

MOST_POINTS = 240
"""Points of a drawn curve; of more, each is the mean of several, with their span beside it."""

_MOST_ERRORS = 1000

EVAL_REWARD = re.compile(r"eval(_[^/]+)?_reward")
"""The metric that an evaluation's mean reward has: "eval_reward", or "eval_<set>_reward"."""

_EVAL_DETAIL = re.compile(
    r"eval_(?:(?P<set>.+?)_)??"
    r"(?:(?P<at_k>(?:pass_at|pass_hat|best_at)_\d+)|rewards/(?P<function>.+)|tasks/(?P<task>.+)/reward)"
)
_MEASURES = {"pass_at": "pass@", "pass_hat": "pass^", "best_at": "best@"}


@dataclass(slots=True)
class ErrorCount:
    """Rollouts that failed for one reason."""

    count: int = 0
    first_step: int = 0
    last_step: int = 0


@dataclass(slots=True)
class Evaluations:
    """Means of one evaluated set: steps, rewards, standard errors (NaN where there is none).

    `trained_on` is True where prompts of the set are training rows too, and None where that was not checked.
    """

    steps: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    trained_on: bool | None = None

    @property
    def best(self) -> int:
        return max(range(len(self.rewards)), key=self.rewards.__getitem__)

    def estimate(self, at: int) -> dict[str, float | None]:
        """Return step, reward and standard error of one evaluation; None for an error that is not known."""
        error = self.errors[at]
        return {"step": self.steps[at], "reward": self.rewards[at], "error": error if math.isfinite(error) else None}

    def put(self, step: float, reward: float, error: float) -> None:
        """Append an evaluation, in place of the last one where that was of the same step."""
        end = len(self.steps) - (self.steps[-1:] == [step])
        for column, value in ((self.steps, step), (self.rewards, reward), (self.errors, error)):
            column[end:] = [value]


@dataclass(slots=True)
class History:
    """The logged numbers of a run.

    Attributes:
        columns: every metric's values at `steps`; NaN where it has none.
        details: other means of evaluations: of "at_k", "function" and "task", by what a curve of them is called.
    """

    steps: array[float] = field(default_factory=lambda: array("d"))
    columns: dict[str, array[float]] = field(default_factory=dict)
    evaluations: dict[str, Evaluations] = field(default_factory=dict)
    details: dict[str, dict[str, Evaluations]] = field(default_factory=dict)
    failures: dict[str, ErrorCount] = field(default_factory=dict)
    time: RunTime = field(default_factory=RunTime)
    signal: LearningSignal = field(default_factory=LearningSignal)

    def values(self, name: str) -> Sequence[float]:
        """Return a metric's values at `steps`; empty where it was never logged."""
        return self.columns.get(name, ())

    def names(self, prefix: str, suffix: str = "") -> list[str]:
        return sorted(name for name in self.columns if name.startswith(prefix) and name.endswith(suffix))


@dataclass(frozen=True, slots=True)
class Points:
    """A curve that can be drawn: x, y, and the smallest and largest value behind each point."""

    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]
    is_thinned: bool = False


def eval_set_label(name: str, *, trained_on: bool | None) -> str:
    """Return the label of an eval reward: "held out", "trained rows" or "not checked", and its set's name if any."""
    inner = name.removeprefix("eval").removesuffix("reward").strip("_")
    kind = "not checked" if trained_on is None else "trained rows" if trained_on else "held out"
    return f"{kind} {inner}".strip()


def name_eval_reward(name: str, logs: Mapping[str, Any]) -> str:
    """Return what a line of text calls an eval reward, such as "held-out reward of easy"."""
    inner = name.removeprefix("eval").removesuffix("reward").strip("_")
    trained_on = is_trained_on(name, logs)
    kind = "held-out reward" if trained_on is False else f"reward on {'trained' if trained_on else 'unchecked'} rows"
    return f"{kind} of {inner}" if inner else kind


def is_trained_on(name: str, logs: Mapping[str, Any]) -> bool | None:
    """Return whether prompts of an eval reward are training rows too; None where the logs do not have it."""
    count = logs.get(f"{name.removesuffix('reward')}prompts_trained_on")
    return None if count is None else bool(count)


def read_history(run_dir: str | Path) -> History:
    history = History()
    for line in read_lines(Path(run_dir) / METRICS):
        step = float(line["step"])
        _take_evaluations(history, line, step)
        _take_failures(history, line, int(step))
        if not line.get("steps"):
            continue
        history.time.take(line)
        history.signal.take(line)
        history.steps.append(step)
        for name, value in line.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                column = history.columns.setdefault(name, array("d"))
                column.extend([math.nan] * (len(history.steps) - 1 - len(column)))
                column.append(value)
    for column in history.columns.values():
        column.extend([math.nan] * (len(history.steps) - len(column)))
    return history


def thin_points(x: Sequence[float], y: Sequence[float]) -> Points:
    """Return the finite points, or `MOST_POINTS` means of neighbours with their spans where there are more."""
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(b)]
    if len(pairs) <= MOST_POINTS:
        values = [b for _, b in pairs]
        return Points([a for a, _ in pairs], values, values, values)
    made = Points([], [], [], [], is_thinned=True)
    for place in range(MOST_POINTS):
        part = pairs[place * len(pairs) // MOST_POINTS : (place + 1) * len(pairs) // MOST_POINTS]
        values = [b for _, b in part]
        made.x.append(part[-1][0])
        made.y.append(math.fsum(values) / len(values))
        made.low.append(min(values))
        made.high.append(max(values))
    return made


def _take_evaluations(history: History, line: Mapping[str, Any], step: float) -> None:
    for name, value in line.items():
        if not name.startswith("eval_") or name.endswith("_stderr") or (mean := finite(value)) is None:
            continue
        error = finite(line.get(f"{name}_stderr"))
        spread = math.nan if error is None else error
        if EVAL_REWARD.fullmatch(name):
            found = history.evaluations.setdefault(name, Evaluations())
            found.put(step, mean, spread)
            found.trained_on = found.trained_on or is_trained_on(name, line)
        elif detail := _EVAL_DETAIL.fullmatch(name):
            kind = next(kind for kind in ("at_k", "function", "task") if detail[kind])
            label = detail[kind]
            if kind == "at_k":
                measure, _, k = label.rpartition("_")
                label = _MEASURES[measure] + k
            label = " ".join(filter(None, (label, detail["set"])))
            history.details.setdefault(kind, {}).setdefault(label, Evaluations()).put(step, mean, spread)


def _take_failures(history: History, line: Mapping[str, Any], step: int) -> None:
    failures = line.get("failures")
    for text, count in failures.items() if isinstance(failures, Mapping) else ():
        # texts that name a time or a place are never the same twice
        known = text in history.failures or len(history.failures) < _MOST_ERRORS
        error = history.failures.setdefault(str(text) if known else OTHER_ERRORS, ErrorCount(first_step=step))
        error.count += int(count)
        error.last_step = step


# -- trends: is a run learning what was meant? ----------------------------------------------------------------------

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


def find_trends(
    history: History, samples: Iterable[Mapping[str, Any]] = (), weights: Mapping[str, float] | None = None
) -> list[Finding]:
    """Return what speaks against a reward that rises; nothing where it does not, or after too few logs.

    `weights` are those of the reward functions, by name; 1 each where they are not known.
    """
    reward = _change(history.values("reward"))
    if reward is None or not reward.rises:
        return []
    rollouts = [(line, one) for line in samples for one in line["rollouts"] if one["reward"] is not None]
    return [
        *_not_held_out(history, reward),
        *_functions_apart(history, weights if isinstance(weights, Mapping) and weights else None),
        *_longer(history, reward),
        *_alike(history),
        *_repeating([str(_last_of_policy(one).get("text", "")) for _, one in rollouts]),
        *_paid_for_nothing(rollouts),
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
        risen = found.rewards[-1] - found.rewards[0] + 2 * _error(found)
        # in part as evaluations may begin late, or count by another scale
        if _fell(found) or (not _rose(found) and risen < 0.5 * _rise_meanwhile(history, found)):
            what = name_eval_reward(name, {f"{name.removesuffix('reward')}prompts_trained_on": found.trained_on})
            yield Finding(
                "not what is evaluated",
                f"the reward rose {reward}, the {what} did not with it ({found.rewards[0]:.3g}, at its best "
                f"{found.rewards[found.best]:.3g}, at last {found.rewards[-1]:.3g})",
                "more prompts or fewer epochs; and see by vf-check what the reward pays for",
            )


def _rise_meanwhile(history: History, found: Evaluations) -> float:
    """Return what the training reward rose by from the first evaluation to the last: means of a tenth of the run."""
    near = (history.steps[-1] - history.steps[0]) / 20
    pairs = [pair for pair in zip(history.steps, history.values("reward"), strict=True) if math.isfinite(pair[1])]

    def around(at: float) -> float:
        close = [value for step, value in pairs if abs(step - at) <= near]
        return fmean(close or [min(pairs, key=lambda pair: abs(pair[0] - at))[1]])

    return around(found.steps[-1]) - around(found.steps[0])


def _error(found: Evaluations, at: int = 0) -> float:
    return math.hypot(*(error for error in (found.errors[at], found.errors[-1]) if math.isfinite(error)))


def _fell(found: Evaluations) -> bool:
    return found.rewards[found.best] - found.rewards[-1] > 3 * _error(found, found.best)


def _rose(found: Evaluations) -> bool:
    return found.rewards[-1] - found.rewards[0] > _error(found)


def _functions_apart(history: History, weights: Mapping[str, float] | None) -> Iterator[Finding]:
    changes = {
        name: _Change(weight * change.first, weight * change.last, abs(weight) * change.error)
        for logged in history.names("rewards/", "/mean")
        if (change := _change(history.values(logged))) is not None
        # what is only measured may fall
        if (weight := _weight(name := logged.removeprefix("rewards/").removesuffix("/mean"), weights))
    }
    rising = {name: change for name, change in changes.items() if change.rises}
    # the one of several that falls by chance is not meant
    falling = {name: one for name, one in changes.items() if one.falls and one.first - one.last > 4 * one.error}
    if rising and falling:
        up = max(rising, key=lambda name: rising[name].last - rising[name].first)
        down = min(falling, key=lambda name: falling[name].last - falling[name].first)
        text = f"{up!r} rose {rising[up]} while {down!r} fell {falling[down]}"
        yield Finding("one reward for another", text, f"more weight for {down!r}, or one function that needs both")


def _weight(name: str, weights: Mapping[str, float] | None) -> float:
    return 1.0 if weights is None else finite(weights.get(name)) or 0.0


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
    if any(not found.trained_on and _rose(found) for found in history.evaluations.values()):
        # so they are right
        return
    change = _change(history.values("completions/frac_identical_groups"))
    if change is not None and change.rises and change.last - change.first >= _ALIKE:
        text = f"the share of groups whose completions are all the same rose {change}"
        yield Finding("always the same", text, "a higher temperature, a lower learning_rate, or beta above 0")


# -- samples ---------------------------------------------------------------------------------------------------------


Sampled = tuple[Mapping[str, Any], Mapping[str, Any]]
"""A line of samples, and a rollout of it that has a reward."""

_TALKS_TO_THE_JUDGE = re.compile(r"\bignore\b.{0,40}\binstructions\b", re.IGNORECASE | re.DOTALL)
_FORMAT = re.compile(r"</?\w+>|\\boxed\{\s*\}")


def _repeating(texts: Sequence[str]) -> Iterator[Finding]:
    change = _change(map(_repeated, texts))
    if change is not None and change.rises and change.last - change.first >= _ALIKE:
        text = f"the share of four words in a row that a sampled completion had said before rose {change}"
        yield Finding("repeats itself", text, "reading samples; a reward that does not count words, or beta above 0")


def _repeated(text: str) -> float:
    words = text.split()
    phrases = list(zip(words, words[1:], words[2:], words[3:], strict=False))
    return 1 - len(set(phrases)) / len(phrases) if phrases else 0.0


def _paid_for_nothing(rollouts: Sequence[Sampled]) -> Iterator[Finding]:
    """Look for texts that `vf-check` would try, in the last third of the samples."""
    best = max((one["reward"] for _, one in rollouts), default=0.0)
    last = rollouts[2 * len(rollouts) // 3 :]
    paid: dict[str, int] = {}
    for line, one in last:
        kind = _kind_of(line, one)
        if kind and best > 0 and one["reward"] > 0.5 * best:
            paid[kind] = paid.get(kind, 0) + 1
    for kind, count in paid.items():
        if count >= max(3, _PAID * len(last)):
            text = f"{count} of the last {len(last)} sampled rollouts are {kind}, and got half of the best reward"
            yield Finding(
                "paid for nothing", text, "a reward that does not pay for it; vf-check says for what else it does"
            )


def _kind_of(line: Mapping[str, Any], rollout: Mapping[str, Any]) -> str:
    last, asked = _last_of_policy(rollout), str((line["prompt"] or [{}])[-1].get("text", ""))
    text = str(last.get("text", "")).strip()
    if last.get("calls") or (text and text == str(line.get("answer")).strip()):
        # an answer of its own, or the right one
        return ""
    if not text:
        return "empty"
    if "<think>" in text and "</think>" not in text:
        return "thoughts that never end"
    if _TALKS_TO_THE_JUDGE.search(text):
        return "words that ask the judge for a grade"
    if not _FORMAT.sub("", text).strip():
        return "the format without an answer"
    # images of a prompt stand before its words
    return "the question, said again" if text == asked.replace("[image] ", "").strip() else ""


def _last_of_policy(rollout: Mapping[str, Any]) -> Mapping[str, Any]:
    said = [one for one in rollout["completion"] if one["role"] not in ("tool", "user")]
    return said[-1] if said else {}
