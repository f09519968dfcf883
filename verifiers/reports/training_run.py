"""A training run as data for the page, made of what its directory holds, and report.html with that data inside."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.evals.transcripts import finite
from verifiers.log import Redactor, secrets_of_run
from verifiers.monitoring.bottleneck import Bottleneck, find_bottleneck
from verifiers.monitoring.history import History, eval_set_label, read_history
from verifiers.monitoring.run_log import METRICS, OTHER_ERRORS, RUN, SAMPLES, read_run
from verifiers.monitoring.stage_timer import STAGES
from verifiers.monitoring.time_metrics import RunTime
from verifiers.reports.page import TRAINING_SCRIPTS, page_text, write_page
from verifiers.reports.training_charts import STAGE_COLOURS, chart_sections, marked_steps, step_span
from verifiers.reports.training_samples import sample_sections

__all__ = [
    "bottleneck_of",
    "run_title",
    "run_version",
    "started_at",
    "training_data",
    "training_page",
    "write_training_report",
]

_ERRORS_SHOWN = 30
_BOTTLENECK_SETTINGS = ("num_batches_ahead", "drains", "max_concurrent", "max_staleness")


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
        directory: of the run.
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
    found = history.signal.verdict(updates if isinstance(updates, int) else 1)
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
            {"name": eval_set_label(name), "last": found.estimate(-1), "best": found.estimate(found.best)}
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
