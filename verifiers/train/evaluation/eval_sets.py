"""The prompts that a training run is evaluated on: one set, or several by name."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verifiers.envs.datasets import count_trained_on
from verifiers.errors import ConfigError
from verifiers.evals.evaluation_run import fingerprint

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")


@dataclass(frozen=True)
class EvalSet:
    """A set of eval prompts.

    Attributes:
        name: part of the names of its metrics; empty where it is the only set.
        rows: the prompts; None for the eval rows of `env`.
        most: the first so many of them; -1 for all.
    """

    name: str
    env: Any
    rows: Any
    most: int
    trained_env: Any

    @property
    def env_name(self) -> str:
        """Id of the environment where it has one, else its class."""
        return str(getattr(self.env, "env_id", None) or type(self.env).__name__)

    @property
    def env_args(self) -> dict[str, Any]:
        return dict(getattr(self.env, "env_args", None) or {})

    @functools.cached_property
    def dataset(self) -> Any:
        if self.rows is None:
            return self.env.rows_to_evaluate(self.most)
        rows = self.rows
        if "prompt" not in (getattr(rows, "column_names", None) or ()):
            rows = self.env.format_dataset(rows, self.env.system_prompt, self.env.few_shot)
        return rows if self.most < 0 else rows.select(range(min(self.most, len(rows))))

    @functools.cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.dataset)

    @functools.cached_property
    def prompts_trained_on(self) -> int | None:
        """Number of the prompts that are training rows too; None where that was not checked."""
        return count_trained_on(self.trained_env, self.dataset)

    def metric_prefix(self, prefix: str) -> str:
        """Return the beginning of its metrics' names: "eval", or "eval_<name>"."""
        return f"{prefix}_{self.name}" if self.name else prefix


def choose_eval_sets(
    env: Any, eval_dataset: Any = None, eval_env: Any = None, *, most: int = -1
) -> tuple[EvalSet, ...]:
    """Return the sets that a run is evaluated on.

    Args:
        env: what is trained on; its own eval rows are the set where nothing else is given.
        eval_dataset: rows that `env` plays, or several such by name.
        eval_env: an environment that is played instead, or several by name.

    Raises:
        ConfigError: both are given, none is inside, or a name cannot stand in a metric's name and a path.
    """
    if eval_dataset is not None and eval_env is not None:
        raise ConfigError("both eval_dataset and eval_env are given; give one: an eval_env has rows of its own.")
    given = eval_env if eval_env is not None else eval_dataset
    if given is None:
        return (EvalSet("", env, None, most, env),)
    named = given if isinstance(given, Mapping) else {"": given}
    if not named:
        raise ConfigError("the eval sets are an empty dict; name at least one, or leave it out.")
    for name in named:
        if isinstance(given, Mapping) and not (isinstance(name, str) and _NAME.match(name)):
            raise ConfigError(
                f"an eval set is called {name!r}; use letters, digits, '_', '.' and '-', since the name is part of "
                "metrics and paths."
            )
    if eval_env is not None:
        return tuple(EvalSet(name, played, None, most, env) for name, played in named.items())
    return tuple(EvalSet(name, env, rows, most, env) for name, rows in named.items())
