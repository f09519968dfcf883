"""The charts of a training report as data: which curves are shown, by subject, and their points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from verifiers.monitoring.history import Evaluations, History, eval_set_label, thin_points

__all__ = ["STAGE_COLOURS", "chart_sections", "marked_steps", "step_span"]

_COLOURS = 9
_STAGES_BY_COLOUR = ("train", "wait", "sync", "optimizer", "old_logprobs", "eval", "save", "prepare", "rest")
STAGE_COLOURS = {stage: number for number, stage in enumerate(_STAGES_BY_COLOUR)}
"""Index of each stage's colour in the style sheet."""

_LEAST_SHARE = 0.01
_MOST_MARKS = 40

_Chart = dict[str, Any]


def step_span(history: History) -> tuple[float, float]:
    """Return the first and last optimizer step of the x axis, which all charts share; (0, 0) without any log."""
    steps = [max(found.steps, default=0.0) for found in history.evaluations.values()]
    return 0.0, float(max([*steps, *history.steps[-1:]], default=0.0))


def chart_sections(run: Mapping[str, Any], history: History) -> list[dict[str, Any]]:
    """Return the charts that have something to draw: `{"title", "charts"}` for each subject.

    A chart is `{"title", "note", "series", "stacked", "staircase", "fromZero"}`. A series is `{"name", "colour",
    "x", "y"}`, with "low" and "high" where each point is the mean of several, or "errors" where the points are means
    of an eval set (null where one has no standard error).
    """
    sections = {
        "Learning": _learning(history),
        "Held out": _evaluated(history),
        "Speed": _speed(history),
        "Off-policy": _off_policy(history),
        "Data": _data(run, history),
    }
    found = ({"title": title, "charts": [c for c in charts if c["series"]]} for title, charts in sections.items())
    return [section for section in found if section["charts"]]


def marked_steps(run: Mapping[str, Any], history: History) -> list[tuple[float, str]]:
    """Return the steps to point out in every chart: resumed sessions and changes of the curriculum's stage."""
    sessions = [session for session in run.get("sessions") or () if isinstance(session, Mapping)]
    found = [(float(s["step"]), f"resumed from step {s['step']}") for s in sessions if s.get("step")]
    stage, names = history.values("curriculum/stage"), list(run.get("stages") or ())
    for at in range(1, len(stage)):
        if math.isfinite(stage[at]) and math.isfinite(stage[at - 1]) and stage[at] != stage[at - 1]:
            number = int(stage[at])
            found.append((history.steps[at], f"stage {names[number] if number < len(names) else number}"))
    return found[:_MOST_MARKS]


def _learning(history: History) -> list[_Chart]:
    functions = _named(history, "rewards/", "/mean")
    rates = [value for value in history.values("learning_rate") if math.isfinite(value)]
    is_constant = not rates or min(rates) == max(rates)
    eval_sets = {
        eval_set_label(name, trained_on=found.trained_on): found for name, found in history.evaluations.items()
    }
    lengths = {"mean": "completions/mean_length", "longest": "completions/max_length"}
    reward = _chart(history, "Reward", {"training": "reward"}, "evaluations with 95 % intervals" if eval_sets else "")
    reward["series"] += _evaluations(eval_sets, first_colour=len(reward["series"]))
    return [
        reward,
        _chart(history, "Reward functions", functions if len(functions) > 1 else {}, "means"),
        _chart(history, "Reward by environment", _named(history, "tasks/", "/reward")),
        _chart(history, "Completion length", lengths, "sampled tokens"),
        _chart(history, "Loss", {"loss": "loss"}, fromZero=False),
        _chart(history, "Gradient norm", {"before clipping": "grad_norm"}),
        _chart(history, "Entropy", {"entropy": "entropy"}, "nats a token"),
        _chart(history, "KL to the reference", {"kl": "kl"}),
        _chart(history, "Learning rate", {} if is_constant else {"learning rate": "learning_rate"}),
    ]


def _evaluated(history: History) -> list[_Chart]:
    at_k, functions = history.details.get("at_k", {}), history.details.get("function", {})
    shown = {
        f"{measure}k": {label: found for label, found in at_k.items() if label.startswith(measure)}
        for measure in ("pass@", "pass^", "best@")
    }
    # one function of each set would be its reward again
    shown["reward functions"] = functions if len(functions) > len(history.evaluations) else {}
    shown["reward by environment"] = history.details.get("task", {})
    charts = []
    for title, found in shown.items():
        chart = _chart(history, f"Evaluations: {title}", {}, "with 95 % intervals" if title.endswith("k") else "")
        chart["series"] = _evaluations(found)
        charts.append(chart)
    return charts


def _speed(history: History) -> list[_Chart]:
    busy = {"overlap ratio": "overlap_ratio", "server busy": "rollouts/server_busy"}
    tokens = {"sampled": "tokens/sampled_per_s", "trained": "tokens/trained_per_s"}
    latency = {"p50": "time/rollout_p50_s", "p95": "time/rollout_p95_s", "max": "time/rollout_max_s"}
    block = {"generation": "time/block_generation_s", "scoring a group": "time/scoring_mean_s"}
    rollouts = {"in flight": "rollouts/in_flight", "waiting for a slot": "rollouts/queued"}
    return [
        _step_time(history),
        _chart(history, "Both sides at work", busy, "1 is the most possible"),
        _chart(history, "Tokens a second", tokens),
        _chart(history, "Rollout latency", latency, "seconds"),
        _chart(history, "A block", block, "seconds"),
        _chart(history, "Rollouts", rollouts, "means over time"),
        _chart(history, "Padding", {"share of computed tokens": "rows/padding_share"}),
    ]


def _step_time(history: History) -> _Chart:
    """Return the seconds of a step by stage; stages of under 1 % are one series, so that the legend stays short."""
    # an evaluation takes as long as many steps, and would flatten the rest
    stages = [stage for stage in STAGE_COLOURS if stage not in ("eval", "save", "rest")]
    shown = [stage for stage in stages if history.time.share(stage) >= _LEAST_SHARE]
    chart = _chart(
        history,
        "A step's time",
        {stage: f"time/{stage}_s" for stage in shown},
        "seconds, no eval or save",
        stacked=True,
    )
    small = [history.values(f"time/{stage}_s") for stage in ("rest", *stages) if stage not in shown]
    rest = [math.fsum(parts) for parts in zip(*(part for part in small if len(part)), strict=True)]
    if rest:
        chart["series"] += _series("rest", 0, history.steps, rest)
    for series in chart["series"]:
        series["colour"] = STAGE_COLOURS[series["name"]]
    return chart


def _off_policy(history: History) -> list[_Chart]:
    ratio = {name: f"sampling/importance_sampling_ratio/{name}" for name in ("mean", "min", "max")}
    clipped = {"importance weight": "sampling/clipped_share", "loss": "clip_ratio/region_mean"}
    difference = {"largest difference": "sampling/probe_difference"}
    return [
        _chart(history, "Staleness", {"oldest token": "staleness"}, "optimizer steps"),
        _chart(history, "Sampler against trainer", {"KL": "mismatch_kl"}, "nats a token"),
        _chart(history, "Importance ratio", ratio, "trainer / sampler"),
        _chart(history, "Clipped", clipped, "share of tokens"),
        _chart(history, "Probe after a push", difference, "nats"),
    ]


def _data(run: Mapping[str, Any], history: History) -> list[_Chart]:
    shares = {"no variance": "frac_reward_zero_std", "truncated": "completions/clipped_ratio"}
    failed = {
        label: name
        for label, name in _spaced(_named(history, "outcomes/")).items()
        if name.endswith(("error", "timed_out", "cancelled")) and any(value > 0 for value in history.values(name))
    }
    curriculum = {"stage": "curriculum/stage", "level": "curriculum/level"}
    stages = ", ".join(f"{number} {name}" for number, name in enumerate(run.get("stages") or ()))
    dropped = _spaced(_named(history, "rows/dropped/"))
    dropped_lengths = _spaced(_named(history, "rows/dropped_tokens/"))
    return [
        _chart(history, "No variance, truncated", shares, "shares"),
        _chart(history, "Failed rollouts", failed, "a block, by outcome", missing=0.0, stacked=True),
        _chart(history, "Not trained on", dropped, "a block, by reason", missing=0.0, stacked=True),
        _chart(history, "Length of dropped rows", dropped_lengths, "mean tokens"),
        _chart(history, "Dropped stragglers", {"had run": "time/straggler_mean_s"}, "seconds"),
        _chart(history, "Curriculum", curriculum, stages[:120], staircase=True),
    ]


def _named(history: History, prefix: str, suffix: str = "") -> dict[str, str]:
    """Return the logged metrics of such a name, by the part between prefix and suffix."""
    return {name.removeprefix(prefix).removesuffix(suffix): name for name in history.names(prefix, suffix)}


def _spaced(metrics: Mapping[str, str]) -> dict[str, str]:
    return {label.replace("_", " "): name for label, name in metrics.items()}


def _chart(
    history: History,
    title: str,
    metrics: Mapping[str, str],
    note: str = "",
    missing: float | None = None,
    **options: bool,
) -> _Chart:
    """Return a chart of those metrics that were logged.

    Args:
        metrics: metric name by label, in the order of their colours.
        missing: value that stands for one that was not logged; None leaves the point out.
    """
    series: list[dict[str, Any]] = []
    for label, name in metrics.items():
        values: Iterable[float] = history.values(name)
        if missing is not None:
            values = [value if math.isfinite(value) else missing for value in values]
        series += _series(label, len(series), history.steps, list(values))
    return {"title": title, "note": note, "series": series, "fromZero": True, **options}


def _series(name: str, colour: int, steps: Iterable[float], values: list[float]) -> list[dict[str, Any]]:
    if not any(math.isfinite(value) for value in values):
        return []
    points = thin_points(list(steps), values)
    series = {"name": name, "colour": colour % _COLOURS, "x": [round(x) for x in points.x], "y": _rounded(points.y)}
    if points.is_thinned:
        series |= {"low": _rounded(points.low), "high": _rounded(points.high)}
    return [series]


def _evaluations(found: Mapping[str, Evaluations], first_colour: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "colour": number % _COLOURS,
            "x": [round(step) for step in one.steps],
            "y": _rounded(one.rewards),
            "errors": [float(f"{error:.4g}") if math.isfinite(error) else None for error in one.errors],
        }
        for number, (name, one) in enumerate(list(found.items())[:_COLOURS], start=first_colour)
    ]


def _rounded(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]
