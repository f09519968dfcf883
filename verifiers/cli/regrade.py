"""`vf-regrade RUN`: grade a stored run with today's rubric, without inference."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verifiers.cli.arguments import CommandParser, json_object
from verifiers.cli.main import DONE, make_importable, run_command
from verifiers.errors import ConfigError
from verifiers.monitoring.number_text import rounded

if TYPE_CHECKING:
    from verifiers.evals.regrade import Regraded

__all__ = ["main", "parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_command("vf-regrade", lambda: regrade_run(parser().parse_args(argv)))


def parser() -> CommandParser:
    """Return the command line."""
    parser = CommandParser(
        "vf-regrade",
        "Grade the rollouts of a run again with today's rubric, without inference; the run stays as it is.",
        examples=(
            "vf-regrade outputs/evals/reverse-text--small/1a2b3c4d",
            "vf-regrade outputs/evals/reverse-text--small/1a2b3c4d --env my_env.py -a '{\"strict\": true}'",
        ),
    )
    add = parser.group("run")
    add("run", metavar="RUN", help="directory of the run")
    add = parser.group("environment")
    add("--env", metavar="ENV", help="grade with another environment's rubric than the run's")
    add("-a", "--env-args", metavar="JSON", help="keyword arguments of load_environment (default: the run's)")
    add("-p", "--env-dir-path", metavar="DIR", help="directory of environment packages (default: ./environments)")
    add = parser.group("limits")
    add("-c", "--max-concurrent", type=int, default=64, metavar="N", help="prompts graded at once")
    add(
        "--grading-timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="deadline for one prompt's rollouts, seconds",
    )
    add = parser.group("output")
    add("--json", action="store_true", help="print the result as one line of JSON")
    return parser


def regrade_run(args: argparse.Namespace) -> int:
    """Grade a stored run again; raise errors instead of printing them."""
    from verifiers.envs.lifecycle import run_teardown
    from verifiers.envs.registry import load_environment
    from verifiers.evals.regrade import regrade
    from verifiers.evals.store import read_run
    from verifiers.log import Redactor, redact_logs, secrets_of_run

    run = read_run(args.run)
    name = args.env or run.metadata.get("env")
    if not name:
        raise ConfigError(f"{args.run!r} does not say which environment it is of; give it with --env.")
    env_args = run.metadata.get("env_args") or {}
    if args.env_args is not None:
        env_args = json_object("--env-args", args.env_args)
    redact = Redactor(secrets_of_run("", "", {}, env_args))
    with redact.in_errors(), redact_logs(redact):
        # unless a flag says otherwise, the environment is where it was in the run
        name = make_importable(name, args.env_dir_path, last=None if args.env else run.metadata.get("env_directory"))
        env = load_environment(name, **env_args)

        async def work() -> Regraded:
            try:
                return await regrade(
                    env,
                    run,
                    max_concurrent=args.max_concurrent,
                    grading_timeout_s=args.grading_timeout,
                    redact=redact,
                )
            finally:
                await run_teardown(env)

        done = asyncio.run(work())
    _show(args, done)
    return DONE


def _show(args: argparse.Namespace, done: Regraded) -> None:
    before, after = done.before.estimates(), done.after.estimates()
    if args.json:
        means = {name: {"before": _mean(before, name), "after": _mean(after, name)} for name in {**before, **after}}
        outcomes = dict(done.after.outcomes)
        found = {"rewards": means, "changed": done.changed, "rollouts": len(done.after), "outcomes": outcomes}
        print(json.dumps({**found, "results": str(done.directory)}))
        return
    from rich.console import Console

    from verifiers.cli.evaluation.output import print_table

    rows = []
    for name in {**before, **after}:
        old, new = _mean(before, name), _mean(after, name)
        stderr = (after if name in after else before)[name].stderr
        difference = None if old is None or new is None else new - old
        rows.append((name, rounded(old, stderr), rounded(new, stderr), rounded(difference, stderr, "+")))
    console = Console(highlight=False)
    print_table(console, ("", "before", "after", "difference"), rows)
    failed = ", ".join(f"{count} {outcome}" for outcome, count in done.after.outcomes.items())
    console.print(f"{len(done.after)} rollouts: {failed}; {done.changed} rewards are others than before")
    commonest = done.after.commonest_failure()
    if commonest:
        console.print(f"most often: {commonest[0]} ({commonest[1]} times)", soft_wrap=True, markup=False)
    console.print(f"{done.directory}/results.jsonl", soft_wrap=True)


def _mean(estimates: dict[str, Any], name: str) -> float | None:
    mean = estimates[name].mean if name in estimates else math.nan
    return None if math.isnan(mean) else mean


if __name__ == "__main__":
    sys.exit(main())
