"""`vf-regrade RUN`: grade a stored run with today's rubric, without inference."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import TYPE_CHECKING

from verifiers.cli.endpoint import add_grading_timeout
from verifiers.cli.main import DONE, Command, CommandParser, json_object, make_importable, writing_results
from verifiers.errors import ConfigError
from verifiers.monitoring.number_text import rounded

if TYPE_CHECKING:
    from verifiers.evals.regrade import Regraded


def parser() -> CommandParser:
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
    add_grading_timeout(add)
    add = parser.group("output")
    add("--json", action="store_true", help="print the result as one line of JSON")
    return parser


def regrade_run(args: argparse.Namespace) -> int:
    from verifiers.envs.lifecycle import run_teardown
    from verifiers.envs.registry import load_environment
    from verifiers.evals.regrade import regrade
    from verifiers.evals.store import read_run
    from verifiers.log import Redactor, redact_logs, secrets_of_run

    run = read_run(args.run)
    name = args.env or run.metadata.get("env")
    if not name:
        raise ConfigError(f"{args.run!r} does not say which environment it is of; give it with --env.")
    env_args, place = run.metadata.get("env_args") or {}, run.metadata.get("env_directory")
    if not isinstance(name, str) or not isinstance(env_args, dict) or not isinstance(place, str | None):
        told = f"env={name!r:.40}, env_args={env_args!r:.40}, env_directory={place!r:.40}"
        raise ConfigError(f"the metadata.json of {args.run!r} has {told}, which name no environment; repair it.")
    if args.env_args is not None:
        env_args = json_object("--env-args", args.env_args)
    redact = Redactor(secrets_of_run("", "", {}, env_args))
    with redact.in_errors(), redact_logs(redact):
        # unless a flag says otherwise, the environment is where it was in the run
        name = make_importable(name, args.env_dir_path, last=None if args.env else place)
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

        with writing_results(run.directory.resolve().parent):
            done = asyncio.run(work())
    _show(args, done)
    return DONE


def _show(args: argparse.Namespace, done: Regraded) -> None:
    from verifiers.evals.summary import summarize

    before, after = (summarize(results).as_json()["rewards"] for results in (done.before, done.after))
    means = {
        name: {"before": before.get(name, {}).get("mean"), "after": after.get(name, {}).get("mean")}
        for name in {**before, **after}
    }
    outcomes = done.after.counts().outcomes
    if args.json:
        found = {"rewards": means, "changed": done.changed, "rollouts": len(done.after), "outcomes": outcomes}
        print(json.dumps({**found, "results": str(done.directory)}))
        return
    from rich.console import Console

    from verifiers.cli.evaluation_output import print_table

    rows = []
    for name, (old, new) in ((name, mean.values()) for name, mean in means.items()):
        stderr = (after if name in after else before)[name]["stderr"]
        difference = None if old is None or new is None else new - old
        rows.append((name, rounded(old, stderr), rounded(new, stderr), rounded(difference, stderr, "+")))
    console = Console(highlight=False)
    print_table(console, ("", "before", "after", "difference"), rows)
    failed = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    console.print(f"{len(done.after)} rollouts: {failed}; {done.changed} rewards are others than before")
    commonest = done.after.commonest_failure()
    if commonest:
        console.print(f"most often: {commonest[0]} ({commonest[1]} times)", soft_wrap=True, markup=False)
    console.print(f"{done.directory}/results.jsonl", soft_wrap=True)


main = Command(parser, regrade_run)
