"""The choice of rollouts of a run that are kept for reading.

At some forty steps of a run, evenly spaced: the prompt of the block whose rewards differ most, a typical one, and
those prompts of the first block that come again. The same prompt over time shows best what a policy learns;
evaluations, which are stored whole beside these, always have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from verifiers.evals.transcripts import as_text, messages_of
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock

__all__ = ["SampleChoice", "shown_messages"]

_TIMES = 40
_FOLLOWED = 3
_ROLLOUTS = 4
_CHARACTERS = 3000
_MESSAGES = 24


class SampleChoice:
    """Chooses what is kept of each block.

    Args:
        max_steps: optimizer steps of the run.
        kept: lines that are kept already, of the same run before it was resumed.
    """

    def __init__(self, max_steps: int, kept: Iterable[Mapping[str, Any]] = ()) -> None:
        self._every = max(1, max_steps // _TIMES)
        self._last_step = -self._every
        self._followed: dict[int, int] = {}
        for line in kept:
            self._last_step = int(line["step"])
            if line.get("followed"):
                self._followed[int(line["example"])] = self._last_step

    def of_block(
        self, block: ScoredBlock, advantages: Mapping[Any, float | list[float]], step: int, *, is_last: bool = False
    ) -> list[dict[str, Any]]:
        """Return the lines to keep of a training block.

        Args:
            block: of training rollouts, scored.
            advantages: by rollout; a list has one a token.
            step: the optimizer step that first trains on it.
            is_last: no block comes after it; it is looked at in any case.
        """
        groups = [group for group in block.groups if group.rollouts]
        if not groups:
            return []
        if not self._followed:
            self._followed = {group.example_id: -self._every for group in _spread(groups, _FOLLOWED)}
        chosen = {
            group.example_id: group
            for group in groups
            if step - self._followed.get(group.example_id, step) >= self._every
        }
        for example_id in chosen:
            self._followed[example_id] = step
        if is_last or step - self._last_step >= self._every:
            self._last_step = step
            chosen |= {group.example_id: group for group in _telling(groups)}
        return [
            {**_line(step, group, advantages), "followed": group.example_id in self._followed}
            for group in chosen.values()
        ]


def shown_messages(messages: Any, role: str) -> list[dict[str, Any]]:
    """Messages as of `viewer.transcripts.messages_of`, long ones cut in the middle, of many the first and last."""
    shown = messages_of(messages, role)
    if len(shown) > _MESSAGES:
        left_out = len(shown) - _MESSAGES
        note = {"role": "", "text": f"[... {left_out} messages are left out here ...]"}
        shown = [*shown[: _MESSAGES // 3], note, *shown[-2 * _MESSAGES // 3 :]]
    for message in shown:
        message.pop("images", None)
        for name in ("text", "think"):
            if name in message:
                message[name] = _cut(message[name])
        for call in message.get("calls", ()):
            call["arguments"] = _cut(call["arguments"])
    return shown


def _line(step: int, group: Group, advantages: Mapping[Any, float | list[float]]) -> dict[str, Any]:
    first = group.rollouts[0]
    rewards = [rollout.reward for rollout in group.scored if rollout.reward is not None]
    return {
        "step": step,
        "example": group.example_id,
        "task": first.task,
        "prompt": shown_messages(first.prompt, "prompt"),
        "answer": _cut(as_text(first.answer)),
        "generations": len(group.rollouts),
        "mean_reward": fmean(rewards) if rewards else None,
        "rollouts": [_shown(rollout, advantages.get(rollout.key)) for rollout in _different(group.rollouts)],
    }


def _shown(rollout: Rollout, advantage: float | list[float] | None) -> dict[str, Any]:
    if isinstance(advantage, list):
        advantage = fmean(advantage) if advantage else None
    return {
        "generation": rollout.key.generation,
        "outcome": str(rollout.outcome),
        "reward": rollout.reward,
        "advantage": advantage,
        "metrics": dict(rollout.metrics),
        "tokens": sum(row.sampled_tokens for row in rollout.rows) or rollout.usage.completion_tokens,
        "oldest_version": min((row.oldest_version for row in rollout.rows), default=None),
        "error": _cut(str(rollout.failure)) if rollout.failure is not None else None,
        "completion": shown_messages(rollout.completion, "completion"),
    }


def _different(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the best, the worst and some between; of those that failed, at most one."""
    scored = sorted((r for r in rollouts if r.reward is not None), key=lambda r: (-(r.reward or 0.0), r.key))
    failed = [rollout for rollout in rollouts if rollout.reward is None][:1]
    return _spread(scored, _ROLLOUTS - len(failed)) + failed


def _telling(groups: Sequence[Group]) -> list[Group]:
    """Return the group whose rewards differ most, and the one whose mean is in the middle."""
    rewards = {group.example_id: [r.reward for r in group.scored if r.reward is not None] for group in groups}
    scored = [group for group in groups if rewards[group.example_id]]
    if not scored:
        return list(groups[:1])
    widest = max(scored, key=lambda group: pstdev(rewards[group.example_id]))
    by_mean = sorted(scored, key=lambda group: fmean(rewards[group.example_id]))
    return [widest, by_mean[len(by_mean) // 2]]


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of them, from the first to the last, evenly."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / max(1, most - 1))] for place in range(most)]


def _cut(text: str) -> str:
    if len(text) <= _CHARACTERS:
        return text
    half = _CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters are left out here ...]\n{text[-half:]}"
