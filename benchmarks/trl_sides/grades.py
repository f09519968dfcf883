"""Rollouts that fail where they are graded, and what that does to the reward that a trainer logs.

The same file is used by every trainer that is measured, so it imports nothing but the standard library. A grade is
drawn to fail after its true reward is known, and independently of it. So the mean of all true rewards is known too,
and a trainer that counted failures as 0 would log `zero_bias` less.
"""

from __future__ import annotations

import json
import math
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class GradeFailedError(RuntimeError):
    """Raised in place of a reward that was drawn to fail."""


class Grades:
    """The true rewards of a run, a line of JSON each in the order of grading, and the draw of those that fail.

    Args:
        path: file that is appended to; a run that is resumed appends to the same.
        fail_share: share of the grades that fail, 0 .. 1.
        seed: of the draws.
    """

    def __init__(self, path: str | Path, *, fail_share: float = 0.0, seed: int = 0) -> None:
        if not 0 <= fail_share < 1:
            raise ValueError(f"fail_share is {fail_share!r}, but it must be from 0 to below 1, such as 0.05.")
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fail_share = fail_share
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def note(self, prompt: str, reward: float) -> bool:
        """Write down a true reward; return True where this grade has to fail."""
        with self._lock:
            failed = self._random.random() < self._fail_share
            line = json.dumps({"prompt": prompt, "reward": reward, "failed": failed}) + "\n"
            # unbuffered and in one piece, as the run may be killed at any time
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                os.write(file, line.encode())
            finally:
                os.close(file)
        return failed

    def reward(self, prompt: str, reward: float) -> float:
        """Return the reward, or raise GradeFailedError where this grade has to fail."""
        if self.note(prompt, reward):
            raise GradeFailedError("this grade was drawn to fail")
        return reward


@dataclass(frozen=True, slots=True)
class Grade:
    """One graded rollout."""

    prompt: str
    reward: float
    failed: bool


def read_grades(path: str | Path) -> list[Grade]:
    """Return the grades of a run; none where it graded nothing."""
    file = Path(path)
    return [Grade(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def reward_bias(logged: Sequence[float], grades: Sequence[Grade]) -> dict[str, Any]:
    """Return how far the mean reward that a run logged is from the true one of the same rollouts.

    Args:
        logged: the rewards of the run's logs, one a step; each step has as many rollouts.
        grades: every grade of the run.

    Returns:
        `bias` with the 95 % interval that leaving out as many rollouts at random gives by itself (sampling without
        replacement), and `zero_bias`: the bias of counting each failure as 0. None where nothing was graded.
    """
    if not logged or not grades:
        return {"bias": None, "chance_low": None, "chance_high": None, "zero_bias": None, "failed": 0, "graded": 0}
    count = len(grades)
    failed = sum(grade.failed for grade in grades)
    true = math.fsum(grade.reward for grade in grades) / count
    variance = math.fsum((grade.reward - true) ** 2 for grade in grades) / max(1, count - 1)
    scored = count - failed
    chance = 1.96 * math.sqrt(variance / scored * failed / count) if scored else math.nan
    lost = math.fsum(grade.reward for grade in grades if grade.failed) / count
    return {
        "bias": round(math.fsum(logged) / len(logged) - true, 5),
        "chance_low": round(-chance, 5),
        "chance_high": round(chance, 5),
        "zero_bias": round(-lost, 5),
        "failed": failed,
        "graded": count,
    }
