"""The configuration file: YAML or TOML, checked as a whole before anything is loaded.

Every mistake is a ConfigError of one sentence that names the key, the value and the remedy.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from verifiers.data.curriculum import Curriculum, staged_curriculum_from
from verifiers.errors import ConfigError
from verifiers_dataserver.scores import BUILTIN
from verifiers_dataserver.tasks import is_answer_from

KNOWN_WITHOUT_TABLE = (*BUILTIN, "math", "rubric")


def _checked_place(how: str) -> str:
    if not is_answer_from(how):
        raise ValueError("give 'text', 'after_think', 'boxed' or 'xml:TAG'")
    return how


def _checked_target(target: str) -> str:
    module, colon, name = target.partition(":")
    if not (module and colon and all(part.isidentifier() for part in [*module.split("."), *name.split(".")])):
        raise ValueError("write it as 'module:function'")
    return target


def _checked_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError("give an address that begins with http:// or https://")
    return url


AnswerPlace = Annotated[str, AfterValidator(_checked_place)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GraderUse(BaseModel):
    """One grader of a dataset. Every further key is an option of the grader.

    Attributes:
        use: a built-in grader, or a name under `graders`.
        gate: its score multiplies the mean instead of counting in it.
        name: what metrics and errors call it; `use` when left out.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    use: str
    weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    gate: bool = False
    name: str | None = None

    @property
    def shown_as(self) -> str:
        return self.name or self.use

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class GraderTable(_Table):
    """A grader under `graders`: give `python` or `http`.

    Attributes:
        python: "module:function"; called in a worker process for each completion.
        path: directory that the module is in, where it is not installed; relative to the file.
        http: URL that completions are posted to.
        token_var: environment variable that holds the bearer token for `http`.
        timeout_s: seconds for one call.
        workers: calls at once.
    """

    python: Annotated[str, AfterValidator(_checked_target)] | None = None
    path: str | None = None
    http: Annotated[str, AfterValidator(_checked_url)] | None = None
    token_var: str | None = None
    timeout_s: Seconds = 10.0
    workers: int = Field(default=2, ge=1, le=64)


class EnvironmentTable(_Table):
    """An installed environment as the source of a dataset.

    Attributes:
        id: its name.
        args: keyword arguments of its load_environment.
        split: "train" or "eval".
        timeout_s: seconds that its rubric may take for one group; always less than half of
            server.grade_timeout_s, for a second chance.
        concurrency: groups that its rubric grades at once.
    """

    id: str
    args: dict[str, Any] = Field(default_factory=dict)
    split: Literal["train", "eval"] = "train"
    timeout_s: Seconds = 60.0
    concurrency: int = Field(default=8, ge=1, le=256)


class HubTable(_Table):
    """A Hugging Face dataset; `path` is a name on the hub, or a directory of data files or `save_to_disk`."""

    path: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None


class DatasetTable(_Table):
    """A dataset; its source is one of `jsonl`, `hf` and `environment`.

    Attributes:
        jsonl: a file with one JSON object a line; relative to the configuration file.
        prompt_key: column of the prompt: a text (the user's) or messages.
        answer_key: column of the answer.
        system_prompt: put before prompts that are texts; a row's own `system_prompt` comes first.
        metadata: keys of a row's `metadata` that clients get; everything else stays here.
        answer_from: which part of a completion is its answer, unless a grader says otherwise.
        graders: names or tables; an environment's default is its rubric.
    """

    jsonl: str | None = None
    hf: HubTable | None = None
    environment: EnvironmentTable | None = None
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    system_prompt: str | None = None
    metadata: list[str] = Field(default_factory=list)
    answer_from: AnswerPlace = "after_think"
    graders: list[str | GraderUse] = Field(default_factory=list)

    def uses(self) -> list[GraderUse]:
        given = [GraderUse(use=item) if isinstance(item, str) else item for item in self.graders]
        return given or ([GraderUse(use="rubric")] if self.environment is not None else [])


class ServerTable(_Table):
    """The server's address and limits.

    Attributes:
        token_var: environment variable that holds the bearer token that requests must bring, if any.
        max_body_mib: longest request body, in MiB.
        max_batch: most samples or completions in one request.
        grade_timeout_s: seconds after which what is not graded yet is answered as an error.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=9000, ge=0, le=65535)
    token_var: str | None = None
    max_body_mib: int = Field(default=8, ge=1, le=1024)
    max_batch: int = Field(default=1024, ge=1, le=65536)
    grade_timeout_s: Seconds = 60.0


class _File(_Table):
    datasets: dict[str, DatasetTable] = Field(min_length=1)
    curriculum: dict[str, Any] | None = None
    graders: dict[str, GraderTable] = Field(default_factory=dict)
    server: ServerTable = Field(default_factory=ServerTable)
    total_steps: int | None = Field(default=None, ge=1)


class Configuration(BaseModel):
    """A whole configuration.

    Attributes:
        path: the file.
        curriculum: stages over the datasets; where the file has none, one stage of all datasets with equal
            weights.
        total_steps: optimizer steps of a run, for `/meta`; the last stage's end when left out.
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    path: Path
    datasets: dict[str, DatasetTable]
    curriculum: Curriculum
    graders: dict[str, GraderTable]
    server: ServerTable
    total_steps: int | None

    def resolve(self, path: str) -> Path:
        """Return a path of the file, which may be relative to it."""
        return self.path.parent / Path(path).expanduser()


def load_configuration(path: str | Path) -> Configuration:
    """Read and check a configuration file; no dataset is loaded yet. Raises ConfigError."""
    place = Path(path)
    data = _read(place)
    try:
        file = _File.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{place}: {_sentence(error)}") from None
    try:
        curriculum = staged_curriculum_from(
            file.curriculum or {"stages": [{"name": "all", "datasets": list(file.datasets)}]}
        )
        _check_datasets(file)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    return Configuration(
        path=place.resolve(),
        datasets=file.datasets,
        curriculum=curriculum,
        graders=file.graders,
        server=file.server,
        total_steps=file.total_steps,
    )


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"the configuration {str(path)!r} does not exist; give the path of a YAML or TOML file."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {str(path)!r} cannot be read: {error}.") from None
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}.") from None
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None


def _check_datasets(file: _File) -> None:
    for name, table in file.graders.items():
        if (table.python is None) == (table.http is None):
            raise ConfigError(f"graders.{name} must have either python or http; give one of them.")
        if name in KNOWN_WITHOUT_TABLE:
            raise ConfigError(f"graders.{name} has the name of a built-in grader; give it another.")
    for name, dataset in file.datasets.items():
        where = f"datasets.{name}"
        if not name or ":" in name:
            raise ConfigError(f"the dataset {name!r} needs a name without ':', which ends it in sample ids.")
        sources = [key for key in ("jsonl", "hf", "environment") if getattr(dataset, key) is not None]
        if len(sources) != 1:
            raise ConfigError(
                f"{where} has {' and '.join(sources) or 'no source'}; give exactly one of jsonl, hf and environment."
            )
        if dataset.environment is not None:
            _check_arguments(where, dataset.environment.args)
        _check_uses(where, dataset, file)


def _check_arguments(where: str, arguments: dict[str, Any]) -> None:
    """Refuse arguments that are not JSON: as JSON they go to the process that grades."""
    for name, value in arguments.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{where}.environment.args.{name} is {value!r:.80}, which is not JSON ({error}); "
                "give texts, numbers, lists and tables, a date in quotation marks."
            ) from None


def _check_uses(where: str, dataset: DatasetTable, file: _File) -> None:
    uses = dataset.uses()
    if not uses:
        raise ConfigError(f"{where}.graders is empty; name at least one grader, such as 'exact'.")
    for use in uses:
        known = [*KNOWN_WITHOUT_TABLE, *file.graders]
        if use.use not in known:
            raise ConfigError(f"{where}.graders uses {use.use!r}, which is not a grader; {_nearest(use.use, known)}")
        if use.use == "rubric" and dataset.environment is None:
            raise ConfigError(f"{where}.graders uses 'rubric', but only an environment has one; use another grader.")
    names = [use.shown_as for use in uses]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{where}.graders has {twice[0]!r} twice; tell them apart by `name`.")
    if not any(use.weight for use in uses if not use.gate):
        raise ConfigError(f"{where}.graders has weights that sum to 0 beside its gates; give one a weight above 0.")


def _sentence(error: ValidationError) -> str:
    # of a union's branches the one that got furthest is the one that was meant
    first = max(error.errors(), key=lambda found: len(found["loc"]))
    place = ".".join(str(part) for part in first["loc"] if part not in ("str", "GraderUse"))
    place = place or "the file"
    if first["type"] == "extra_forbidden":
        owner, _, key = place.rpartition(".")
        return f"{owner or 'the file'} has an unknown key {key!r}; {_nearest(key, _keys_at(first['loc']))}"
    if first["type"] == "missing":
        owner, _, key = place.rpartition(".")
        return f"{owner or 'the file'} has no {key!r}; add it."
    if first["type"] == "too_short":
        return f"{place} is empty; name at least one dataset."
    if first["type"] in ("model_type", "dict_type"):
        return f"{place} is {first['input']!r:.80}, but it must be a table of keys and values."
    message = first["msg"].removeprefix("Value error, ")
    return f"{place} is {first['input']!r:.80}: {message[:1].lower() + message[1:]}."


_TABLES: dict[str, type[BaseModel]] = {
    "environment": EnvironmentTable,
    "hf": HubTable,
    "server": ServerTable,
}


def _keys_at(location: tuple[int | str, ...]) -> list[str]:
    """Return the keys that may stand beside the last part of a location."""
    if len(location) == 1:
        return list(_File.model_fields)
    by_parent = _TABLES.get(str(location[-2]))
    if by_parent is None:
        by_parent = GraderTable if location[0] == "graders" else DatasetTable
    return list(by_parent.model_fields)


def secret_in(variable: str | None) -> str | None:
    """Return the token in an environment variable; None without one. Raises ConfigError where it is not set."""
    if variable is None:
        return None
    token = os.environ.get(variable, "")
    if not token:
        raise ConfigError(f"the token's variable {variable!r} is not set, or empty; set it to the secret.")
    return token


def _nearest(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(sorted(known))}."
