"""`vf-check ENV`: is this environment right? Findings, worst first, each with how to mend it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.cli.endpoint import (
    add_endpoint_group,
    add_sampling_group,
    add_timeouts,
    chosen_endpoint,
    opened_model,
    require_listener,
    sampling_of,
)
from verifiers.cli.main import DONE, FAILED, Command, CommandParser, json_object, make_importable
from verifiers.errors import ConfigError
from verifiers.installation import install_hint

if TYPE_CHECKING:
    from verifiers.checks.check_report import CheckReport

_BLOCKED_S = 60.0
"""Seconds without a step of the event loop after which the command ends with the function's name."""


def parser() -> CommandParser:
    parser = CommandParser(
        "vf-check",
        "Say what is wrong with an environment: its rows, its rewards and, with a model, what that earns.",
        examples=("vf-check my_env.py", "vf-check reverse-text -m my-model -b http://127.0.0.1:8000/v1"),
    )
    parser.environment_group()
    add = parser.group("check")
    add("-n", "--num-examples", type=int, at_least=1, default=32, metavar="N", help="prompts that a model is asked")
    told = "rollouts of each prompt, which are compared"
    add("-r", "--rollouts-per-example", type=int, at_least=2, default=8, metavar="N", help=told)
    told = "rows whose rewards are tried with right and wrong texts"
    add("--rows", type=int, at_least=1, default=8, metavar="N", help=told)
    add("--tokenizer", metavar="PATH", help="tokenizer that prompts are measured with (needs the train extra)")
    add("--max-model-len", type=int, metavar="N", help="tokens that the model reads at most")
    add_endpoint_group(parser)
    add("-c", "--max-concurrent", type=int, default=64, metavar="N", help="rollouts in flight")
    add_timeouts(add, "rollout")
    add_sampling_group(parser, "environment")
    add = parser.group("output")
    add("--json", action="store_true", help="print the report as one line of JSON")
    add("--html", metavar="FILE", help="write the report as a page, too")
    return parser


def check_command(args: argparse.Namespace) -> int:
    from verifiers.envs.registry import load_environment

    if args.max_model_len is not None and args.tokenizer is None:
        raise ConfigError("--max-model-len needs --tokenizer, which counts the tokens of a prompt.")
    env_args = json_object("--env-args", args.env_args)
    name = make_importable(args.env, args.env_dir_path)
    env = load_environment(name, **env_args)
    if args.html is not None and not os.access(Path(args.html).parent, os.W_OK):
        raise ConfigError(f"--html is {args.html!r}, and no file can be written there; give another path.")
    report = asyncio.run(_checked(args, name, env))
    if args.html is not None:
        from verifiers.reports.page import plain_page

        Path(args.html).write_text(plain_page(f"vf-check {name}", report.html()), encoding="utf-8")
    print(json.dumps(report.as_json()) if args.json else "\n".join(report.lines()))
    return DONE if report.is_right else FAILED


async def _checked(args: argparse.Namespace, name: str, env: Any) -> CheckReport:
    from verifiers.checks.environment_check import check_environment, why_not_rewarded
    from verifiers.envs.lifecycle import run_teardown
    from verifiers.interrupt import exit_if_blocked, handlers, stopped_with_its_timer

    guard = asyncio.create_task(exit_if_blocked(min(_BLOCKED_S, args.rollout_timeout)))
    options: dict[str, Any] = {"rows": args.rows, "max_model_len": args.max_model_len}
    if args.tokenizer is not None:
        options["count_tokens"] = _counter(args.tokenizer)
    run: Any = None
    try:
        # without the key of a judge, what needs no model is still found
        if (args.model is not None or args.api_base_url) and why_not_rewarded(env) is None:
            run = await _run_of(args, env)
            options |= {"prompts": args.num_examples, "rollouts_per_example": args.rollouts_per_example}
        with handlers({signal.SIGTSTP: stopped_with_its_timer}):
            return await check_environment(env, name, run=run, **options)
    finally:
        if run is not None:
            await run.backend.close()
        await run_teardown(env)
        guard.cancel()


async def _run_of(args: argparse.Namespace, env: Any) -> Any:
    from verifiers.inference.limiter import Limiter
    from verifiers.rollouts.run import Run

    entry = chosen_endpoint(args, "vf-check")
    await require_listener(entry)
    return Run(
        env,
        opened_model(args, entry, env.rows_to_evaluate(args.num_examples), env),
        entry.model,
        {**env.sampling_args, **sampling_of(args)},
        limiter=Limiter(args.max_concurrent),
        rollout_timeout_s=args.rollout_timeout,
    )


def _counter(path: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(
            f"--tokenizer needs transformers, which is not installed; {install_hint('train')}."
        ) from None
    from verifiers.train.models import raises_load_error

    with raises_load_error(path):
        tokenizer = AutoTokenizer.from_pretrained(path)

    def count(prompt: Any) -> int:
        if isinstance(prompt, str):
            return len(tokenizer.encode(prompt))
        return len(
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
        )

    return count


main = Command(parser, check_command)
