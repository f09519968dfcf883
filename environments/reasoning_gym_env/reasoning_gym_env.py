"""All tasks of reasoning-gym, scored by reasoning-gym's own scorers.

Training and evaluation questions never overlap, and the same arguments always give the same rows.
"""

from __future__ import annotations

from typing import Any, Literal

import verifiers as vf
from verifiers.integrations.reasoning_gym import Entry, draw_split, gym_tasks

__all__ = ["disjoint_entries", "load_environment"]


def disjoint_entries(
    task: str | list[Any],
    *,
    num_train: int,
    num_eval: int,
    seed: int,
    task_config: dict[str, Any] | None = None,
    question_pattern: str = "",
) -> tuple[list[Entry], list[Entry]]:
    """Return the training and the evaluation entries of the rows of `load_environment`."""
    tasks = gym_tasks(task, task_config=task_config)
    train, evaluation = draw_split(
        tasks, num_train=num_train, num_eval=num_eval, seed=seed, question_pattern=question_pattern
    )
    return [entry for _, entry in train], [entry for _, entry in evaluation]


def load_environment(
    task: str | list[Any] = "spell_backward",
    num_train: int = 2000,
    num_eval: int = 300,
    seed: int = 0,
    system_prompt: str | None = None,
    task_config: dict[str, Any] | None = None,
    question_pattern: str = "",
    reward: Literal["score", "exact"] = "score",
    parser: vf.Parser | None = None,
    curriculum: int | dict[str, int] | None = None,
    scoring_timeout_s: float = 10.0,
) -> vf.Environment:
    """Build a single-turn environment over one reasoning-gym task or a mix of them.

    Args:
        task: name of a reasoning-gym task, or a list of names and of {"name", "weight", "config", "curriculum"}.
        num_train: distinct training questions.
        num_eval: distinct evaluation questions; none of them is a training question.
        seed: chooses the questions.
        system_prompt: put before each question, if given.
        task_config: settings of the task, such as {"min_word_len": 3, "max_word_len": 5}.
        question_pattern: regular expression to be found in a question, else it is left out; `r": [a-z]+$"` keeps
            the lower-case words of spell_backward.
        reward: which of `score` and `exact_match` has weight 1; the other is reported with weight 0.
        parser: finds the answer in a completion. Default: the whole text.
        curriculum: level of the task's curriculum, for all of its attributes or for each by name.
        scoring_timeout_s: seconds a scorer may take in a worker process; an answer that takes longer scores 0.

    Raises:
        ValueError: an argument cannot work; the message says which and why.
    """
    return vf.ReasoningGymEnv(
        task,
        num_train_examples=num_train,
        num_eval_examples=num_eval,
        system_prompt=system_prompt,
        parser=parser if parser is not None else vf.Parser(),
        seed=seed,
        task_config=task_config,
        curriculum=curriculum,
        question_pattern=question_pattern,
        reward=reward,
        scoring_timeout_s=scoring_timeout_s,
    )
