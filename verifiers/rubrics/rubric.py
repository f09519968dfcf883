"""Rubric: reward functions and their weights; RubricGroup: several rubrics whose rewards are summed."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from numbers import Real
from operator import attrgetter
from typing import Any, Self

from verifiers.errors import ConfigError, GradingError
from verifiers.keywords import nearest_name, set_extra_keywords, warn_once
from verifiers.parsers.parser import Parser
from verifiers.rubrics.scoring import (
    ARGUMENTS,
    PLURALS,
    RewardCall,
    added_by_role,
    added_by_turn,
    for_each_turn,
    is_group_func,
    note_failure,
    one_number,
    reward_name,
    reward_names,
    reward_values,
    signature_of,
    store_scores,
)
from verifiers.types import RewardFunc, RolloutScore, State

CLASSIC_METHODS = ("score_group", "score_rollout", "score_rollouts", "call_reward_func")
"""Methods that packages for verifiers 0.1.x override; `verifiers.classic.rubrics` makes such an override count."""


def _classic() -> Any:
    from verifiers.classic import rubrics

    return rubrics


def _of_classic(name: str) -> Callable[..., Awaitable[Any]]:
    async def method(self: Rubric, *args: Any, **kwargs: Any) -> Any:
        return await getattr(_classic(), name)(self, *args, **kwargs)

    method.__name__, method.__qualname__ = name, f"Rubric.{name}"
    method.__doc__ = f"See `verifiers.classic.rubrics.{name}`."
    return method


def _bounds_of(func: RewardFunc) -> Any:
    bounds = getattr(func, "reward_bounds", None)
    # a mock has any attribute
    return None if callable(bounds) else bounds


class Rubric:
    """Reward functions and their weights: the reward is the weighted sum, the metrics are the plain values.

    A reward function is sync or async, and names what it needs among prompt, completion, answer, state, task, info,
    parser and the class objects; `**kwargs` receives all of it. One that names prompts, completions, answers,
    states, tasks or infos is a group function: it gets all rollouts of a prompt and returns a float for each.
    An `async def` runs on the event loop; all plain functions of a group run one after the other in a worker thread.

    A function that raises or gives no finite number counts 0.0 in the sum, as it always did, but the failure is in
    the score's `errors` (and in `state["grading_errors"]`), so that no failed grade passes for a reward of zero.
    Functions of one name, such as lambdas, are name_1, name_2, ... among the metrics.

    A function whose values have bounds may say so in an attribute: `func.reward_bounds = (-1.0, 0.0)`. Intervals of
    its mean end there, and those of the reward at the weighted sum of the bounds.

    A subclass scores in its own way by overriding `score_states`. Overrides of the classic methods (`score_rollout`,
    `score_rollouts`, `score_group`, `call_reward_func`) take effect too.

    Args:
        funcs: reward functions.
        weights: one for each function; 1.0 each when left out. Surplus ones are dropped, with a warning.
        parser: given to functions that name it; a plain `Parser` when left out.
        parallelize_scoring: functions of one rollout run side by side; False: one after the other, in order.
        **kwargs: every further keyword becomes an attribute, with a warning.

    Raises:
        ConfigError (a ValueError): fewer weights than functions; a misspelled keyword or parameter of a function.
    """

    def __init__(
        self,
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        parallelize_scoring: bool = True,
        **kwargs: Any,
    ) -> None:
        self.logger = logging.getLogger(f"verifiers.rubrics.{type(self).__name__}")
        set_extra_keywords(self, kwargs)
        if parser is not None and not (hasattr(parser, "parse_answer") or hasattr(parser, "parse")):
            raise ConfigError(f"parser is {parser!r:.100}; give a parser, and reward functions as funcs=[...].")
        self.parser = parser if parser is not None else Parser()
        self.parallelize_scoring = parallelize_scoring
        self.class_objects: dict[str, Any] = {"parser": self.parser}
        self._seen_failing: set[str] = set()
        self.reward_funcs: list[RewardFunc] = self._checked(funcs or [])
        self.reward_weights: list[float] = list(() if weights is None else weights) or [1.0] * len(self.reward_funcs)
        self._check_weights()

    funcs = property(
        attrgetter("reward_funcs"),
        lambda self, funcs: setattr(self, "reward_funcs", funcs),
        doc="Another name of `reward_funcs`.",
    )
    weights = property(
        attrgetter("reward_weights"),
        lambda self, weights: setattr(self, "reward_weights", weights),
        doc="Another name of `reward_weights`.",
    )

    def get_reward_func_names(self) -> list[str]:
        """Return the functions' names, which are the metrics' names."""
        return reward_names(self.get_reward_funcs())

    def get_reward_funcs(self) -> list[RewardFunc]:
        """Return the reward functions."""
        return self.reward_funcs

    def get_reward_weights(self) -> list[float]:
        """Return the weights, one a function."""
        return self.reward_weights

    def add_reward_func(self, func: RewardFunc, weight: float = 1.0) -> None:
        """Add a function to the weighted sum."""
        self.reward_funcs += self._checked([func])
        self.reward_weights.append(weight)

    def add_metric(self, func: RewardFunc, weight: float = 0.0) -> None:
        """Add a function that is shown among the metrics and, unless given a weight, does not change the reward."""
        self.add_reward_func(func, weight)

    def add_class_object(self, name: str, value: Any) -> None:
        """Make an object available to every function that has a parameter of this name."""
        self.class_objects[name] = value

    @property
    def has_group_funcs(self) -> bool:
        """Return whether a reward may depend on the other rollouts of its prompt."""
        return self.scores_groups_itself or any(is_group_func(func) for func in self.reward_funcs)

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to score by: no function, and no scoring of a subclass's own."""
        is_plain = getattr(self.score_states, "__func__", None) is Rubric.score_states
        return is_plain and not self.scores_groups_itself and not self.get_reward_funcs()

    @property
    def is_weighted_sum(self) -> bool:
        """Return whether a reward is the weighted sum of the functions, and a subclass scores in no other way."""
        score = getattr(self.score_states, "__func__", None)
        members = all(getattr(rubric, "is_weighted_sum", False) for rubric in getattr(self, "rubrics", ()))
        return members and not self.scores_groups_itself and score in (Rubric.score_states, RubricGroup.score_states)

    def declared_bounds(self) -> dict[str, tuple[float, float]]:
        """Return the least and largest value of each function with an attribute `reward_bounds`, by its name.

        "reward" has those of the weighted sum, where every function with a weight has the attribute.
        """
        names, funcs, weights = self.get_reward_func_names(), self.get_reward_funcs(), self.get_reward_weights()
        if not len(names) == len(set(names)) == len(funcs) == len(weights):
            return {}  # functions of several rubrics under one name
        bounds = [_bounds_of(func) for func in funcs]
        found = {name: known for name, known in zip(names, bounds, strict=True) if known and name != "reward"}
        weighted = [(weight, known) for weight, known in zip(weights, bounds, strict=True) if weight]
        if weighted and self.is_weighted_sum and all(known for _, known in weighted):
            ends = [sorted(weight * end for end in known or ()) for weight, known in weighted]
            found["reward"] = (sum(low for low, _ in ends), sum(high for _, high in ends))
        return found

    def refuse_unsupplied(self) -> None:
        """Raise ConfigError for a function with an argument that nobody supplies; before anything is sampled."""
        if getattr(self.score_states, "__func__", None) is not Rubric.score_states or not self.checks_parameters:
            return  # a rubric that calls functions in its own way
        for func in self.get_reward_funcs():
            known = {*(PLURALS if is_group_func(func) else (*ARGUMENTS,)), *self.class_objects}
            missing = next((name for name in signature_of(func).required if name not in known), None)
            if missing is not None:
                of_trl = " One of TRL's form is vf.from_trl(func)." if is_group_func(func) else ""
                raise ConfigError(
                    f"The reward function {reward_name(func)!r} has a parameter {missing!r}, which nobody supplies; "
                    f"there are {', '.join(sorted(known))}. Put other columns of a row into its info.{of_trl}"
                )

    async def score_group(self, states: Sequence[State], score_sem: Any = None) -> list[RolloutScore]:
        """Score the rollouts of one prompt together; also sets `reward` and `metrics` in each state.

        A score with `errors` is a failed grade. Fewer weights than functions are a ConfigError. `score_sem`, an async
        context manager, bounds the rollouts scored at once.
        """
        started = time.perf_counter()
        if score_sem is None:
            scores = await self.score_states(states)
        else:
            scores = await _classic().bounded_scores(self, states, score_sem)
        store_scores(states, scores, started)
        return scores

    async def score_states(self, states: Sequence[State]) -> list[RolloutScore]:
        """Return a score for each rollout of a group; the method that rubrics of another kind override.

        Failures are noted, by `record_failure` or as `errors` of a score; a ConfigError alone is raised.
        """
        self._check_weights()
        if self.is_empty:
            warn_once(self.logger.name, "A rubric has no reward function: every reward is 0.0; give it funcs=[...].")
        calls = [self.reward_call(func) for func in self.reward_funcs]
        names = reward_names(self.reward_funcs)
        given = await reward_values(calls, states, self.class_objects, parallel=self.parallelize_scoring)
        columns = ([*map(for_each_turn, values, states)] for values in given)
        scores = [RolloutScore(0.0) for _ in states]
        for name, weight, values in zip(names, self.reward_weights, columns, strict=True):
            for score, value in zip(scores, values, strict=True):
                if isinstance(value, list):
                    by_turn = [weight * one for one in value]
                    score["turn_rewards"] = added_by_turn(score.get("turn_rewards"), by_turn)
                    score["metrics"][name] = score["metrics"].get(name, 0.0) + one_number(value)
                elif isinstance(value, dict):
                    by_role = {role: weight * one for role, one in value.items()}
                    score["role_rewards"] = added_by_role(score.get("role_rewards"), by_role)
                    score["reward"] += one_number(by_role)
                    score["metrics"] |= {f"{name}/{role}": one for role, one in value.items()}
                elif isinstance(value, float):
                    score["reward"] += weight * value
                    score["metrics"][name] = score["metrics"].get(name, 0.0) + value
                elif weight:
                    score["metrics"].setdefault(name, 0.0)
            for error in {id(value): value for value in values if isinstance(value, BaseException)}.values():
                failed = [state for state, value in zip(states, values, strict=True) if value is error]
                # without what a function measures only, the grade stands
                self.record_failure(name, failed if weight else [], error)
        return scores

    def reward_call(self, func: RewardFunc) -> RewardCall:
        """Return the way to call a function for the rollouts of a group."""
        return RewardCall(func)

    def record_failure(self, name: str, states: Sequence[State], error: BaseException) -> None:
        """Log the failure of a reward function, and note it for each of the states."""
        # a function that fails once tends to fail always: one traceback is enough, and none for our own sentences
        is_sentence = isinstance(error, (GradingError, ConfigError))
        text = f"The reward function {name} failed: {type(error).__name__}: {error}"
        key = text if is_sentence else name
        if not (is_sentence and key in self._seen_failing):
            self.logger.error("%s", text, exc_info=None if is_sentence or key in self._seen_failing else error)
        self._seen_failing.add(key)
        for state in states:
            note_failure(state, name, error)

    async def member_scores(self, member: Any, states: Sequence[State]) -> list[RolloutScore]:
        """Return the scores of a rubric that this one holds; where it raises, failed grades.

        The states keep the reward and the metrics that they have.
        """
        kept = [{name: state[name] for name in ("reward", "metrics") if name in state} for state in states]
        scores: list[RolloutScore]
        try:
            scores = await member.score_group(states)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            self.record_failure("score_group", states, error)
            scores = [RolloutScore(0.0) for _ in states]
        finally:
            for state, before in zip(states, kept, strict=True):
                state.pop("reward", None)
                state.pop("metrics", None)
                state.update(before)
        return scores

    score_rollout = _of_classic("score_rollout")
    score_rollouts = _of_classic("score_rollouts")
    call_reward_func = _of_classic("call_reward_func")
    checks_parameters = True
    scores_groups_itself = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if any(getattr(cls, name) is not getattr(Rubric, name) for name in CLASSIC_METHODS):
            _classic().adapt(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in CLASSIC_METHODS:
            _classic().set_on(self, name, value)

    def _checked(self, funcs: Sequence[RewardFunc]) -> list[RewardFunc]:
        if callable(funcs) or not all(map(callable, funcs)):
            raise ConfigError(
                f"funcs is {funcs!r}; give a list of functions, such as def correct(completion, answer)."
            )
        known = {*ARGUMENTS, *PLURALS, *self.class_objects}
        for func in funcs if self.checks_parameters else ():
            for name in signature_of(func).required:
                near = None if name in known else nearest_name(name, known)
                if near is not None:
                    raise ConfigError(
                        f"The reward function {reward_name(func)!r} has a parameter {name!r}, which no caller "
                        f"supplies; did you mean {near!r}?"
                    )
        for func in funcs:
            match _bounds_of(func):
                case None:
                    continue
                case (int() | float() as low, int() | float() as high) if low < high:
                    continue
                case found:
                    raise ConfigError(
                        f"The reward function {reward_name(func)!r} has reward_bounds {found!r}; give its least "
                        "and its largest value, such as (-1.0, 0.0)."
                    )
        return list(funcs)

    def _check_weights(self) -> None:
        count = len(self.reward_funcs)
        if len(self.reward_weights) < count:
            raise ConfigError(
                f"The rubric has {count} reward functions but {len(self.reward_weights)} weights; give each function "
                "one weight."
            )
        weights: list[Any] = self.reward_weights
        if not all(isinstance(weight, Real) and math.isfinite(weight) for weight in weights):
            raise ConfigError(f"The rubric's weights are {weights!r}; give one finite number a function.")
        if surplus := self.reward_weights[count:]:
            text = f"A rubric has {count} reward functions: the weights {surplus} beyond them have no effect."
            warn_once(self.logger.name, text)
            self.reward_weights = self.reward_weights[:count]


class RubricGroup(Rubric):
    """Several rubrics as one, each with its own functions, weights, parser and class objects.

    The reward is the sum of the rubrics' rewards; metrics of one name add up. Rubrics score one after the
    other, so a later one can read what an earlier one has left in the state. A rubric that raises is a failed grade
    of its rollouts. Groups may hold groups.

    `reward_funcs`, `reward_weights` and `class_objects` show the union of the rubrics'; to change them, use
    `add_reward_func`, `add_metric` and `add_class_object`, which go to the first rubric, or the rubric itself.

    `parser` is the first rubric's when left out; every further keyword becomes an attribute, with a warning. An empty
    list of rubrics is a ConfigError (a ValueError).
    """

    def __init__(self, rubrics: Iterable[Rubric], **kwargs: Any) -> None:
        # the base class would keep functions of its own, which a group does not have
        self.rubrics: list[Rubric] = list(rubrics)
        if not self.rubrics:
            raise ConfigError("A RubricGroup must have at least one rubric, but rubrics is empty.")
        for each in self.rubrics:
            if isinstance(each, type) or not hasattr(each, "score_rollout"):
                raise ConfigError(f"A group's rubrics hold {each!r}; give rubrics, such as Rubric(funcs=[correct]).")
        self.logger = logging.getLogger(f"verifiers.rubrics.{type(self).__name__}")
        self.parser = kwargs.pop("parser", None) or self.rubrics[0].parser
        self.parallelize_scoring = True
        self._seen_failing = set()
        set_extra_keywords(self, kwargs)

    def with_rubric(self, rubric: Rubric) -> Self:
        """Return a group of the same kind with one more rubric."""
        group = copy.copy(self)
        group.rubrics = [*self.rubrics, rubric]
        return group

    @property
    def reward_funcs(self) -> list[RewardFunc]:
        """The functions of all rubrics, in order."""
        return [func for rubric in self.rubrics for func in rubric.get_reward_funcs()]

    @reward_funcs.setter
    def reward_funcs(self, funcs: list[RewardFunc]) -> None:
        raise ConfigError("A RubricGroup has no functions of its own; give them to one of its rubrics.")

    @property
    def reward_weights(self) -> list[float]:
        """The weights of all rubrics, one a function."""
        return [weight for rubric in self.rubrics for weight in rubric.get_reward_weights()]

    @reward_weights.setter
    def reward_weights(self, weights: list[float]) -> None:
        raise ConfigError("A RubricGroup has no weights of its own; give them to one of its rubrics.")

    @property
    def class_objects(self) -> dict[str, Any]:  # type: ignore[override]
        """The class objects of all rubrics; of two with one name the first rubric's is shown."""
        merged: dict[str, Any] = {}
        for rubric in reversed(self.rubrics):
            merged.update(rubric.class_objects)
        return merged

    def get_reward_func_names(self) -> list[str]:
        """Return the functions' names, which are the metrics' names."""
        return [name for rubric in self.rubrics for name in rubric.get_reward_func_names()]

    def add_reward_func(self, func: RewardFunc, weight: float = 1.0) -> None:
        """Add a function to the first rubric's weighted sum."""
        assert self.rubrics, "RubricGroup must have at least one rubric, whose function it becomes."
        self.rubrics[0].add_reward_func(func, weight)

    def refuse_unsupplied(self) -> None:
        for rubric in self.rubrics:
            rubric.refuse_unsupplied()

    def add_class_object(self, name: str, value: Any) -> None:
        """Make an object available to every function of the first rubric that has a parameter of this name."""
        self.rubrics[0].add_class_object(name, value)

    @property
    def has_group_funcs(self) -> bool:
        """Return whether a reward of some rubric may depend on the other rollouts of its prompt."""
        return self.scores_groups_itself or any(rubric.has_group_funcs for rubric in self.rubrics)

    @property
    def is_empty(self) -> bool:
        """Return whether none of the rubrics has anything to score by."""
        return all(rubric.is_empty for rubric in self.rubrics)

    async def score_states(self, states: Sequence[State]) -> list[RolloutScore]:
        """Score rollouts by each rubric, one after the other; as `Rubric.score_states`."""
        totals = [RolloutScore(0.0) for _ in states]
        # an environment without a rubric has an empty one, to which add_rubric adds
        for rubric in [rubric for rubric in self.rubrics if not rubric.is_empty] or self.rubrics:
            for total, score in zip(totals, await self.member_scores(rubric, states), strict=True):
                total["reward"] += score.reward
                for name, value in score.metrics.items():
                    total["metrics"][name] = total["metrics"].get(name, 0.0) + value
                if "turn_rewards" in score:
                    total["turn_rewards"] = added_by_turn(total.get("turn_rewards"), score["turn_rewards"])
                if "role_rewards" in score:
                    total["role_rewards"] = added_by_role(total.get("role_rewards"), score["role_rewards"])
        return totals
