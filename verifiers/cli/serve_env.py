"""`vf-serve-env ENV`: serve an environment as OpenEnv, for trainers and clients that speak its protocol."""

from __future__ import annotations

import argparse
import asyncio

from verifiers.cli.main import Command, CommandParser, json_object, make_importable, tell
from verifiers.errors import ConfigError


def parser() -> CommandParser:
    parser = CommandParser(
        "vf-serve-env",
        "Serve an environment as OpenEnv: each session plays rows of its dataset, and gets the reward at the end.",
        examples=("vf-serve-env my-env", "vf-serve-env my_env.py -a '{\"n\": 100}' --split eval --port 9000"),
        epilog="Ctrl-C ends it. Who reaches the address may play: OpenEnv's clients send no key.",
    )
    parser.environment_group()
    add = parser.group("tasks")
    add("--split", choices=("train", "eval"), default="train", help="which dataset")
    add = parser.group("server")
    add("--host", default="127.0.0.1", metavar="HOST", help="address to listen on")
    add("--port", type=int, default=8200, metavar="N", help="port; 0 takes a free one")
    add("--max-sessions", type=int, at_least=1, default=64, metavar="N", help="sessions at once")
    told = "seconds of an episode, the policy's too"
    add("--rollout-timeout", type=float, above=0, default=3600.0, metavar="S", help=told)
    add("--grading-timeout", type=float, above=0, default=120.0, metavar="S", help="seconds of its rewards")
    return parser


def serve(args: argparse.Namespace) -> int:
    from verifiers.envs.lifecycle import run_teardown
    from verifiers.envs.registry import load_environment
    from verifiers.evals.evaluation_run import in_whole_groups
    from verifiers.integrations.openenv_server import OpenEnvServer
    from verifiers.server_process import bind, end_by_signals, exits_on_sigterm, url_of

    listener = bind(args.host, args.port)
    env_args = json_object("--env-args", args.env_args)
    with exits_on_sigterm():
        env = load_environment(make_importable(args.env, args.env_dir_path), **env_args)
        rows = env.get_dataset() if args.split == "train" else env.get_eval_dataset()
    if not len(rows):
        raise ConfigError(f"the {args.split} dataset of {args.env} has no rows.")
    if in_whole_groups(env):
        tell(f"vf-serve-env: rollouts of {args.env} may depend on others of a prompt, and an episode is alone.")
    limits = {"rollout_timeout_s": args.rollout_timeout, "grading_timeout_s": args.grading_timeout}

    async def work() -> int:
        server = OpenEnvServer(env, rows, args.env, max_sessions=args.max_sessions, **limits)
        ended = end_by_signals()
        try:
            await server.start(listener)
            print(f"{len(rows)} tasks of {args.env} as OpenEnv at {url_of(listener)}", flush=True)
            return await ended
        finally:
            await server.close()
            await run_teardown(env)

    return asyncio.run(work())


main = Command(parser, serve)
