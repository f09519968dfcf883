"""`vf-compare RUN_A RUN_B`: is the second run better than the first, and how sure can one be?"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verifiers.cli.main import DONE, CommandFailedError, run_command
from verifiers.errors import ConfigError

if TYPE_CHECKING:
    from verifiers.evals.comparison import Comparison, Side
    from verifiers.evals.statistics import Estimate

__all__ = ["compare", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    args = _parser().parse_args(argv)
    return run_command("vf-compare", lambda: compare(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vf-compare",
        description="Compare two evaluations of the same prompts: is run B better than run A?",
        epilog="Exit codes: 0 compared, whatever came out; 1 nothing to compare; 2 usage, or different prompts.",
    )
    add = parser.add_argument
    add("run_a", help="directory of the run to compare with")
    add("run_b", help="directory of the run that may be better")
    add(
        "--metric",
        action="append",
        metavar="NAME",
        help="reward, a reward function, pass@K, pass^K or best@K; repeatable (default: reward)",
    )
    different = parser.add_mutually_exclusive_group()
    different.add_argument(
        "--on-common-prompts", action="store_true", help="the runs may differ in prompts: pair those that both have"
    )
    different.add_argument(
        "--unpaired-ok", action="store_true", help="compare the means of different prompts, without pairs"
    )
    add(
        "--match-by",
        choices=("prompt", "id"),
        default="prompt",
        help="what makes two prompts the same: id and text, or the id alone (default: prompt)",
    )
    add("--right-from", type=float, default=1.0, help="reward from which a rollout is right (default: 1.0)")
    add("--confidence", type=float, default=0.95, help="coverage of the intervals (default: 0.95)")
    add("--seed", type=int, default=0, help="of the permutation test (default: 0)")
    add("--json", action="store_true", help="print the comparison as one line of JSON")
    return parser


def compare(args: argparse.Namespace) -> int:
    """Do what the command does; raises instead of printing errors."""
    from verifiers.evals.comparison import compare_runs, read_compared_run

    if not 0 < args.confidence < 1:
        raise ConfigError(f"--confidence is {args.confidence}; give a number between 0 and 1, such as 0.95.")
    if args.seed < 0:
        raise ConfigError(f"--seed is {args.seed}; give 0 or more.")
    runs = [read_compared_run(directory) for directory in (args.run_a, args.run_b)]
    found = [
        compare_runs(
            runs[0],
            runs[1],
            metric=metric,
            pairing="common" if args.on_common_prompts else "unpaired" if args.unpaired_ok else "same",
            match_by=args.match_by,
            right_from=args.right_from,
            confidence=args.confidence,
            seed=args.seed,
        )
        for metric in dict.fromkeys(args.metric or ["reward"])
    ]
    if args.json:
        print(json.dumps({"comparisons": [comparison.as_json() for comparison in found]}))
    else:
        _print(found, args.confidence)
    # a comparison of nothing must not look like one without a difference
    empty = [comparison.metric for comparison in found if math.isnan(comparison.difference.mean)]
    if empty:
        raise CommandFailedError(f"no prompt has a value in both runs for {', '.join(empty)}.")
    return DONE


def _print(comparisons: Sequence[Comparison], confidence: float) -> None:
    from rich.console import Console
    from rich.markup import escape

    from verifiers.cli.evaluate_output import print_table

    console = Console(highlight=False, soft_wrap=True)
    first = comparisons[0]
    for letter, side in (("A", first.a), ("B", first.b)):
        console.print(f"{letter}: {escape(side.name)}: {_counts(side)}")
    for name, (before, after) in first.settings.items():
        console.print(escape(f"   {name}: {before!r} in A, {after!r} in B"))
    columns = ("", "A", "B", "B - A", f"{confidence * 100:g} % interval", "p")
    rows = [
        (
            c.metric,
            _number(c.a.estimate.mean),
            _number(c.b.estimate.mean),
            _number(c.difference.mean, "+"),
            _interval(c.difference),
            _p(c),
        )
        for c in comparisons
    ]
    print_table(console, columns, rows)
    for comparison in comparisons:
        console.print(_sentence(comparison), markup=False)


def _sentence(comparison: Comparison) -> str:
    c = comparison
    parts = [f"{c.metric}: {c.verdict}"]
    if c.paired:
        parts.append(f"{c.difference.prompts} prompts in pairs of {c.common} in common")
        parts.append(f"B won {c.wins}, tied {c.ties}, lost {c.losses}")
    else:
        parts.append(f"unpaired, {c.a.estimate.prompts} prompts against {c.b.estimate.prompts}, {c.common} in common")
    for letter, side in (("A", c.a), ("B", c.b)):
        if side.only_here:
            parts.append(f"{side.only_here} prompts only in {letter}")
        if side.unscored:
            parts.append(f"{side.unscored} common prompts without a value in {letter}")
    if math.isfinite(c.detectable):
        parts.append(f"detectable with 80 % power: {c.detectable:.4f}")
    return "; ".join(parts)


def _counts(side: Side) -> str:
    counts = side.counts
    parts = [f"{counts.scored} of {counts.rollouts} rollouts of {counts.prompts} prompts scored"]
    parts += [
        f"{count} {name}"
        for name, count in (
            ("unscored", counts.unscored - counts.failed),
            ("failed", counts.failed),
            ("truncated", counts.truncated),
            ("missing", counts.missing),
        )
        if count
    ]
    return ", ".join(parts)


def _interval(estimate: Estimate) -> str:
    return "-" if math.isnan(estimate.low) else f"{estimate.low:+.4f} .. {estimate.high:+.4f}"


def _p(comparison: Comparison) -> str:
    p: float = comparison.test.p
    if math.isnan(p):
        return "-"
    return f"{p:.4f}" if p >= 0.0001 else f"{p:.1e}"


def _number(value: Any, sign: str = "") -> str:
    return "-" if math.isnan(value) else f"{value:{sign}.4f}"


if __name__ == "__main__":
    sys.exit(main())
