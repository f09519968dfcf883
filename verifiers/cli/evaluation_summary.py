"""What vf-eval prints at the end: rewards with their intervals, what k rollouts give, counts, and where all is."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from verifiers.cli.tables import print_table
from verifiers.evals.fake_endpoint import FAKE_URL

if TYPE_CHECKING:
    from verifiers.evals.session import EvaluationRun

__all__ = ["show_summary"]


def show_summary(run: EvaluationRun, summary: Mapping[str, Any], *, title: str, as_json: bool) -> None:
    """Print the summary of a run.

    Args:
        summary: of `run.summary`.
        title: of the table.
        as_json: one line for machines instead.
    """
    if as_json:
        print(json.dumps({**summary, "results": str(run.directory)}))
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, markup=False)
    if run.metadata["base_url"] == FAKE_URL:
        console.print("built-in fake endpoint, no model: these numbers say nothing about any policy")
    columns = ("", "mean", "± stderr", "95 % interval", "scored")
    print_table(console, columns, [_row(name, e, summary["rollouts"]) for name, e in _estimates(summary)], title)
    for line in _lines(run, summary):
        console.print(line)


def _estimates(summary: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield from summary["rewards"].items()
    yield from ((f"reward of {task}", of_task["reward"]) for task, of_task in summary["tasks"].items())
    for name, kind in (("pass@", "pass_at_k"), ("pass^", "pass_hat_k"), ("best@", "best_at_k")):
        # one rollout of a prompt is the mean; and where rewards are 0 and 1 the best of k is what passes
        if name != "best@" or not _all_near(summary["best_at_k"], summary["pass_at_k"]):
            yield from ((f"{name}{k}", estimate) for k, estimate in summary[kind].items() if int(k) > 1)


def _all_near(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(math.isclose(one[k]["mean"], other[k]["mean"], abs_tol=1e-9) for k in one)


def _row(name: str, estimate: Mapping[str, Any], rollouts: int) -> tuple[str, ...]:
    low, high = _number(estimate["low"]), _number(estimate["high"])
    scored = estimate["rollouts"]
    without = estimate.get("without", rollouts - scored)
    return (
        name,
        _number(estimate["mean"]),
        _number(estimate["stderr"]),
        "-" if low == "-" else f"{low} .. {high}",
        f"{scored} of {scored + without}",
    )


def _lines(run: EvaluationRun, summary: Mapping[str, Any]) -> Iterator[str]:
    outcomes = ", ".join(f"{count} {name}" for name, count in summary["outcomes"].items())
    missing = f"; {summary['missing']} missing" if summary["missing"] else ""
    cost = "" if summary["cost"] is None else f"; {summary['cost']:.4f} {summary['currency']}"
    yield (
        f"{summary['rollouts']} rollouts of {summary['prompts']} prompts in {summary['seconds']:.1f} s: {outcomes}"
        f"{missing}; {summary['retries']} retries; {summary['completion_tokens']:,} completion tokens{cost}"
    )
    variance = summary["variance"]
    if variance["share_between"] is not None and variance["advice"]:
        yield (
            f"{100 * variance['share_between']:.0f} % of the reward's variance is between prompts: "
            f"{variance['advice']} narrow the interval most"
        )
    if run.lag_distorts and run.metadata["base_url"] != FAKE_URL:
        yield (
            f"the event loop was late by {summary['loop_lag_ms']['p95']:g} ms in 1 of 20 cases: timings show this "
            "machine rather than the server; try a smaller -c"
        )
    yield f"{run.directory}/results.jsonl"
    yield f"{run.directory}/report.html"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
