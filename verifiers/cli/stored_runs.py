"""`vf-merge`, `vf-export`, `vf-report` and `vf-view`: what is done with runs that are stored."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from verifiers.cli.main import DONE, Command, CommandParser, writing_results
from verifiers.errors import ConfigError
from verifiers.server_process import end_by_signals

_SUFFIXES = {"csv": ".csv", "jsonl": ".jsonl", "hf": "", "sft": ".jsonl", "preference": ".jsonl", "inspect": ".eval"}

# -- vf-merge ------------------------------------------------------------------------------------------------------


def _merge_parser() -> CommandParser:
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


def _merge(args: argparse.Namespace) -> int:
    from verifiers.evals.merge import merge_runs
    from verifiers.evals.summary import load_prices
    from verifiers.reports.evaluation import write_evaluation_report

    prices = None if args.prices is None else load_prices(args.prices)
    with writing_results(Path(args.output_dir)):
        directory = merge_runs(args.runs, args.output_dir, prices=prices)
        report = write_evaluation_report(directory)
    print(f"{len(args.runs)} shards: {directory}/results.jsonl")
    print(report)
    return DONE


merge = Command(_merge_parser, _merge)


# -- vf-export -----------------------------------------------------------------------------------------------------


def _export_parser() -> CommandParser:
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


def _export(args: argparse.Namespace) -> int:
    from verifiers.evals.export import export_run
    from verifiers.evals.store import read_run

    run = read_run(args.run)
    target = args.output or run.directory / f"{args.format}{_SUFFIXES[args.format]}"
    path, rows = export_run(run, target, args.format, threshold=args.threshold)
    print(f"{rows} rows: {path}")
    return DONE


export = Command(_export_parser, _export)


# -- vf-report -----------------------------------------------------------------------------------------------------


def _report_parser() -> CommandParser:
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


def _report(args: argparse.Namespace) -> int:
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


report = Command(_report_parser, _report)


# -- vf-view -------------------------------------------------------------------------------------------------------


def _view_parser() -> CommandParser:
    parser = CommandParser(
        "vf-view",
        "Look at the runs of a folder in a browser on this machine, also while they are in progress.",
        examples=("vf-view", "vf-view outputs/evals --port 0"),
        epilog="Ctrl-C ends it.",
    )
    add = parser.group("runs")
    add("directory", nargs="?", default="outputs", metavar="DIR", help="folder of runs, or one run")
    add = parser.group("server")
    add("--port", type=int, default=7480, metavar="N", help="port on 127.0.0.1; 0 takes a free one")
    return parser


def _view(args: argparse.Namespace) -> int:
    asyncio.run(_serve(Path(args.directory), args.port))
    return DONE


async def _serve(directory: Path, port: int) -> None:
    from verifiers.reports.server import RunServer

    # being interrupted is how this command ends, so it is not a failure
    server, ended = RunServer(directory, port), end_by_signals()
    await server.start()
    try:
        print(f"{directory} at {server.url} (Ctrl-C ends it)", flush=True)
        await ended
    finally:
        await server.close()


view = Command(_view_parser, _view)
