"""`vf-gateway -m MODEL -b URL`: record the calls of programs that are started elsewhere."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from typing import TYPE_CHECKING, Any

from verifiers.cli.endpoint import (
    add_endpoint_group,
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
from verifiers.cli.main import DONE, Command, CommandParser, writing_results
from verifiers.interrupt import drained_by_signals

if TYPE_CHECKING:
    from verifiers.evals.results import RolloutResults
    from verifiers.evals.store import ResultStore
    from verifiers.inference.endpoint_registry import EndpointEntry
    from verifiers.log import Redactor

_BLOCKED_S = 120.0


def parser() -> CommandParser:
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
    add_timeouts(add, "session")
    told = "seconds to end for open sessions after Ctrl-C"
    add("--drain-timeout", type=float, above=0, default=30.0, metavar="S", help=told)
    add_sampling_group(parser, "program")
    add = parser.group("results")
    add("--name", default="external", metavar="NAME", help="name of what is evaluated, in the results")
    add("--output-dir", default="outputs/evals", metavar="DIR", help="where results go")
    add("--tokens", action="store_true", help="ask for token ids and log-probs, and refuse answers without them")
    add = parser.group("output")
    add("-v", "--verbose", action="store_true", help="log what happens")
    return parser


def record(args: argparse.Namespace) -> int:
    """Record the sessions of programs; return when the command is interrupted and everything is stored."""
    from verifiers.log import redact_logs, setup_logging

    if args.verbose:
        setup_logging("DEBUG")
    with typed_redactor(args).in_errors():
        sampling = sampling_of(args)
        entry = chosen_endpoint(args, "vf-gateway")
    redact = endpoint_redactor(entry, {"sampling": sampling})
    with redact.in_errors(), redact_logs(redact):
        return _record(args, entry, sampling, redact)


def _record(args: argparse.Namespace, entry: EndpointEntry, sampling: dict[str, Any], redact: Redactor) -> int:
    from verifiers.evals.results import RolloutResults
    from verifiers.evals.store import ResultStore, git_provenance, new_run_directory, versions
    from verifiers.evals.summary import run_summary
    from verifiers.inference.limiter import Limiter
    from verifiers.inference.retry import RetryPolicy
    from verifiers.reports.evaluation import write_evaluation_report

    settings = {
        "sampling_args": sampling,
        "limiter": Limiter(args.max_concurrent),
        # enough to outlast a restart of the server
        "retry": RetryPolicy(max_attempts=9),
        "rollout_timeout_s": args.rollout_timeout,
        "require_tokens": args.tokens,
    }
    metadata = {
        "env": args.name,
        **endpoint_metadata(args, entry),
        "sampling_args": sampling,
        "records_tokens": args.tokens,
        "versions": versions(),
        "git": git_provenance(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "started_at": time.time(),
        "status": "running",
    }
    results, started = RolloutResults(redact=redact), time.perf_counter()
    directory = new_run_directory(args.name, entry.model, args.output_dir)
    with writing_results(directory):
        with ResultStore(directory, metadata, redact) as store:
            try:
                asyncio.run(_serve(args, entry, store, results, settings))
            finally:
                summary = run_summary(results, metadata, time.perf_counter() - started)
                store.write_metadata(summary=summary, status="finished")
        if len(results):
            write_evaluation_report(directory)
    mean = f", mean reward {results.mean_reward:.3f}" if results.scored else ""
    print(f"{len(results)} sessions, {results.scored} with a reward{mean}: {directory}")
    return DONE


async def _serve(
    args: argparse.Namespace,
    entry: EndpointEntry,
    store: ResultStore,
    results: RolloutResults,
    settings: dict[str, Any],
) -> None:
    from verifiers.cli.external_run import ExternalRun

    backend = opened_model(args, entry)
    where = {"host": args.host, "port": args.port, "train": args.train, "drain_s": args.drain_timeout}
    try:
        run = ExternalRun(backend, entry.model, store, results, **where, **settings)
        await require_listener(entry)
        async with drained_by_signals("vf-gateway", run, _BLOCKED_S, at_once=()):
            await run.serve()
    finally:
        await backend.close()


main = Command(parser, record)

if __name__ == "__main__":
    sys.exit(main())
