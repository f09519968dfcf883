"""`vf-train run.toml`: train a policy on an environment, as a file says."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verifiers.cli.exit_codes import DONE, run_command

if TYPE_CHECKING:
    from verifiers.envs.environment import Environment
    from verifiers.train.run_file import RunFile

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="vf-train", description="Train a policy on an environment with GRPO.")
    parser.add_argument("run_file", help="TOML file that describes the run; see docs/reference/run-file.md")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the batch plan, and stop")
    parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint")
    args = parser.parse_args(argv)
    return run_command("vf-train", lambda: train(args.run_file, dry_run=args.dry_run, resume=args.resume))


def train(run_file: str, *, dry_run: bool = False, resume: bool = False) -> int:
    """Do what the command does; raises instead of printing."""
    # the file is checked before the slow imports, so that a typo is told at once
    from verifiers.train.run_file import load_run_file

    run = load_run_file(run_file)
    from verifiers.envs.ending import run_teardown
    from verifiers.errors import ConfigError
    from verifiers.train.config import GRPOConfig, lora_defaults
    from verifiers.train.curriculum import planned_run
    from verifiers.train.models import check_model_path

    check_model_path(run.model.path)
    # an environment that is not installed may stand beside the run file
    sys.path.insert(0, str(Path(run_file).resolve().parent))
    env = load_environments(run)
    try:
        config = GRPOConfig(**{"output_dir": "outputs/" + run.name, **run.trainer})
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{run_file}: [trainer]: {error}") from error
    curriculum = run.curriculum_of(config.seed if config.data_seed is None else config.data_seed)
    plan = planned_run(config, env, curriculum, warn=dry_run)
    if dry_run:
        print(plan.describe())
        return DONE

    from verifiers.train.launch import launched_server
    from verifiers.train.trainer import GRPOTrainer

    with contextlib.ExitStack() as stack:
        if run.server.launch is not None:
            config.server_url = stack.enter_context(
                launched_server(
                    run.server.launch,
                    run.model.path,
                    args=run.server.args,
                    start_timeout_s=run.server.start_timeout,
                )
            )
        elif run.server.url is not None:
            config.server_url = run.server.url
        peft_config = lora_defaults(run.lora.r, run.lora.alpha) if run.lora is not None else None
        trainer = GRPOTrainer(run.model.path, env, config, peft_config=peft_config, curriculum=curriculum)
        stack.callback(lambda: asyncio.run(run_teardown(env)))
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
    print(f"saved to {config.output_dir}")
    return DONE


def load_environments(run: RunFile) -> Environment:
    """The environment of a run file, or its environments as one group under their names there."""
    from verifiers.envs.env_group import EnvGroup
    from verifiers.envs.loading import load_environment

    if run.environment is not None:
        return load_environment(run.environment.id, **run.environment.args)
    members = [load_environment(table.id, **table.args) for table in run.environments.values()]
    return EnvGroup(members, list(run.environments))


if __name__ == "__main__":
    sys.exit(main())
