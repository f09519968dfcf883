"""Checks of the settings of evaluations, by themselves and with the eval sets."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verifiers.errors import ConfigError

if TYPE_CHECKING:
    from verifiers.train.config import GRPOConfig
    from verifiers.train.evaluation.eval_sets import EvalSet

__all__ = ["adjust_evaluation", "check_eval_sets", "needs_the_metric"]

_SCHEDULES_BY_METRIC = ("reduce_lr_on_plateau", "greedy")
_MEASURES = ("reward", "reward_stderr", "prompts", "failed", "seconds")
_FAMILIES = ("rewards/", "tasks/", "outcomes/", "completions/", "pass_at_", "pass_hat_", "best_at_")


def needs_the_metric(args: GRPOConfig) -> bool:
    """Return whether training cannot continue before an evaluation ends, as its result sets the learning rate."""
    return _name(args.lr_scheduler_type) in _SCHEDULES_BY_METRIC


def adjust_evaluation(args: GRPOConfig) -> None:
    """Check a run's settings of evaluation; the reward becomes the metric for the best model where none is named.

    Raises:
        ConfigError: settings that contradict each other.
    """
    generations = args.num_generations_eval or 1
    if generations > 1 and args.eval_temperature == 0:
        raise ConfigError(
            f"num_generations_eval is {generations} with eval_temperature=0: greedy answers of a prompt are all the "
            "same; give a temperature above 0, or num_generations_eval=1."
        )
    for name in ("eval_max_concurrent", "eval_timeout"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name} is {value:g}; give a number above 0, or leave it out.")
    best = args.load_best_model_at_end or _name(args.save_strategy) == "best"
    if args.metric_for_best_model is None and (best or needs_the_metric(args)):
        args.metric_for_best_model = "eval_reward"


def check_eval_sets(args: GRPOConfig, sets: Sequence[EvalSet]) -> None:
    """Check that there is something to evaluate on, and that evaluations have the metric for the best model.

    Raises:
        ConfigError: no eval set, one without rows, or a metric that no evaluation of these sets has.
    """
    if _name(args.eval_strategy) == "no":
        return
    for eval_set in sets:
        if eval_set.rows is None and getattr(eval_set.env, "eval_dataset", None) is None:
            raise ConfigError(
                f"eval_strategy is {_name(args.eval_strategy)!r}, but {eval_set.env_name} has no eval set; give "
                "it an eval_dataset, give the trainer eval_dataset or eval_env, or set eval_strategy='no'."
            )
        if len(eval_set.dataset) == 0:
            named = f"eval set {eval_set.name!r}" if eval_set.name else "eval set"
            raise ConfigError(
                f"eval_strategy is {_name(args.eval_strategy)!r}, but the {named} of {eval_set.env_name} has 0 rows; "
                "give it rows, or set eval_strategy='no'."
            )
    metric = args.metric_for_best_model
    if metric is None:
        return
    full = metric if metric.startswith("eval_") else f"eval_{metric}"
    prefixes = [eval_set.metric_prefix("eval") + "_" for eval_set in sets]
    if any(_is_measure(full, prefix) for prefix in prefixes):
        return
    known = [prefix + measure for prefix in prefixes for measure in _MEASURES]
    nearest = difflib.get_close_matches(full, known, n=1, cutoff=0.4) or known[:1]
    raise ConfigError(
        f"metric_for_best_model is {metric!r}, which no evaluation here has; did you mean {nearest[0]!r}? "
        f"There are also {prefixes[0]}rewards/<function> and what docs/reference/metrics.md lists."
    )


def _is_measure(metric: str, prefix: str) -> bool:
    rest = metric.removeprefix(prefix)
    return rest != metric and (rest in _MEASURES or rest.startswith(_FAMILIES))


def _name(value: object) -> str:
    return str(getattr(value, "value", value))
