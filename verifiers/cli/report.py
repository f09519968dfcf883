"""`vf-report DIR`: write the report of a run again, from what its directory holds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verifiers.cli.main import DONE, run_command
from verifiers.errors import ConfigError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="vf-report",
        description="Write report.html of a training run or an evaluation again, also while it is in progress.",
    )
    parser.add_argument("directory", help="output_dir of a training run, or directory of an evaluation")
    parser.add_argument(
        "-o", "--out", metavar="FILE", help="the file to write (default: report.html in the directory)"
    )
    args = parser.parse_args(argv)
    return run_command("vf-report", lambda: report(Path(args.directory), Path(args.out) if args.out else None))


def report(directory: Path, out: Path | None = None) -> int:
    """Do what the command does; raises instead of printing errors."""
    from verifiers.evals.store import RESULTS
    from verifiers.monitoring.run_log import is_training_run
    from verifiers.reports.evaluation import write_evaluation_report
    from verifiers.reports.training_run import write_training_report

    if out is not None and out.is_dir():
        raise ConfigError(f"--out is {str(out)!r}, which is a directory; give a file, such as report.html in it.")
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
