"""The words of the project as types: messages, states, rollouts and their outcomes.

Nothing here imports more than the standard library, so that `import verifiers` stays cheap.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypedDict

from verifiers.chat_messages import (
    AssistantMessage,
    ChatMessage,
    Message,
    MessageRecord,
    Messages,
    Record,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
    as_message,
    as_messages,
    content_text,
    joined,
    message_field,
    message_text,
)
from verifiers.notebook import results_html

__all__ = [
    "AssistantMessage",
    "ChatMessage",
    "ClientConfig",
    "FailedGrade",
    "GenerateInputs",
    "GenerateOutputs",
    "Info",
    "Message",
    "MessageRecord",
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
    "SystemMessage",
    "ToolCall",
    "ToolMessage",
    "TrajectoryStep",
    "UserMessage",
    "as_message",
    "as_messages",
    "content_text",
    "joined",
    "message_field",
    "message_text",
]

MessageType = Literal["chat", "completion"]
"""The endpoint that an environment calls: chat completions, or completions of plain text."""

ModelResponse = Any
"""An object shaped like openai's ChatCompletion or Completion."""

Info = dict[str, Any]
"""Data of a row beside prompt and answer; the column `info`."""

SamplingArgs = dict[str, Any]
"""OpenAI's sampling arguments by name: temperature, max_tokens, top_p, seed, extra_body and the like."""

RewardFunc = Callable[..., float | list[float] | Awaitable[float] | Awaitable[list[float]]]
"""A function from what it names (prompt, completion, answer, state, ...) to a float; see `Rubric`."""


class State(dict[str, Any]):
    """The state of a rollout: a plain dict that environments read and write freely.

    Keys always present after a rollout: id, prompt, completion, answer, task, info, responses, turn, timing;
    and trajectory, input, is_completed, is_truncated, stop_condition, reward, metrics, error, model, sampling_args,
    oai_tools. While the rollout runs and is scored there is `client` too.

    Attributes:
        held: the worker that holds what reward functions need of it, and its number there; None without workers.
    """

    held: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        # connections are shared, not copied
        return State(
            {name: value if name == "client" else copy.deepcopy(value, memo) for name, value in self.items()}
        )


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Address, key and limits of an endpoint, for `verifiers.utils.client_utils.setup_client`.

    Attributes:
        api_base_url: with the version, e.g. "http://127.0.0.1:8000/v1".
        max_retries: the openai client's own retries.
    """

    api_key_var: str = "OPENAI_API_KEY"
    api_base_url: str = "https://api.openai.com/v1"
    timeout: float = 3600.0
    max_connections: int = 28000
    max_keepalive_connections: int = 28000
    max_retries: int = 10
    extra_headers: Mapping[str, str] = field(default_factory=dict)


class FailedGrade(TypedDict):
    """A reward function that failed on one rollout: its name, and the error as text."""

    func: str
    error: str


class RolloutScore(Record):
    """Score of one rollout.

    Attributes:
        reward: the weighted sum, a finite float.
        metrics: name -> unweighted float.
        errors: the reward functions that failed, each a `FailedGrade`. Where there are any, the reward is that of
            the other functions alone, and the rollout is a failed grade.
    """

    def __init__(
        self,
        reward: float,
        metrics: dict[str, float] | None = None,
        errors: list[FailedGrade] | None = None,
        **extra: Any,
    ) -> None:
        super().__init__(
            reward=reward,
            metrics=metrics if metrics is not None else {},
            errors=errors if errors is not None else [],
            **extra,
        )


class RolloutScores(Record):
    """Scores of several rollouts: `reward` (list of float) and `metrics` (name -> list of float)."""

    def __init__(self, reward: list[float], metrics: dict[str, list[float]] | None = None, **extra: Any) -> None:
        super().__init__(reward=reward, metrics=metrics if metrics is not None else {}, **extra)


class GenerateInputs(Record):
    """Columns of prompts: prompt, and where given answer, info, task."""


class GenerateOutputs(Record):
    """Columns of finished rollouts: prompt, completion, answer, state, info, task, reward, metrics.

    A notebook shows their means and the first rollouts.
    """

    def _repr_html_(self) -> str:
        return results_html(self)


class ProcessedOutputs(Record):
    """Token lists of rollouts in the classic layout.

    Keys: prompt_ids, prompt_mask, completion_ids, completion_mask, completion_logprobs, rewards.
    """


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
    trajectory_id: str | None
    extras: dict[str, Any]


class Outcome(StrEnum):
    """The end of a rollout. Each rollout has exactly one; only the first two are scored."""

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
    """Tokens as the server counted them, summed over the calls of the trained policy; None where it left one out."""

    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0


@dataclass(slots=True)
class Failure:
    """Reason for a rollout without a reward: `kind` is the exception's class name, `text` its message."""

    kind: str
    text: str
    exception: BaseException | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        # asked by `from ... import`
        raise AttributeError(name)
    # by name: an import would run upwards
    return importlib.import_module("verifiers.classic.import_paths").classic_name(__name__, name)
