"""`vf-compare RUN_A RUN_B`: is the second run better than the first, and how sure can one be?"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verifiers.cli.main import DONE, Command, CommandFailedError, CommandParser
from verifiers.errors import ConfigError
from verifiers.monitoring.number_text import rounded

if TYPE_CHECKING:
    from verifiers.evals.comparison import Comparison, Side
    from verifiers.evals.statistics import Estimate


def parser() -> CommandParser:
    parser = CommandParser(
        "vf-compare",
        "Compare two evaluations of the same prompts: is run B better than run A?",
        examples=(
            "vf-compare outputs/evals/reverse-text--small/1a2b3c4d outputs/evals/reverse-text--large/5e6f7a8b",
            "vf-compare before after --metric reward --metric pass@4 --on-common-prompts",
        ),
        epilog="Exit codes: 0 compared, whatever came out; 1 nothing to compare; 2 usage, or different prompts.",
    )
    add = parser.group("runs")
    add("run_a", metavar="RUN_A", help="directory of the run to compare with")
    add("run_b", metavar="RUN_B", help="directory of the run that may be better")
    add = parser.group("prompts")
    add("--on-common-prompts", action="store_true", help="the runs may differ in prompts: pair those that both have")
    add("--unpaired-ok", action="store_true", help="compare the means of different prompts, without pairs")
    add(
        "--match-by",
        choices=("prompt", "id"),
        default="prompt",
        help="what makes two prompts the same: id, text, answer and task, or the id alone",
    )
    add = parser.group("statistics")
    add(
        "--metric",
        action="append",
        metavar="NAME",
        help="reward, a reward function, pass@K, pass^K or best@K; repeatable (default: reward)",
    )
    add("--right-from", type=float, default=1.0, metavar="REWARD", help="reward from which a rollout is right")
    add("--confidence", type=float, default=0.95, metavar="P", help="coverage of the intervals")
    add("--permutation-seed", type=int, at_least=0, default=0, metavar="N", help="seed of the permutation test")
    add = parser.group("output")
    add("--json", action="store_true", help="print the comparison as one line of JSON")
    return parser


def compare(args: argparse.Namespace) -> int:
    from verifiers.evals.comparison import compare_runs, read_compared_run

    if args.on_common_prompts and args.unpaired_ok:
        raise ConfigError("--on-common-prompts and --unpaired-ok exclude each other; give one of them.")
    if not 0 < args.confidence < 1:
        raise ConfigError(f"--confidence is {args.confidence}; give a number between 0 and 1, such as 0.95.")
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
            seed=args.permutation_seed,
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

    from verifiers.cli.evaluation_output import print_table

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
            rounded(c.a.estimate.mean, c.a.estimate.stderr),
            rounded(c.b.estimate.mean, c.b.estimate.stderr),
            rounded(c.difference.mean, c.difference.stderr, "+"),
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
        parts.append(f"detectable with 80 % power: {rounded(c.detectable, c.difference.stderr)}")
    return "; ".join(parts)


def _counts(side: Side) -> str:
    counts = side.counts
    others = {"unscored": counts.unscored - counts.failed, "failed": counts.failed}
    others |= {"truncated": counts.truncated, "missing": counts.missing or 0}
    told = [f"{count} {name}" for name, count in others.items() if count]
    return ", ".join([f"{counts.scored} of {counts.rollouts} rollouts of {counts.prompts} prompts scored", *told])


def _interval(estimate: Estimate) -> str:
    if math.isnan(estimate.low):
        return "-"
    return " .. ".join(rounded(end, estimate.stderr, "+") for end in (estimate.low, estimate.high))


def _p(comparison: Comparison) -> str:
    p: float = comparison.test.p
    return "-" if math.isnan(p) else f"{p:.2g}"


main = Command(parser, compare)
