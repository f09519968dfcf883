"""Scores of reasoning-gym's own scorers, taken in a worker process where the scorer interprets the model's text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from verifiers.envs.adapters import reasoning_gym_worker, tagged_json
from verifiers.errors import GradingError, WorkerCallError, WorkerError, WorkerTimeoutError
from verifiers.parsers.parser import Parser
from verifiers.rubrics.rubric import Rubric
from verifiers.types import Info, Messages, State

if TYPE_CHECKING:
    from verifiers.sandbox.workers import WorkerPool

__all__ = ["COMPARING_TASKS", "ReasoningGymRubric", "Verdict", "compares_text", "scoring_pool"]

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

SCORING_MEMORY_BYTES = 1 << 30

_SCORE = f"{reasoning_gym_worker.__name__}:score_in_worker"
_STATE_KEY = "reasoning_gym_verdict"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one answer.

    Attributes:
        answer: what was scored; None where the completion had no answer.
        score: the scorer's number; 0 where it did not come to one.
        killed: the scorer was stopped at its limit of time or memory.
        raised: name of the exception that the scorer raised, or "".
    """

    answer: str | None
    score: float
    killed: bool = False
    raised: str = ""


def compares_text(name: str) -> bool:
    """True for a task whose scorer does no more than compare text, so that it may run in the calling process."""
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS

    return name in COMPARING_TASKS or DATASETS[name][0].score_answer is ProceduralDataset.score_answer


@functools.cache
def scoring_pool() -> WorkerPool:
    """The process's one pool of scoring processes; they start at the first score."""
    from verifiers.sandbox.workers import WorkerPool

    return WorkerPool(
        memory_bytes=SCORING_MEMORY_BYTES,
        preload=("reasoning_gym", reasoning_gym_worker.__name__),
        name="reasoning-gym",
    )


class ReasoningGymRubric(Rubric):
    """reasoning-gym's score of the parsed answer, and metrics about it.

    Metrics: `score`, in most tasks 0 .. 1, with partial credit; `exact_match`, 1 where the score is exactly 1; and
    where a task is scored in a worker process, `scoring_timeout`, 1 where the scorer was killed at its limit of time
    or memory, and `scorer_raised`, 1 where this answer made it raise. Both of these score 0: the answer is to blame.
    A worker that fails without the answer's doing is a failed grade.

    Args:
        tasks: name and settings (as tagged JSON) of each task; `info["gym"]` is the place of a row's task.
        in_process: which of them are scored in the calling process.
        reward: which of `score` and `exact_match` has weight 1; the other has weight 0.
        parser: finds the answer in a completion.
        timeout_s: seconds that a scorer may take in a worker.
    """

    def __init__(
        self,
        tasks: Sequence[tuple[str, str]],
        in_process: Sequence[bool],
        *,
        reward: Literal["score", "exact"],
        parser: Parser,
        timeout_s: float,
    ) -> None:
        functions: dict[str, Callable[..., Any]] = {
            "score": self._value(lambda verdict: verdict.score),
            "exact_match": self._value(lambda verdict: verdict.score == 1.0),
        }
        if not all(in_process):
            functions["scoring_timeout"] = self._value(lambda verdict: verdict.killed)
            functions["scorer_raised"] = self._value(lambda verdict: verdict.raised != "")
        for name, function in functions.items():
            function.__name__ = name
        counts = "score" if reward == "score" else "exact_match"
        weights = [1.0 if name == counts else 0.0 for name in functions]
        # in turn: the first scores, the others read what it left in the state
        super().__init__(funcs=list(functions.values()), weights=weights, parser=parser, parallelize_scoring=False)
        self.tasks = list(tasks)
        self.in_process = list(in_process)
        self.timeout_s = timeout_s

    def _value(self, read: Callable[[Verdict], float]) -> Callable[..., Any]:
        async def value(completion: Messages, info: Info, state: State) -> float:
            parsed = self.parser.parse_answer(completion)
            answer = None if parsed is None else str(parsed).strip()
            verdict = state.get(_STATE_KEY)
            if not isinstance(verdict, Verdict) or verdict.answer != answer:
                verdict = state[_STATE_KEY] = await self._verdict(answer, info)
            return float(read(verdict))

        return value

    async def _verdict(self, answer: str | None, info: Info) -> Verdict:
        position = int(info.get("gym", 0))
        name, settings = self.tasks[position]
        arguments = (name, settings, info["entry"], answer)
        if self.in_process[position]:
            result = reasoning_gym_worker.score(*arguments)
            if result["raised"]:
                # a scorer that only compares takes any text, so the answer is not to blame
                raise GradingError(f"The scorer of task {name!r} raised {result['raised']}.")
            return Verdict(answer, result["score"])
        try:
            result = await scoring_pool().call(_SCORE, *arguments, timeout_s=self.timeout_s)
        except WorkerTimeoutError:
            return Verdict(answer, 0.0, killed=True)
        except WorkerCallError as error:
            if error.kind != "MemoryError":
                raise
            return Verdict(answer, 0.0, killed=True)
        except WorkerError as error:
            await self._blame(error, arguments)
            return Verdict(answer, 0.0, killed=True)
        return _verdict_from(answer, result)

    async def _blame(self, error: WorkerError, arguments: tuple[str, str, str, str | None]) -> None:
        """Return where it was the answer that ended the worker: an empty one is scored without harm.

        Raises:
            GradingError: the empty answer fails too.
        """
        try:
            await scoring_pool().call(_SCORE, *arguments[:3], "", timeout_s=self.timeout_s)
        except WorkerError:
            raise GradingError(f"The scorer of task {arguments[0]!r} cannot run in a worker: {error}") from error


def _verdict_from(answer: str | None, result: Mapping[str, Any]) -> Verdict:
    raised = str(result["raised"])
    return Verdict(answer, float(result["score"]), killed=raised == "MemoryError", raised=raised)


def settings_text(settings: Mapping[str, Any]) -> str:
    """A task's settings as they travel to a worker."""
    return tagged_json.dumps(dict(settings))
