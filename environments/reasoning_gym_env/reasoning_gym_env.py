"""Single-turn tasks of reasoning-gym, scored by reasoning-gym's own scorers.

Training and held-out questions never overlap, and the same arguments always give the same rows.

The scorers of some tasks run `eval`, sympy or a simulation on what the model wrote. A scorer runs inside the
caller's process here, so only tasks whose scorer compares text are accepted: those in `COMPARING_TASKS`, and
those that keep reasoning-gym's default scorer.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any, Literal

import reasoning_gym
from datasets import Dataset
from reasoning_gym.dataset import ProceduralDataset

import verifiers as vf

__all__ = ["COMPARING_TASKS", "disjoint_entries", "load_environment", "make_task", "reward_functions"]

COMPARING_TASKS = frozenset(
    {
        "ab",
        "circuit_logic",
        "color_cube_rotation",
        "dice",
        "emoji_mystery",
        "family_relationships",
        "figlet_font",
        "futoshiki",
        "mini_sudoku",
        "needle_haystack",
        "palindrome_generation",
        "path_star",
        "self_reference",
        "sentence_reordering",
        "spell_backward",
        "sudoku",
        "tsumego",
        "word_sorting",
        "zebra_puzzles",
    }
)
"""Tasks with a scorer of their own that does no more than compare text: no eval, no parser, no simulation."""

Entry = dict[str, Any]
"""What reasoning-gym yields: question, answer, metadata."""


def make_task(task: str, *, seed: int, size: int, task_config: dict[str, Any] | None = None) -> ProceduralDataset:
    """Open a reasoning-gym task after checking that its scorer is safe to run in this process.

    Neighbouring seeds give unrelated questions: reasoning-gym itself draws row i from `seed + i`, so the seed is
    spread over 32 bits first.

    Raises:
        ValueError: the task is unknown, its scorer interprets model text, or a setting does not fit it.
    """
    settings = dict(task_config or {})
    if reserved := sorted({"seed", "size"} & settings.keys()):
        raise ValueError(f"task_config must not set {reserved}: give seed, num_train and num_eval instead.")
    try:
        dataset = reasoning_gym.create_dataset(
            task, seed=random.Random(f"{task}:{seed}").getrandbits(32), size=size, **settings
        )
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning-gym refuses task {task!r} with settings {settings!r}: {error}") from error
    keeps_default_scorer = type(dataset).score_answer is ProceduralDataset.score_answer
    if not keeps_default_scorer and task not in COMPARING_TASKS:
        raise ValueError(
            f"Task {task!r} is refused: its scorer does more with the model's text than compare it (it may eval, "
            "parse or simulate it), and scorers run inside this process. Choose a task with reasoning-gym's default "
            f"scorer or one of {sorted(COMPARING_TASKS)}."
        )
    return dataset


def disjoint_entries(
    task: str,
    *,
    num_train: int,
    num_eval: int,
    seed: int,
    task_config: dict[str, Any] | None = None,
    question_pattern: str = "",
) -> tuple[list[Entry], list[Entry]]:
    """Draw `num_train` training and `num_eval` held-out entries, all with distinct questions.

    Only questions in which the regular expression `question_pattern` is found are drawn.

    Two questions that differ only in case or outer white space count as one: "Abe" and "abe" are the same word to
    the spell_backward scorer. Held-out entries are drawn first, so they do not depend on `num_train`.

    Raises:
        ValueError: the task has too few distinct questions.
    """
    if num_train < 0 or num_eval < 0 or num_train + num_eval == 0:
        raise ValueError(f"num_train={num_train} and num_eval={num_eval} must be 0 or more, and not both 0.")
    wanted = num_train + num_eval
    attempts = 20 * wanted + 1000
    dataset = make_task(task, seed=seed, size=attempts, task_config=task_config)
    distinct: dict[str, Entry] = {}
    for index in range(attempts):
        entry = dataset[index]
        if re.search(question_pattern, entry["question"]):
            distinct.setdefault(entry["question"].strip().casefold(), entry)
        if len(distinct) == wanted:
            break
    if len(distinct) < wanted:
        raise ValueError(
            f"Task {task!r} gave {len(distinct)} distinct questions in {attempts} draws, but num_train={num_train} "
            f"plus num_eval={num_eval} needs {wanted}: ask for fewer, or widen task_config or question_pattern "
            f"({question_pattern!r})."
        )
    entries = list(distinct.values())
    return entries[num_eval:], entries[:num_eval]


def to_dataset(entries: list[Entry]) -> Dataset | None:
    """Rows of question, answer and info; None for no rows.

    `info["entry"]` holds the whole entry as JSON text, because Arrow would give every row the union of all rows'
    metadata keys. What JSON cannot hold becomes its `str`; no accepted scorer reads such a value.
    """
    if not entries:
        return None
    return Dataset.from_list(
        [
            {
                "question": entry["question"],
                "answer": str(entry["answer"]),
                "info": {"entry": json.dumps(entry, default=str)},
            }
            for entry in entries
        ]
    )


def reward_functions(scorer: ProceduralDataset) -> dict[str, Callable[..., float]]:
    """The two reward functions over one task's scorer, by name: `score` and `exact_match`."""

    def score(parser: vf.Parser, completion: vf.Messages, info: vf.Info) -> float:
        """reasoning-gym's score in 0..1 of the parsed answer, stripped; may give partial credit."""
        answer = parser.parse_answer(completion)
        return float(scorer.score_answer(answer=(answer or "").strip(), entry=json.loads(info["entry"])))

    def exact_match(parser: vf.Parser, completion: vf.Messages, info: vf.Info) -> float:
        """1.0 where the score is exactly 1.0, else 0.0."""
        return float(score(parser, completion, info) == 1.0)

    return {"score": score, "exact_match": exact_match}


def load_environment(
    task: str = "spell_backward",
    num_train: int = 2000,
    num_eval: int = 300,
    seed: int = 0,
    system_prompt: str | None = None,
    task_config: dict[str, Any] | None = None,
    question_pattern: str = "",
    reward: Literal["score", "exact"] = "score",
    parser: vf.Parser | None = None,
) -> vf.Environment:
    """Build a single-turn environment over one reasoning-gym task.

    Args:
        task: name of a reasoning-gym task whose scorer compares text.
        num_train: distinct training questions.
        num_eval: distinct held-out questions; none of them is a training question.
        seed: chooses the questions.
        system_prompt: put before each question, if given.
        task_config: settings of the task, such as {"min_word_len": 3, "max_word_len": 5}.
        question_pattern: regular expression to be found in a question, else it is left out; `r": [a-z]+$"` keeps
            the lower-case words of spell_backward.
        reward: which of `score` and `exact_match` has weight 1; the other is reported with weight 0.
        parser: finds the answer in a completion. Default: the whole text.

    Raises:
        ValueError: an argument cannot work; the message says which and why.
    """
    if reward not in ("score", "exact"):
        raise ValueError(f"reward={reward!r} is unknown: choose 'score' or 'exact'.")
    train, held_out = disjoint_entries(
        task,
        num_train=num_train,
        num_eval=num_eval,
        seed=seed,
        task_config=task_config,
        question_pattern=question_pattern,
    )
    functions = reward_functions(make_task(task, seed=seed, size=1, task_config=task_config))
    parser = parser if parser is not None else vf.Parser()
    weights = [1.0, 0.0] if reward == "score" else [0.0, 1.0]
    return vf.SingleTurnEnv(
        dataset=to_dataset(train),
        eval_dataset=to_dataset(held_out),
        system_prompt=system_prompt,
        parser=parser,
        rubric=vf.Rubric(funcs=list(functions.values()), weights=weights, parser=parser),
    )
