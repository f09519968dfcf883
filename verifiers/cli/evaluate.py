"""`vf-eval ENV -m MODEL -b URL`: evaluate an environment against an OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verifiers.cli.endpoint import (
    add_endpoint_group,
    add_grading_timeout,
    add_sampling_group,
    add_timeouts,
    chosen_endpoint,
    endpoint_metadata,
    endpoint_redactor,
    opened_model,
    require_listener,
    sampling_of,
    typed_redactor,
)
from verifiers.cli.main import DONE, Command, CommandParser, json_object, make_importable, tell, writing_results
from verifiers.errors import ConfigError
from verifiers.interrupt import drained_by_signals

if TYPE_CHECKING:
    from verifiers.evals.evaluation_run import EvaluationRun
    from verifiers.evals.store import ResultStore
    from verifiers.inference.endpoint import Backend
    from verifiers.inference.endpoint_registry import EndpointEntry
    from verifiers.inference.limiter import Limiter
    from verifiers.log import Redactor
    from verifiers.rollouts.run import Run

_FAKE_CONCURRENT = 32


_AT_ONCE = "-c bounds the rollouts in flight"
_CLASSIC_FLAGS = {
    **dict.fromkeys(("-x", "--extra-env-kwargs"), "-a holds all arguments of load_environment"),
    **dict.fromkeys(("--max-concurrent-generation", "--max-concurrent-scoring"), _AT_ONCE),
    **dict.fromkeys(("-N", "--no-interleave-scoring", "--independent-scoring"), "rollouts are scored as they end"),
    **dict.fromkeys(("-f", "--save-every", "--save-results"), "each rollout is stored as it ends"),
    **dict.fromkeys(("-R", "--resume"), "the same command continues a stopped run"),
    **dict.fromkeys(("-C", "--state-columns"), "a metric of the rubric keeps a number of the state"),
    "--tui": "vf-view shows runs",
}


def parser() -> CommandParser:
    parser = CommandParser(
        "vf-eval",
        "Evaluate an environment against an OpenAI endpoint. The same command continues a stopped run.",
        examples=(
            "vf-eval my_env.py -m fake",
            "vf-eval harbor:./tasks --agent oracle -n -1 -r 1",
            "vf-eval reverse-text -m my-model -b http://127.0.0.1:8000/v1 -n 100 -r 4 -T 0.7",
        ),
        gone=_CLASSIC_FLAGS,
    )
    add = parser.environment_group()
    add(
        "--agent",
        metavar="AGENT",
        help="argument `agent` of the environment; for harbor:PATH 'shell', 'oracle' (asks no model) or a command",
    )
    add_endpoint_group(parser)
    add = parser.group("rollouts")
    add("-n", "--num-examples", type=int, default=5, metavar="N", help="prompts; -1 for all")
    add("-r", "--rollouts-per-example", type=int, at_least=1, default=3, metavar="N", help="rollouts of each prompt")
    add("--shard", metavar="K/N", help="run every N-th prompt from the K-th on; vf-merge joins the N runs")
    add(
        "-c",
        "--max-concurrent",
        type=int,
        metavar="N",
        help="rollouts in flight (default: what the endpoint sustains)",
    )
    told = "requests begun per second (default: no limit)"
    add("--requests-per-second", type=float, above=0, metavar="X", help=told)
    add(
        "--workers",
        default="inline",
        metavar="ENGINE[:N]",
        help="'processes' plays environments in worker processes, 'ray' in a Ray cluster; N workers",
    )
    add_timeouts(add, "rollout")
    add_grading_timeout(add)
    add = add_sampling_group(parser, "environment")
    add("--seed", type=int, metavar="N", help="derive each rollout's sampling seed from this number (default: none)")
    add = parser.group("results")
    add("--output-dir", default="outputs/evals", metavar="DIR", help="where results go")
    add("--fresh", action="store_true", help="start a new run, though this command has one")
    add("-s", "--save-dataset", action="store_true", help="save the results as a datasets directory too")
    add("-H", "--save-to-hf-hub", action="store_true", help="push the results to the Hugging Face Hub")
    add("-D", "--hf-hub-dataset-name", default="", metavar="NAME", help="dataset on the Hub (default: ENV-MODEL)")
    add = parser.group("output")
    add("--right-from", type=float, default=1.0, metavar="REWARD", help="reward from which pass@k counts a rollout")
    add("--prices", metavar="FILE", help="TOML table of prices by model, for the cost of the run")
    add("--json", action="store_true", help="print the summary as one line of JSON, and no progress")
    add("--trace", metavar="URL", help="send OpenTelemetry spans to this collector")
    add("--trace-share", type=float, default=1.0, metavar="X", help="share of the rollouts that are traced")
    add("--trace-content", action="store_true", help="trace what is said too, not only names and numbers")
    add("-v", "--verbose", action="store_true", help="log what happens")
    return parser


def evaluate(args: argparse.Namespace) -> int:
    from verifiers.data.sampler import Shard
    from verifiers.integrations.harbor_task import ORACLE
    from verifiers.log import redact_logs, setup_logging
    from verifiers.testing.fake_model import FAKE_MODEL

    args.shard = None if args.shard is None else Shard.parse(args.shard)
    if args.num_examples < -1 or args.num_examples == 0:
        raise ConfigError(f"--num-examples is {args.num_examples}; give 1 or more, or -1 for all.")
    if args.trace is not None:
        from verifiers import tracing

        tracing.check(args)
    if args.verbose:
        setup_logging("DEBUG")
    with typed_redactor(args).in_errors():
        env_args, sampling = json_object("--env-args", args.env_args), sampling_of(args)
        if args.agent is not None:
            env_args["agent"] = args.agent
        if env_args.get("agent") == ORACLE and not (args.model or args.api_base_url):
            # nothing asks it
            args.model = FAKE_MODEL
        entry = chosen_endpoint(args, "vf-eval")
    redact = endpoint_redactor(entry, {"env": env_args, "sampling": sampling})
    with redact.in_errors(), redact_logs(redact):
        return _evaluate(args, entry, env_args, sampling, redact)


def _evaluate(
    args: argparse.Namespace,
    entry: EndpointEntry,
    env_args: dict[str, Any],
    sampling: dict[str, Any],
    redact: Redactor,
) -> int:
    from verifiers.cli.evaluation_output import show_summary
    from verifiers.envs.registry import load_environment
    from verifiers.evals.evaluation_run import open_run
    from verifiers.evals.export import check_hub
    from verifiers.evals.store import ResultStore
    from verifiers.evals.summary import load_prices
    from verifiers.inference.retry import RetryPolicy
    from verifiers.reports.evaluation import write_evaluation_report
    from verifiers.rollouts.run import Run

    settings = None
    if args.workers != "inline":
        from verifiers.workers.settings import WorkerSettings

        settings = WorkerSettings.parse(args.workers)
    args.env = make_importable(args.env, args.env_dir_path)
    env = load_environment(args.env, **env_args)
    if args.save_to_hf_hub:
        check_hub(_hub_name(args), "--save-to-hf-hub")
    sampling = {**env.sampling_args, **sampling}
    shown: dict[str, Any] = {"right_from": args.right_from}
    if args.prices is not None:
        shown["prices"] = load_prices(args.prices)
    dataset = env.rows_to_evaluate(args.num_examples)
    played: Any = env
    if settings is not None:
        make = functools.partial(load_environment, args.env, **env_args)
        played = settings.open([(env, make)], blocked_s=args.grading_timeout).of(env, dataset)
    backend, limiter = _open_endpoint(args, entry, dataset, env)
    plan = _run_plan(args, entry, env_args, sampling, env, dataset)
    run = open_run(plan, env, args.output_dir, rows=dataset, fresh=args.fresh, redact=redact)
    say = (lambda text: None) if args.json else (lambda text: tell(f"vf-eval: {text}"))
    if run.is_complete:
        say("already complete; --fresh runs it again")
    elif run.finished_before:
        say(f"resuming {run.directory}: {run.finished_before} of {run.planned} rollouts are there")
    started = time.perf_counter()
    with writing_results(run.directory):
        # a complete run that belongs to somebody else is read
        writes = not run.is_complete or os.access(run.directory, os.W_OK)
        with contextlib.ExitStack() as opened:
            if args.trace is not None and not run.is_complete:
                from verifiers import tracing

                opened.callback(tracing.start(args, run.directory.name))
            store = ResultStore(run.directory, {**run.metadata, "status": "running"}, redact)
            if writes:
                opened.enter_context(store)
            runner = Run(
                played,
                backend,
                entry.model,
                sampling,
                limiter=limiter,
                # enough to outlast a restart of the server
                retry=RetryPolicy(max_attempts=9),
                rollout_timeout_s=args.rollout_timeout,
                grading_timeout_s=args.grading_timeout,
            )
            try:
                if not run.is_complete:
                    asyncio.run(_run(run, runner, env, dataset, store, started, entry, quiet=args.json))
            finally:
                done = run.finished_before + run.ran >= run.planned
                summary = run.summary(time.perf_counter() - started if run.ran else 0.0, **shown)
                if writes:
                    store.write_metadata(summary=summary, status="finished" if done else "stopped")
        if writes:
            write_evaluation_report(run.directory)
    if not run.interruption.requested or run.results.scored:
        run.require_scores()
        shard = "" if args.shard is None else f", shard {args.shard}"
        show_summary(run, summary, title=f"{args.env} / {run.metadata['model']}{shard}", as_json=args.json)
    if run.interruption.requested and not done:
        say(f"interrupted at {run.finished_before + run.ran} of {run.planned} rollouts; the same command continues")
        return run.interruption.exit_code
    _save_dataset(args, run)
    return DONE


async def _run(
    run: EvaluationRun,
    runner: Run,
    env: Any,
    dataset: Any,
    store: ResultStore,
    started: float,
    entry: EndpointEntry,
    *,
    quiet: bool,
) -> None:
    from verifiers.cli.evaluation_output import live_line, progress_text
    from verifiers.envs.lifecycle import run_teardown

    def text(on_terminal: bool) -> str:
        now = time.perf_counter()
        elapsed_s, quiet_s = now - started, now - (run.newest or started)
        counts = {"in_flight": runner.limiter.in_flight, "grading": runner.activity.scoring}
        return progress_text(run, elapsed_s, **counts, quiet_s=quiet_s, with_bar=on_terminal)

    line: Any = contextlib.nullcontext() if quiet else live_line(text)
    try:
        await require_listener(entry)
        async with line, drained_by_signals("vf-eval", run.interruption, runner.grading_timeout_s):
            await run.run(runner, dataset, store.append)
    finally:
        await runner.backend.close()
        await run_teardown(env)


def _open_endpoint(args: argparse.Namespace, entry: EndpointEntry, dataset: Any, env: Any) -> tuple[Backend, Limiter]:
    """Return the backend of an endpoint and what may be in flight on it."""
    from verifiers.inference.limiter import Limiter, limiter_for
    from verifiers.testing.fake_model import FAKE_URL, play_judges

    backend = opened_model(args, entry, dataset, env, args.seed)
    if entry.urls == (FAKE_URL,):
        if play_judges(env, args.seed) and not args.json:
            tell("vf-eval: the built-in fake endpoint answers for the judge, too")
        return backend, Limiter(_FAKE_CONCURRENT if args.max_concurrent is None else args.max_concurrent)
    rate = entry.requests_per_second if args.requests_per_second is None else args.requests_per_second
    limiter = limiter_for(entry.urls, args.max_concurrent, maximum=entry.max_concurrent, requests_per_second=rate)
    return backend, limiter


def _save_dataset(args: argparse.Namespace, run: EvaluationRun) -> None:
    if not (args.save_dataset or args.save_to_hf_hub):
        return
    from verifiers.evals.export import push_dataset, save_dataset

    if args.save_dataset:
        save_dataset(run.directory, run.directory / "dataset")
    if args.save_to_hf_hub:
        push_dataset(run.directory, _hub_name(args))


def _hub_name(args: argparse.Namespace) -> str:
    # the Hub takes ASCII, no two dashes or dots together, no ".git" at the end, and 96 characters
    own = re.sub(r"(?:[^A-Za-z0-9_.]|\.(?!\d))+", "-", f"{args.env}-{args.model}").strip("-.")[:96].rstrip("-.")
    return args.hf_hub_dataset_name or own


def _run_plan(
    args: argparse.Namespace,
    entry: EndpointEntry,
    env_args: Mapping[str, Any],
    sampling: Mapping[str, Any],
    env: Any,
    dataset: Any,
) -> dict[str, Any]:
    from verifiers.envs.datasets import count_trained_on
    from verifiers.evals.evaluation_run import fingerprint
    from verifiers.evals.store import environment_provenance, git_provenance, versions

    return {
        "env": args.env,
        **environment_provenance(args.env),
        "env_args": dict(env_args),
        "prompts": fingerprint(dataset),
        "prompts_trained_on": count_trained_on(env, dataset),
        **endpoint_metadata(args, entry),
        "sampling_args": dict(sampling),
        "num_examples": len(dataset),
        "rollouts_per_example": args.rollouts_per_example,
        "seed": args.seed,
        **({} if args.shard is None else {"shard": str(args.shard)}),
        "requests_per_second": args.requests_per_second,
        "grading_timeout_s": args.grading_timeout,
        "versions": versions(),
        "git": git_provenance(),
    }


main = Command(parser, evaluate)

if __name__ == "__main__":
    sys.exit(main())
