"""The datasets of a group's environments as one, and whose rows are whose."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from verifiers.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

    from verifiers.envs.environment import Environment

__all__ = ["Route", "group_datasets", "in_turn"]


class Route(NamedTuple):
    """Where a task belongs: the name of the environment, and the task's name inside it."""

    name: str
    task: str


def group_datasets(
    env_map: Mapping[str, Environment],
) -> tuple[Dataset | None, Dataset | None, dict[str, Route]]:
    """The training rows and the held-out rows of all environments, in their order, and the routes of their tasks.

    An environment without training rows has none in the first; the second is None where no environment has
    held-out rows, and else takes training rows from those that have none.

    Raises:
        ConfigError: a column that cannot hold what it holds in each of them.
    """
    routes: dict[str, Route] = {}
    # a plain row of an environment has its name as task, so that name is never another's
    for name in env_map:
        routes[name] = Route(name, name)
    renamed: dict[Route, str] = {}
    train = {name: env.get_dataset() for name, env in env_map.items() if env.dataset is not None}
    held_out: dict[str, Dataset] = {}
    if any(env.eval_dataset is not None for env in env_map.values()):
        held_out = {name: env.get_eval_dataset() for name, env in env_map.items()}
    tables = []
    for of_env in (train, held_out):
        parts = {name: _with_tasks(dataset, name, routes, renamed) for name, dataset in of_env.items()}
        tables.append(_concatenated(parts) if parts else None)
    return tables[0], tables[1], routes


def in_turn(names: Iterable[str]) -> list[int]:
    """Places of rows such that environments take turns, each with its rows in order, until all are through.

    Args:
        names: of each row's environment.
    """
    seen: Counter[str] = Counter()
    turns = []
    for place, name in enumerate(names):
        turns.append((seen[name], place))
        seen[name] += 1
    return [place for _, place in sorted(turns)]


def _with_tasks(dataset: Dataset, name: str, routes: dict[str, Route], renamed: dict[Route, str]) -> Dataset:
    dataset = dataset.remove_columns([column for column in ("id", "example_id") if column in dataset.column_names])
    if "task" not in dataset.column_names:
        return dataset.add_column("task", [name] * len(dataset))
    tasks = [task or name for task in dataset["task"]]
    return dataset.remove_columns("task").add_column(
        "task", [_outer_task(Route(name, task), routes, renamed) for task in tasks]
    )


def _outer_task(route: Route, routes: dict[str, Route], renamed: dict[Route, str]) -> str:
    """The group's name of an environment's task: the same, unless another environment has it."""
    known = renamed.get(route)
    if known is not None:
        return known
    task = route.task
    while routes.setdefault(task, route) != route:
        task = f"{route.name}/{task}"
    renamed[route] = task
    return task


def _concatenated(parts: Mapping[str, Dataset]) -> Dataset:
    """All rows as one table; a column that is missing somewhere is None there."""
    import datasets
    import pyarrow

    kinds: dict[str, dict[str, Any]] = {}
    for name, part in parts.items():
        for column, kind in part.features.items():
            kinds.setdefault(column, {})[name] = kind
    differing = [column for column, of_env in kinds.items() if len({repr(kind) for kind in of_env.values()}) > 1]
    alike = [
        part.remove_columns([column for column in differing if column in part.column_names])
        for part in parts.values()
    ]
    joined: Dataset = datasets.concatenate_datasets(alike)
    for column in differing:
        values: list[Any] = []
        for part in parts.values():
            values += list(part[column]) if column in part.column_names else [None] * len(part)
        if column == "info":
            # one struct type cannot hold two kinds of info without giving each the other's fields
            values = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
        try:
            joined = joined.add_column(column, pyarrow.array(values))
        except pyarrow.ArrowException as error:
            named = ", ".join(f"{kind} in {name!r}" for name, kind in kinds[column].items())
            raise ConfigError(
                f"The column {column!r} holds different things in the environments of the group ({named}); give it "
                "one type, for instance text."
            ) from error
    return joined
