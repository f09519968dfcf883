"""A training run as a TOML file: what `vf-train run.toml` reads.

    [environment]          # what to train on
    id = "reasoning-gym-env"
    args = { task = "spell_backward" }

    [model]                # the policy's start
    path = "runs/demo-tiny/start"

    [server]               # where rollouts come from; left out, from a copy of the policy in the trainer's process
    launch = "embedded"    # start one of the installed servers; or url = "http://127.0.0.1:8000/v1"

    [trainer]              # any field of GRPOConfig under its own name
    num_generations = 8

    [environments.short]   # several by name, in place of [environment]: the datasets of a curriculum
    id = "reasoning-gym-env"

    [eval_environment]     # what to evaluate on instead of its own eval rows; or [eval_environments.NAME]
    id = "reasoning-gym-env"

    [workers]              # where environments run
    engine = "processes"

    [cluster]              # what vf-launch asks for
    server_nodes = 2

    [curriculum]           # what is drawn when
    stages = [{ name = "warm", until_step = 20, datasets = ["short"] }, ...]

Unknown keys are errors that name the nearest known one.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from verifiers.data.adaptive_curriculum import CurriculumPolicy, curriculum_from
from verifiers.data.curriculum import Curriculum
from verifiers.errors import ConfigError
from verifiers.workers.settings import WorkerSettings

__all__ = ["EnvironmentTable", "LoraTable", "ModelTable", "RunFile", "ServerTable", "load_run_file"]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EnvironmentTable(_Table):
    """`[environment]`: what is trained on."""

    id: str = Field(description="Name of an installed environment package or module.")
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of its load_environment.")


class ModelTable(_Table):
    """`[model]`: the policy's start."""

    path: str = Field(description="Directory written by save_pretrained, or a hub name.")


class ServerTable(_Table):
    """`[server]`: where rollouts come from: `url` or `launch`, or without either the trainer's own process."""

    url: str | None = Field(default=None, description="Base URL of a running server, with /v1.")
    launch: str | None = Field(default=None, description="Installed server to start beside the trainer: 'embedded'.")
    args: list[str] = Field(default_factory=list, description="Further command-line arguments of that server.")
    start_timeout: float = Field(default=180.0, gt=0, description="How long it may take to start, in seconds.")


class LoraTable(_Table):
    """`[lora]`: train an adapter instead of all weights; leave the table out for full training."""

    r: int = Field(default=8, ge=1, description="Rank.")
    alpha: int = Field(default=16, ge=1, description="Scale; the adapter is multiplied by alpha / r.")


class ClusterTable(_Table):
    """`[cluster]`: the nodes that `vf-launch` asks for; `vf-train` does not read it."""

    trainer_nodes: int = Field(default=1, ge=1, description="Nodes that train.")
    server_nodes: int = Field(default=0, ge=0, description="Nodes that sample, with a rollout server each.")
    ray_nodes: int = Field(default=0, ge=0, description="Nodes that play rollouts, with engine 'ray' of [workers].")
    gpus_per_node: int = Field(default=0, ge=0, description="GPUs of a node; each is a process where it trains.")
    accelerate_config: str | None = Field(default=None, description="File of `accelerate launch --config_file`.")
    main_process_port: int = Field(default=29500, ge=1, le=65535, description="Port on the first training node.")
    server_port: int = Field(default=8000, ge=1, le=65535, description="Port of the rollout servers.")
    ray_port: int = Field(default=6379, ge=1, le=65535, description="Slurm: port of Ray's head.")
    time: str = Field(default="24:00:00", description="Slurm: time limit of the job.")
    sbatch: list[str] = Field(default_factory=list, description="Slurm: further options, such as '--partition=gpu'.")
    image: str | None = Field(default=None, description="Kubernetes: image of the trainer.")
    server_image: str | None = Field(
        default=None, description="Kubernetes: image of the servers; as image if left out."
    )
    volume_claim: str | None = Field(default=None, description="Kubernetes: claim that all pods mount as /work.")


class RunFile(_Table):
    """A whole run. Give `environment`, or `environments` by name: they are trained as one group.

    Evaluations are on their eval rows, or on `eval_environment`, or on each of `eval_environments` by name.
    """

    environment: EnvironmentTable | None = Field(default=None)
    environments: dict[str, EnvironmentTable] = Field(default_factory=dict)
    eval_environment: EnvironmentTable | None = Field(default=None)
    eval_environments: dict[str, EnvironmentTable] = Field(default_factory=dict)
    model: ModelTable
    server: ServerTable = Field(default_factory=ServerTable)
    trainer: dict[str, Any] = Field(default_factory=dict, description="Fields of verifiers.GRPOConfig.")
    lora: LoraTable | None = Field(default=None)
    workers: WorkerSettings = Field(default_factory=WorkerSettings)
    cluster: ClusterTable = Field(default_factory=ClusterTable)
    curriculum: dict[str, Any] | None = Field(default=None, description="Stages, levels or pools of datasets.")

    @property
    def name(self) -> str:
        """The name of what is trained on, for the output directory."""
        return self.environment.id if self.environment is not None else "-".join(self.environments)

    @property
    def names_server(self) -> bool:
        """True where any setting says which server rollouts come from."""
        named = ("server_url", "server_urls", "rollout_device", "vllm_server_base_url", "vllm_server_host")
        in_table = self.server.url is not None or self.server.launch is not None
        return in_table or any(self.trainer.get(name) for name in (*named, "vllm_server_port"))

    def with_servers(self, urls: Sequence[str]) -> RunFile:
        """Return this run with rollouts from other servers, which are running."""
        trainer = {name: value for name, value in self.trainer.items() if name != "server_url"}
        trainer["server_urls"] = list(urls)
        return self.model_copy(update={"server": ServerTable(), "trainer": trainer})

    def curriculum_of(self, seed: int) -> Curriculum | CurriculumPolicy | None:
        """Return the curriculum, if the file has one; `seed` where it gives none of its own.

        Raises:
            ConfigError: it cannot be; one sentence.
        """
        return None if self.curriculum is None else curriculum_from(self.curriculum, seed)


def load_run_file(path: str | Path) -> RunFile:
    """Read and check a run file; nothing is loaded or started yet.

    Raises:
        ConfigError: the file is missing, is not valid TOML, or has an unknown, missing or wrong key; one sentence.
    """
    try:
        data = tomllib.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"the run file {str(path)!r} does not exist; see examples/ for one to start from."
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the run file {str(path)!r} cannot be read: {error}.") from None
    _check_keys(path, "", data, RunFile.model_fields)
    for name, table in (
        ("environment", EnvironmentTable),
        ("eval_environment", EnvironmentTable),
        ("model", ModelTable),
        ("server", ServerTable),
        ("lora", LoraTable),
        ("workers", WorkerSettings),
        ("cluster", ClusterTable),
    ):
        if isinstance(data.get(name), dict):
            _check_keys(path, name, data[name], table.model_fields)
    for several in ("environments", "eval_environments"):
        if isinstance(data.get(several), dict):
            for name, table in data[several].items():
                if isinstance(table, dict):
                    _check_keys(path, f"{several}.{name}", table, EnvironmentTable.model_fields)
    if isinstance(data.get("trainer"), dict):
        _check_keys(path, "trainer", data["trainer"], trainer_fields())
        if "resume_from_checkpoint" in data["trainer"]:
            raise ConfigError(
                f"{path}: [trainer] resume_from_checkpoint has no effect here: vf-train resumes from the newest "
                "complete checkpoint of output_dir; another one is given in Python, "
                "train(resume_from_checkpoint=...)."
            )
        data["trainer"] = _checked_values(path, data["trainer"])
    try:
        run = RunFile.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {where}: {first['msg']} (given: {first['input']!r}).") from None
    if run.server.url is not None and run.server.launch is not None:
        raise ConfigError(f"{path}: [server] has both url and launch; give url for a running server, else launch.")
    for key, other in itertools.product(("url", "launch"), ("server_urls", "server_url")):
        if getattr(run.server, key) is not None and run.trainer.get(other):
            raise ConfigError(
                f"{path}: [server] has {key} and [trainer] has {other}, so one would be ignored; leave one out."
            )
    if run.environment is None and not run.environments:
        raise ConfigError(f"{path}: environment: Field required (give [environment], or [environments.NAME] tables).")
    if run.environment is not None and run.environments:
        raise ConfigError(
            f"{path} has both [environment] and [environments]; give one environment, or several by name."
        )
    if run.eval_environment is not None and run.eval_environments:
        raise ConfigError(
            f"{path} has both [eval_environment] and [eval_environments]; give one environment, or several by name."
        )
    try:
        run.curriculum_of(0)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return run


def trainer_fields() -> list[str]:
    """Return the names that may stand in `[trainer]`: the fields of GRPOConfig."""
    from verifiers.train.config import GRPOConfig

    return [field.name for field in dataclasses.fields(GRPOConfig)]


def _checked_values(path: str | Path, given: dict[str, Any]) -> dict[str, Any]:
    """Return the values as the types that GRPOConfig declares, which does not check them itself."""
    from verifiers.train.config import GRPOConfig

    types = get_type_hints(GRPOConfig)
    checked = {}
    for key, value in given.items():
        try:
            checked[key] = TypeAdapter(types[key]).validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ConfigError(f"{path}: trainer.{key}: {reason} (given: {value!r}).") from None
    return checked


def _check_keys(path: str | Path, table: str, given: dict[str, Any], known: Iterable[str]) -> None:
    names = list(known)
    for key in given:
        if key not in names:
            nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"it takes {', '.join(sorted(names)[:12])}."
            place = f"[{table}]" if table else "the file"
            raise ConfigError(f"{path}: {place} has an unknown key {key!r}; {hint}")
