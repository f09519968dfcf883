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

ChatMessage = dict[str, Any]
"""One message in OpenAI's format: role, content, and for assistants perhaps tool_calls, reasoning_content."""

Message = ChatMessage | str
"""One message, or a piece of text in completion mode."""

Messages = list[ChatMessage] | str
"""A conversation, or a plain string in completion mode."""


class Record(dict[str, Any]):
    """A dict whose keys are attributes too: both generations of the classic API read results in their own way."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}; it has {sorted(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


_MESSAGE_FIELDS = frozenset({
    "audio", "content", "function_call", "name", "reasoning_content", "refusal", "role", "tool_call_id", "tool_calls",
})  # fmt: skip


class MessageRecord(Record):
    """A chat message: a plain dict for JSON, tables and comparisons, whose fields are attributes too.

    `message.role`, `message.tool_calls[0].function.name`. Fields of OpenAI's messages that are absent read as None.
    Packages of the classic API from 0.1.11 on take messages for objects, those from before for dicts.
    """

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return _readable(self, name)
        if name in _MESSAGE_FIELDS:
            return None
        raise AttributeError(f"a message has no field {name!r}; this one has {sorted(self)}")

    def __deepcopy__(self, memo: dict[int, Any]) -> MessageRecord:
        return type(self)({name: copy.deepcopy(value, memo) for name, value in self.items()})

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """Return the message as plain nested data."""
        return {name: _dumped(value) for name, value in self.items() if not (exclude_none and value is None)}


class _Part(Record):
    """A dict inside a message. The name and arguments of a tool call are found where the second generation looks."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return _readable(self, name)
        function = self.get("function")
        if isinstance(function, Mapping) and name in function:
            return function[name]
        raise AttributeError(f"this part of a message has no field {name!r}; it has {sorted(self)}")


class ToolCall(_Part):
    """A tool call of an assistant message, in OpenAI's form; `ToolCall(id="...", name="...", arguments="{}")`."""

    def __init__(self, id: str = "", name: str = "", arguments: str = "{}") -> None:  # noqa: A002
        super().__init__(id=id, type="function", function={"name": name, "arguments": arguments})


def _readable(owner: dict[str, Any], name: str) -> Any:
    """Return a field whose dicts answer to attributes; they are put back, so that what is written to them stays."""
    value = owner[name]
    if type(value) is dict:
        value = owner[name] = _Part(value)
    elif type(value) is list:
        value[:] = [_part(item) if type(item) is dict else item for item in value]
    return value


def _part(fields: dict[str, Any]) -> _Part:
    kind = ToolCall if "function" in fields else _Part
    part = kind.__new__(kind)
    part.update(fields)
    return part


def _dumped(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _dumped(item) for name, item in value.items()}
    return [_dumped(item) for item in value] if isinstance(value, list) else value


class _MessageOfRole(MessageRecord):
    _role = ""

    def __init__(self, fields: Mapping[str, Any] | None = None, **more: Any) -> None:
        dict.__init__(self, fields or {}, **more)
        self.setdefault("role", self._role)


class SystemMessage(_MessageOfRole):
    """A message of role "system"; `SystemMessage(content="...")`."""

    _role = "system"


class UserMessage(_MessageOfRole):
    """A message of role "user"; `UserMessage(content="...")`."""

    _role = "user"


class AssistantMessage(_MessageOfRole):
    """A message of role "assistant"; `AssistantMessage(content="...")`."""

    _role = "assistant"


class ToolMessage(_MessageOfRole):
    """A message of role "tool"; `ToolMessage(content="...", tool_call_id="...")`."""

    _role = "tool"


_KINDS: dict[Any, type[MessageRecord]] = {
    "assistant": AssistantMessage,
    "system": SystemMessage,
    "tool": ToolMessage,
    "user": UserMessage,
}


def message_field(message: Any, name: str, default: Any = None) -> Any:
    """Return a field of a message that is a dict (classic) or an object with attributes (openai's and pydantic's)."""
    if isinstance(message, Mapping):
        return message.get(name, default)
    return getattr(message, name, default)


def content_text(content: Any) -> str:
    """Return the text of a message's content: a string, None, or a list of OpenAI content parts.

    Parts that are not text (images, audio) count as empty.
    """
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, (list, tuple)):
        return "".join(part if isinstance(part, str) else message_field(part, "text") or "" for part in content)
    return str(content)


def image_url_of(part: Any) -> str | None:
    """Return the URL of a content part that is an image, of OpenAI's form; None of another."""
    given = message_field(part, "image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    return url if isinstance(url, str) else None


def message_text(message: Any) -> str:
    """Return the text of a message; a string is its own text."""
    return message if isinstance(message, str) else content_text(message_field(message, "content"))


def as_message(message: Any) -> MessageRecord:
    """Return the message as states hold it: a dict that answers to attributes too.

    Args:
        message: a dict, a pydantic object (its `model_dump` is taken, without what is None), another object with
            `role` and `content`, or a string, which becomes a user message.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(message, MessageRecord):
        return message
    if isinstance(message, dict):
        return _KINDS.get(message.get("role"), MessageRecord)(message)
    if isinstance(message, str):
        return UserMessage(role="user", content=message)
    if isinstance(message, Mapping):
        return as_message(dict(message))
    dump = getattr(message, "model_dump", None)
    if callable(dump):
        fields = dump(exclude_none=True)
        if isinstance(fields, dict):
            # the key is expected also beside tool calls
            fields.setdefault("content", None)
            return as_message(fields)
    if hasattr(message, "role") and hasattr(message, "content"):
        return as_message({name: value for name, value in vars(message).items() if value is not None})
    raise TypeError(f"{message!r:.200} is not a chat message; give a dict with 'role' and 'content'.")


def as_messages(messages: Any) -> Any:
    """Return a conversation as states hold it: a list of `as_message`, always a new one; a string is left as it is.

    One message by itself counts as a list of it, None as an empty one.
    """
    if isinstance(messages, str):
        return messages
    if messages is None:
        return []
    if isinstance(messages, (list, tuple)):
        return [as_message(message) for message in messages]
    return [as_message(messages)]


def joined(before: Any, after: Any) -> Any:
    """Join two parts of a conversation: messages after messages, or text after text in completion mode."""
    if isinstance(before, str):
        return before + (after if isinstance(after, str) else "".join(map(message_text, as_messages(after))))
    return before + as_messages([after] if isinstance(after, str) else after)


def drop_none(value: Any) -> Any:
    """Return nested data without the dict entries that are None; list items stay, so that positions do."""
    if isinstance(value, Mapping):
        return {key: drop_none(item) for key, item in value.items() if item is not None}
    return [drop_none(item) for item in value] if isinstance(value, list) else value


# -- rollouts and their data ----------------------------------------------------------------------------------------

MessageType = Literal["chat", "completion"]
"""The endpoint that an environment calls: chat completions, or completions of plain text."""

ModelResponse = Any
"""An object shaped like openai's ChatCompletion or Completion."""

Info = dict[str, Any]
"""Data of a row beside prompt and answer; the column `info`."""

SamplingArgs = dict[str, Any]
"""OpenAI's sampling arguments by name: temperature, max_tokens, top_p, seed, extra_body and the like."""

_Rewarded = float | list[float] | Mapping[str, float]
RewardFunc = Callable[..., _Rewarded | Awaitable[_Rewarded]]
"""A function from what it names (prompt, completion, answer, state, ...) to a float; see `Rubric`."""


class State(dict[str, Any]):
    """The state of a rollout: a plain dict that environments read and write freely.

    Keys always present after a rollout: id, prompt, completion, answer, task, info, responses, turn, timing;
    and trajectory, input, is_completed, is_truncated, stop_condition, reward, metrics, error, model, sampling_args,
    oai_tools. While the rollout runs and is scored there is `client` too.

    Attributes:
        held: the worker that holds what reward functions need of it, and its number there; None without workers.
        place: of the rollout in a trace, where it is traced.
    """

    held: Any = None
    place: Any = None

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
        # by name: an import would run upwards
        return str(importlib.import_module("verifiers.notebook").results_html(self))


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


def names_of_classic(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module in which `verifiers.classic` has further names."""

    def get(name: str) -> Any:
        if name.startswith("__"):
            # asked by `from ... import`
            raise AttributeError(name)
        # by name: an import would run upwards
        return importlib.import_module("verifiers.classic.import_paths").classic_name(module, name)

    return get


__getattr__ = names_of_classic(__name__)
