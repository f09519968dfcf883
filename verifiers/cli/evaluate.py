"""`vf-eval ENV -m MODEL -b URL`: evaluate an environment against an OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verifiers.cli.arguments import CommandParser, json_object
from verifiers.cli.evaluation.endpoint import (
    OPENAI_KEY,
    add_endpoint_group,
    attempt_timeout_s,
    chosen_endpoint,
    key_variables,
    open_endpoint,
    require_key,
    require_listener,
)
from verifiers.cli.main import DONE, CommandFailedError, make_importable, run_command
from verifiers.errors import ConfigError, Error
from verifiers.interrupt import drained_by_signals
from verifiers.keywords import check_keywords

if TYPE_CHECKING:
    from verifiers.evals.evaluation_run import EvaluationRun
    from verifiers.evals.store import ResultStore
    from verifiers.inference.endpoint_registry import EndpointEntry
    from verifiers.log import Redactor
    from verifiers.rollouts.run import Run
    from verifiers.workers.settings import WorkerSettings

__all__ = ["main", "parser"]

SAMPLING_ARGS = ("temperature", "top_p", "max_tokens", "stop", "seed", "frequency_penalty", "presence_penalty")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_command("vf-eval", lambda: evaluate(parser().parse_args(argv)))


def parser() -> CommandParser:
    """Return the command line."""
    parser = CommandParser(
        "vf-eval",
        "Evaluate an environment against an OpenAI endpoint. The same command continues a stopped run.",
        examples=(
            "vf-eval my_env.py -m fake",
            "vf-eval reverse-text -m my-model -b http://127.0.0.1:8000/v1 -n 100 -r 4 -T 0.7",
        ),
    )
    parser.environment_group()
    add_endpoint_group(parser)
    add = parser.group("rollouts")
    add("-n", "--num-examples", type=int, default=5, metavar="N", help="prompts; -1 for all")
    add("-r", "--rollouts-per-example", type=int, default=3, metavar="N", help="rollouts of each prompt")
    add("--shard", metavar="K/N", help="run every N-th prompt from the K-th on; vf-merge joins the N runs")
    add(
        "-c",
        "--max-concurrent",
        type=int,
        metavar="N",
        help="rollouts in flight (default: what the endpoint sustains)",
    )
    add("--requests-per-second", type=float, metavar="X", help="requests begun per second (default: no limit)")
    add(
        "--workers",
        default="inline",
        metavar="ENGINE[:N]",
        help="'processes' plays environments in worker processes, 'ray' in a Ray cluster; N workers",
    )
    add("--rollout-timeout", type=float, default=1800.0, metavar="S", help="deadline of one rollout, seconds")
    add(
        "--attempt-timeout",
        type=float,
        metavar="S",
        help="deadline of one HTTP attempt, seconds (default: a third of --rollout-timeout, at most 600)",
    )
    add(
        "--grading-timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="deadline for one prompt's rollouts, seconds",
    )
    add = parser.group("sampling")
    add("-t", "--max-tokens", type=int, metavar="N", help="tokens of one answer (default: the environment's)")
    add("-T", "--temperature", type=float, metavar="X", help="0 is greedy (default: the environment's)")
    add("-S", "--sampling-args", default="{}", metavar="JSON", help="further OpenAI sampling arguments")
    add("--seed", type=int, metavar="N", help="derive each rollout's sampling seed from this number (default: none)")
    add = parser.group("results")
    add("--output-dir", default="outputs/evals", metavar="DIR", help="where results go")
    add("--fresh", action="store_true", help="start a new run, though this command has one")
    add("-s", "--save-dataset", action="store_true", help="save the results as a datasets directory too")
    add("-H", "--save-to-hf-hub", action="store_true", help="push the results to the Hugging Face Hub")
    add("-D", "--hf-hub-dataset-name", default="", metavar="NAME", help="dataset on the Hub (default: ENV--MODEL)")
    add = parser.group("output")
    add("--right-from", type=float, default=1.0, metavar="REWARD", help="reward from which pass@k counts a rollout")
    add("--prices", metavar="FILE", help="TOML table of prices by model, for the cost of the run")
    add("--json", action="store_true", help="print the summary as one line of JSON, and no progress")
    add("-v", "--verbose", action="store_true", help="log what happens")
    return parser


def evaluate(args: argparse.Namespace) -> int:
    """Evaluate a model on an environment; raise errors instead of printing them."""
    from verifiers.data.shard import Shard
    from verifiers.log import Redactor, redact_logs, secrets_of_run, url_without_secrets

    args.shard = None if args.shard is None else Shard.parse(args.shard)
    if args.num_examples < -1 or args.num_examples == 0:
        raise ConfigError(f"--num-examples is {args.num_examples}; give 1 or more, or -1 for all.")
    if args.rollouts_per_example < 1:
        raise ConfigError(f"--rollouts-per-example is {args.rollouts_per_example}; give 1 or more.")
    for flag in ("attempt", "rollout", "grading"):
        seconds = getattr(args, f"{flag}_timeout")
        if seconds is not None and not seconds > 0:
            raise ConfigError(f"--{flag}-timeout is {seconds:g}; give a number of seconds above 0.")
    if args.verbose:
        from verifiers.log import setup_logging

        setup_logging("DEBUG")
    if args.model is None and not args.api_base_url:
        raise ConfigError("-m is missing: name a model, or 'fake' for the built-in one, which needs no endpoint.")
    args.model = args.model or "gpt-4.1-mini"
    typed = Redactor(secrets_of_run("", os.environ.get(args.api_key_var or OPENAI_KEY, ""), {}))
    with typed.in_errors():
        env_args = json_object("--env-args", args.env_args)
        sampling_args = json_object("--sampling-args", args.sampling_args)
        check_keywords("--sampling-args", sampling_args, SAMPLING_ARGS)
        if args.temperature is not None and not args.temperature >= 0:
            raise ConfigError(f"--temperature is {args.temperature:g}; give 0 or more.")
        entry, registry = chosen_endpoint(args)
    require_key(args, entry)
    keys = [os.environ.get(name, "") for name in key_variables(entry)]
    arguments = {"env": env_args, "sampling": sampling_args}
    redact = Redactor([*keys, *(s for url in entry.urls for s in secrets_of_run(url, "", entry.headers, arguments))])
    with redact.in_errors(), redact_logs(redact):
        if registry is not None:
            # a key goes to this address because of a file that no flag named
            url = url_without_secrets(entry.urls[0])
            print(f"vf-eval: -m {args.model} is {entry.model} at {url}, as {registry} says", file=sys.stderr)
        return _evaluate(args, entry, env_args, sampling_args, redact)


def _evaluate(
    args: argparse.Namespace,
    entry: EndpointEntry,
    env_args: dict[str, Any],
    sampling_args: dict[str, Any],
    redact: Redactor,
) -> int:
    from verifiers.cli.evaluation.output import show_summary
    from verifiers.envs.registry import load_environment
    from verifiers.evals.evaluation_run import open_run
    from verifiers.evals.store import ResultStore
    from verifiers.evals.summary import load_prices
    from verifiers.inference.retry import RetryPolicy
    from verifiers.reports.evaluation import write_evaluation_report
    from verifiers.rollouts.run import Run

    settings = _worker_settings(args)
    args.env = make_importable(args.env, args.env_dir_path)
    env = load_environment(args.env, **env_args)
    sampling = {**env.sampling_args, **sampling_args}
    for name, value in (("max_tokens", args.max_tokens), ("temperature", args.temperature)):
        if value is not None:
            sampling[name] = value
    shown: dict[str, Any] = {"right_from": args.right_from}
    if args.prices is not None:
        shown["prices"] = load_prices(args.prices)
    dataset = env.rows_to_evaluate(args.num_examples)
    played: Any = env
    if settings is not None:
        make = functools.partial(load_environment, args.env, **env_args)
        played = settings.open([(env, make)], blocked_s=args.grading_timeout).of(env, dataset)
    backend, limiter = open_endpoint(args, entry, dataset, env)
    plan = _run_plan(args, entry, env_args, sampling, env, dataset)
    run = open_run(plan, env.rubric, args.output_dir, fresh=args.fresh, redact=redact)
    say = (lambda text: None) if args.json else (lambda text: print(f"vf-eval: {text}", file=sys.stderr))
    if run.is_complete:
        say("already complete; --fresh runs it again")
    elif run.finished.count:
        say(f"resuming {run.directory}: {run.finished.count} of {run.planned} rollouts are there")
    started = time.perf_counter()
    try:
        with ResultStore(run.directory, {**run.metadata, "status": "running"}, redact) as store:
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
                done = run.finished.count + run.ran >= run.planned
                summary = run.summary(time.perf_counter() - started if run.ran else 0.0, **shown)
                store.write_metadata(summary=summary, status="finished" if done else "stopped")
        write_evaluation_report(run.directory)
    except OSError as error:
        if isinstance(error, Error):
            raise
        # rollouts turn their own into outcomes: this one came from writing
        raise CommandFailedError(f"results cannot be written to {str(run.directory)!r}: {error}.") from error
    if not run.interruption.requested or run.progress.scored:
        run.require_scores()
        shard = "" if args.shard is None else f", shard {args.shard}"
        show_summary(run, summary, title=f"{args.env} / {run.metadata['model']}{shard}", as_json=args.json)
    if run.interruption.requested and not done:
        say(f"interrupted at {run.finished.count + run.ran} of {run.planned} rollouts; the same command continues")
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
    from verifiers.cli.evaluation.output import live_line, progress_text
    from verifiers.envs.lifecycle import run_teardown

    def text(on_terminal: bool) -> str:
        return progress_text(
            run.progress,
            env=run.metadata["env"],
            planned=run.planned,
            finished_before=run.finished.count,
            ran=run.ran,
            tokens=run.tokens,
            elapsed_s=time.perf_counter() - started,
            in_flight=runner.limiter.in_flight,
            with_bar=on_terminal,
        )

    line: Any = contextlib.nullcontext() if quiet else live_line(text)
    try:
        await require_listener(entry)
        async with line, drained_by_signals("vf-eval", run.interruption, runner.grading_timeout_s):
            await run.run(runner, dataset, store)
    finally:
        await runner.backend.close()
        await run_teardown(env)


def _save_dataset(args: argparse.Namespace, run: EvaluationRun) -> None:
    if not (args.save_dataset or args.save_to_hf_hub):
        return
    from verifiers.evals.export import push_dataset, save_dataset

    if args.save_dataset:
        save_dataset(run.directory, run.directory / "dataset")
    if args.save_to_hf_hub:
        name = args.hf_hub_dataset_name or f"{args.env}--{args.model}".replace("/", "--")
        push_dataset(run.directory, name)


def _worker_settings(args: argparse.Namespace) -> WorkerSettings | None:
    """Return where the environment is played; None for this process, which needs no settings and no pydantic."""
    if args.workers == "inline":
        return None
    from verifiers.workers.settings import WorkerSettings

    return WorkerSettings.parse(args.workers)


def _run_plan(
    args: argparse.Namespace,
    entry: EndpointEntry,
    env_args: Mapping[str, Any],
    sampling: Mapping[str, Any],
    env: Any,
    dataset: Any,
) -> dict[str, Any]:
    """Return the metadata of a run before its first rollout; names of keys and headers, never their values."""
    from verifiers.envs.datasets import count_trained_on
    from verifiers.evals.evaluation_run import fingerprint
    from verifiers.evals.provenance import environment_provenance, git_provenance, versions
    from verifiers.log import url_without_secrets

    urls: Sequence[str] = [url_without_secrets(url) for url in entry.urls]
    return {
        "env": args.env,
        **environment_provenance(args.env),
        "env_args": dict(env_args),
        "prompts": fingerprint(dataset),
        "prompts_trained_on": count_trained_on(env, dataset),
        "model": entry.model,
        "base_url": urls[0],
        "base_urls": list(urls),
        "endpoint": entry.name,
        "api": entry.api,
        "api_key_var": entry.key_var,
        "headers": sorted({*entry.headers, *entry.header_vars}),
        "sampling_args": dict(sampling),
        "num_examples": len(dataset),
        "rollouts_per_example": args.rollouts_per_example,
        "seed": args.seed,
        **({} if args.shard is None else {"shard": str(args.shard)}),
        "max_concurrent": args.max_concurrent,
        "requests_per_second": args.requests_per_second,
        "attempt_timeout_s": attempt_timeout_s(args, entry),
        "rollout_timeout_s": args.rollout_timeout,
        "grading_timeout_s": args.grading_timeout,
        "versions": versions(),
        "git": git_provenance(),
    }


if __name__ == "__main__":
    sys.exit(main())
