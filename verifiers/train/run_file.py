"""A training run as a TOML file, which `vf-train run.toml` reads; docs/reference/run-file.md describes the tables.

Unknown keys are errors that name the nearest known one.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from verifiers.data.adaptive_curriculum import CurriculumPolicy, curriculum_from
from verifiers.data.curriculum import Curriculum
from verifiers.errors import ConfigError
from verifiers.installation import missing_extra
from verifiers.workers.settings import WorkerSettings


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EnvironmentTable(_Table):
    """`[environment]`: what is trained on."""

    id: str = Field(description="Name of an installed environment package or module.")
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of its load_environment.")


class ModelTable(_Table):
    """`[model]`: the policy's start."""

    path: Annotated[str, AfterValidator(os.path.expanduser)] = Field(
        description="Directory written by save_pretrained, or a hub name."
    )


class ServerTable(_Table):
    """`[server]`: where rollouts come from: `url` or `launch`, or without either the trainer's own process."""

    url: str | None = Field(default=None, description="Base URL of a running server, with /v1.")
    launch: str | None = Field(default=None, description="Installed server to start beside the trainer: 'embedded'.")
    args: list[str] = Field(default_factory=list, description="Further command-line arguments of that server.")
    start_timeout: float = Field(default=180.0, gt=0, description="How long it may take to start, in seconds.")


class TeacherTable(_Table):
    """`[teacher]`: distil this model into the policy; `teacher_coef` and other settings of it are in `[trainer]`."""

    url: str | None = Field(default=None, description="Base URL of its running server, with /v1.")
    model: str | None = Field(default=None, description="Its name there; the first listed if left out.")
    path: Annotated[str, AfterValidator(os.path.expanduser)] | None = Field(
        default=None, description="Directory or hub name to serve beside the trainer, by the embedded server."
    )


class DemonstrationsTable(_Table):
    """`[demonstrations]`: conversations that are trained on by cross-entropy, beside rollouts."""

    dataset: Annotated[str, AfterValidator(os.path.expanduser)] = Field(
        description="JSON lines, a Parquet file, a directory of save_to_disk, or a hub name."
    )
    share: float = Field(default=0.25, gt=0, description="How many an update has, as a share of its rollouts.")
    coef: float = Field(default=1.0, ge=0, description="What the mean cross-entropy of their tokens counts.")


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
    teacher: TeacherTable | None = Field(default=None)
    demonstrations: DemonstrationsTable | None = Field(default=None)
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
        """Return the curriculum, if the file has one; `seed` where it gives none of its own."""
        return None if self.curriculum is None else curriculum_from(self.curriculum, seed)


def load_run_file(path: str | Path) -> RunFile:
    """Read and check a run file; nothing is loaded or started yet."""
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(
            f"the run file {str(path)!r} does not exist; see examples/ for one to start from."
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the run file {str(path)!r} cannot be read: {error}.") from None
    try:
        run = RunFile.model_validate(data)
    except ValidationError as error:
        # keys first: one that is misspelled is also one that is missing
        first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        place = [str(part) for part in first["loc"]]
        if first["type"] == "extra_forbidden":
            raise _unknown_key(path, place) from None
        raise ConfigError(f"{path}: {'.'.join(place)}: {first['msg']} (given: {first['input']!r}).") from None
    given = _checked_trainer(path, run.trainer)
    _refuse_both(path, run)
    try:
        run.curriculum_of(0)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return run.model_copy(update={"trainer": given})


def _refuse_both(path: str | Path, run: RunFile) -> None:
    """Refuse two answers to one question, of which one would be ignored."""
    if run.server.url is not None and run.server.launch is not None:
        raise ConfigError(f"{path}: [server] has both url and launch; give url for a running server, else launch.")
    if run.server.args and run.server.launch is None:
        raise ConfigError(f"{path}: [server] args has no effect without launch; give that too, or leave it out.")
    for key, other in itertools.product(("url", "launch"), ("server_urls", "server_url")):
        if getattr(run.server, key) is not None and run.trainer.get(other):
            raise ConfigError(
                f"{path}: [server] has {key} and [trainer] has {other}, so one would be ignored; leave one out."
            )
    teacher = run.teacher
    if teacher is not None and ((teacher.url is None) == (teacher.path is None) or run.trainer.get("teacher_url")):
        raise ConfigError(f"{path}: [teacher] needs either url (of a running server) or path (of a model), once.")
    if run.environment is None and not run.environments:
        raise ConfigError(f"{path}: environment: Field required (give [environment], or [environments.NAME] tables).")
    for name in ("environment", "eval_environment"):
        if getattr(run, name) is not None and getattr(run, f"{name}s"):
            raise ConfigError(f"{path} has both [{name}] and [{name}s]; give one environment, or several by name.")
    says = {"eval_strategy", "eval_on_start"} & run.trainer.keys()
    if (run.eval_environment or run.eval_environments) and not says:
        raise ConfigError(
            f"{path}: an eval environment has no effect without eval_strategy; give [trainer] that, such as 'steps', "
            "or leave the table out."
        )


def _checked_trainer(path: str | Path, given: dict[str, Any]) -> dict[str, Any]:
    """Return `[trainer]` as the types that GRPOConfig declares, which does not check them itself."""
    try:
        from verifiers.train.config import GRPOConfig
    except ImportError as error:
        sentence = missing_extra("a run file", error)
        if sentence is None:
            raise
        raise ConfigError(sentence) from error

    types = get_type_hints(GRPOConfig)
    fields = {field.name for field in dataclasses.fields(GRPOConfig)}
    checked = {}
    for key, value in given.items():
        if key not in fields:
            raise _unknown_key(path, ["trainer", key], fields)
        if key == "resume_from_checkpoint":
            raise ConfigError(
                f"{path}: [trainer] resume_from_checkpoint has no effect here: vf-train resumes from the newest "
                "complete checkpoint of output_dir; another one is given in Python, "
                "train(resume_from_checkpoint=...)."
            )
        kinds = {types[key], *get_args(types[key])}
        if isinstance(value, bool) and bool not in kinds and kinds & {int, float}:
            raise ConfigError(f"{path}: trainer.{key} is {str(value).lower()}; it is not switched on or off.")
        try:
            checked[key] = TypeAdapter(types[key]).validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ConfigError(f"{path}: trainer.{key}: {reason} (given: {value!r}).") from None
    return checked


def _unknown_key(path: str | Path, place: Sequence[str], known: Iterable[str] = ()) -> ConfigError:
    """Return the refusal of a key at its place in the file, with the nearest that is known there."""
    *tables, key = place
    names = list(known)
    if not names:
        table: Any = RunFile.model_fields[tables[0]].annotation if tables else RunFile
        models = [one for one in (table, *get_args(table)) if isinstance(one, type) and issubclass(one, BaseModel)]
        names = list(models[0].model_fields)
    from verifiers.train.conflicts import unknown_setting

    where = f"[{'.'.join(tables)}]" if tables else "the file"
    return ConfigError(f"{path}: {where} has an unknown key {key!r}; {unknown_setting(key, names)}")
