"""`vf-export RUN --format F -o FILE`: a stored run as a table, a dataset, training data, or inspect_ai's log."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from verifiers.cli.arguments import CommandParser
from verifiers.cli.main import DONE, run_command

__all__ = ["main", "parser"]

_SUFFIXES = {"csv": ".csv", "jsonl": ".jsonl", "hf": "", "sft": ".jsonl", "preference": ".jsonl", "inspect": ".eval"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_command("vf-export", lambda: export(parser().parse_args(argv)))


def parser() -> CommandParser:
    """Return the command line."""
    parser = CommandParser(
        "vf-export",
        "Write a stored run in another form. A file that is there already is not overwritten.",
        examples=(
            "vf-export outputs/evals/reverse-text--small/1a2b3c4d --format csv",
            "vf-export outputs/evals/reverse-text--small/1a2b3c4d --format sft --threshold 0.5 -o sft.jsonl",
        ),
    )
    add = parser.group("run")
    add("run", metavar="RUN", help="directory of the run")
    add = parser.group("output")
    add("-f", "--format", required=True, choices=sorted(_SUFFIXES), help="form to write (required)")
    add("-o", "--output", metavar="FILE", help="file, for hf a directory (default: beside the results)")
    add("--threshold", type=float, metavar="X", help="sft: least reward (default: 1); preference: least difference")
    return parser


def export(args: argparse.Namespace) -> int:
    """Export a run; raise errors instead of printing them."""
    from verifiers.evals.export import export_run
    from verifiers.evals.store import read_run

    run = read_run(args.run)
    target = args.output or run.directory / f"{args.format}{_SUFFIXES[args.format]}"
    path, rows = export_run(run, target, args.format, threshold=args.threshold)
    print(f"{rows} rows: {path}")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
