"""A training run as data for the page, made of what its directory holds, and report.html with that data inside."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.evals.store import RESULTS, iter_rows, parse_row
from verifiers.log import Redactor, secrets_of_run
from verifiers.monitoring.findings import Finding, find_bottleneck
from verifiers.monitoring.history import Evaluations, History, eval_set_label, find_trends, read_history, thin_points
from verifiers.monitoring.run_log import (
    METRICS,
    OTHER_ERRORS,
    RUN,
    SAMPLES,
    is_number,
    read_lines,
    read_run,
    sample_line,
)
from verifiers.monitoring.stage_timer import STAGES, RunTime
from verifiers.notebook import finite
from verifiers.reports.page import TRAINING_SCRIPTS, page_text, write_page

_COLOURS = 9
_STAGES_BY_COLOUR = ("train", "wait", "sync", "optimizer", "old_logprobs", "eval", "save", "prepare", "rest")
STAGE_COLOURS = {stage: number for number, stage in enumerate(_STAGES_BY_COLOUR)}
"""Index of each stage's colour in the style sheet."""

_LEAST_SHARE = 0.01
_MOST_MARKS = 40

_ERRORS_SHOWN = 30
_BOTTLENECK_SETTINGS = ("num_batches_ahead", "shared_device", "drains", "max_concurrent", "max_staleness")


def write_training_report(run_dir: str | Path, out: Path | None = None) -> Path:
    """Write the page that shows a training run: its numbers, curves, and rollouts to read; return its path.

    The file is replaced in one step: readers see the old page or the new one.

    Args:
        run_dir: the run's `output_dir`; the run may still be in progress.
        out: the file to write; report.html in `run_dir` when left out.

    Raises:
        ConfigError: the directory holds no record of a training run.
    """
    directory = Path(run_dir)
    if not (directory / RUN).is_file():
        raise ConfigError(f"{str(directory)!r} holds no {RUN}; give the output_dir of a training run.")
    return write_page(Path(out) if out is not None else directory / "report.html", training_page(directory))


def training_page(directory: Path, *, live: bool = False) -> str:
    """Return the page of a training run; a live one may ask its server for newer data."""
    data = training_data(directory)
    return page_text(
        data["title"], {**data, "live": live, "home": "/" if live else None}, scripts=TRAINING_SCRIPTS, live=live
    )


def training_data(directory: Path) -> dict[str, Any]:
    """Return what the page shows of a run, as plain data without NaN and without the secrets of this process."""
    run, history = read_run(directory), read_history(directory)
    updates, samples = run.get("updates_per_block"), read_lines(directory / SAMPLES)
    data = {
        "version": run_version(directory),
        "title": " / ".join(str(run[key]) for key in ("env", "model") if run.get(key)) or directory.resolve().name,
        "status": str(run.get("status", "")),
        "started": _started(run),
        "stoppedBy": str(run["stopped_by"]) if run.get("stopped_by") else "",
        "head": _head(run, history),
        "learning": _finding(history.signal.finding(updates if isinstance(updates, int) else 1)),
        "trends": [_finding(found) for found in find_trends(history, samples, run.get("reward_weights"))],
        "bottleneck": _finding(bottleneck_of(run, history.time)),
        "time": _time(history.time, run.get("memory")),
        "span": step_span(history),
        "marks": marked_steps(run, history),
        "sections": chart_sections(run, history),
        "errors": _errors(history),
        "samples": sample_sections(directory),
        "plan": str(run.get("plan") or ""),
        "details": [
            [label, json.dumps(finite(run[name]), indent=1, ensure_ascii=False)]
            for name, label in (("settings", "Settings"), ("versions", "Versions"), ("sessions", "Starts"))
            if run.get(name)
        ],
    }
    # files from elsewhere, such as a stored evaluation, may contain a key of this environment
    redact = Redactor(secrets_of_run("", "", {}))
    redacted: dict[str, Any] = redact.data(finite(data))
    return redacted


def run_version(directory: Path) -> str:
    """Return a text that changes whenever the files of the run do."""
    sizes = []
    for name in (RUN, METRICS, SAMPLES):
        path = directory / name
        status = path.stat() if path.is_file() else None
        sizes.append(f"{status.st_size}.{status.st_mtime_ns}" if status is not None else "")
    return " ".join(sizes)


def bottleneck_of(run: Mapping[str, Any], total: RunTime) -> Finding | None:
    """Return what limits the speed of a run; None where nothing was measured."""
    settings = run.get("judged_by")
    if not isinstance(settings, dict):
        return None
    # another version may have written others
    known = {name: settings[name] for name in _BOTTLENECK_SETTINGS if name in settings}
    return find_bottleneck(total, **{"num_batches_ahead": 0, **known})


def _finding(found: Finding | None) -> dict[str, str] | None:
    return None if found is None else dataclasses.asdict(found)


def _head(run: Mapping[str, Any], history: History) -> dict[str, Any]:
    """Return the numbers to look at first: steps, seconds, rewards, tokens, failed rollouts."""
    rewards = [value for value in history.values("reward") if math.isfinite(value)]
    part = max(1, len(rewards) // 20)
    return {
        "steps": round(max(history.steps, default=0)),
        "maxSteps": run["max_steps"] if isinstance(run.get("max_steps"), int) else None,
        "seconds": history.time.wall,
        "rewards": [math.fsum(some) / len(some) for some in (rewards[:part], rewards[-part:]) if some],
        "evaluations": [
            {
                "name": eval_set_label(name, trained_on=found.trained_on),
                "last": found.estimate(-1),
                "best": found.estimate(found.best),
            }
            for name, found in history.evaluations.items()
        ],
        "sampledTokens": round(history.time.sampled_tokens),
        "failed": sum(error.count for error in history.failures.values()),
    }


def started_at(run: Mapping[str, Any]) -> str:
    """Return the local time at which a run was first started; "" where that is not known."""
    at = next((session["at"] for session in _sessions(run)), None)
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def _started(run: Mapping[str, Any]) -> str:
    sessions = _sessions(run)
    parts = [f"started {started_at(run)}"] if sessions else []
    if len(sessions) > 1:
        parts.append("resumed from step " + ", ".join(f"{session.get('step'):,}" for session in sessions[1:][:8]))
    if run.get("run_name"):
        parts.append(str(run["run_name"]))
    if run.get("device"):
        parts.append(f"{run.get('processes', 1)} x {run['device']}")
    return " · ".join(parts)


def _sessions(run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [one for one in run.get("sessions") or () if isinstance(one, Mapping) and is_number(one.get("at"))]


def _time(total: RunTime, memory: str | None) -> dict[str, Any] | None:
    """Return seconds and peak memory by stage, and the overlap of generation and training; None before any step."""
    if total.wall <= 0:
        return None
    return {
        "stages": [
            {
                "name": stage,
                "meaning": meaning,
                "colour": STAGE_COLOURS[stage],
                "seconds": total.stages.get(stage, 0.0),
                "share": total.share(stage),
                "peakGib": total.peak_gib.get(stage),
            }
            for stage, meaning in STAGES.items()
        ],
        "steps": total.steps,
        "seconds": total.wall,
        "overlap": total.overlap,
        "serverBusy": total.server_busy,
        "sampledPerSecond": total.sampled_tokens / total.wall,
        "trainedPerSecond": total.trained_tokens / total.wall,
        "memory": str(memory) if memory else "",
    }


def _errors(history: History) -> dict[str, Any]:
    """Return the commonest errors of rollouts, and how many others are left out."""
    found = sorted(history.failures.items(), key=lambda item: (item[0] == OTHER_ERRORS, -item[1].count))
    shown, others = found[:_ERRORS_SHOWN], found[_ERRORS_SHOWN:]
    return {
        "rows": [
            {"text": text[:400], "count": error.count, "first": error.first_step, "last": error.last_step}
            for text, error in shown
        ],
        "leftOut": len(others),
        "leftOutRollouts": sum(error.count for _, error in others),
    }


# -- charts: which curves are shown, by subject, and their points ----------------------------------------------

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
        "Learning": _learning_charts(history),
        "Held out": _evaluation_charts(history),
        "Speed": [_step_time(history), *(_chart(history, *one) for one in _SPEED)],
        "Off-policy": [_chart(history, *one) for one in _OFF_POLICY],
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


def _learning_charts(history: History) -> list[_Chart]:
    functions = _named(history, "rewards/", "/mean")
    rates = [value for value in history.values("learning_rate") if math.isfinite(value)]
    is_constant = not rates or min(rates) == max(rates)
    eval_sets = {
        eval_set_label(name, trained_on=found.trained_on): found for name, found in history.evaluations.items()
    }
    lengths = {"mean": "completions/mean_length", "longest": "completions/max_length"}
    reward = _chart(history, "Reward", {"training": "reward"}, "evaluations ± 2 standard errors" if eval_sets else "")
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


def _evaluation_charts(history: History) -> list[_Chart]:
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
        chart = _chart(history, f"Evaluations: {title}", {}, "± 2 standard errors" if title.endswith("k") else "")
        chart["series"] = _evaluations(found)
        charts.append(chart)
    return charts


_SPEED = (
    (
        "Both sides at work",
        {"overlap ratio": "overlap_ratio", "server busy": "rollouts/server_busy"},
        "1 is the most",
    ),
    ("Tokens a second", {"sampled": "tokens/sampled_per_s", "trained": "tokens/trained_per_s"}, ""),
    ("Rollout latency", {name: f"time/rollout_{name}_s" for name in ("p50", "p95", "max")}, "seconds"),
    ("A block", {"generation": "time/block_generation_s", "scoring a group": "time/scoring_mean_s"}, "seconds"),
    ("Rollouts", {"in flight": "rollouts/in_flight", "waiting for a slot": "rollouts/queued"}, "means over time"),
    ("Padding", {"share of computed tokens": "rows/padding_share"}, ""),
)
_OFF_POLICY = (
    ("Staleness", {"oldest token": "staleness"}, "optimizer steps"),
    ("Sampler against trainer", {"KL": "mismatch_kl"}, "nats a token"),
    (
        "Importance ratio",
        {name: f"sampling/importance_sampling_ratio/{name}" for name in ("mean", "min", "max")},
        "trainer / sampler",
    ),
    (
        "Clipped",
        {"importance weight": "sampling/clipped_share", "loss": "clip_ratio/region_mean"},
        "share of tokens",
    ),
    ("Probe after a push", {"difference": "sampling/probe_difference"}, "nats"),
)


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
    """Return a chart of those metrics, by label, that were logged.

    `missing` stands for a value that was not logged; None leaves the point out.
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


# -- sampled rollouts: for each prompt its steps, and its rollouts at each of them ---------------------------------

_PROMPTS = 4
_TIMES = 40
_ROLLOUTS = 4
_MOST_CHARACTERS = 6 << 20
_STEP = re.compile(r"step-(\d+)(?:-.*)?")

_Line = dict[str, Any]


def sample_sections(run_dir: Path) -> list[dict[str, Any]]:
    """Return the sections with sampled rollouts, without empty ones.

    A section is `{"title", "note", "scale", "cards"}`: "scale" has the mean rewards of the lightest and the darkest
    colour. A card is one prompt over time, `{"title", "prompt", "answer", "steps"}`, or has prompts of many blocks,
    each with its text beside its rollouts, and then no "title". A step is `{"step", "mean", "groups"}`, and a group a
    line of samples.jsonl.
    """
    followed: dict[str, list[_Line]] = {}
    others: list[_Line] = []
    for line in read_lines(run_dir / SAMPLES):
        if line.get("followed"):
            followed.setdefault(str(line.get("example")), []).append(line)
        else:
            others.append(line)
    once = [name for name, lines in followed.items() if len(lines) == 1]
    others = [line for name in once for line in followed.pop(name)] + others
    sections = [
        _section(
            "The same evaluated prompts over time",
            "greedy or sampled, as the evaluations were",
            [_card(name, lines) for name, lines in _evaluated(run_dir).items()],
        ),
        _section(
            "The same training prompts over time",
            "prompts of the first block that came again",
            [_card(name, lines) for name, lines in followed.items()],
        ),
        _section(
            "Prompts of a block, by step",
            "the one whose rewards differ most, and a typical one",
            [{"steps": _steps(others)}] if others else [],
        ),
    ]
    return [section for section in sections if section["cards"]]


def _section(title: str, note: str, cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    means = [step["mean"] for card in cards for step in card["steps"] if step["mean"] is not None]
    # 0 is always on the scale, so that a colour tells a reward also where all rewards are equal
    low, high = min([0.0, *means]), max([0.0, *means])
    return {"title": title, "note": note, "cards": cards, "scale": [low, high if high > low else low + 1.0]}


def _card(name: str, lines: Sequence[_Line]) -> dict[str, Any]:
    steps = _steps([{**line, "prompt": [], "answer": ""} for line in lines])
    first = lines[0]
    return {
        "title": f"prompt {name}",
        "prompt": first.get("prompt") or [],
        "answer": str(first.get("answer") or ""),
        "steps": steps,
    }


def _steps(lines: Iterable[_Line]) -> list[dict[str, Any]]:
    """Return the lines by step; every second step, every fourth and so on where there is too much to show."""
    by_step: dict[int, list[_Line]] = {}
    for line in lines:
        by_step.setdefault(int(line["step"]), []).append(line)
    steps = [{"step": step, "mean": _mean(groups), "groups": groups} for step, groups in sorted(by_step.items())]
    every = max(1, -(-len(steps) // _TIMES))
    sizes = [len(str(step)) for step in steps]
    while sum(sizes[::every]) > _MOST_CHARACTERS and every < len(sizes):
        every *= 2
    chosen = steps[::every]
    if steps and chosen[-1] is not steps[-1]:
        chosen.append(steps[-1])
    return chosen


def _mean(lines: Iterable[_Line]) -> float | None:
    means = [line["mean_reward"] for line in lines if is_number(line.get("mean_reward"))]
    return sum(means) / len(means) if means else None


def stored_evaluations(run_dir: Path) -> dict[str, list[tuple[int, Path]]]:
    """Return the directories of stored evaluations by the name of their set, in order of their steps."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in (run_dir / "evals").glob(f"step-*/**/{RESULTS}"):
        parts = path.parent.relative_to(run_dir / "evals").parts
        number = _STEP.fullmatch(parts[0])
        if number is not None:
            found.setdefault("/".join(parts[1:]), []).append((int(number.group(1)), path.parent))
    return {name: sorted(stored) for name, stored in sorted(found.items())}


def _evaluated(run_dir: Path) -> dict[str, list[_Line]]:
    """Return the rollouts of a few prompts in each stored evaluation, by set and prompt, like samples.jsonl."""
    found: dict[str, list[_Line]] = {}
    for name, stored in stored_evaluations(run_dir).items():
        every = max(1, -(-len(stored) // _TIMES))
        shown = stored[::every] if (len(stored) - 1) % every == 0 else [*stored[::every], stored[-1]]
        chosen: list[Any] = []
        for step, directory in shown:
            try:
                chosen = chosen or _chosen_examples(directory)
                for example, rows in _rows_of(directory, chosen).items():
                    found.setdefault(f"{name} {example}".strip(), []).append(
                        sample_line(step, example, rows, rows[:_ROLLOUTS])
                    )
            except (ConfigError, OSError, ValueError):
                continue  # one that is being written, or was damaged
    return found


def _chosen_examples(directory: Path) -> list[Any]:
    examples = {row.get("example_id"): None for row in iter_rows(directory)}
    # numbers before names, each in order
    ordered = sorted(examples, key=lambda one: (not isinstance(one, int), one if isinstance(one, int) else str(one)))
    every = max(1, len(ordered) / _PROMPTS)
    return [ordered[int(at * every)] for at in range(min(_PROMPTS, len(ordered)))]


def _rows_of(directory: Path, examples: Sequence[Any]) -> dict[Any, list[dict[str, Any]]]:
    """Return the rollouts of some prompts. Only their lines are parsed, since there may be thousands."""
    beginnings = {f'{{"example_id": {json.dumps(example)},'.encode(): example for example in examples}
    rows: dict[Any, list[dict[str, Any]]] = {example: [] for example in examples}
    with (directory / RESULTS).open("rb") as file:
        for line in file:
            for beginning, example in beginnings.items():
                if line.startswith(beginning) and line.endswith(b"\n"):
                    rows[example].append(parse_row(line))
    return {example: found for example, found in rows.items() if found}
