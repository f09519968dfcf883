"""The words of the project as types: messages, states, rollouts and their outcomes.

Nothing here imports more than the standard library, so that `import verifiers` stays cheap.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypedDict

__all__ = [
    "ChatMessage",
    "GenerateInputs",
    "GenerateOutputs",
    "Info",
    "Message",
    "MessageType",
    "Messages",
    "ModelResponse",
    "Outcome",
    "ProcessedOutputs",
    "Record",
    "RewardFunc",
    "RolloutInput",
    "RolloutKey",
    "RolloutScore",
    "RolloutScores",
    "SamplingArgs",
    "State",
    "TrajectoryStep",
]

ChatMessage = dict[str, Any]
"""One message in OpenAI's format: role, content, and for assistants perhaps tool_calls, reasoning_content."""

Message = ChatMessage | str
Messages = list[ChatMessage] | str
"""A conversation, or a plain string in completion mode."""

MessageType = Literal["chat", "completion"]
ModelResponse = Any
"""An object shaped like openai's ChatCompletion or Completion."""

Info = dict[str, Any]
SamplingArgs = dict[str, Any]
RewardFunc = Callable[..., float | Awaitable[float]]


class State(dict[str, Any]):
    """What a rollout knows: a plain dict that environments read and write freely.

    Keys always present after a rollout: id, prompt, completion, answer, task, info, responses, turn, timing;
    and trajectory, input, is_completed, stop_condition, reward, metrics, error.
    """


class Record(dict[str, Any]):
    """A dict whose keys are attributes too: both generations of the classic API read results in their own way."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}; it has {sorted(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class RolloutScore(Record):
    """Score of one rollout: `reward` (float) and `metrics` (name -> unweighted float)."""

    def __init__(self, reward: float, metrics: dict[str, float] | None = None, **extra: Any) -> None:
        super().__init__(reward=reward, metrics=metrics if metrics is not None else {}, **extra)


class RolloutScores(Record):
    """Scores of several rollouts: `reward` (list of float) and `metrics` (name -> list of float)."""

    def __init__(self, reward: list[float], metrics: dict[str, list[float]] | None = None, **extra: Any) -> None:
        super().__init__(reward=reward, metrics=metrics if metrics is not None else {}, **extra)


class GenerateInputs(Record):
    """Columns of prompts: prompt, and where given answer, info, task."""


class GenerateOutputs(Record):
    """Columns of finished rollouts: prompt, completion, answer, state, info, task, reward, metrics."""


class ProcessedOutputs(Record):
    """Token lists of rollouts in the classic layout: prompt_ids, prompt_mask, completion_ids, completion_mask,
    completion_logprobs, rewards."""


class RolloutInput(TypedDict, total=False):
    """One task row as the second generation of the classic API passes it."""

    prompt: Messages
    example_id: int
    task: str
    answer: str
    info: Info


class TrajectoryStep(TypedDict, total=False):
    """One model call inside a rollout, as the second generation of the classic API records it."""

    prompt: Messages
    completion: Messages
    response: ModelResponse
    tokens: dict[str, Any] | None
    reward: float | None
    advantage: float | None
    is_truncated: bool
    extras: dict[str, Any]


class Outcome(StrEnum):
    """How a rollout ended. Each rollout has exactly one; only the first two are scored."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ENVIRONMENT_ERROR = "environment_error"
    PROVIDER_ERROR = "provider_error"
    GRADING_ERROR = "grading_error"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"

    @property
    def is_failure(self) -> bool:
        """True for outcomes that carry no reward and must stay out of group statistics and loss."""
        return self not in (Outcome.COMPLETED, Outcome.TRUNCATED)


@dataclass(frozen=True, slots=True, order=True)
class RolloutKey:
    """Identity of a rollout; never its place in a list.

    Attributes:
        block_id: number of the block it was planned in, from 0. Evaluations use block 0.
        example_id: row of the dataset.
        generation: 0 .. num_generations - 1 within its group.
    """

    block_id: int
    example_id: int
    generation: int


@dataclass(slots=True)
class Timing:
    """Wall-clock seconds spent on a rollout."""

    queued_s: float = 0.0
    generation_s: float = 0.0
    scoring_s: float = 0.0


@dataclass(slots=True)
class Usage:
    """Tokens as the server counted them, summed over the calls of the trained policy."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class Failure:
    """Why a rollout has no reward: `kind` is the exception's class name, `text` its message."""

    kind: str
    text: str
    exception: BaseException | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"
