"""A training run as data for the page, made of what its directory holds, and report.html with that data inside."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.evals.json_lines import parse_row
from verifiers.evals.store import RESULTS, iter_rows
from verifiers.log import Redactor, secrets_of_run
from verifiers.monitoring.bottleneck import Bottleneck, find_bottleneck
from verifiers.monitoring.history import History, eval_set_label, read_history
from verifiers.monitoring.run_log import METRICS, OTHER_ERRORS, RUN, SAMPLES, read_lines, read_run, shown_messages
from verifiers.monitoring.stage_timer import STAGES
from verifiers.monitoring.time_metrics import RunTime
from verifiers.notebook import finite
from verifiers.reports.page import TRAINING_SCRIPTS, page_text, write_page
from verifiers.reports.training_charts import STAGE_COLOURS, chart_sections, marked_steps, step_span

__all__ = [
    "bottleneck_of",
    "run_title",
    "run_version",
    "sample_sections",
    "started_at",
    "stored_evaluations",
    "training_data",
    "training_page",
    "write_training_report",
]

_ERRORS_SHOWN = 30
_BOTTLENECK_SETTINGS = ("num_batches_ahead", "shares_cores", "drains", "max_concurrent", "max_staleness")


def write_training_report(run_dir: str | Path, out: Path | None = None) -> Path:
    """Write the page that shows a training run: its numbers, curves, and rollouts to read.

    The file is replaced in one step: readers see the old page or the new one.

    Args:
        run_dir: the run's `output_dir`; the run may still be in progress.
        out: the file to write; report.html in `run_dir` when left out.

    Returns:
        The path written to.

    Raises:
        ConfigError: the directory holds no record of a training run.
        OSError: the file cannot be written.
    """
    directory = Path(run_dir)
    if not (directory / RUN).is_file():
        raise ConfigError(f"{str(directory)!r} holds no {RUN}; give the output_dir of a training run.")
    return write_page(Path(out) if out is not None else directory / "report.html", training_page(directory))


def training_page(directory: Path, *, live: bool = False) -> str:
    """Return the page of a training run.

    Args:
        live: let the page ask its server for newer data.
    """
    data = training_data(directory)
    return page_text(
        data["title"], {**data, "live": live, "home": "/" if live else None}, scripts=TRAINING_SCRIPTS, live=live
    )


def training_data(directory: Path) -> dict[str, Any]:
    """Return what the page shows of a run, as plain data without NaN and without the secrets of this process."""
    run, history = read_run(directory), read_history(directory)
    data = {
        "version": run_version(directory),
        "title": run_title(run, directory),
        "status": str(run.get("status", "")),
        "started": _started(run),
        "stoppedBy": str(run["stopped_by"]) if run.get("stopped_by") else "",
        "head": _head(run, history),
        "learning": _learning(run, history),
        "bottleneck": _bottleneck(bottleneck_of(run, history.time)),
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
    redacted: dict[str, Any] = json.loads(redact(json.dumps(finite(data), ensure_ascii=False)))
    return redacted


def run_title(run: Mapping[str, Any], directory: Path) -> str:
    """Return environment and model of a run, or else the name of its directory."""
    return " / ".join(str(run[key]) for key in ("env", "model") if run.get(key)) or directory.resolve().name


def run_version(directory: Path) -> str:
    """Return a text that changes whenever the files of the run do."""
    sizes = []
    for name in (RUN, METRICS, SAMPLES):
        path = directory / name
        status = path.stat() if path.is_file() else None
        sizes.append(f"{status.st_size}.{status.st_mtime_ns}" if status is not None else "")
    return " ".join(sizes)


def bottleneck_of(run: Mapping[str, Any], total: RunTime) -> Bottleneck | None:
    """Return what limits the speed of a run; None where nothing was measured."""
    settings = run.get("judged_by")
    if not isinstance(settings, dict):
        return None
    # another version may have written others
    known = {name: settings[name] for name in _BOTTLENECK_SETTINGS if name in settings}
    return find_bottleneck(total, **{"num_batches_ahead": 0, **known})


def _bottleneck(found: Bottleneck | None) -> dict[str, str] | None:
    return None if found is None else {"kind": found.kind, "text": found.text, "advice": found.advice}


def _learning(run: Mapping[str, Any], history: History) -> dict[str, str] | None:
    updates = run.get("updates_per_block")
    found = history.signal.finding(updates if isinstance(updates, int) else 1)
    return None if found is None else {"text": str(found), "advice": found.advice}


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
    found = (session for session in run.get("sessions") or () if isinstance(session, Mapping))
    return [session for session in found if isinstance(session.get("at"), (int, float))]


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
    means = [line["mean_reward"] for line in lines if isinstance(line.get("mean_reward"), (int, float))]
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
                    found.setdefault(f"{name} {example}".strip(), []).append(_line(step, example, rows))
            except (ConfigError, OSError, ValueError):
                continue  # one that is being written, or was damaged
    return found


def _chosen_examples(directory: Path) -> list[Any]:
    examples = sorted({row.get("example_id") for row in iter_rows(directory)}, key=_order)
    if len(examples) <= _PROMPTS:
        return examples
    return [examples[at * len(examples) // _PROMPTS] for at in range(_PROMPTS)]


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


def _order(example: Any) -> tuple[int, int, str]:
    return (0, example, "") if isinstance(example, int) else (1, 0, str(example))


def _line(step: int, example: Any, rows: Sequence[Mapping[str, Any]]) -> _Line:
    rewards = [row["reward"] for row in rows if isinstance(row.get("reward"), (int, float))]
    return {
        "step": step,
        "example": example,
        "prompt": shown_messages(rows[0].get("prompt"), "prompt"),
        "answer": str(rows[0].get("answer") or "")[:3000],
        "generations": len(rows),
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "rollouts": [
            {
                "outcome": row.get("outcome"),
                "reward": row.get("reward"),
                "tokens": row.get("completion_tokens"),
                "error": row.get("error"),
                "completion": shown_messages(row.get("completion"), "completion"),
            }
            for row in rows[:_ROLLOUTS]
        ],
    }
