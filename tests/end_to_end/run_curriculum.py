"""Runs over three stages, or levels: their environment, and what was trained."""

from __future__ import annotations

import re
from collections.abc import Sequence

import tiny_world

import verifiers as vf
from verifiers.data.adaptive_curriculum import LevelsPolicy
from verifiers.data.curriculum import Curriculum, staged_curriculum_from

ROWS = 24
"""Rows of each of the datasets d0, d1 and d2."""


def environment() -> vf.SingleTurnEnv:
    """Three datasets told apart by their task; a question names its dataset and its row."""
    rows = [
        {"question": f"d{number} r{row}", "answer": "", "task": f"d{number}"}
        for number in range(3)
        for row in range(ROWS)
    ]
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows[:4], rubric=vf.Rubric(funcs=[tiny_world.vowels]))


def three_stages(first: int, second: int) -> Curriculum:
    """d0, then d0 and d1 with weights 1 and 3, then d2."""
    return staged_curriculum_from(
        {
            "stages": [
                {"name": "warm", "until_step": first, "datasets": ["d0"]},
                {"name": "main", "until_step": second, "datasets": ["d0", {"id": "d1", "weight": 3}]},
                {"name": "late", "datasets": ["d2"]},
            ],
            "seed": 5,
        }
    )


def levels() -> LevelsPolicy:
    """Up after nearly every block: a rollout passes when it has some vowel."""
    return LevelsPolicy(("d0", "d1", "d2"), window=2, raise_at=0.6, lower_at=0.1, passes_at=1.0, seed=5)


def trained(trainer: tiny_world.ObservedTrainer) -> list[tuple[int, str]]:
    """(optimizer step, question) of every row that was trained, in order."""
    # the fake server's token ids are the code points of what it was sent
    found = [(batch["step"], "".join(map(chr, prompt))) for prompt, _, _, _, batch, _ in trainer.rows()]
    return [(step, re.findall(r"d\d r\d+", text)[0]) for step, text in found]


def stage_names(step: int, ends: Sequence[int]) -> set[str]:
    """Datasets that `three_stages` may train at a step."""
    return ({"d0"}, {"d0", "d1"}, {"d2"})[sum(end <= step for end in ends)]
