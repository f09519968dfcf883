"""`vf-gateway -m MODEL -b URL`: record the calls of programs that are started elsewhere."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verifiers.cli.arguments import CommandParser, json_object
from verifiers.cli.evaluation.endpoint import (
    OPENAI_KEY,
    add_endpoint_group,
    attempt_timeout_s,
    chosen_endpoint,
    key_variables,
    require_key,
    require_listener,
)
from verifiers.cli.main import DONE, CommandFailedError, run_command
from verifiers.errors import ConfigError, Error
from verifiers.interrupt import drained_by_signals

if TYPE_CHECKING:
    from verifiers.cli.evaluation.external_run import ExternalRun
    from verifiers.inference.endpoint import Backend
    from verifiers.inference.endpoint_registry import EndpointEntry
    from verifiers.log import Redactor

__all__ = ["main", "parser"]

_BLOCKED_S = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_command("vf-gateway", lambda: record(parser().parse_args(argv)))


def parser() -> CommandParser:
    """Return the command line."""
    parser = CommandParser(
        "vf-gateway",
        "Record the calls of programs that are started elsewhere: each opens a session, calls the model by the base "
        "URL and key that it is given, posts a reward and ends the session.",
        examples=(
            "vf-gateway -m fake",
            "vf-gateway -m my-model -b http://127.0.0.1:8000/v1 --host 0.0.0.0 --tokens",
        ),
        epilog="Ctrl-C ends it; the variable VF_GATEWAY_KEY holds the key that opens sessions.",
    )
    add_endpoint_group(parser)
    add = parser.group("server")
    add("--host", default="127.0.0.1", metavar="HOST", help="address to listen on")
    add("--port", type=int, default=8100, metavar="N", help="port; 0 takes a free one")
    add = parser.group("sessions")
    add("-c", "--max-concurrent", type=int, metavar="N", help="sessions open at once (default: no bound)")
    add(
        "--train",
        action="append",
        default=[],
        metavar="NAME",
        help="further name of the model; '*' for all; repeatable",
    )
    add("--rollout-timeout", type=float, default=1800.0, metavar="S", help="deadline of one session, seconds")
    add(
        "--attempt-timeout",
        type=float,
        metavar="S",
        help="deadline of one HTTP attempt, seconds (default: a third of --rollout-timeout, at most 600)",
    )
    add(
        "--drain-timeout", type=float, default=30.0, metavar="S", help="seconds to end for open sessions after Ctrl-C"
    )
    add = parser.group("sampling")
    add("-t", "--max-tokens", type=int, metavar="N", help="tokens of one answer (default: the program's)")
    add("-T", "--temperature", type=float, metavar="X", help="0 is greedy (default: the endpoint's)")
    add("-S", "--sampling-args", default="{}", metavar="JSON", help="further OpenAI sampling arguments")
    add = parser.group("results")
    add("--name", default="external", metavar="NAME", help="name of what is evaluated, in the results")
    add("--output-dir", default="outputs/evals", metavar="DIR", help="where results go")
    add("--tokens", action="store_true", help="ask for token ids and log-probs, and refuse answers without them")
    add = parser.group("output")
    add("-v", "--verbose", action="store_true", help="log what happens")
    return parser


def record(args: argparse.Namespace) -> int:
    """Record the sessions of programs; return when the command is interrupted and everything is stored."""
    from verifiers.cli.evaluation.external_run import SAMPLING_ARGS
    from verifiers.keywords import check_keywords
    from verifiers.log import Redactor, redact_logs, secrets_of_run, setup_logging

    if args.verbose:
        setup_logging("DEBUG")
    if args.model is None:
        raise ConfigError("-m is missing: name a model, or 'fake' for the built-in one, which needs no endpoint.")
    for flag in ("attempt", "rollout", "drain"):
        seconds = getattr(args, f"{flag}_timeout")
        if seconds is not None and not seconds > 0:
            raise ConfigError(f"--{flag}-timeout is {seconds:g}; give a number of seconds above 0.")
    if args.temperature is not None and not args.temperature >= 0:
        raise ConfigError(f"--temperature is {args.temperature:g}; give 0 or more.")
    sampling = json_object("--sampling-args", args.sampling_args)
    check_keywords("--sampling-args", sampling, SAMPLING_ARGS)
    given = (("max_tokens", args.max_tokens), ("temperature", args.temperature))
    sampling |= {name: value for name, value in given if value is not None}
    typed = Redactor(secrets_of_run("", os.environ.get(args.api_key_var or OPENAI_KEY, ""), {}))
    with typed.in_errors():
        entry, _ = chosen_endpoint(args)
    require_key(args, entry)
    keys = [os.environ.get(name, "") for name in key_variables(entry)]
    secrets = (s for url in entry.urls for s in secrets_of_run(url, "", entry.headers, {"sampling": sampling}))
    redact = Redactor([*keys, *secrets])
    with redact.in_errors(), redact_logs(redact):
        return _record(args, entry, sampling, redact)


def _record(args: argparse.Namespace, entry: EndpointEntry, sampling: dict[str, Any], redact: Redactor) -> int:
    from verifiers.cli.evaluation.external_run import ExternalRun, TokenStore
    from verifiers.evals.progress import Progress
    from verifiers.evals.store import ResultStore, new_run_directory
    from verifiers.inference.limiter import Limiter
    from verifiers.inference.retry import RetryPolicy
    from verifiers.reports.evaluation import write_evaluation_report

    progress, limiter, backend = Progress(redact), Limiter(args.max_concurrent), _backend(args, entry)
    directory = new_run_directory(args.name, entry.model, args.output_dir)
    metadata = _metadata(args, entry, sampling)
    started = time.perf_counter()
    try:
        with ResultStore(directory, metadata, redact) as store, TokenStore(directory) as tokens:

            def run() -> ExternalRun:
                return ExternalRun(
                    backend,
                    entry.model,
                    store,
                    tokens,
                    progress,
                    host=args.host,
                    port=args.port,
                    train=args.train,
                    drain_s=args.drain_timeout,
                    sampling_args=sampling,
                    limiter=limiter,
                    # enough to outlast a restart of the server
                    retry=RetryPolicy(max_attempts=9),
                    rollout_timeout_s=args.rollout_timeout,
                    require_tokens=args.tokens,
                )

            try:
                asyncio.run(_serve(run, entry, backend))
            finally:
                summary = progress.summary(time.perf_counter() - started, metadata)
                store.write_metadata(summary=summary, status="finished")
        if len(progress):
            write_evaluation_report(directory)
    except OSError as error:
        if isinstance(error, Error):
            raise
        raise CommandFailedError(f"results cannot be written to {str(directory)!r}: {error}.") from error
    mean = f", mean reward {progress.mean_reward:.3f}" if progress.scored else ""
    print(f"{len(progress)} sessions, {progress.scored} with a reward{mean}: {directory}")
    return DONE


async def _serve(make_run: Any, entry: EndpointEntry, backend: Backend) -> None:
    # its events belong to the running loop
    run: ExternalRun = make_run()
    try:
        await require_listener(entry)
        async with drained_by_signals("vf-gateway", run, _BLOCKED_S, at_once=()):
            await run.serve()
    finally:
        await backend.close()


def _backend(args: argparse.Namespace, entry: EndpointEntry) -> Backend:
    from verifiers.inference.endpoint_registry import open_backend
    from verifiers.testing.fake_model import FAKE_URL, FakeEndpoint

    if entry.urls == (FAKE_URL,):
        return FakeEndpoint(())
    return open_backend(entry, attempt_timeout_s=attempt_timeout_s(args, entry))


def _metadata(args: argparse.Namespace, entry: EndpointEntry, sampling: dict[str, Any]) -> dict[str, Any]:
    """Return what is recorded of a run beside its sessions; names of keys and headers, never their values."""
    from verifiers.evals.provenance import git_provenance, versions
    from verifiers.log import url_without_secrets

    urls = [url_without_secrets(url) for url in entry.urls]
    return {
        "env": args.name,
        "model": entry.model,
        "base_url": urls[0],
        "base_urls": urls,
        "endpoint": entry.name,
        "api": entry.api,
        "api_key_var": entry.key_var,
        "headers": sorted({*entry.headers, *entry.header_vars}),
        "sampling_args": sampling,
        "max_concurrent": args.max_concurrent,
        "rollout_timeout_s": args.rollout_timeout,
        "attempt_timeout_s": attempt_timeout_s(args, entry),
        "records_tokens": args.tokens,
        "versions": versions(),
        "git": git_provenance(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "started_at": time.time(),
        "status": "running",
    }


if __name__ == "__main__":
    sys.exit(main())
