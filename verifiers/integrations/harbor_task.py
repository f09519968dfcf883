"""Task folders in Harbor's format: task.toml, instructions, tests and solutions, read and checked."""

from __future__ import annotations

import fnmatch
import hashlib
import io
import json
import logging
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from verifiers.errors import ConfigError
from verifiers.rubrics.scoring import is_finite_number

logger = logging.getLogger("verifiers.envs")

TASK_FILE = "task.toml"
ORACLE = "oracle"
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_SIZE = re.compile(r"(\d*\.?\d+)\s*([KMG])")
_UNITS_MB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
_STEP_NAME = re.compile(r"\w[\w.-]*")
_COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")


# -- task.toml, schemas 1.0 to 1.4; what it has beside these is named once and left out -----------------------------


class _TaskSection(BaseModel):
    model_config = ConfigDict(extra="allow")


class Healthcheck(_TaskSection):
    """A command that has to succeed before the agent begins, with the meaning of docker's HEALTHCHECK."""

    command: str
    interval_sec: float = Field(default=5.0, gt=0)
    timeout_sec: float = Field(default=30.0, gt=0)
    start_period_sec: float = Field(default=0.0, ge=0)
    start_interval_sec: float = Field(default=5.0, gt=0)
    retries: int = Field(default=3, ge=1)


class _Phase(_TaskSection):
    user: str | int | None = None
    network_mode: str | None = None
    allowed_hosts: list[str] | None = None


class AgentSection(_Phase):
    timeout_sec: float | None = Field(default=None, gt=0)


class VerifierSection(_Phase):
    timeout_sec: float | None = Field(default=None, gt=0)
    env: dict[str, str] = {}
    environment_mode: str | None = None
    environment: dict[str, Any] | None = None
    collect: list[dict[str, Any]] = []


class ContainerSection(_TaskSection):
    """What the container is made of and may use."""

    build_timeout_sec: float = Field(default=600.0, gt=0)
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: float | None = Field(default=None, gt=0)
    storage_mb: float | None = Field(default=None, gt=0)
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: Any = None
    mcp_servers: list[Any] = []
    skills_dir: str | None = None
    env: dict[str, str] = {}
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    network_mode: Literal["public", "no-network", "allowlist"] = "public"
    allowed_hosts: list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_older_schemas(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for name in ("memory", "storage"):
            if (size := data.pop(name, None)) is None:
                continue
            found = _SIZE.fullmatch(str(size).strip().upper())
            if found is None:
                raise ValueError(f"{name} = {size!r} is no size such as '512M' or '2G'")
            data.setdefault(f"{name}_mb", float(found[1]) * _UNITS_MB[found[2]])
        if data.pop("allow_internet", None) is False:
            data.setdefault("network_mode", "no-network")
        return data


class StepSection(_TaskSection):
    name: str
    agent: AgentSection = AgentSection()
    verifier: VerifierSection = VerifierSection()
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: list[str | dict[str, Any]] = []


class SolutionSection(_TaskSection):
    env: dict[str, str] = {}


class TaskFile(_TaskSection):
    """The content of a task.toml."""

    schema_version: str | None = None
    version: str | None = None
    task: dict[str, Any] | None = None
    metadata: dict[str, Any] = {}
    source: str | None = None
    agent: AgentSection = AgentSection()
    verifier: VerifierSection = VerifierSection()
    environment: ContainerSection = ContainerSection()
    solution: SolutionSection = SolutionSection()
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[StepSection] = []
    artifacts: list[str | dict[str, Any]] = []


# -- folders --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskStep:
    """One instruction with its tests; a task without steps has one, in the task's own folder."""

    folder: Path
    instruction: str
    agent_timeout_s: float
    agent_user: str | None
    tests: tuple[Path, ...]
    verifier_timeout_s: float
    verifier_user: str | None
    verifier_env: Mapping[str, str]
    solution: Path
    min_reward: Mapping[str, float]
    healthcheck: Healthcheck | None

    @property
    def test(self) -> Path:
        """The test.sh that runs: the step's own, or else the task's."""
        return next(script for place in reversed(self.tests) if (script := place / "test.sh").is_file())


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A task folder.

    Attributes:
        digest: of the folder's files, so that a task that was edited is another one.
        image_digest: of the files that the image is built from.
        artifacts: paths in the container that are kept after a rollout.
    """

    name: str
    path: Path
    table: TaskFile
    digest: str
    image_digest: str
    steps: tuple[TaskStep, ...]
    artifacts: tuple[str, ...]

    @property
    def environment(self) -> ContainerSection:
        return self.table.environment


def read_tasks(path: str | Path, names: Sequence[str] | None = None) -> list[HarborTask]:
    """Return the tasks of a task folder, or of a directory of them, in the order of their names.

    Args:
        names: those to take, by the names of their folders; patterns such as "git-*" too. None for all.

    Raises:
        ConfigError: there is none, one cannot be read, or one needs what cannot be had here.
    """
    root = Path(path).expanduser().resolve()
    folders = [root] if (root / TASK_FILE).is_file() else sorted(file.parent for file in root.glob(f"*/{TASK_FILE}"))
    if not folders:
        raise ConfigError(f"{str(path)!r} is no task folder and has none: there is no {TASK_FILE} in it.")
    if names is not None:
        chosen = named([folder.name for folder in folders], names)
        folders = [folder for folder in folders if folder.name in chosen]
    unknown: dict[str, str] = {}
    tasks = [_read_task(folder, unknown) for folder in folders]
    for key, folder_name in unknown.items():
        logger.warning("task.toml has a key that is not known here, %s (first in %r); ignoring it.", key, folder_name)
    return tasks


def named(known: Sequence[str], names: Sequence[str]) -> set[str]:
    """Return those that have one of the names or match a pattern. Raises ConfigError where none does."""
    found = {one for one in known if any(fnmatch.fnmatchcase(one, name) for name in names)}
    if not found:
        raise ConfigError(f"no task is named {', '.join(map(repr, names))}; there are {list(known[:10])}.")
    return found


def trained_and_evaluated(names: Sequence[str], eval_tasks: Sequence[str]) -> tuple[set[str], set[str]]:
    """Return the names that are trained and those that are evaluated: all are both where none is held out."""
    if not eval_tasks:
        return set(names), set(names)
    evaluated = named(names, eval_tasks)
    if not (trained := set(names) - evaluated):
        raise ConfigError(f"eval_tasks={list(eval_tasks)} takes every task, and none is left to train on.")
    return trained, evaluated


def _read_task(folder: Path, unknown: dict[str, str]) -> HarborTask:
    try:
        table = TaskFile.model_validate(tomllib.loads((folder / TASK_FILE).read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, ValidationError) as error:
        raise ConfigError(f"{folder / TASK_FILE} cannot be read: {_first_problem(error)}.") from error
    for key in _unknown_keys(table):
        unknown.setdefault(key, folder.name)
    if missing := list(_refusals(table, folder)):
        raise ConfigError(f"the task {folder.name!r} needs {'; '.join(missing)}; leave it out by tasks=.")
    return HarborTask(
        name=folder.name,
        path=folder,
        table=table,
        digest=content_digest(folder),
        image_digest=content_digest(folder / "environment"),
        steps=tuple(_steps(table, folder)),
        artifacts=(
            "/logs/artifacts",
            *(one if isinstance(one, str) else str(one["source"]) for one in _artifacts(table)),
        ),
    )


def _steps(table: TaskFile, folder: Path) -> Iterator[TaskStep]:
    for step in table.steps or [StepSection(name="")]:
        if step.name and not _STEP_NAME.fullmatch(step.name):
            raise ConfigError(f"the task {folder.name!r} has a step {step.name!r}, which is no name of a folder.")
        own = folder / "steps" / step.name if step.name else folder
        tests = tuple(place for place in dict.fromkeys((folder / "tests", own / "tests")) if place.is_dir())
        if not any((place / "test.sh").is_file() for place in tests):
            raise ConfigError(f"the task {folder.name!r} has no {own.relative_to(folder.parent) / 'tests/test.sh'}.")
        try:
            instruction = without_canary((own / "instruction.md").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{own / 'instruction.md'} cannot be read: {error}.") from error
        user = step.agent.user if step.agent.user is not None else table.agent.user
        judge = step.verifier.user if step.verifier.user is not None else table.verifier.user
        least = step.min_reward
        yield TaskStep(
            folder=own,
            instruction=instruction,
            agent_timeout_s=step.agent.timeout_sec or table.agent.timeout_sec or 3600.0,
            agent_user=None if user is None else str(user),
            tests=tests,
            verifier_timeout_s=step.verifier.timeout_sec or table.verifier.timeout_sec or 600.0,
            verifier_user=None if judge is None else str(judge),
            verifier_env={**table.verifier.env, **step.verifier.env},
            solution=own / "solution" if (own / "solution").is_dir() else folder / "solution",
            min_reward=least if isinstance(least, dict) else {} if least is None else {"reward": least},
            healthcheck=step.healthcheck,
        )


def _artifacts(table: TaskFile) -> list[str | dict[str, Any]]:
    return [*table.artifacts, *(one for step in table.steps for one in step.artifacts)]


def _refusals(table: TaskFile, folder: Path) -> Iterator[str]:
    """Yield what the task needs and cannot be had here."""
    environment = table.environment
    if environment.os.lower() != "linux":
        yield f"os = {environment.os!r}, and containers run Linux"
    if environment.gpus:
        yield f"gpus = {environment.gpus}"
    if environment.tpu is not None:
        yield "a TPU"
    if environment.mcp_servers:
        yield "MCP servers in the task (mcp_servers)"
    if any((folder / "environment" / name).exists() for name in _COMPOSE_FILES):
        yield "several services (docker-compose)"
    if environment.docker_image is None and not (folder / "environment/Dockerfile").is_file():
        yield "an environment/Dockerfile or a docker_image, and has neither"
    verifiers = [table.verifier, *(step.verifier for step in table.steps)]
    if any(each.environment_mode == "separate" or each.environment for each in verifiers):
        yield "a container of its own for the verifier"
    if any(each.collect for each in verifiers):
        yield "verifier.collect"
    described = [one for one in _artifacts(table) if isinstance(one, dict)]
    if any(one.get("service") not in (None, "main") or "source" not in one for one in described):
        yield "artifacts of another service"
    for where in (environment.env, table.solution.env, *(each.env for each in verifiers)):
        for name, value in where.items():
            for match in _VARIABLE.finditer(value):
                if match[2] is None and match[1] not in os.environ:
                    yield f"the variable {match[1]} for {name}, which is not set"


def read_rewards(name: str, text: str) -> tuple[str, dict[str, float]]:
    """Return why a file has no rewards, or "", and its rewards by name; a single number is named "reward"."""
    try:
        value = json.loads(text) if name.endswith(".json") else float(text)
    except (ValueError, RecursionError) as error:
        return f"{name} of the tests has no reward ({error}): {text[:200]!r}", {}
    rewards: dict[str, Any] = value if isinstance(value, dict) else {"reward": value}
    wrong = [key for key, number in rewards.items() if not is_finite_number(number)]
    if wrong or not rewards:
        return f"{name} of the tests has {wrong[0] if wrong else 'nothing'} as no finite number: {text[:200]!r}", {}
    return "", {key: float(number) for key, number in rewards.items()}


def resolved(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables with `${NAME}` and `${NAME:-default}` replaced from this process's own."""
    return {
        name: _VARIABLE.sub(lambda match: os.environ.get(match[1], match[2] or ""), value)
        for name, value in env.items()
    }


def without_canary(text: str) -> str:
    """Return an instruction without the canary lines at its beginning, which mark benchmarks in training data."""
    lines = text.splitlines()
    first = next((n for n, line in enumerate(lines) if line.strip() and not _CANARY.fullmatch(line.strip())), 0)
    return "\n".join(lines[first:]).strip()


def content_digest(folder: Path) -> str:
    """Return a hash of a folder's names, modes and contents."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        link = os.fsencode(os.readlink(file)) if file.is_symlink() else None
        if link is None and not file.is_file():
            continue
        size = file.stat().st_size if link is None else len(link)
        executable = link is None and os.access(file, os.X_OK)
        digest.update(os.fsencode(f"{file.relative_to(folder)}\0{executable}\0{size}\0"))
        with file.open("rb") if link is None else io.BytesIO(link) as content:
            hashlib.file_digest(content, lambda: digest)
    return digest.hexdigest()


def _unknown_keys(table: BaseModel, prefix: str = "") -> Iterator[str]:
    yield from (f"{prefix}{key}" for key in table.model_extra or {})
    for name in type(table).model_fields:
        value = getattr(table, name)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, BaseModel):
                yield from _unknown_keys(one, f"{prefix}{name}.")


def _first_problem(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error).rstrip(".")
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
