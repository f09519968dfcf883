"""`vf-eval ENV -m MODEL -b URL`: evaluate an environment against an OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.cli.main import (
    DONE,
    INTERRUPTED,
    CommandFailedError,
    json_object,
    make_importable,
    run_command,
)
from verifiers.errors import ConfigError, Error, ProviderError
from verifiers.keywords import check_keywords

if TYPE_CHECKING:
    from verifiers.evals.run import EvaluationRun
    from verifiers.evals.store import ResultStore
    from verifiers.inference.endpoint import Backend
    from verifiers.inference.endpoint_registry import EndpointEntry
    from verifiers.inference.limits import Limiter
    from verifiers.log import Redactor
    from verifiers.rollouts.runner import RolloutRunner

__all__ = [
    "OPENAI_URL",
    "attempt_timeout_s",
    "chosen_endpoint",
    "key_variables",
    "main",
    "open_endpoint",
    "require_listener",
    "run_plan",
]

OPENAI_KEY = "OPENAI_API_KEY"
SAMPLING_ARGS = ("temperature", "top_p", "max_tokens", "stop", "seed", "frequency_penalty", "presence_penalty")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    args = _parser().parse_args(argv)
    return run_command("vf-eval", lambda: evaluate(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vf-eval",
        description="Evaluate an environment against an OpenAI endpoint. The same command continues a stopped run.",
    )
    add = parser.add_argument
    add("env", help="name of an environment (installed, in ./environments or in ./), or a path such as my_env.py")
    add("-a", "--env-args", default="{}", metavar="JSON", help="keyword arguments of its load_environment")
    add("-p", "--env-dir-path", metavar="DIR", help="directory of environment packages (default: ./environments)")
    add(
        "-m",
        "--model",
        help="the model's name (default, beside -b: gpt-4.1-mini); 'fake' without -b needs no endpoint",
    )
    add("-k", "--api-key-var", metavar="VAR", help="variable that holds the API key (default: OPENAI_API_KEY)")
    add(
        "-b",
        "--api-base-url",
        action="append",
        metavar="URL",
        help="base URL, with /v1; repeatable, for several servers of one model (default: OpenAI's)",
    )
    add(
        "-e",
        "--endpoints-path",
        metavar="FILE",
        help="registry of endpoints (TOML, or endpoints.py); -m names one (default: the first of ./endpoints.toml, "
        "./configs/endpoints.toml, ./endpoints.py, ./configs/endpoints.py and ~/.config/verifiers/endpoints.toml "
        "that has the name)",
    )
    add("--header", action="append", default=[], metavar="'NAME: VALUE'", help="further HTTP header; repeatable")
    add("-n", "--num-examples", type=int, default=5, help="prompts; -1 for all (default: 5)")
    add("-r", "--rollouts-per-example", type=int, default=3, help="rollouts of each prompt (default: 3)")
    add(
        "-c", "--max-concurrent", type=int, default=None, help="rollouts in flight (default: what the endpoint bears)"
    )
    add("--requests-per-second", type=float, default=None, help="requests begun per second")
    add("-t", "--max-tokens", type=int, default=None, help="tokens of one answer")
    add("-T", "--temperature", type=float, default=None, help="sampling temperature; 0 is greedy")
    add("-S", "--sampling-args", default="{}", metavar="JSON", help="further OpenAI sampling arguments")
    add("--seed", type=int, default=None, help="derive each rollout's sampling seed from this number")
    add(
        "--attempt-timeout",
        type=float,
        default=None,
        help="deadline of one HTTP attempt, in seconds (default: a third of --rollout-timeout, at most 600)",
    )
    add("--rollout-timeout", type=float, default=1800.0, help="deadline of one rollout, in seconds (default: 1800)")
    add("--output-dir", default="outputs/evals", help="where results go (default: outputs/evals)")
    add("--fresh", action="store_true", help="start a new run, though this command has one")
    add("-s", "--save-dataset", action="store_true", help="save the results as a datasets directory too")
    add("-H", "--save-to-hf-hub", action="store_true", help="push the results to the Hugging Face Hub")
    add("-D", "--hf-hub-dataset-name", default="", metavar="NAME", help="dataset on the Hub that is pushed to")
    add("--right-from", type=float, default=1.0, help="reward from which pass@k counts a rollout (default: 1)")
    add("--prices", metavar="FILE", help="TOML table of prices by model, for the cost of the run")
    add("--json", action="store_true", help="print the summary as one line of JSON, and no progress")
    add("-v", "--verbose", action="store_true", help="log what happens")
    return parser


def evaluate(args: argparse.Namespace) -> int:
    """Do what the command does; raises instead of printing errors."""
    from verifiers.cli.evaluate import chosen_endpoint, key_variables
    from verifiers.log import Redactor, redact_logs, secrets_of_run, url_without_secrets

    if args.num_examples < -1 or args.num_examples == 0:
        raise ConfigError(f"--num-examples is {args.num_examples}; give 1 or more, or -1 for all.")
    if args.rollouts_per_example < 1:
        raise ConfigError(f"--rollouts-per-example is {args.rollouts_per_example}; give 1 or more.")
    for flag, seconds in (("attempt", args.attempt_timeout), ("rollout", args.rollout_timeout)):
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
        headers = dict(_header(text) for text in args.header)
        entry, registry = chosen_endpoint(args, headers)
    _require_key(args, entry)
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
    from verifiers.cli.evaluate import open_endpoint, run_plan
    from verifiers.cli.evaluate_output import show_summary
    from verifiers.envs.registry import load_environment
    from verifiers.evals.run import open_run
    from verifiers.evals.store import ResultStore
    from verifiers.evals.summary import load_prices
    from verifiers.inference.retries import RetryPolicy
    from verifiers.reports.evaluation import write_evaluation_report
    from verifiers.rollouts.runner import RolloutRunner

    args.env = make_importable(args.env, args.env_dir_path)
    env = load_environment(args.env, **env_args)
    sampling = {**env.sampling_args, **sampling_args}
    for name, value in (("max_tokens", args.max_tokens), ("temperature", args.temperature)):
        if value is not None:
            sampling[name] = value
    shown: dict[str, Any] = {"right_from": args.right_from}
    if args.prices is not None:
        shown["prices"] = load_prices(args.prices)
    dataset = env.get_eval_dataset(args.num_examples)
    backend, limiter = open_endpoint(args, entry, dataset, env)
    plan = run_plan(args, entry, env_args, sampling, dataset)
    run = open_run(plan, env.rubric, args.output_dir, fresh=args.fresh, redact=redact)
    say = (lambda text: None) if args.json else (lambda text: print(f"vf-eval: {text}", file=sys.stderr))
    if run.is_complete:
        say("already complete; --fresh runs it again")
    elif run.finished.count:
        say(f"resuming {run.directory}: {run.finished.count} of {run.planned} rollouts are there")
    started = time.perf_counter()
    try:
        with ResultStore(run.directory, {**run.metadata, "status": "running"}, redact) as store:
            runner = RolloutRunner(
                env,
                backend,
                entry.model,
                sampling,
                limiter=limiter,
                # enough to outlast a restart of the server
                retry=RetryPolicy(max_attempts=9),
                rollout_timeout_s=args.rollout_timeout,
            )
            try:
                if not run.is_complete:
                    asyncio.run(_run(run, runner, dataset, store, started, entry, quiet=args.json))
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
        show_summary(run, summary, title=f"{args.env} / {run.metadata['model']}", as_json=args.json)
    if run.interruption.requested and not done:
        say(f"interrupted at {run.finished.count + run.ran} of {run.planned} rollouts; the same command continues")
        return INTERRUPTED
    _save_dataset(args, run)
    return DONE


async def _run(
    run: EvaluationRun,
    runner: RolloutRunner,
    dataset: Any,
    store: ResultStore,
    started: float,
    entry: EndpointEntry,
    *,
    quiet: bool,
) -> None:
    import contextlib

    from verifiers.cli.evaluate import require_listener
    from verifiers.cli.evaluate_output import live_line, progress_text
    from verifiers.cli.main import handle_interrupts
    from verifiers.envs.lifecycle import run_teardown

    def text() -> str:
        return progress_text(
            run.progress,
            planned=run.planned,
            finished_before=run.finished.count,
            ran=run.ran,
            tokens=run.tokens,
            elapsed_s=time.perf_counter() - started,
            in_flight=runner.limiter.in_flight,
        )

    line: Any = contextlib.nullcontext() if quiet else live_line(text)
    try:
        await require_listener(entry)
        async with line:
            with handle_interrupts("vf-eval", run.interruption):
                await run.run(runner, dataset, store)
    finally:
        await runner.backend.close()
        await run_teardown(runner.env)


def _save_dataset(args: argparse.Namespace, run: EvaluationRun) -> None:
    if not (args.save_dataset or args.save_to_hf_hub):
        return
    from verifiers.evals.export import push_dataset, save_dataset

    if args.save_dataset:
        save_dataset(run.directory, run.directory / "dataset")
    if args.save_to_hf_hub:
        name = args.hf_hub_dataset_name or f"{args.env}--{args.model}".replace("/", "--")
        push_dataset(run.directory, name)


def _require_key(args: argparse.Namespace, entry: EndpointEntry) -> None:
    """Raise ConfigError where the key that a flag names, or that OpenAI asks for, is not set."""
    asks = any(urllib.parse.urlsplit(url).hostname == "api.openai.com" for url in entry.urls)
    if (asks or args.api_key_var == entry.key_var) and not os.environ.get(entry.key_var):
        raise ConfigError(
            f"the environment variable {entry.key_var!r} holds no key for {entry.urls[0]}; set it, name another "
            "by -k, or give a server's address by -b."
        )


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise ConfigError(f"--header is {text!r}; give it as 'Name: value'.")
    return name.strip(), value.strip()


if __name__ == "__main__":
    sys.exit(main())


OPENAI_URL = "https://api.openai.com/v1"
LISTENER_GRACE_S = 5.0
_FAKE_CONCURRENT = 32
_LONGEST_ATTEMPT_S = 600.0


def chosen_endpoint(args: argparse.Namespace, headers: Mapping[str, str]) -> tuple[EndpointEntry, Path | None]:
    """Return the endpoint that the flags name: an entry of a registry, the built-in fake, or what they spell out.

    Returns:
        The endpoint, and the registry that was found without a flag where it is from there.

    Raises:
        ConfigError: flags that contradict each other, or a registry that cannot be read.
    """
    from verifiers.inference.endpoint_registry import EndpointEntry, discover_endpoint, find_endpoint
    from verifiers.testing.fake_model import FAKE_MODEL, FAKE_URL

    if args.endpoints_path is not None:
        if args.api_base_url or args.header:
            raise ConfigError("--endpoints-path names the endpoint; leave --api-base-url and --header out.")
        return find_endpoint(args.model, args.endpoints_path), None
    urls = tuple(args.api_base_url or ([FAKE_URL] if args.model == FAKE_MODEL else []))
    if not urls:
        found = discover_endpoint(args.model)
        if found is not None and args.header:
            raise ConfigError(
                f"-m {args.model} is an endpoint of {str(found[1])!r}; put the headers there, or give --api-base-url."
            )
        if found is not None:
            return found
    spelled = EndpointEntry(
        args.model, args.model, urls or (OPENAI_URL,), key_var=args.api_key_var or OPENAI_KEY, headers=dict(headers)
    )
    return spelled, None


def attempt_timeout_s(args: argparse.Namespace, entry: EndpointEntry) -> float:
    """Deadline of one HTTP attempt: the flag's, the entry's, else short enough for a hang to be tried again twice."""
    given: float | None = args.attempt_timeout or entry.attempt_timeout_s
    return given or min(_LONGEST_ATTEMPT_S, args.rollout_timeout / 3)


def key_variables(entry: EndpointEntry) -> Iterator[str]:
    """Return the environment variables whose values are this endpoint's secrets."""
    yield entry.key_var
    yield from entry.header_vars.values()


def open_endpoint(args: argparse.Namespace, entry: EndpointEntry, dataset: Any, env: Any) -> tuple[Backend, Limiter]:
    """Return the backend of an endpoint and what may be in flight on it.

    Args:
        args: flags of the command.
        entry: the endpoint.
        dataset, env: whose rows and parsers the built-in fake endpoint knows.

    Raises:
        ConfigError: an address or a limit that cannot work.
    """
    from verifiers.evals.evaluation_loop import iter_requests
    from verifiers.inference.adaptive_limiter import limiter_for
    from verifiers.inference.endpoint_registry import open_backend
    from verifiers.inference.limits import Limiter
    from verifiers.testing.fake_model import FAKE_URL, FakeEndpoint

    if entry.urls == (FAKE_URL,):
        limit = _FAKE_CONCURRENT if args.max_concurrent is None else args.max_concurrent

        def parser_of(task: str) -> Any:
            member = env.get_env_for_task(task) if hasattr(env, "get_env_for_task") else env
            return getattr(member, "parser", None)

        return FakeEndpoint(iter_requests(dataset, 1, None), parser_of, args.seed), Limiter(limit)
    limiter = limiter_for(
        entry.urls,
        args.max_concurrent,
        maximum=entry.max_concurrent,
        requests_per_second=args.requests_per_second or entry.requests_per_second,
    )
    return open_backend(entry, attempt_timeout_s=attempt_timeout_s(args, entry), seed=args.seed or 0), limiter


def run_plan(
    args: argparse.Namespace,
    entry: EndpointEntry,
    env_args: Mapping[str, Any],
    sampling: Mapping[str, Any],
    dataset: Any,
) -> dict[str, Any]:
    """Return the metadata of a run before its first rollout; names of keys and headers, never their values."""
    from verifiers.evals.provenance import environment_provenance, git_provenance, versions
    from verifiers.evals.remaining import fingerprint
    from verifiers.log import url_without_secrets

    urls: Sequence[str] = [url_without_secrets(url) for url in entry.urls]
    return {
        "env": args.env,
        **environment_provenance(args.env),
        "env_args": dict(env_args),
        "prompts": fingerprint(dataset),
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
        "max_concurrent": args.max_concurrent,
        "requests_per_second": args.requests_per_second,
        "attempt_timeout_s": attempt_timeout_s(args, entry),
        "rollout_timeout_s": args.rollout_timeout,
        "versions": versions(),
        "git": git_provenance(),
    }


async def require_listener(entry: EndpointEntry) -> None:
    """Make sure that something listens where the servers of this machine should be.

    Rollouts wait for a server that restarts; a mistaken port should fail without that wait.

    Raises:
        ProviderError: all servers are on this machine, and none takes a connection within `LISTENER_GRACE_S`.
    """
    from verifiers.inference.endpoint import is_loopback
    from verifiers.testing.fake_model import FAKE_URL

    if FAKE_URL in entry.urls or not all(is_loopback(url) for url in entry.urls):
        return
    until = time.monotonic() + LISTENER_GRACE_S
    while True:
        for url in entry.urls:
            parts = urllib.parse.urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            try:
                _, writer = await asyncio.open_connection(parts.hostname, port)
            except OSError as error:
                problem = error
            else:
                writer.close()
                return
        if time.monotonic() > until:
            break
        await asyncio.sleep(0.2)
    raise ProviderError(
        f"{', '.join(entry.urls)} could not be reached: {problem}; start the server, or give its address with -b."
    )
