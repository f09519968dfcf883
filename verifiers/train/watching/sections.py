"""The parts of a training report beside its curves: what it is bound by, time and memory, failures, settings."""

from __future__ import annotations

import html
import json
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from verifiers.train.watching.causes import OTHER_CAUSES
from verifiers.train.watching.charts import short
from verifiers.train.watching.clock import STAGES
from verifiers.train.watching.curves import STAGE_COLOURS
from verifiers.train.watching.figures import RunTime
from verifiers.train.watching.history import Evaluations, History, held_out_name
from verifiers.train.watching.verdict import Verdict, judge

__all__ = ["failures_section", "header", "plan_section", "time_section", "verdict_of", "verdict_section"]

_CAUSES_SHOWN = 30
_JUDGED_BY = ("num_batches_ahead", "drains", "max_concurrent", "max_staleness")


def verdict_of(run: Mapping[str, Any], total: RunTime) -> Verdict | None:
    """What the run is bound by."""
    settings = run.get("judged_by")
    if not isinstance(settings, dict):
        return None
    # another version may have written others
    known = {name: settings[name] for name in _JUDGED_BY if name in settings}
    return judge(total, **{"num_batches_ahead": 0, **known})


def header(run: Mapping[str, Any], history: History, title: str) -> str:
    """Title, how far it is and how it ended, and the numbers that one looks for first."""
    status = str(run.get("status", ""))
    words = {"finished": "finished", "stopped": "stopped", "running": "not ended when this was written"}
    kind = {"finished": "good", "stopped": "bad"}.get(status, "some")
    facts = [(name, value) for name, value in _facts(run, history) if value]
    cells = "".join(f"<div><dt>{name}</dt><dd>{html.escape(value)}</dd></div>" for name, value in facts)
    stopped = (
        f'<p class="notice">Stopped by {html.escape(str(run["stopped_by"]))}</p>' if run.get("stopped_by") else ""
    )
    return (
        f'<header class="head"><h1>{html.escape(title)} '
        f'<span class="badge {kind}">{words.get(status, "")}</span></h1>'
        f'<p class="soft">{html.escape(_when(run))}</p></header>{stopped}'
        f'<div class="card"><dl class="facts wide">{cells}</dl></div>'
    )


def verdict_section(verdict: Verdict | None, total: RunTime) -> str:
    """The rule of thumb in words, over a bar of the trainer's time."""
    if verdict is None:
        return ""
    at, parts, legend = 0.0, [], []
    for stage in sorted(STAGE_COLOURS, key=lambda stage: -total.stages.get(stage, 0.0)):
        share = total.share(stage)
        if share < 0.002:
            continue
        colour = f"c{STAGE_COLOURS[stage]}"
        title = f"{stage}: {100 * share:.1f} %"
        parts.append(
            f'<rect class="{colour}" x="{1000 * at:.1f}" width="{max(1.0, 1000 * share - 1.5):.1f}" height="14">'
            f"<title>{title}</title></rect>"
        )
        legend.append(f'<li><i class="key {colour}"></i>{stage} <b>{100 * share:.0f} %</b></li>')
        at += share
    bar = (
        f'<svg class="bar" viewBox="0 0 1000 14" preserveAspectRatio="none" aria-hidden="true">{"".join(parts)}</svg>'
    )
    return (
        f'<div class="card verdict"><h2>{html.escape(verdict.kind.capitalize())}: {html.escape(verdict.text)}.</h2>'
        f'<p>Try: {html.escape(verdict.advice)}.</p>{bar}<ul class="legend">{"".join(legend)}</ul></div>'
    )


def time_section(total: RunTime, where: str | None) -> str:
    """Seconds and peak memory by stage, and how the two sides overlap."""
    if total.wall <= 0:
        return ""
    highest = max(total.peak_gib.values(), default=0.0)
    rows = []
    for stage, meaning in STAGES.items():
        seconds = total.stages.get(stage, 0.0)
        peak = total.peak_gib.get(stage)
        memory = f"{_meter(peak / highest)}{peak:.2f} GiB" if peak and highest else "–"
        rows.append(
            f'<tr><th scope="row"><i class="key c{STAGE_COLOURS[stage]}"></i>{stage} '
            f'<span class="soft">{meaning}</span></th>'
            f"<td>{_meter(total.share(stage))}{100 * total.share(stage):.1f} %</td><td>{_duration(seconds)}</td>"
            f"<td>{_seconds(seconds / total.steps)}</td><td>{memory}</td></tr>"
        )
    facts = [
        ("overlap ratio", "–" if total.overlap is None else f"{total.overlap:.2f}"),
        ("server busy", f"{100 * total.server_busy:.0f} %"),
        ("tokens sampled", f"{short(total.sampled_tokens / total.wall)} / s"),
        ("tokens trained", f"{short(total.trained_tokens / total.wall)} / s"),
        ("a step", _seconds(total.wall / total.steps)),
    ]
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    caption = f"Peak memory: {html.escape(where)}, rank 0" if where else "Peak memory is not measured on this system"
    return (
        '<section><h2>Where time and memory go</h2><div class="card wide-table">'
        f'<dl class="facts wide">{cells}</dl><table><caption>{caption}</caption><thead><tr><th></th>'
        '<th scope="col">share</th><th scope="col">total</th><th scope="col">a step</th>'
        '<th scope="col">peak memory</th>'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def failures_section(history: History) -> str:
    """Rollouts that failed, by cause."""
    if not history.failures:
        return ""
    causes = sorted(history.failures.items(), key=lambda item: (item[0] == OTHER_CAUSES, -item[1].count))
    rows = "".join(
        f'<tr><th scope="row">{html.escape(text[:400])}</th><td>{cause.count:,}</td><td>{cause.first_step:,}</td>'
        f"<td>{cause.last_step:,}</td></tr>"
        for text, cause in causes[:_CAUSES_SHOWN]
    )
    left_out = causes[_CAUSES_SHOWN:]
    more = (
        f"; {len(left_out):,} rarer causes, of {sum(cause.count for _, cause in left_out):,} rollouts, are left out"
        if left_out
        else ""
    )
    return (
        '<section><h2>Failed rollouts by cause</h2><div class="card wide-table"><table>'
        f"<caption>No failure is a reward of 0: these are in no mean{more}</caption>"
        '<thead><tr><th></th><th scope="col">rollouts</th><th scope="col">first step</th>'
        f'<th scope="col">last step</th></tr></thead><tbody>{rows}</tbody></table></div></section>'
    )


def plan_section(run: Mapping[str, Any]) -> str:
    """Batch plan, settings and versions."""
    parts = []
    if run.get("plan"):
        parts.append(f'<div class="card"><h3>Batch plan</h3><pre>{html.escape(str(run["plan"]))}</pre></div>')
    for name, label in (("settings", "Settings"), ("versions", "Versions"), ("sessions", "Starts")):
        value = run.get(name)
        if value:
            text = html.escape(json.dumps(value, indent=1, ensure_ascii=False))
            parts.append(f'<details class="card fold"><summary>{label}</summary><pre>{text}</pre></details>')
    return f"<section><h2>What was run</h2>{''.join(parts)}</section>" if parts else ""


# -- words -----------------------------------------------------------------------------------------------------


def _facts(run: Mapping[str, Any], history: History) -> Iterable[tuple[str, str]]:
    steps = f"{max(history.steps, default=0):,.0f}"
    yield "optimizer steps", f"{steps} of {run['max_steps']:,}" if isinstance(run.get("max_steps"), int) else steps
    yield "training time", _duration(history.time.wall)
    rewards = [value for value in history.values("reward") if math.isfinite(value)]
    if rewards:
        part = max(1, len(rewards) // 20)
        first, last = rewards[:part], rewards[-part:]
        yield "reward, first to last", f"{short(sum(first) / len(first))} → {short(sum(last) / len(last))}"
    for name, found in history.evaluations.items():
        best = max(range(len(found.rewards)), key=found.rewards.__getitem__)
        yield held_out_name(name), _estimate(found, -1)
        if best < len(found.rewards) - 1:
            yield f"best {held_out_name(name)}", f"{_estimate(found, best)} at step {found.steps[best]:,.0f}"
    yield "tokens sampled", short(round(history.time.sampled_tokens)) if history.time.sampled_tokens else ""
    failed = sum(cause.count for cause in history.failures.values())
    yield "failed rollouts", f"{failed:,}" if failed or history.steps else ""


def _estimate(found: Evaluations, at: int) -> str:
    error = found.errors[at]
    return short(found.rewards[at]) + (f" ± {short(error)}" if math.isfinite(error) else "")


def _when(run: Mapping[str, Any]) -> str:
    sessions = [
        s for s in run.get("sessions") or () if isinstance(s, Mapping) and isinstance(s.get("at"), (int, float))
    ]
    parts = []
    if sessions:
        parts.append("started " + time.strftime("%Y-%m-%d %H:%M", time.localtime(sessions[0]["at"])))
    if len(sessions) > 1:
        steps = ", ".join(f"{session.get('step'):,}" for session in sessions[1:][:8])
        parts.append(f"resumed from step {steps}")
    if run.get("run_name"):
        parts.append(str(run["run_name"]))
    if run.get("device"):
        parts.append(f"{run.get('processes', 1)} x {run['device']}")
    return " · ".join(parts)


def _meter(share: float) -> str:
    width = 60 * min(1.0, max(0.0, share))
    return (
        '<svg class="meter-bar" viewBox="0 0 60 6" aria-hidden="true">'
        '<rect class="rail" width="60" height="6" rx="3" />'
        f'<rect class="fill" width="{width:.1f}" height="6" rx="3" /></svg>'
    )


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.1f} ms"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
