"""ReasoningGymEnv: the tasks of reasoning-gym, scored by reasoning-gym's own scorers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from verifiers.envs.adapters import tagged_json
from verifiers.envs.adapters.reasoning_gym_rows import Entry, GymTask, draw_split, gym_tasks
from verifiers.envs.adapters.reasoning_gym_scoring import ReasoningGymRubric, compares_text, settings_text
from verifiers.envs.singleturn_env import SingleTurnEnv
from verifiers.errors import ConfigError
from verifiers.parsers.parser import Parser
from verifiers.parsers.xml_parser import XMLParser

__all__ = ["DEFAULT_SYSTEM_PROMPT", "ReasoningGymEnv"]

DEFAULT_SYSTEM_PROMPT = (
    "Think about the problem step by step. Then give the final answer, and nothing but it, between <answer> and "
    "</answer>. Where the problem shows an example, write the answer in exactly that form."
)


class ReasoningGymEnv(SingleTurnEnv):
    """Single-turn questions of one reasoning-gym task or a weighted mix of them.

    Questions are drawn when the environment is made; the same arguments give the same rows. All are distinct, so
    no held-out question is a training question, and the held-out ones do not depend on `num_train_examples`.
    Scorers that do more with an answer than compare it run in worker processes with limits of time and memory.

    Args:
        gym: the name of a task, or a list of names, of dicts {"name", "weight", "config", "curriculum"}, and of
            reasoning-gym's DatasetSpec.
        num_train_examples: training rows; 0 for none.
        num_eval_examples: held-out rows; 0 for none.
        system_prompt: put before each question; None for none.
        parser: finds the answer in a completion. Default: `XMLParser(["answer"])`.
        seed: chooses the questions.
        task_config: settings of the task, such as {"min_word_len": 3}; only where `gym` is one name.
        curriculum: level of the task's curriculum, for all attributes (an int, at most each one's highest), or for
            some by name (the others stay at their lowest); only where `gym` is one name. `task_config` goes before.
        question_pattern: regular expression to be found in a question, else it is left out.
        reward: which of the metrics `score` and `exact_match` is the reward.
        scoring_timeout_s: seconds a scorer may take in a worker process; an answer that takes longer scores 0.
        num_samples, num_eval_samples: older names of `num_train_examples` and `num_eval_examples`.
        **kwargs: as for `Environment`.

    Raises:
        ConfigError: an argument cannot work; the message says which and why.
    """

    def __init__(
        self,
        gym: str | Mapping[str, Any] | Sequence[Any],
        num_train_examples: int = 1000,
        num_eval_examples: int = 100,
        system_prompt: str | None = DEFAULT_SYSTEM_PROMPT,
        parser: Parser | None = None,
        seed: int = 0,
        *,
        task_config: Mapping[str, Any] | None = None,
        curriculum: int | Mapping[str, int] | None = None,
        question_pattern: str = "",
        reward: Literal["score", "exact"] = "score",
        scoring_timeout_s: float = 10.0,
        num_samples: int | None = None,
        num_eval_samples: int | None = None,
        **kwargs: Any,
    ) -> None:
        if reward not in ("score", "exact"):
            raise ConfigError(f"reward={reward!r} is unknown: choose 'score' or 'exact'.")
        self.gym = gym
        self.num_train_examples = num_train_examples if num_samples is None else num_samples
        self.num_eval_examples = num_eval_examples if num_eval_samples is None else num_eval_samples
        self.seed = seed
        self.gym_tasks = gym_tasks(gym, task_config=task_config, curriculum=curriculum)
        split = draw_split(
            self.gym_tasks,
            num_train=self.num_train_examples,
            num_eval=self.num_eval_examples,
            seed=seed,
            question_pattern=question_pattern,
        )
        parser = parser if parser is not None else XMLParser(fields=["answer"])
        super().__init__(
            dataset=_rows(self.gym_tasks, split.train),
            eval_dataset=_rows(self.gym_tasks, split.held_out),
            system_prompt=system_prompt,
            parser=parser,
            rubric=ReasoningGymRubric(
                [(task.name, settings_text(task.settings)) for task in self.gym_tasks],
                [compares_text(task.name) for task in self.gym_tasks],
                reward=reward,
                parser=parser,
                timeout_s=scoring_timeout_s,
            ),
            **kwargs,
        )


def _rows(tasks: Sequence[GymTask], entries: Sequence[tuple[int, Entry]]) -> list[dict[str, Any]] | None:
    """Rows of question, answer and info; None for no rows.

    `info["entry"]` holds the whole entry as text, because Arrow would give every row the union of all rows'
    metadata keys, and tagged, because scorers compare with tuples and sets that they put there.
    """
    if not entries:
        return None
    return [
        {
            "question": entry["question"],
            # some tasks have many right answers and name none
            "answer": "" if entry["answer"] is None else str(entry["answer"]),
            "info": {"gym": position, "task": tasks[position].name, "entry": tagged_json.dumps(entry)},
        }
        for position, entry in entries
    ]
