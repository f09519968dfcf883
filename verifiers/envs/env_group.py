"""EnvGroup: several environments as one, each row played and scored by the one that it came from."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from verifiers.classic.hooks import by_requests
from verifiers.concurrency import gather_owned
from verifiers.envs.environment import Environment
from verifiers.errors import ConfigError
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import Run, refuse_unsupplied, require_one_each
from verifiers.rubrics.rubric import Rubric
from verifiers.rubrics.scoring import arguments_of
from verifiers.types import RewardFunc, RolloutScore, State

if TYPE_CHECKING:
    from datasets import Dataset

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")
Result = TypeVar("Result")


class Route(NamedTuple):
    """The home of a task: the name of the environment, and the task's name inside it."""

    name: str
    task: str


def group_datasets(
    env_map: Mapping[str, Environment],
) -> tuple[Dataset | None, Dataset | None, dict[str, Route]]:
    """Return the training rows and the eval rows of all environments, in their order, and the routes of their tasks.

    An environment without training rows has none in the first; the second is None where no environment has
    eval rows, and else takes training rows from those that have none.
    """
    # a plain row of an environment has its name as task, so that name is never another's
    routes = {name: Route(name, name) for name in env_map}
    train = {name: env.get_dataset() for name, env in env_map.items() if env.dataset is not None}
    evaluation: dict[str, Dataset] = {}
    if any(env.eval_dataset is not None for env in env_map.values()):
        evaluation = {name: env.get_eval_dataset() for name, env in env_map.items()}
    tables: list[Dataset | None] = []
    for of_env in (train, evaluation):
        parts = {name: _with_tasks(dataset, name, routes) for name, dataset in of_env.items() if len(dataset)}
        tables.append(_concatenated(parts) if parts else None)
    return tables[0], tables[1], routes


def alternating(names: Iterable[str]) -> list[int]:
    """Return the places of rows so that environments take turns, each with its rows in order, until all are through.

    The rows are given by the names of their environments.
    """
    seen: Counter[str] = Counter()
    turns = []
    for place, name in enumerate(names):
        turns.append((seen[name], place))
        seen[name] += 1
    return [place for _, place in sorted(turns)]


def _with_tasks(dataset: Dataset, name: str, routes: dict[str, Route]) -> Dataset:
    dataset = dataset.remove_columns([column for column in ("id", "example_id") if column in dataset.column_names])
    if "task" not in dataset.column_names:
        return dataset.add_column("task", [name] * len(dataset))
    tasks = [name if task in (None, "") else str(task) for task in dataset["task"]]
    outer = {task: _outer_task(Route(name, task), routes) for task in dict.fromkeys(tasks)}
    return dataset.remove_columns("task").add_column("task", [outer[task] for task in tasks])


def _outer_task(route: Route, routes: dict[str, Route]) -> str:
    """Return the group's name of an environment's task: the same, unless another environment has it."""
    task = route.task
    while routes.setdefault(task, route) != route:
        task = f"{route.name}/{task}"
    return task


def _concatenated(parts: Mapping[str, Dataset]) -> Dataset:
    """Join all rows into one table; a column that is missing somewhere is None there."""
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
            array = pyarrow.array(values)
            if column == "answer" and _as_text(array.to_pylist()) != _as_text(values):
                raise pyarrow.ArrowInvalid("4 beside 4.5 would become 4.0, and each dict get the keys of all")
            joined = joined.add_column(column, array)
        except pyarrow.ArrowException as error:
            named = ", ".join(f"{kind} in {name!r}" for name, kind in kinds[column].items())
            raise ConfigError(
                f"The column {column!r} holds different things in the environments of the group ({named}); give it "
                "one type, for instance text."
            ) from error
    return joined


def _as_text(values: list[Any]) -> str:
    return json.dumps(values, sort_keys=True, default=str)


class EnvGroupRubric(Rubric):
    """A rubric that scores each rollout by the rubric of the environment that its task belongs to.

    The classic calls (`score_rollout`, `score_rollouts`) give every rollout all metrics of the group, 0.0 where they
    are another environment's; `score_group` gives each rollout those of its environment, so that means are over what
    was measured. A rollout whose task no environment has is a failed grade.

    `routes` has the tasks that are not names of environments; `all_reward_names` are those of the group, sorted.
    """

    def __init__(self, env_map: Mapping[str, Environment], routes: Mapping[str, Route] | None = None) -> None:
        super().__init__()
        self.env_map = dict(env_map)
        self.routes = {**{name: Route(name, name) for name in env_map}, **(routes or {})}
        names = {name for env in self.env_map.values() for name in env.rubric.get_reward_func_names()}
        self.all_reward_names = sorted(names)

    def get_reward_func_names(self) -> list[str]:
        return self.all_reward_names

    def add_reward_func(self, func: RewardFunc, weight: float = 1.0) -> None:
        """Refuse the function: each environment of a group has reward functions of its own."""
        raise ConfigError(
            "a group has no reward functions of its own; add it to the rubric of one of its environments."
        )

    def refuse_unsupplied(self) -> None:
        for env in self.env_map.values():
            refuse_unsupplied(env)

    @property
    def has_group_funcs(self) -> bool:
        """True where some environment's rubric needs a prompt's whole group."""
        return any(getattr(env.rubric, "has_group_funcs", False) is True for env in self.env_map.values())

    def rubric_of(self, task: Any) -> Rubric | None:
        route = self.routes.get(task)
        return None if route is None else self.env_map[route.name].rubric

    async def score_states(self, states: Sequence[State]) -> list[RolloutScore]:
        async def score_task(task: Any, of_task: list[State]) -> list[RolloutScore]:
            route = self.routes.get(task)
            if route is None:
                error = ConfigError(f"no environment of the group has the task {task!r}, only {sorted(self.env_map)}")
                self.record_failure("EnvGroupRubric", of_task, error)
                return [RolloutScore(0.0) for _ in of_task]
            for state in of_task:
                state["task"] = route.task
            try:
                return await self.member_scores(self.env_map[route.name].rubric, of_task)
            finally:
                for state in of_task:
                    state["task"] = task

        return await _by_key([arguments_of(state)["task"] for state in states], states, score_task)


class EnvGroup(Environment):
    """Several environments as one: their rows in one dataset, each played, scored and tidied up by its own.

    Rows without a `task` get their environment's name. Rows that have one keep it; where two environments use the
    same, the second's becomes "name/task", so that every row finds back. Inside an environment a task has the name
    that it had there. Sampling arguments, tools, turns and rubrics are each environment's own; those given in a call
    win over them. Groups may hold groups.

    Args:
        envs: at least one; all in chat mode or all in completion mode.
        env_names: one for each, all different; env_0, env_1, ... when left out.
        **kwargs: as `Environment`.

    Attributes:
        env_map: environments by name.

    Raises:
        ConfigError (a ValueError): no environments, names that do not fit them, message types that differ, or
            datasets whose columns hold different things.
    """

    def __init__(self, envs: Sequence[Environment], env_names: Sequence[str] | None = None, **kwargs: Any) -> None:
        if isinstance(envs, Environment):
            raise ConfigError(f"EnvGroup takes a list of environments, not {envs!r}; give several, or it alone.")
        self.envs = list(envs)
        self.env_names = list(env_names) if env_names is not None else [f"env_{i}" for i in range(len(self.envs))]
        self._check_members()
        self.env_map: dict[str, Environment] = dict(zip(self.env_names, self.envs, strict=True))
        dataset, eval_dataset, self._routes = group_datasets(self.env_map)
        sampling_args = kwargs.pop("sampling_args", None)
        options = {
            "rubric": EnvGroupRubric(self.env_map, self._routes),
            "message_type": self.envs[0].message_type,
            "dataset": dataset,
            "eval_dataset": eval_dataset,
        }
        super().__init__(**{**options, **kwargs})
        # the usual defaults would win over what the environments were given
        self.sampling_args = dict(sampling_args or {})

    def _check_members(self) -> None:
        if not self.envs:
            raise ConfigError("EnvGroup requires at least one environment; give a list of them.")
        stranger = next((env for env in self.envs if not hasattr(env, "message_type")), None)
        if stranger is not None:
            raise ConfigError(f"A group's envs hold {stranger!r}; give environments, such as load_environment(name).")
        if len(self.env_names) != len(self.envs):
            raise ConfigError(
                f"Number of env_names must match number of envs: {len(self.env_names)} names were given for "
                f"{len(self.envs)} environments."
            )
        if len(set(self.env_names)) < len(self.env_names):
            raise ConfigError(f"The env_names {self.env_names!r} must all be different: rows are told apart by them.")
        kinds = {name: env.message_type for name, env in zip(self.env_names, self.envs, strict=True)}
        if len(set(kinds.values())) > 1:
            named = ", ".join(f"{name!r} is {kind}" for name, kind in kinds.items())
            raise ConfigError(
                "A group holds chat or completion environments, not both, since one column cannot hold both kinds of "
                f"prompts ({named}); make a group of each."
            )

    def rows_to_evaluate(self, n: int = -1) -> Dataset:
        """Return the evaluation rows; the first `n` alternate between the environments."""
        rows = self.get_eval_dataset()
        if n < 0:
            return rows
        routes = (self._routes.get(task) for task in rows["task"])
        return rows.select(alternating("" if route is None else route.name for route in routes)[:n])

    def get_env_for_task(self, task: str) -> Environment:
        """Return the environment that plays rows of this task; the first one where none has it."""
        return self._place(task)[0]

    @property
    def plays_groups_itself(self) -> bool:
        """Return whether `run_rollouts` is an override, here or in a member."""
        is_own = getattr(self.run_rollouts, "__func__", None) is not EnvGroup.run_rollouts
        return is_own or any(env.plays_groups_itself for env in self.envs)

    @by_requests
    async def run_rollouts(self, requests: Sequence[RolloutRequest], run: Run) -> list[Rollout]:
        """Play every request by the `run_rollouts` of its task's environment."""

        async def play(_: int, members: list[RolloutRequest]) -> list[Rollout]:
            env = self._place(members[0].task)[0]
            inside = [dataclasses.replace(request, task=self._place(request.task)[1]) for request in members]
            sampling_args = _merged(env.sampling_args, run.sampling_args)
            rollouts = await env.run_rollouts(inside, dataclasses.replace(run, sampling_args=sampling_args))
            require_one_each(env, inside, rollouts)
            for rollout, request in zip(rollouts, members, strict=True):
                rollout.task = rollout.state["task"] = request.task
            return rollouts

        return await _by_key([id(self._place(request.task)[0]) for request in requests], requests, play)

    async def play(self, state: State) -> None:
        """Play one rollout by the environment of its task."""
        task = state["task"]
        env, state["task"] = self._place(task)
        state["sampling_args"] = _merged(env.sampling_args, state["sampling_args"])
        try:
            await env.play(state)
        finally:
            state["task"] = task

    def _place(self, task: str) -> tuple[Environment, str]:
        route = self._routes.get(task)
        return (self.envs[0], task) if route is None else (self.env_map[route.name], route.task)


async def _by_key(
    keys: Iterable[Key], items: Sequence[Item], work: Callable[[Key, list[Item]], Awaitable[list[Result]]]
) -> list[Result]:
    """Give items of one key together to `work`, all keys at once; return the results in the items' order."""
    places: dict[Key, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    results: dict[int, Result] = {}

    async def work_on(key: Key) -> None:
        done = await work(key, [items[place] for place in places[key]])
        results.update(zip(places[key], done, strict=True))

    await gather_owned([work_on(key) for key in places])
    return [results[place] for place in range(len(items))]


def _merged(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the sampling arguments of an environment and of a call; the call's win, also inside `extra_body`."""
    extra_body = {**(own.get("extra_body") or {}), **(given.get("extra_body") or {})}
    return {**own, **given, "extra_body": extra_body}
