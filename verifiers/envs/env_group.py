"""EnvGroup: several environments as one, each row played and scored by the one that it came from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verifiers.envs.calling import either_generation
from verifiers.envs.env_group_data import Route, group_datasets, in_turn
from verifiers.envs.environment import Environment
from verifiers.envs.processing import TokenLists
from verifiers.errors import ConfigError
from verifiers.rollouts.run import call_rollout, gives_rollout_input, takes_rollout_input
from verifiers.rubrics.rows import Row
from verifiers.rubrics.rubric import Rubric
from verifiers.types import (
    ChatMessage,
    Info,
    Messages,
    RewardFunc,
    RolloutInput,
    RolloutScore,
    SamplingArgs,
    State,
)

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["EnvGroup", "EnvGroupRubric"]


class EnvGroupRubric(Rubric):
    """Scores each rollout by the rubric of the environment that its task belongs to.

    The classic calls (`score_rollout`, `score_rollouts`) give every rollout all metrics of the group, 0.0 where they
    are another environment's; `score_group` gives it those of its own, so that means are over what was measured.
    A task that no environment has scores 0.0, with the failure noted in `state["grading_errors"]`.

    Args:
        env_map: environments by name.
        routes: for tasks that are not names of environments: whose they are, and under which name there.

    Attributes:
        all_reward_names: names of all reward functions of the group, sorted.
    """

    def __init__(self, env_map: Mapping[str, Environment], routes: Mapping[str, Route] | None = None) -> None:
        super().__init__()
        self.env_map = dict(env_map)
        self.routes = dict(routes or {})
        names = {name for env in self.env_map.values() for name in env.rubric.get_reward_func_names()}
        self.all_reward_names = sorted(names)

    def get_reward_func_names(self) -> list[str]:
        return self.all_reward_names

    def add_reward_func(self, func: RewardFunc, weight: float = 1.0) -> None:
        """Refused: each environment of a group has reward functions of its own."""
        raise ConfigError(
            "a group has no reward functions of its own; add it to the rubric of one of its environments."
        )

    @property
    def has_group_funcs(self) -> bool:
        """True where some environment's rubric needs a prompt's whole group."""
        return any(getattr(env.rubric, "has_group_funcs", False) is True for env in self.env_map.values())

    async def score_rollout(self, *args: Any, **kwargs: Any) -> RolloutScore:
        """Score one rollout, called in either generation's way; as `Rubric.score_rollout`."""
        by_state = isinstance(args[0], Mapping) if args else "completion" not in kwargs
        if not by_state:
            return await self._score_in_columns(*args, **kwargs)
        state: State = args[0] if args else kwargs["state"]
        if self._route(state) is None:
            self._note_unknown_task(state)
            metrics: dict[str, float] = {}
            state["reward"] = 0.0
        else:
            await self.score_group([state])
            metrics = state["metrics"]
        state["metrics"] = self._padded(metrics)
        return RolloutScore(state["reward"], state["metrics"])

    async def score_group(self, states: Sequence[State], score_sem: Any = None) -> None:
        """Score the rollouts of one prompt together, by the rubric of their task."""
        by_task: dict[Any, list[State]] = {}
        for state in states:
            by_task.setdefault(_task_of(state), []).append(state)
        for of_task in by_task.values():
            route = self._route(of_task[0])
            if route is None:
                for state in of_task:
                    self._note_unknown_task(state)
                    state["reward"], state["metrics"] = 0.0, {}
                continue
            with _task_inside(of_task, route.task):
                await self.env_map[route.name].rubric.score_group(of_task, score_sem)

    async def _score_in_columns(
        self,
        prompt: Messages,
        completion: Messages,
        answer: Any = "",
        state: State | None = None,
        task: str = "default",
        info: Info | None = None,
        **kwargs: Any,
    ) -> RolloutScore:
        state = state if state is not None else State()
        route = _route_of(task, self.env_map, self.routes)
        if route is None:
            self._note_unknown_task(state, task)
            return RolloutScore(0.0, self._padded({}))
        row = Row(prompt, completion, answer, state, route.task, info or {})
        with _task_inside([state], route.task):
            score = await self.env_map[route.name].rubric._score_row(row, None, kwargs)
        return RolloutScore(score.reward, self._padded(score.metrics))

    def _route(self, state: State) -> Route | None:
        return _route_of(_task_of(state), self.env_map, self.routes)

    def _padded(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {**dict.fromkeys(self.all_reward_names, 0.0), **metrics}

    def _note_unknown_task(self, state: State, task: str | None = None) -> None:
        task = task if task is not None else _task_of(state)
        error = ConfigError(f"no environment of the group has the task {task!r}, only {sorted(self.env_map)}")
        self._record_failure("EnvGroupRubric", [state], error)


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
        if len(self.env_names) != len(self.envs):
            raise ConfigError(
                f"The number of env_names must match the number of envs: {len(self.env_names)} names were given for "
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

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> Dataset:
        """As of any environment, but the first `n` rows are of all environments in turn, not of the first alone."""
        if n < 0 or seed is not None:
            return super().get_eval_dataset(n, seed)
        rows = super().get_eval_dataset()
        routes = (_route_of(task, self.env_map, self._routes) for task in rows["task"])
        return rows.select(in_turn("" if route is None else route.name for route in routes)[:n])

    def get_env_for_task(self, task: str) -> Environment:
        """The environment that plays rows of this task; the first one where none has it."""
        return self._place(task)[0]

    @takes_rollout_input
    @either_generation(gives_rollout_input, lambda self, *args, **kwargs: self._rollout_from_input(*args, **kwargs))
    async def rollout(
        self,
        client: Any,
        model: str,
        prompt: Messages,
        answer: Any = "",
        task: str = "default",
        info: Info | None = None,
        sampling_args: SamplingArgs | None = None,
        **kwargs: Any,
    ) -> tuple[Messages, State]:
        """One rollout by the environment of its task; called as, and giving what, `MultiTurnEnv.rollout` does."""
        row = {"prompt": prompt, "answer": answer, "task": task, "info": info or {}}
        row["example_id"] = kwargs.get("example_id", 0)
        return await self._routed(row, client, model, sampling_args)

    async def _rollout_from_input(
        self,
        input: RolloutInput,  # noqa: A002 - the classic API's name
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
    ) -> State:
        defaults = {"answer": "", "task": "default", "info": {}, "example_id": 0}
        completion, state = await self._routed({**defaults, **input}, client, model, sampling_args)
        state["completion"] = completion
        return state

    async def _routed(
        self, row: dict[str, Any], client: Any, model: str, sampling_args: SamplingArgs | None
    ) -> tuple[Messages, State]:
        env, inner_task = self._place(row["task"])
        completion, state = await call_rollout(
            env, {**row, "task": inner_task}, client, model, _merged(env.sampling_args, sampling_args or {})
        )
        state["task"] = row["task"]
        return completion, state

    def _place(self, task: str) -> tuple[Environment, str]:
        route = _route_of(task, self.env_map, self._routes)
        return (self.envs[0], task) if route is None else (self.env_map[route.name], route.task)

    def process_chat_format_vllm(
        self,
        prompt: list[ChatMessage],
        completion: list[ChatMessage],
        state: State,
        processing_class: Any,
        mask_env_responses: bool = False,
    ) -> TokenLists:
        """As the environment of the rollout's task does it, with its tools."""
        env = self.get_env_for_task(state["task"])
        return env.process_chat_format_vllm(prompt, completion, state, processing_class, mask_env_responses)


def _route_of(task: Any, env_map: Mapping[str, Environment], routes: Mapping[str, Route]) -> Route | None:
    route = routes.get(task)
    return Route(task, task) if route is None and task in env_map else route


def _task_of(state: Mapping[str, Any]) -> Any:
    given = state.get("input")
    task = state.get("task")
    return task if task is not None or not isinstance(given, Mapping) else given.get("task")


@contextlib.contextmanager
def _task_inside(states: Sequence[State], task: str) -> Iterator[None]:
    """The states with the task's name inside its environment, which its reward functions know it by."""
    names = [state.get("task") for state in states]
    for state in states:
        state["task"] = task
    try:
        yield
    finally:
        for state, name in zip(states, names, strict=True):
            state["task"] = name


def _merged(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling arguments of an environment and of a call; the call's win, also inside `extra_body`."""
    extra_body = {**(own.get("extra_body") or {}), **(given.get("extra_body") or {})}
    return {**own, **given, "extra_body": extra_body}
