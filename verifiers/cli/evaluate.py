"""`vf-eval ENV -m MODEL -b URL`: evaluate an environment against an OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from verifiers.cli.arguments import ENVIRONMENTS_DIRECTORY, json_object, make_importable
from verifiers.cli.exit_codes import DONE, run_command
from verifiers.errors import ConfigError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    args = _parser().parse_args(argv)
    return run_command("vf-eval", lambda: evaluate(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vf-eval", description="Evaluate an environment against an OpenAI endpoint."
    )
    add = parser.add_argument
    add("env", help="installed environment, or a module that can be imported")
    add("-a", "--env-args", default="{}", metavar="JSON", help="keyword arguments of its load_environment")
    add("-p", "--env-dir-path", default=ENVIRONMENTS_DIRECTORY, help="directory whose packages can be imported too")
    add("-m", "--model", default="gpt-4.1-mini", help="the model's name on the endpoint")
    add("-k", "--api-key-var", default="OPENAI_API_KEY", help="environment variable that holds the API key")
    add("-b", "--api-base-url", default="https://api.openai.com/v1", metavar="URL", help="base URL, with /v1")
    add("--header", action="append", default=[], metavar="'NAME: VALUE'", help="further HTTP header; repeatable")
    add("-n", "--num-examples", type=int, default=5, help="prompts; -1 for all (default: 5)")
    add("-r", "--rollouts-per-example", type=int, default=3, help="rollouts of each prompt (default: 3)")
    add("-c", "--max-concurrent", type=int, default=32, help="rollouts in flight at once (default: 32)")
    add("-t", "--max-tokens", type=int, default=None, help="tokens of one answer")
    add("-T", "--temperature", type=float, default=None, help="sampling temperature; 0 is greedy")
    add("-S", "--sampling-args", default="{}", metavar="JSON", help="further OpenAI sampling arguments")
    add("--seed", type=int, default=None, help="derive each rollout's sampling seed from this number")
    add("--rollout-timeout", type=float, default=600.0, help="deadline of one rollout, in seconds (default: 600)")
    add("--output-dir", default="outputs/evals", help="where results go (default: outputs/evals)")
    add("--json", action="store_true", help="print the summary as one line of JSON")
    add("-v", "--verbose", action="store_true", help="log what happens")
    return parser


def evaluate(args: argparse.Namespace) -> int:
    """Do what the command does; raises instead of printing errors."""
    from verifiers.envs.ending import run_teardown
    from verifiers.envs.loading import load_environment
    from verifiers.evals.runner import evaluation_requests, run_evaluation
    from verifiers.evals.store import ResultStore, new_run_directory
    from verifiers.rollouts.endpoint import Endpoint, HttpBackend
    from verifiers.rollouts.limits import Limiter
    from verifiers.rollouts.run import RolloutRunner

    if args.num_examples < -1 or args.num_examples == 0:
        raise ConfigError(f"--num-examples is {args.num_examples}; give 1 or more, or -1 for all.")
    if args.rollouts_per_example < 1:
        raise ConfigError(f"--rollouts-per-example is {args.rollouts_per_example}; give 1 or more.")
    if args.verbose:
        from verifiers.log import setup_logging

        setup_logging("DEBUG")
    make_importable(args.env_dir_path)
    env = load_environment(args.env, **json_object("--env-args", args.env_args))
    sampling = {**env.sampling_args, **json_object("--sampling-args", args.sampling_args)}
    for name, value in (("max_tokens", args.max_tokens), ("temperature", args.temperature)):
        if value is not None:
            sampling[name] = value
    key = os.environ.get(args.api_key_var, "").strip() or "EMPTY"
    endpoint = Endpoint(args.api_base_url, key, dict(_header(text) for text in args.header))
    groups = evaluation_requests(env.get_eval_dataset(args.num_examples), args.rollouts_per_example, args.seed)
    directory = new_run_directory(args.env, args.model, args.output_dir)
    metadata = {
        "env": args.env,
        "env_args": json_object("--env-args", args.env_args),
        "model": args.model,
        "base_url": args.api_base_url,
        "sampling_args": sampling,
        "num_examples": len(groups),
        "rollouts_per_example": args.rollouts_per_example,
        "seed": args.seed,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    started = time.perf_counter()
    with ResultStore(directory, metadata) as store:

        async def work() -> Any:
            backend = HttpBackend(endpoint)
            limiter = Limiter(args.max_concurrent)
            runner = RolloutRunner(
                env, backend, args.model, sampling, limiter=limiter, rollout_timeout_s=args.rollout_timeout
            )
            try:
                return await run_evaluation(runner, groups, store.append)
            finally:
                await backend.close()
                await run_teardown(env)

        block = asyncio.run(work())
        summary = _summary(block, time.perf_counter() - started)
        store.write_metadata(summary=summary)
    if args.json:
        print(json.dumps({**summary, "results": str(directory)}))
    else:
        _print_table(args, summary, str(directory))
    return DONE


def _summary(block: Any, seconds: float) -> dict[str, Any]:
    from verifiers.evals.runner import estimates

    rows = {
        # JSON has no NaN, which stands for what so few prompts cannot tell
        name: {field: None if math.isnan(value) else value for field, value in _fields(e).items()}
        for name, e in estimates(block).items()
    }
    return {
        "rewards": rows,
        "prompts": len(block.groups),
        "rollouts": len(block.rollouts),
        "outcomes": {str(outcome): count for outcome, count in block.outcomes().most_common()},
        "completion_tokens": sum(rollout.usage.completion_tokens for rollout in block),
        "retries": sum(rollout.attempts - 1 for rollout in block),
        "seconds": seconds,
    }


def _fields(estimate: Any) -> dict[str, float]:
    return {field: getattr(estimate, field) for field in ("mean", "stderr", "low", "high")}


def _print_table(args: argparse.Namespace, summary: dict[str, Any], directory: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{args.env} / {args.model}", title_justify="left")
    for column in ("", "mean", "± stderr", "95 % interval"):
        table.add_column(column, justify="left" if not column else "right")
    for name, e in summary["rewards"].items():
        mean, stderr, low, high = ("-" if value is None else f"{value:.4f}" for value in e.values())
        table.add_row(name, mean, stderr, "-" if low == "-" else f"{low} .. {high}")
    outcomes = ", ".join(f"{count} {name}" for name, count in summary["outcomes"].items())
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{summary['rollouts']} rollouts of {summary['prompts']} prompts in {summary['seconds']:.1f} s: {outcomes}; "
        f"{summary['retries']} retries; {summary['completion_tokens']:,} completion tokens"
    )
    console.print(f"{directory}/results.jsonl", soft_wrap=True)


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise ConfigError(f"--header is {text!r}; give it as 'Name: value'.")
    return name.strip(), value.strip()


if __name__ == "__main__":
    sys.exit(main())
