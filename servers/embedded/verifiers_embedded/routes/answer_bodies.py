"""The bodies that the server answers, as typed dictionaries; the OpenAPI description is made from them."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from verifiers_embedded.engine.generation import FinishReason

Count = Annotated[int, Field(ge=0)]
ChatEnd = FinishReason | Literal["tool_calls"]

closed = with_config(ConfigDict(extra="forbid"))


@closed
class ErrorFields(TypedDict):
    """OpenAI's fields of an error."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


@closed
class Error(TypedDict):
    """A refusal or a failure."""

    error: ErrorFields


@closed
class Usage(TypedDict):
    """Counts of tokens."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count


@closed
class VersionSpan(TypedDict):
    """The tokens [start, end) of a completion, sampled under the weights called `version`."""

    version: str
    start: Count
    end: Count


@closed
class CalledFunction(TypedDict):
    """The function of a call; its arguments are JSON text."""

    name: str
    arguments: str


@closed
class ToolCall(TypedDict):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"]
    function: CalledFunction


@closed
class ToolCallDelta(ToolCall):
    """A call in an event; it is sent whole."""

    index: Count


@closed
class NamedToken(TypedDict):
    """A token and its log-probability in nats."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


@closed
class SampledToken(NamedToken):
    """A sampled token with its likeliest alternatives."""

    top_logprobs: list[NamedToken]


@closed
class ChatLogprobs(TypedDict):
    """Chat completions' form of log-probabilities."""

    content: list[SampledToken]
    refusal: None


@closed
class TextLogprobs(TypedDict):
    """Completions' form of log-probabilities."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[Count]


@closed
class AssistantMessage(TypedDict):
    """The assistant's message: content, and apart from it reasoning and calls."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[Annotated[list[ToolCall], Field(min_length=1)]]


@closed
class Delta(TypedDict):
    """The part of the assistant's message that an event adds."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[Annotated[list[ToolCallDelta], Field(min_length=1)]]


@closed
class ChatChoice(TypedDict):
    """A choice of a chat completion."""

    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatEnd
    weight_versions: list[VersionSpan]
    token_ids: NotRequired[list[Count]]


@closed
class ChatChunkChoice(TypedDict):
    """A choice in an event of a chat completion."""

    index: Count
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatEnd | None
    weight_versions: NotRequired[list[VersionSpan]]
    token_ids: NotRequired[list[Count]]


@closed
class TextChoice(TypedDict):
    """A choice of a completion."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    weight_versions: list[VersionSpan]
    prompt_token_ids: NotRequired[list[Count]]
    token_ids: NotRequired[list[Count]]


@closed
class TextChunkChoice(TypedDict):
    """A choice in an event of a completion."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    weight_versions: NotRequired[list[VersionSpan]]
    prompt_token_ids: NotRequired[list[Count]]
    token_ids: NotRequired[list[Count]]


@closed
class ChatCompletion(TypedDict):
    """A whole chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    choices: Annotated[list[ChatChoice], Field(min_length=1)]
    usage: Usage
    prompt_token_ids: NotRequired[list[Count]]


@closed
class ChatChunk(TypedDict):
    """An event of a chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: Count
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage]
    prompt_token_ids: NotRequired[list[Count]]


@closed
class Completion(TypedDict):
    """A whole completion."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: Annotated[list[TextChoice], Field(min_length=1)]
    usage: Usage


@closed
class CompletionChunk(TypedDict):
    """An event of a completion."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: list[TextChunkChoice]
    usage: NotRequired[Usage]


@closed
class GenerationChoice(TypedDict):
    """A choice of a generation from token ids."""

    index: Count
    token_ids: list[Count]
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    weight_versions: list[VersionSpan]


@closed
class GenerationChunkChoice(TypedDict):
    """A choice in an event of a generation from token ids."""

    index: Count
    token_ids: list[Count]
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    weight_versions: NotRequired[list[VersionSpan]]


@closed
class TokenGeneration(TypedDict):
    """A whole generation from token ids."""

    request_id: str
    choices: list[GenerationChoice]
    prompt_logprobs: None


@closed
class GenerationChunk(TypedDict):
    """An event of a generation from token ids."""

    request_id: str
    choices: list[GenerationChunkChoice]
    usage: NotRequired[Usage]


@closed
class ServedModel(TypedDict):
    """An entry of the list of models."""

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    max_model_len: Count


@closed
class ModelList(TypedDict):
    """The list of models, of which there is one."""

    object: Literal["list"]
    data: list[ServedModel]


@closed
class Tokenized(TypedDict):
    """Token ids of a text or a conversation."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


@closed
class Detokenized(TypedDict):
    """The text of token ids."""

    prompt: str


@closed
class Health(TypedDict):
    """The lengths of the queue."""

    status: Literal["ok"]
    running: Count
    waiting: Count


@closed
class Paused(TypedDict):
    """The answer of /pause: no more tokens are sampled."""

    status: Literal["paused"]


@closed
class Resumed(TypedDict):
    """The answer of /resume: tokens are sampled again."""

    status: Literal["resumed"]


@closed
class PauseState(TypedDict):
    """The answer of /is_paused."""

    is_paused: bool


@closed
class Reloaded(TypedDict):
    """The new weights are in use."""

    results: list[None]


@closed
class VersionSet(TypedDict):
    """The weights have a new name."""

    success: Literal[True]
    new_version: str


@closed
class WeightInfo(TypedDict):
    """The weights that are served."""

    weight_version: str
    num_parameters: Count
    model: str
