"""`vf-report DIR`: write the report of a run again, from what its directory holds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verifiers.cli.arguments import CommandParser
from verifiers.cli.main import DONE, run_command
from verifiers.errors import ConfigError

__all__ = ["main", "parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_command("vf-report", lambda: report(parser().parse_args(argv)))


def parser() -> CommandParser:
    """Return the command line."""
    parser = CommandParser(
        "vf-report",
        "Write report.html of a training run or an evaluation again, also while it is in progress.",
        examples=(
            "vf-report outputs/my-run",
            "vf-report outputs/evals/reverse-text--small/1a2b3c4d -o reverse-text.html",
        ),
    )
    add = parser.group("run")
    add("directory", metavar="RUN", help="output_dir of a training run, or directory of an evaluation")
    add = parser.group("output")
    add("-o", "--output", metavar="FILE", help="file to write (default: report.html in the directory)")
    return parser


def report(args: argparse.Namespace) -> int:
    """Write the report of a run; raise errors instead of printing them."""
    from verifiers.evals.store import RESULTS
    from verifiers.monitoring.run_log import is_training_run
    from verifiers.reports.evaluation import write_evaluation_report
    from verifiers.reports.training_run import write_training_report

    directory, out = Path(args.directory), Path(args.output) if args.output else None
    if out is not None and out.is_dir():
        raise ConfigError(f"--output is {str(out)!r}, which is a directory; give a file, such as report.html in it.")
    if is_training_run(directory):
        written = write_training_report(directory, out)
    elif (directory / RESULTS).is_file():
        written = write_evaluation_report(directory, out)
    else:
        raise ConfigError(
            f"{str(directory)!r} holds neither a training run (run.json and metrics.jsonl) nor an evaluation "
            f"({RESULTS}); give the directory that the run wrote to."
        )
    print(written)
    return DONE


if __name__ == "__main__":
    sys.exit(main())
