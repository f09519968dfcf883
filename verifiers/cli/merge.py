"""`vf-merge RUN...`: join the shards of an evaluation into one run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from verifiers.cli.arguments import CommandParser
from verifiers.cli.main import DONE, run_command

__all__ = ["main", "merge", "parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_command("vf-merge", lambda: merge(parser().parse_args(argv)))


def parser() -> CommandParser:
    """Return the command line."""
    parser = CommandParser(
        "vf-merge",
        "Join the runs of `vf-eval --shard 1/N` to `N/N` into one run, which equals that of vf-eval without --shard.",
        examples=(
            "vf-merge outputs/evals/reverse-text--small/*-of-8",
            "vf-merge host-1/shard host-2/shard --output-dir outputs/evals",
        ),
    )
    add = parser.group("runs")
    add("runs", metavar="RUN", nargs="+", help="directory of a shard; all of them, in any order")
    add = parser.group("results")
    add("--output-dir", default="outputs/evals", metavar="DIR", help="where the run goes")
    add("--prices", metavar="FILE", help="TOML table of prices by model, where the shards were run with one")
    return parser


def merge(args: argparse.Namespace) -> int:
    """Merge the shards of an evaluation; raise errors instead of printing them."""
    from verifiers.evals.merge import merge_runs
    from verifiers.evals.summary import load_prices
    from verifiers.reports.evaluation import write_evaluation_report

    prices = None if args.prices is None else load_prices(args.prices)
    directory = merge_runs(args.runs, args.output_dir, prices=prices)
    print(f"{len(args.runs)} shards: {directory}/results.jsonl")
    print(write_evaluation_report(directory))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
