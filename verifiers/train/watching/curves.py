"""Which curves a training report shows, by subject."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from verifiers.train.watching.charts import COLOURS, Chart, chart_figure
from verifiers.train.watching.history import Evaluations, History, Points, few_points, held_out_name

__all__ = ["STAGE_COLOURS", "curve_sections"]

_BY_COLOUR = ("train", "wait", "sync", "optimizer", "old_logprobs", "eval", "save", "prepare", "rest")
STAGE_COLOURS = {stage: number for number, stage in enumerate(_BY_COLOUR)}
"""The colour of each stage of the trainer's time."""

_LEAST_SHARE = 0.01


def curve_sections(run: Mapping[str, Any], history: History) -> str:
    """All charts, by subject."""
    last = max(history.steps, default=0.0)
    for found in history.evaluations.values():
        last = max(last, max(found.steps, default=0.0))
    if last <= 0:
        return '<section><p class="notice">Nothing was logged yet.</p></section>'
    span = (0.0, float(last))
    marks = _marks(run, history)
    sections = []
    for title, charts in (
        ("Learning", _learning(history)),
        ("Held out", _held_out(history)),
        ("Speed", _speed(history)),
        ("Off-policy", _off_policy(history)),
        ("Data", _data(run, history)),
    ):
        figures = [chart_figure(chart, span, marks) for chart in charts if not chart.is_empty]
        if figures:
            sections.append(f'<section><h2>{title}</h2><div class="charts">{"".join(figures)}</div></section>')
    return "".join(sections)


def _learning(history: History) -> list[Chart]:
    functions = {_inner(name, "rewards/", "/mean"): name for name in history.names("rewards/", "/mean")}
    tasks = {_inner(name, "tasks/", "/reward"): name for name in history.names("tasks/", "/reward")}
    held_out = {held_out_name(name): found for name, found in history.evaluations.items()}
    return [
        Chart(
            "Reward",
            _curves(history, {"training": "reward"}),
            "held out with 95 % intervals" if held_out else "",
            evaluations=held_out,
        ),
        Chart("Reward functions", _curves(history, functions) if len(functions) > 1 else {}, "means"),
        Chart("Reward by environment", _curves(history, tasks)),
        Chart(
            "Completion length",
            _curves(history, {"mean": "completions/mean_length", "longest": "completions/max_length"}),
            "sampled tokens",
        ),
        Chart("Loss", _curves(history, {"loss": "loss"}), from_zero=False),
        Chart("Gradient norm", _curves(history, {"before clipping": "grad_norm"})),
        Chart("Entropy", _curves(history, {"entropy": "entropy"}), "nats a token"),
        Chart("KL to the reference", _curves(history, {"kl": "kl"})),
        Chart(
            "Learning rate",
            _curves(history, {"learning rate": "learning_rate"}) if _varies(history, "learning_rate") else {},
        ),
    ]


def _held_out(history: History) -> list[Chart]:
    def some(kind: str, beginning: str = "") -> dict[str, Evaluations]:
        found = history.details.get(kind, {}).items()
        return dict([(label, means) for label, means in found if label.startswith(beginning)][:COLOURS])

    functions = some("function")
    return [
        *(
            Chart(f"Held-out {measure}k", {}, "with 95 % intervals", evaluations=some("at_k", measure))
            for measure in ("pass@", "pass^", "best@")
        ),
        Chart(
            "Held-out reward functions",
            {},
            # one of each set would be its reward again
            evaluations=functions if len(functions) > len(history.evaluations) else {},
        ),
        Chart("Held-out reward by environment", {}, evaluations=some("task")),
    ]


def _speed(history: History) -> list[Chart]:
    shares = {"overlap ratio": "overlap_ratio", "server busy": "rollouts/server_busy"}
    latency = {"p50": "time/rollout_p50_s", "p95": "time/rollout_p95_s", "max": "time/rollout_max_s"}
    return [
        _step_time(history),
        Chart("Both sides at work", _curves(history, shares), "1 is all that can be had"),
        Chart(
            "Tokens a second",
            _curves(history, {"sampled": "tokens/sampled_per_s", "trained": "tokens/trained_per_s"}),
        ),
        Chart("Rollout latency", _curves(history, latency), "seconds"),
        Chart(
            "A block",
            _curves(history, {"generation": "time/block_generation_s", "scoring a group": "time/scoring_mean_s"}),
            "seconds",
        ),
        Chart(
            "Rollouts",
            _curves(history, {"in flight": "rollouts/in_flight", "waiting for a slot": "rollouts/queued"}),
            "means over time",
        ),
        Chart("Padding", _curves(history, {"share of computed tokens": "rows/padding_share"})),
    ]


def _step_time(history: History) -> Chart:
    """Seconds a step by stage; those that hardly take any are one, so that the legend stays short."""
    # an evaluation takes as long as many steps, and would flatten the rest
    stages = [stage for stage in STAGE_COLOURS if stage not in ("eval", "save", "rest")]
    shown = [stage for stage in stages if history.time.share(stage) >= _LEAST_SHARE]
    curves = _curves(history, {stage: f"time/{stage}_s" for stage in shown})
    small = [history.values(f"time/{stage}_s") for stage in ("rest", *stages) if stage not in shown]
    rest = [math.fsum(parts) for parts in zip(*(part for part in small if len(part)), strict=True)]
    points = few_points(history.steps, rest) if rest else None
    if points is not None and points.x:
        curves["rest"] = points
    colours = [STAGE_COLOURS[stage] for stage in curves]
    return Chart("A step's time", curves, "seconds, no eval or save", stacked=True, colours=colours)


def _off_policy(history: History) -> list[Chart]:
    ratio = {name: f"sampling/importance_sampling_ratio/{name}" for name in ("mean", "min", "max")}
    clipped = {"correction": "sampling/clipped_share", "loss": "clip_ratio/region_mean"}
    return [
        Chart("Staleness", _curves(history, {"oldest token": "staleness"}), "optimizer steps"),
        Chart("Sampler against trainer", _curves(history, {"KL": "mismatch_kl"}), "nats a token"),
        Chart("Importance ratio", _curves(history, ratio), "trainer / sampler"),
        Chart("Clipped", _curves(history, clipped), "share of tokens"),
        Chart("Probe after a push", _curves(history, {"largest difference": "sampling/probe_difference"}), "nats"),
    ]


def _data(run: Mapping[str, Any], history: History) -> list[Chart]:
    dropped = {name.removeprefix("rows/dropped/").replace("_", " "): name for name in history.names("rows/dropped/")}
    lengths = {
        name.removeprefix("rows/dropped_tokens/").replace("_", " "): name
        for name in history.names("rows/dropped_tokens/")
    }
    failed = {
        name.removeprefix("outcomes/").replace("_", " "): name
        for name in history.names("outcomes/")
        if name.endswith(("error", "timed_out", "cancelled")) and any(value > 0 for value in history.values(name))
    }
    levels = {"stage": "curriculum/stage", "level": "curriculum/level"}
    note = ", ".join(f"{number} {name}" for number, name in enumerate(run.get("stages") or ()))
    return [
        Chart(
            "No variance, truncated",
            _curves(history, {"no variance": "frac_reward_zero_std", "truncated": "completions/clipped_ratio"}),
            "shares",
        ),
        Chart("Failed rollouts", _curves(history, failed, missing=0.0), "a block, by outcome", stacked=True),
        Chart(
            "Not trained on",
            _curves(history, dropped, missing=0.0),
            "a block, by reason",
            stacked=True,
        ),
        Chart("Length of dropped rows", _curves(history, lengths), "mean tokens"),
        Chart("Dropped stragglers", _curves(history, {"had run": "time/straggler_mean_s"}), "seconds"),
        Chart(
            "Curriculum",
            _curves(history, {name: key for name, key in levels.items() if history.values(key)}),
            note[:120],
            steps_between=True,
        ),
    ]


def _curves(history: History, names: Mapping[str, str], missing: float | None = None) -> dict[str, Points]:
    """Points by label, of those metrics that were logged; what is missing may count as a number."""
    made = {}
    for label, name in names.items():
        values = list(history.values(name))
        if missing is not None:
            values = [value if math.isfinite(value) else missing for value in values]
        points = few_points(history.steps, values) if values else None
        if points is not None and points.x:
            made[label] = points
    return made


def _varies(history: History, name: str) -> bool:
    values = [value for value in history.values(name) if math.isfinite(value)]
    return bool(values) and max(values) > min(values)


def _marks(run: Mapping[str, Any], history: History) -> list[tuple[float, str]]:
    marks = [
        (float(session["step"]), f"went on from step {session['step']}")
        for session in run.get("sessions") or ()
        if isinstance(session, Mapping) and session.get("step")
    ]
    stage = history.values("curriculum/stage")
    names = list(run.get("stages") or ())
    for at in range(1, len(stage)):
        if math.isfinite(stage[at]) and math.isfinite(stage[at - 1]) and stage[at] != stage[at - 1]:
            number = int(stage[at])
            marks.append((history.steps[at], f"stage {names[number] if number < len(names) else number}"))
    return marks[:40]


def _inner(name: str, prefix: str, suffix: str) -> str:
    return name.removeprefix(prefix).removesuffix(suffix)
