"""The numbers at the head of the page: means with intervals, outcomes, tokens, pass@k, differences of two runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.evals.columns import RolloutColumns
from verifiers.evals.statistics import Estimate, mean_and_stderr_clustered, paired_difference
from verifiers.evals.summary import RIGHT_FROM, at_k
from verifiers.evals.viewer.data import Entry
from verifiers.evals.viewer.transcripts import as_text

__all__ = ["difference_of", "summary_of"]


def summary_of(numbers: RolloutColumns, metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
    """One run's numbers, ready for JSON; null stands for what the data cannot tell.

    Args:
        numbers: of all rollouts of the run so far.
        metadata: of metadata.json.
        name: what the run is called where it stands beside another.
    """
    prompts, each = metadata.get("num_examples"), metadata.get("rollouts_per_example")
    expected = prompts * each if isinstance(prompts, int) and isinstance(each, int) else None
    summary = metadata.get("summary")
    seconds = summary.get("seconds") if isinstance(summary, Mapping) else None
    chosen = summary.get("right_from") if isinstance(summary, Mapping) else None
    right_from = float(chosen) if isinstance(chosen, (int, float)) and math.isfinite(chosen) else RIGHT_FROM
    counts = numbers.counts()
    return {
        "name": name,
        "title": _title(metadata, name),
        "started": as_text(metadata.get("started"))[:80],
        "metadata": as_text(dict(metadata)),
        "rollouts": counts.rollouts,
        "expected": expected if expected and expected > 0 else None,
        "finished": _is_finished(metadata),
        "prompts": counts.prompts,
        "scored": counts.scored,
        "outcomes": dict(counts.outcomes),
        "measures": _measures(numbers),
        "promptTokens": numbers.prompt_tokens,
        "completionTokens": numbers.completion_tokens,
        "seconds": seconds if isinstance(seconds, (int, float)) and math.isfinite(seconds) else None,
        "passAtK": _pass_curve(numbers, right_from),
        "rightFrom": right_from,
    }


def difference_of(
    before: Sequence[Entry],
    after: Sequence[Entry],
    settings: Sequence[Mapping[str, Any]] = ({}, {}),
) -> dict[str, Any]:
    """How much better the second run does, paired by prompt: one estimate of each measure that both have.

    A prompt that asks something else in the second run, under the same example id, is in no pair, and is named.

    Args:
        before, after: entries of the runs; their `asked` tells prompts apart.
        settings: metadata of both runs.
    """
    asked = {entry.example: entry.asked for entry in before}
    other = {entry.example for entry in after if asked.get(entry.example, entry.asked) != entry.asked}
    before, after = ([entry for entry in entries if entry.example not in other] for entries in (before, after))
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
        "askedOtherwise": sorted(other),
        "settings": [
            {
                "name": name,
                "before": as_text(settings[0].get(name))[:200],
                "after": as_text(settings[1].get(name))[:200],
            }
            for name in ("env", "env_args")
            if settings[0].get(name) != settings[1].get(name)
        ],
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


def _measures(numbers: RolloutColumns) -> list[dict[str, Any]]:
    return [
        {"name": name, **_numbers(mean_and_stderr_clustered(list(numbers.values(name).values())))}
        for name in numbers.metrics
    ]


def _pass_curve(numbers: RolloutColumns, right_from: float) -> list[dict[str, Any]]:
    """pass@k over prompts for the k of `at_k`, with 95 % intervals."""
    rows = at_k(list(numbers.values().values()), right_from=right_from)
    return [{"k": row.k, **_numbers(row.pass_at)} for row in rows]


def _numbers(estimate: Estimate) -> dict[str, Any]:
    shown = {name: getattr(estimate, name) for name in ("mean", "stderr", "low", "high")}
    numbers = {name: None if math.isnan(value) else float(f"{value:.6g}") for name, value in shown.items()}
    return {**numbers, "prompts": estimate.prompts, "rollouts": estimate.rollouts}
