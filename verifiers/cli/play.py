"""`vf-play ENV`: be the policy yourself; the environment answers through its own rollout loop, and scores the end."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verifiers.cli.arguments import ENVIRONMENTS_DIRECTORY, json_object, make_importable
from verifiers.cli.exit_codes import DONE, FAILED, CommandFailedError, run_command
from verifiers.errors import ConfigError

if TYPE_CHECKING:
    from verifiers.cli.player import Screen
    from verifiers.rollouts.rollout import Rollout

__all__ = ["main"]

_MODEL = "you"
_NO_DEADLINE_S = 7 * 24 * 3600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    args = _parser().parse_args(argv)
    return run_command("vf-play", lambda: play(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vf-play",
        description="Be the policy yourself: read the prompt, type the answers, see the score.",
        epilog="While playing: /done on a line of its own sends what was typed, /tool NAME {json} adds a tool call "
        "to it, /quit gives up, /help says so. The end of the input sends what was typed, too.",
    )
    add = parser.add_argument
    add("env", help="installed environment, or a module that can be imported")
    add("-a", "--env-args", default="{}", metavar="JSON", help="keyword arguments of its load_environment")
    add("-p", "--env-dir-path", default=ENVIRONMENTS_DIRECTORY, help="directory whose packages can be imported too")
    add("-i", "--example", type=int, default=None, metavar="N", help="row of the dataset, from 0 (default: 0)")
    add("--split", choices=("train", "eval"), default="eval", help="which dataset (default: %(default)s)")
    add("--seed", type=int, default=None, metavar="N", help="choose the row at random, by this number")
    return parser


def play(args: argparse.Namespace) -> int:
    """Do what the command does; raises instead of printing errors."""
    from verifiers.cli.player import Player, Screen
    from verifiers.envs.dataset_format import row_fields
    from verifiers.envs.ending import run_teardown
    from verifiers.envs.loading import load_environment
    from verifiers.rollouts.rollout import RolloutRequest
    from verifiers.rollouts.run import RolloutRunner
    from verifiers.types import RolloutKey

    env_args = json_object("--env-args", args.env_args)
    if args.seed is not None and args.example is not None:
        raise ConfigError("--seed chooses the row at random and --example names it; give one of them.")
    make_importable(args.env_dir_path)
    env = load_environment(args.env, **env_args)
    dataset = env.get_dataset() if args.split == "train" else env.get_eval_dataset()
    example = _chosen_row(args, len(dataset))
    prompt, answer, task, info = row_fields(dataset[example])
    request = RolloutRequest(RolloutKey(0, example, 0), prompt, answer, task, info)
    screen = Screen()
    screen.note(f"{args.env}, row {example} of {len(dataset)} ({args.split})")

    async def work() -> tuple[Rollout, bool]:
        player = Player(_MODEL, screen)
        runner = RolloutRunner(env, player, _MODEL, dict(env.sampling_args), rollout_timeout_s=_NO_DEADLINE_S)
        try:
            group = await runner.run_group([request])
        finally:
            await run_teardown(env)
        rollout = group.rollouts[0]
        if not player.gave_up:
            player.show_rest(prompt, rollout.completion)
        return rollout, player.gave_up

    rollout, gave_up = asyncio.run(work())
    if gave_up:
        if screen.quit_asked:
            screen.note("given up; there is no score")
            return DONE
        raise CommandFailedError("the input ended before the rollout did, so there is no score.")
    return _show_score(screen, env, rollout)


def _chosen_row(args: argparse.Namespace, rows: int) -> int:
    if rows == 0:
        raise ConfigError(f"the {args.split} dataset of {args.env!r} has no rows.")
    if args.seed is not None:
        return random.Random(args.seed).randrange(rows)
    example = args.example or 0
    if not 0 <= example < rows:
        raise ConfigError(f"--example is {example}, but the {args.split} dataset has the rows 0 to {rows - 1}.")
    return example


def _show_score(screen: Screen, env: Any, rollout: Rollout) -> int:
    screen.heading("score")
    ended = rollout.state.get("stop_condition")
    screen.line(f"outcome  {rollout.outcome}" + (f" ({ended})" if ended else ""))
    if rollout.answer not in ("", None):
        screen.line(f"answer   {rollout.answer}")
    if rollout.reward is None:
        # what could not be graded has no reward: it is not a zero
        screen.line(f"reward   none: {rollout.failure}")
        return FAILED
    screen.line(f"reward   {rollout.reward:.4f}")
    weights = _weights(env)
    for name, value in rollout.metrics.items():
        weight = weights.get(name)
        screen.line(f"  {name}  {value:.4f}" + (f"  (weight {weight:g})" if weight is not None else ""))
    return DONE


def _weights(env: Any) -> dict[str, float]:
    """Weight of each reward function; without those whose name stands for several."""
    try:
        names, weights = list(env.rubric.get_reward_func_names()), list(env.rubric.get_reward_weights())
    except (AttributeError, NotImplementedError):
        # a rubric of another make may know only how to score
        return {}
    return {n: w for n, w in zip(names, weights, strict=False) if names.count(n) == 1 and len(names) == len(weights)}


if __name__ == "__main__":
    sys.exit(main())
