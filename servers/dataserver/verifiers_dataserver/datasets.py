"""The datasets of a configuration: their rows, loaded and checked once, at the start."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from verifiers.envs.datasets import format_prompt, row_fields
from verifiers.errors import ConfigError
from verifiers_dataserver.config import Configuration, DatasetTable, EnvironmentTable, HubTable
from verifiers_dataserver.tasks import Row

log = logging.getLogger("verifiers_dataserver")

_BATCH = 1000
_GRADERS_ONLY = frozenset({"metadata", "info", "task", "system_prompt"})


class _Table(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


class TaskRows:
    """A dataset as rows; `environment` is the one whose rows these are, None for others."""

    def __init__(self, name: str, table: DatasetTable, source: _Table, environment: Any = None) -> None:
        self.name = name
        self.table = table
        self.environment = environment
        self.in_memory = isinstance(source, list)
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def row(self, index: int) -> Row:
        """Return row number `index`. Raises ConfigError where it has no prompt, or one of a wrong kind."""
        raw = self._source[index]
        sample_id = f"{self.name}:{index}"
        if self.environment is not None:
            try:
                prompt, answer, task, info = row_fields(raw)
            except ConfigError as error:
                raise ConfigError(f"row {index} of dataset {self.name!r}: {error}") from None
            return Row(sample_id, prompt, answer, task, info, self._shown(info))
        prompt = self.prompt(raw, index)
        metadata = _mapping(raw.get("metadata"))
        info = {**metadata, **_mapping(raw.get("info"))}
        # graders also get the columns that have no meaning of their own here
        known = {self.table.prompt_key, self.table.answer_key, *_GRADERS_ONLY}
        info = {**{key: value for key, value in raw.items() if key not in known}, **info}
        answer = raw.get(self.table.answer_key)
        return Row(sample_id, prompt, "" if answer is None else answer, self.name, info, self._shown(metadata))

    def prompt(self, raw: Mapping[str, Any], index: int) -> list[dict[str, Any]] | str:
        """Return the prompt of a raw row of a file or a table."""
        prompt = raw.get(self.table.prompt_key)
        if isinstance(prompt, str):
            return format_prompt(prompt, raw.get("system_prompt") or self.table.system_prompt)
        if isinstance(prompt, Sequence) and prompt and all(isinstance(message, Mapping) for message in prompt):
            return [dict(message) for message in prompt]
        raise ConfigError(
            f"row {index} of dataset {self.name!r} has {prompt!r:.80} as {self.table.prompt_key!r}; "
            "give a text or a list of messages, or name another column as prompt_key."
        )

    def _shown(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        return {key: metadata[key] for key in self.table.metadata if key in metadata}


def load_datasets(configuration: Configuration) -> dict[str, TaskRows]:
    """Load all datasets. Raises ConfigError where one cannot be loaded, has no rows, or rows without prompts."""
    loaded = {}
    for name, table in configuration.datasets.items():
        environment = None
        source: _Table
        if table.jsonl is not None:
            source = _read_jsonl(configuration.resolve(table.jsonl), name)
        elif table.hf is not None:
            source = _read_hub(table.hf, configuration, name)
        else:
            assert table.environment is not None
            environment, source = _read_environment(table.environment, name)
        if not len(source):
            raise ConfigError(f"dataset {name!r} has no rows; give it at least one.")
        if table.hf is not None:
            source = servable(source, name, table)
        loaded[name] = TaskRows(name, table, source, environment)
        _check_rows(loaded[name], source)
    return loaded


def _check_rows(rows: TaskRows, source: _Table) -> None:
    """Check a file as a whole, for it is in memory; of a table all prompts, and what one row holds."""
    table = rows.table
    if table.jsonl is not None:
        for index in range(len(source)):
            rows.row(index)
        return
    first = rows.row(0)
    for key, value in {"prompt": first.prompt, "answer": first.answer, **first.info}.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"dataset {rows.name!r}: row 0 has {value!r:.80} as {key!r}, which is not JSON ({error}), so "
                "no grader can get it; make it a text or a number."
            ) from None
    if table.hf is not None:
        for index, prompt in enumerate(prompts_of(source, table.prompt_key)):
            rows.prompt({table.prompt_key: prompt}, index)


def _read_jsonl(path: Path, name: str) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ConfigError(
                        f"line {number} of {path} (dataset {name!r}) is not valid JSON: {error}."
                    ) from None
                if not isinstance(row, dict):
                    raise ConfigError(f"line {number} of {path} (dataset {name!r}) is not an object: {line[:60]!r}.")
                rows.append(row)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset {name!r}: {path} cannot be read: {error}.") from None
    return rows


def _read_hub(table: HubTable, configuration: Configuration, name: str) -> _Table:
    import datasets

    directory = configuration.resolve(table.path)
    try:
        if (directory / "state.json").exists() or (directory / "dataset_dict.json").exists():
            found: Any = datasets.load_from_disk(str(directory))
            if isinstance(found, datasets.DatasetDict):
                found = found[table.split]
        else:
            place = str(directory) if directory.exists() else table.path
            found = datasets.load_dataset(place, table.name, split=table.split, revision=table.revision)
    except Exception as error:
        # the libraries below raise of every kind, down to KeyError for a split
        raise ConfigError(
            f"dataset {name!r}: {table.path!r} (split {table.split!r}) cannot be loaded: "
            f"{type(error).__name__}: {error}."
        ) from error
    loaded: _Table = found
    return loaded


def _read_environment(table: EnvironmentTable, name: str) -> tuple[Any, _Table]:
    from verifiers.envs.multiturn_env import SingleTurnEnv
    from verifiers.envs.registry import load_environment

    try:
        environment = load_environment(table.id, **table.args)
    except ConfigError as error:
        raise ConfigError(f"dataset {name!r}: {error}") from error
    members = list(getattr(environment, "envs", None) or [environment])
    if not all(isinstance(member, SingleTurnEnv) for member in members):
        log.warning(
            "dataset %r: the environment %r is more than a prompt and an answer; clients get its prompts "
            "and its rubric, but not its turns and tools.",
            name,
            table.id,
        )
    rows: _Table = environment.get_dataset() if table.split == "train" else environment.get_eval_dataset()
    return environment, rows


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


# -- columns of a Hugging Face table that cannot be served: found at the start, not by a grade -----------------------


def servable(source: Any, name: str, table: DatasetTable) -> Any:
    """Return the table without columns that are not JSON, such as dates and images: no grader could get them.

    Raises ConfigError for such a column that the configuration or the format of rows names.
    """
    wanted = {table.prompt_key, table.answer_key, "system_prompt", "metadata", "info"}
    dropped = [column for column in source.column_names if not _is_json(source, column)]
    for column in dropped:
        if column in wanted:
            raise ConfigError(
                f"dataset {name!r}: the column {column!r} holds {source.features[column]}, which is not JSON; "
                "make it texts or numbers, or name another column as prompt_key and answer_key."
            )
    if dropped:
        log.warning(
            "dataset %r: graders do not get the columns %s, for what they hold is not JSON.",
            name,
            ", ".join(map(repr, dropped)),
        )
    return source.remove_columns(dropped) if dropped else source


def prompts_of(source: Any, column: str) -> Iterator[Any]:
    for batch in source.select_columns([column]).iter(_BATCH):
        yield from batch[column]


def _is_json(source: Any, column: str) -> bool:
    import pyarrow

    # of what is stored: rows of dates may begin with an empty one
    pending = [source.data.schema.field(column).type]
    while pending:
        kind = pending.pop()
        types = pyarrow.types
        if (
            types.is_temporal(kind)
            or types.is_decimal(kind)
            or types.is_binary(kind)
            or types.is_large_binary(kind)
            or types.is_fixed_size_binary(kind)
        ):
            return False
        pending += [kind.field(place).type for place in range(kind.num_fields)]
    try:
        json.dumps(source.select_columns([column])[0][column])
    except (TypeError, ValueError):
        return False
    return True
