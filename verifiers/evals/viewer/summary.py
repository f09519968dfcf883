"""The numbers at the head of the page: means with intervals, outcomes, tokens, pass@k, differences of two runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.evals.statistics import Estimate, mean_and_stderr_clustered, paired_difference, pass_at_k
from verifiers.evals.viewer.data import Entry
from verifiers.evals.viewer.transcripts import as_text

__all__ = ["RIGHT_FROM", "difference_of", "summary_of"]

RIGHT_FROM = 1.0
"""Reward from which a rollout counts as right in pass@k."""

_ALMOST = 1e-9


def summary_of(entries: Sequence[Entry], metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
    """One run's numbers, ready for JSON; null stands for what the data cannot tell.

    Args:
        entries: all rollouts of the run so far.
        metadata: of metadata.json.
        name: what the run is called where it stands beside another.
    """
    prompts, each = metadata.get("num_examples"), metadata.get("rollouts_per_example")
    expected = prompts * each if isinstance(prompts, int) and isinstance(each, int) else None
    summary = metadata.get("summary")
    seconds = summary.get("seconds") if isinstance(summary, Mapping) else None
    return {
        "name": name,
        "title": _title(metadata, name),
        "started": as_text(metadata.get("started"))[:80],
        "metadata": as_text(dict(metadata)),
        "rollouts": len(entries),
        "expected": expected if expected and expected > 0 else None,
        "finished": _is_finished(metadata),
        "prompts": len({entry.example for entry in entries}),
        "scored": sum(entry.reward is not None for entry in entries),
        "outcomes": dict(Counter(entry.outcome for entry in entries).most_common()),
        "measures": _measures(entries),
        "promptTokens": sum(entry.prompt_tokens for entry in entries),
        "completionTokens": sum(entry.completion_tokens for entry in entries),
        "seconds": seconds if isinstance(seconds, (int, float)) and math.isfinite(seconds) else None,
        "passAtK": _pass_curve(entries),
        "rightFrom": RIGHT_FROM,
    }


def difference_of(before: Sequence[Entry], after: Sequence[Entry]) -> dict[str, Any]:
    """How much better the second run does, paired by prompt: one estimate of each measure that both have."""
    rows = {}
    for name in _names([*before, *after]):
        one, two = _by_prompt(before, name), _by_prompt(after, name)
        rows[name] = _numbers(paired_difference(one, two))
    # a prompt that one side never scored has nothing to be compared with
    one, two = _by_prompt(before, "reward"), _by_prompt(after, "reward")
    return {
        "measures": rows,
        "shared": len(one.keys() & two.keys()),
        "onlyBefore": len(one.keys() - two.keys()),
        "onlyAfter": len(two.keys() - one.keys()),
    }


def _is_finished(metadata: Mapping[str, Any]) -> bool:
    status = metadata.get("status")
    # older runs have no status, but got their summary at the end
    return status == "finished" if isinstance(status, str) else isinstance(metadata.get("summary"), Mapping)


def _title(metadata: Mapping[str, Any], name: str) -> str:
    parts = [as_text(metadata[key])[:120] for key in ("env", "model") if metadata.get(key)]
    return " / ".join(parts) or name


def _names(entries: Sequence[Entry]) -> list[str]:
    return ["reward", *sorted({name for entry in entries for name in entry.metrics} - {"reward"})]


def _by_prompt(entries: Sequence[Entry], name: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for entry in entries:
        # what was not scored has no part in any mean, whichever of its functions did answer
        value = None if entry.reward is None else entry.reward if name == "reward" else entry.metrics.get(name)
        if value is not None:
            found.setdefault(entry.example, []).append(value)
    return found


def _measures(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    rows = []
    for name in _names(entries):
        by_prompt = _by_prompt(entries, name)
        rows.append({"name": name, **_numbers(mean_and_stderr_clustered(list(by_prompt.values())))})
    return rows


def _pass_curve(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """pass@k over prompts for k = 1, 2, 4 ... up to the most rollouts that a prompt has, with 95 % intervals."""
    by_prompt = list(_by_prompt(entries, "reward").values())
    most = max(map(len, by_prompt), default=0)
    points, k = [], 1
    while k <= most:
        known = [
            [pass_at_k(len(rewards), sum(reward >= RIGHT_FROM - _ALMOST for reward in rewards), k)]
            for rewards in by_prompt
            if len(rewards) >= k
        ]
        points.append({"k": k, **_numbers(mean_and_stderr_clustered(known))})
        k *= 2
    return points


def _numbers(estimate: Estimate) -> dict[str, Any]:
    shown = {name: getattr(estimate, name) for name in ("mean", "stderr", "low", "high")}
    numbers = {name: None if math.isnan(value) else float(f"{value:.6g}") for name, value in shown.items()}
    return {**numbers, "prompts": estimate.prompts, "rollouts": estimate.rollouts}
