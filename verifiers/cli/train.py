"""`vf-train run.toml`: train a policy on an environment, as a file says."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.cli.main import DONE, Command, CommandParser, hide_library_bars

if TYPE_CHECKING:
    from verifiers.envs.environment import Environment
    from verifiers.train.run_file import EnvironmentTable, RunFile

_TEARDOWN_AFTER_FAILURE_S = 1.5
"""A run that fails has ended within 5 seconds, whatever its environments and its server wait for."""

_OWN_SERVER_AWAY_S = 60.0
"""Seconds that a server which the run has started may be away before the run ends: longer than a push."""


def parser() -> CommandParser:
    parser = CommandParser(
        "vf-train",
        "Train a policy on an environment with GRPO, as a run file says.",
        examples=("vf-train run.toml --dry-run", "vf-train run.toml"),
    )
    add = parser.group("run")
    add("run_file", metavar="FILE", help="TOML file that describes the run; see docs/reference/run-file.md")
    add("--dry-run", action="store_true", help="check file, environments and sizes, print the batch plan, and stop")
    add("--server-url", action="append", metavar="URL", help="rollout server in place of the file's; repeatable")
    add = parser.group("start")
    add("--fresh", action="store_true", help="start at step 0; the directory of an earlier run gets another name")
    add("--resume", action="store_true", help="resume from the newest complete checkpoint, as without this flag")
    return parser


def _start(args: argparse.Namespace) -> int:
    # one of several processes, where a launcher has started them; a missing file needs no torch
    if os.environ.get("RANK", "0") == "0" and "torch" not in sys.modules and Path(args.run_file).is_file():
        print(f"vf-train: {args.run_file}; loading torch takes some seconds", flush=True)
    # read once, when torch is imported: idle threads must not spin on the server's cores
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    from verifiers.train.processes.distributed import recorded

    return recorded(lambda: train(**vars(args)))


def train(
    run_file: str,
    *,
    dry_run: bool = False,
    fresh: bool = False,
    resume: bool = False,
    server_url: Sequence[str] | None = None,
) -> int:
    """Train as a run file says; raise errors instead of printing them."""
    from verifiers.errors import ConfigError

    if fresh and resume:
        raise ConfigError("--fresh starts at step 0 and --resume resumes; give one of them, or neither to resume.")
    from verifiers.train.run_file import load_run_file

    run = load_run_file(run_file)
    if server_url:
        run = run.with_servers(server_url)
    from verifiers.train.models import check_model_path
    from verifiers.train.processes.launch import installed_servers, starting_server

    check_model_path(run.model.path, adds_adapter=run.lora is not None)
    if run.teacher is not None and run.teacher.path is not None:
        check_model_path(run.teacher.path)
    known = {"embedded", "vllm", *installed_servers()}
    if run.server.launch is not None and run.server.launch not in known:
        raise ConfigError(f"{run_file}: [server] launch is {run.server.launch!r}; give one of {sorted(known)}.")
    with contextlib.ExitStack() as server:
        url = None
        if run.server.launch is not None and not dry_run and os.environ.get("RANK", "0") == "0":
            # beside the imports, which take as long; where the run is refused it ends
            options: Any = {"args": run.server.args, "start_timeout_s": run.server.start_timeout}
            url = server.enter_context(starting_server(run.server.launch, run.model.path, **options))
        return _train(run, Path(run_file), server, url, dry_run=dry_run, fresh=fresh)


def _train(
    run: RunFile,
    run_file: Path,
    server: contextlib.ExitStack,
    server_url: Callable[[], str] | None,
    *,
    dry_run: bool,
    fresh: bool,
) -> int:
    from verifiers.errors import ConfigError
    from verifiers.train.checkpoint.checkpoint import model_name
    from verifiers.train.checkpoint.run_directory import finished_steps, note_saved
    from verifiers.train.config import GRPOConfig, lora_defaults
    from verifiers.train.models import check_model_exists
    from verifiers.train.processes.distributed import Ranks
    from verifiers.train.processes.launch import launched_server, share_cores
    from verifiers.train.run_plan import plan_run

    # an environment that is not installed may stand beside the run file
    sys.path.insert(0, str(run_file.resolve().parent))
    env = load_environments(run)
    eval_env = load_eval_environments(run)
    try:
        settings = {"output_dir": "outputs/" + run.name, **_server_settings(run), **_objective_settings(run)}
        config = GRPOConfig(**{**settings, **run.trainer})
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{run_file}: [trainer]: {error}") from error
    played, played_eval = in_workers(run, env, eval_env, config.grading_timeout)
    curriculum = run.curriculum_of(config.seed if config.data_seed is None else config.data_seed)
    plan = plan_run(config, played, curriculum, eval_env=played_eval)
    is_rank_0 = os.environ.get("RANK", "0") == "0"
    if dry_run:
        if is_rank_0:
            print(plan.batches.describe())
        return DONE
    output_dir = str(config.output_dir)
    of = (plan.batches, env.get_dataset(), model_name(run.model.path))
    done = None if fresh else Ranks(config.distributed_state).on_rank_0(lambda: finished_steps(output_dir, *of))
    if done is not None:
        if is_rank_0:
            print(f"finished: {done} steps in {output_dir}; --fresh starts again at step 0")
        return DONE
    check_model_exists(run.model.path, config.model_init_kwargs)

    from verifiers.train.evaluation.storage import evaluation_lines
    from verifiers.train.trainer import GRPOTrainer

    hide_library_bars()
    with contextlib.ExitStack() as stack:
        # left last: a server does not wait for it
        evaluated = eval_env.values() if isinstance(eval_env, dict) else [eval_env]
        stack.enter_context(_teardown_on_exit([env, *(one for one in evaluated if one is not None)]))
        stack.enter_context(server.pop_all())
        if server_url is not None:
            config.server_url = server_url()
            # nobody starts it again
            config.server_restart_timeout = min(config.server_restart_timeout, _OWN_SERVER_AWAY_S)
        if run.teacher is not None and run.teacher.path is not None and is_rank_0:
            # after the server, which looks how much memory is free
            start_timeout_s = run.server.start_timeout
            config.teacher_url = stack.enter_context(
                launched_server("embedded", run.teacher.path, start_timeout_s=start_timeout_s)
            )
        overlaps = config.shared_device == "cores" and config.num_batches_ahead > 0
        if (line := share_cores(overlaps=overlaps)) and is_rank_0:
            print(line, flush=True)
        peft_config = lora_defaults(run.lora.r, run.lora.alpha) if run.lora is not None else None
        trainer = GRPOTrainer(run.model.path, played, config, peft_config=peft_config, plan=plan)
        trainer.train(resume_from_checkpoint=not fresh)
        trainer.save_model()
        if is_rank_0:
            note_saved(output_dir, trainer.state.global_step, *of)
    if is_rank_0:
        for line in evaluation_lines(trainer.state, config):
            print(line)
        print(f"saved to {config.output_dir}")
    return DONE


def _server_settings(run: RunFile) -> dict[str, str]:
    """Return the settings of a run's server; one process without any generates with a copy of the policy in it."""
    if run.server.url is not None:
        return {"server_url": run.server.url}
    if run.names_server or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return {}
    import torch

    from verifiers.train.config import has_accelerator

    if run.trainer.get("use_cpu") or not has_accelerator():
        return {"rollout_device": "cpu"}
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return {"rollout_device": f"{accelerator.type}:{min(1, torch.accelerator.device_count() - 1)}"}


def _objective_settings(run: RunFile) -> dict[str, Any]:
    """Return the settings of [teacher] and [demonstrations]; a teacher's URL is its path, until it is started."""
    settings: dict[str, Any] = {}
    if run.teacher is not None:
        settings = {"teacher_url": run.teacher.url or run.teacher.path, "teacher_model": run.teacher.model}
    if run.demonstrations is not None:
        shown = run.demonstrations
        settings |= {"demonstrations": shown.dataset, "demonstrations_share": shown.share}
        settings["demonstrations_coef"] = shown.coef
    return settings


def load_environments(run: RunFile) -> Environment:
    """Load the environment of a run file, or its environments as one group under their names there."""
    from verifiers.envs.env_group import EnvGroup

    if run.environment is not None:
        return _loaded(run.environment)
    return EnvGroup([_loaded(table) for table in run.environments.values()], list(run.environments), env_id=run.name)


def load_eval_environments(run: RunFile) -> Environment | dict[str, Environment] | None:
    """Load the environments that a run file evaluates on; None for the eval set of its training environment."""
    if run.eval_environment is not None:
        return _loaded(run.eval_environment)
    return {name: _loaded(table) for name, table in run.eval_environments.items()} or None


def in_workers(
    run: RunFile, env: Environment, eval_env: Environment | dict[str, Environment] | None, blocked_s: float
) -> tuple[Any, Any]:
    """Return the environments of a run as its workers play them; as they are where the run has no workers."""
    # under `python -m`, as accelerate starts it, this module is __main__, which no worker can import
    from verifiers.cli import train

    tables, named = run.eval_environments, eval_env if isinstance(eval_env, dict) else {}
    factories: list[Any] = [(env, functools.partial(train.load_environments, run))]
    factories += [(named[name], functools.partial(train._loaded, tables[name])) for name in named]
    if run.eval_environment is not None:
        factories.append((eval_env, functools.partial(train._loaded, run.eval_environment)))
    workers = run.workers.open(factories, blocked_s=blocked_s)

    def evaluated(one: Any) -> Any:
        return workers.of(one, one.get_eval_dataset())

    played = workers.of(env, env.get_dataset())
    if run.eval_environment is not None:
        return played, evaluated(eval_env)
    if not named and getattr(env, "eval_dataset", None) is not None:
        # its rows are checked, too
        evaluated(env)
    return played, {name: evaluated(one) for name, one in named.items()} or None


@contextlib.contextmanager
def _teardown_on_exit(envs: Sequence[Environment]) -> Iterator[None]:
    from verifiers.envs.lifecycle import TEARDOWN_WITHIN_S, tear_down

    within_s = _TEARDOWN_AFTER_FAILURE_S
    try:
        yield
        within_s = TEARDOWN_WITHIN_S
    finally:
        tear_down(envs, within_s)


def _loaded(table: EnvironmentTable) -> Environment:
    from verifiers.envs.registry import load_environment

    env: Any = load_environment(table.id, **table.args)
    # stored evaluations say under which name they are loaded again
    env.env_id, env.env_args = table.id, dict(table.args)
    loaded: Environment = env
    return loaded


main = Command(parser, _start)

if __name__ == "__main__":
    sys.exit(main())
