"""The bodies of requests: chat completions, completions, token ids, and what surrounds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    WrapValidator,
    model_validator,
)

from verifiers_embedded.engine.generation import FinishReason
from verifiers_embedded.errors import ApiError
from verifiers_embedded.routes.bodies import (
    Body,
    Count,
    Flag,
    RequestBody,
    Text,
    TokenId,
    TokenIds,
    Whole,
    as_given,
    only,
)
from verifiers_embedded.text.grammars import schema_text
from verifiers_embedded.text.prompts import RESERVED_TEMPLATE_ARGUMENTS


class Called(BaseModel):
    name: Text
    arguments: Text


class Call(BaseModel):
    """A tool call in an assistant's message."""

    function: Called


class TextPart(BaseModel):
    """A text in a message's content."""

    type: Literal["text"]
    text: Text


class ImageUrl(BaseModel):
    url: Text
    detail: Any = None


class ImagePart(BaseModel):
    """An image in a message's content, as a data URL."""

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[
    TextPart | ImagePart, Field(discriminator="type", description="an object with a 'type' of text or image_url")
]


def _as_content(value: Any, check: Callable[[Any], Any]) -> Any:
    """Check a content; pydantic would tell of a list that it is no text."""
    try:
        return check(value)
    except ValidationError as error:
        place = max((one["loc"] for one in error.errors()), key=len)
        wrong = next((value[part] for part in place if isinstance(part, int)), value)
        raise ApiError(
            f"the content of a message holds {wrong!r:.80}; give a text or a list of "
            "{'type': 'text', 'text': ...} and {'type': 'image_url', 'image_url': {'url': 'data:image/...'}}",
            param="messages",
        ) from None


class Message(Body):
    """A message of a conversation. With tool calls, which only the assistant has, the content may be left out."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text | list[Part], WrapValidator(_as_content)] | None = None
    name: Text | None = None
    tool_call_id: Text | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: list[Annotated[Call, WrapValidator(as_given)]] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value != [] or name == "content"}

    @model_validator(mode="after")
    def _content_or_calls(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls belong to the role 'assistant', not {self.role!r}")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing; give a string or a list of parts")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it. Text parts are joined by newlines, as vLLM does."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        parts = self.content or ""
        if isinstance(parts, str):
            given["content"] = parts
        elif self.image_urls:
            given["content"] = [
                {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
                for part in parts
            ]
        else:
            given["content"] = "\n".join(part.text for part in parts if isinstance(part, TextPart))
        return given

    @property
    def image_urls(self) -> list[str]:
        parts = self.content if isinstance(self.content, list) else ()
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]


class Function(BaseModel):
    name: Text
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    function: Function


class NamedTool(BaseModel):
    """The tool that must be called."""

    type: Literal["function"]
    function: Function


class PlainFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object"]


class NamedSchema(BaseModel):
    """A JSON schema under OpenAI's wrapping."""

    model_config = ConfigDict(extra="forbid")
    json_schema: dict[str, Any] = Field(alias="schema")
    name: Any = None
    strict: Any = None
    description: Any = None


class SchemaFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    PlainFormat | SchemaFormat,
    Field(discriminator="type", description="an object with a 'type' of text, json_object or json_schema"),
]


def _check_template_arguments(value: dict[str, Any]) -> dict[str, Any]:
    taken = sorted((RESERVED_TEMPLATE_ARGUMENTS | {"messages"}) & set(value))
    if taken:
        raise ApiError(
            f"chat_template_kwargs may not set {', '.join(taken)}; the server does",
            param="chat_template_kwargs",
        )
    return value


TemplateArguments = Annotated[
    dict[str, Any],
    AfterValidator(_check_template_arguments),
    Field(json_schema_extra={"propertyNames": {"not": {"enum": sorted({*RESERVED_TEMPLATE_ARGUMENTS, "messages"})}}}),
]
Messages = Annotated[list[Message], Field(min_length=1, description="a list of at least one message")]
Tools = list[Annotated[Tool, WrapValidator(as_given)]]


class Constrained(Body):
    """The field that says what the text of an answer must look like."""

    response_format: ResponseFormat | None = None

    @property
    def schema_text(self) -> str | None:
        """JSON text of the schema that the answer must fit; None where it is free."""
        wanted = self.response_format
        if isinstance(wanted, SchemaFormat):
            return schema_text(wanted.json_schema.json_schema, "response_format")
        return '{"type":"object"}' if wanted is not None and wanted.type == "json_object" else None


class Conversation(Body):
    """The fields that the chat template renders."""

    messages: Messages
    tools: Tools = Field(default_factory=list)
    chat_template_kwargs: TemplateArguments = Field(default_factory=dict)
    # a wish that a template may know how to tell the model
    reasoning_effort: Text | None = None

    @property
    def template_arguments(self) -> dict[str, Any]:
        wish = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**wish, **self.chat_template_kwargs}

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        return self.tools  # type: ignore[return-value]

    @property
    def text_length(self) -> int:
        """Characters that the chat template will print, roughly."""
        texts = sum(len(str(message.content)) + len(repr(message.tool_calls)) for message in self.messages)
        return texts + len(repr(self.shown_tools))


MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP = 4
MAX_TEMPERATURE = 1000.0
_MAX_TOP_K = 2**24
_COMPLETIONS_MAX_TOKENS = 16

TopLogprobs = Annotated[
    Whole, Field(ge=0, le=MAX_TOP_LOGPROBS, description=f"a whole number from 0 to {MAX_TOP_LOGPROBS}")
]
Prompt = Annotated[str, Strict(), Field(min_length=1)] | TokenIds


class Decoding(RequestBody):
    """The fields that say how completions are sampled, and how many."""

    max_tokens: Count | None = None
    temperature: Annotated[
        float, Strict(), Field(ge=0, le=MAX_TEMPERATURE, description=f"a number in [0, {MAX_TEMPERATURE:g}]")
    ] = 1.0
    top_p: Annotated[float, Strict(), Field(gt=0, le=1, description="a number in (0, 1]")] = 1.0
    top_k: Annotated[Whole, Field(ge=-1, description="a whole number of at least -1")] = 0
    min_p: Annotated[float, Strict(), Field(ge=0, le=1, description="a number in [0, 1]")] = 0.0
    stop: Annotated[
        Annotated[str, Strict(), Field(min_length=1)]
        | Annotated[list[Annotated[str, Strict(), Field(min_length=1)]], Field(max_length=MAX_STOP)],
        Field(description=f"a non-empty string or a list of at most {MAX_STOP}"),
    ] = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(description="a list of token ids")] = Field(default_factory=list)
    seed: Annotated[Whole, Field(description="a whole number")] | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES, description=f"a whole number from 1 to {MAX_CHOICES}")] = 1
    ignore_eos: Flag = False
    return_sampling_mask: Flag = False

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def most_likely(self) -> int:
        return min(max(self.top_k, 0), _MAX_TOP_K)

    @property
    def seed_64(self) -> int | None:
        return None if self.seed is None else self.seed % 2**64


class CountedLogprobs(Decoding):
    """Decoding where `logprobs` is the number of alternatives a token, beside the sampled one."""

    logprobs: TopLogprobs | None = None

    @property
    def top_logprobs(self) -> int:
        return self.logprobs or 0

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


class StreamOptions(Body):
    """The options of a stream: `include_usage` adds a last event with the counts of tokens."""

    include_usage: Flag = False
    include_obfuscation: Any = None


class Delivery(Body):
    """The fields that say how the answer is sent."""

    model: Text
    stream: Flag = False
    stream_options: StreamOptions | None = Field(None, description="an object, with 'stream': true")
    return_token_ids: Flag = False

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and self.stream_options.model_fields_set and not self.stream:
            raise ApiError("field 'stream_options' needs 'stream': true", param="stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def refuse_in_stream(self, name: str, asked: bool) -> None:
        if asked and self.stream:
            raise ApiError(f"'{name}' is answered as a whole; leave 'stream' out", param=name)


class ChatRequest(Conversation, Constrained, Delivery, Decoding):
    """The body of a chat completion."""

    max_completion_tokens: Count | None = None
    logprobs: Flag = False
    top_logprobs: TopLogprobs = 0
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | NamedTool,
        Field(
            description="'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}",
        ),
    ] = "auto"
    parallel_tool_calls: Flag = True
    best_of: Any = only(1)
    echo: Any = only(False)

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(
                f"field 'top_logprobs' is {self.top_logprobs}, which needs 'logprobs': true",
                param="top_logprobs",
            )
        self.refuse_in_stream("return_sampling_mask", self.return_sampling_mask)
        names, named = self._tool_names, self.named_tool
        if self.tool_choice not in ("auto", "none") and not names:
            raise ApiError(
                "field 'tool_choice' asks for a call, which needs 'tools' to choose from", param="tool_choice"
            )
        if named is not None and named not in names:
            raise ApiError(
                f"field 'tool_choice' names the function {named!r}, but the tools are {', '.join(names)}",
                param="tool_choice",
            )
        # refused here, before anything is rendered
        _ = self.schema_text
        return self

    @property
    def _tool_names(self) -> tuple[str, ...]:
        return tuple(tool["function"]["name"] for tool in super().shown_tools)

    @property
    def named_tool(self) -> str | None:
        """Name of the function that must be called; None where the model chooses."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def forced(self) -> tuple[str, ...]:
        """Names of the functions one of which must be called; none where none must."""
        named = self.named_tool
        if named is not None:
            return (named,)
        return self._tool_names if self.tool_choice == "required" else ()

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else super().shown_tools

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs


class TextRequest(Constrained, Delivery, CountedLogprobs):
    """The body of a completion: OpenAI's four forms of prompt are a text, texts, ids, or several prompts' ids."""

    prompt: Annotated[
        Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_CHOICES)],
        Field(description=f"a text, a list of token ids, or a list of 1 to {MAX_CHOICES} of either"),
    ]
    max_tokens: Annotated[Whole, Field(ge=0, description="a whole number of at least 0")] | None = None
    echo: Flag = False
    add_special_tokens: Flag = True
    prompt_logprobs: TopLogprobs | None = None
    best_of: Annotated[Whole, Field(ge=1)] | None = None
    suffix: Any = only("")

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ApiError("field 'max_tokens' must be at least 1, or 0 with 'echo'", param="max_tokens")
        if self.best_of not in (None, 1, self.n):
            raise ApiError(
                f"field 'best_of' with value {self.best_of} is not supported by this server; leave it out or give 1",
                param="best_of",
                code="unsupported_parameter",
            )
        self.refuse_in_stream("prompt_logprobs", self.prompt_logprobs is not None)
        self.refuse_in_stream("echo", self.echo and (self.wants_logprobs or self.max_tokens == 0))
        self.refuse_in_stream("return_sampling_mask", self.return_sampling_mask)
        _ = self.schema_text
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def scores_of_prompt(self) -> int | None:
        """How many alternatives to each token of the prompts are wanted; None where no log-probability is."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)

    @property
    def limit(self) -> int | None:
        """Most tokens of a completion; 16 where the request leaves it open, as with OpenAI."""
        return _COMPLETIONS_MAX_TOKENS if self.max_tokens is None else self.max_tokens


class SamplingParams(CountedLogprobs):
    """vLLM's sampling parameters of a generation from token ids."""

    detokenize: Flag | None = None
    output_kind: Any = only()


class TokenRequest(Delivery, RequestBody):
    """The body of /inference/v1/generate: generation from token ids, under vLLM's names. `model` may be left out."""

    model: Text = ""
    token_ids: TokenIds
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)
    features: Any = only()
    kv_transfer_params: Any = only()

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        self.refuse_in_stream("return_sampling_mask", self.return_sampling_mask)
        return self

    @property
    def wants_logprobs(self) -> bool:
        return self.sampling_params.wants_logprobs

    @property
    def return_sampling_mask(self) -> bool:
        return self.sampling_params.return_sampling_mask


class TokenizeRequest(Conversation, RequestBody):
    """The body of /tokenize: a text, or a conversation to be rendered."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None  # type: ignore[assignment]
    add_special_tokens: Flag = True
    return_token_strs: Flag = False

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError("give either 'prompt', a text, or 'messages'", param="prompt")
        return self


class DetokenizeRequest(RequestBody):
    """The body of /detokenize."""

    model: Text | None = None
    tokens: TokenIds


class Generated(BaseModel):
    """One choice of /inference/v1/generate; its log-probs are not needed."""

    token_ids: TokenIds
    finish_reason: FinishReason = "stop"


class GenerateResponse(BaseModel):
    """An answer of /inference/v1/generate."""

    choices: Annotated[list[Generated], Field(min_length=1)]


def _without_model(value: Any) -> Any:
    return {"model": "", **value} if isinstance(value, dict) else value


class DerenderRequest(RequestBody):
    """The body of /v1/chat/completions/derender: finished generations and the chat request they answer.

    `prompt_token_ids` is what the generations continue: names of tool calls are made of them, and their end
    says if a think tag is open.
    """

    model: Text | None = None
    generate_response: GenerateResponse
    chat_request: Annotated[ChatRequest, BeforeValidator(_without_model)]
    prompt_token_ids: TokenIds | None = None
    prompt_tokens: Any = None
    stream: Any = only(False)


class WeightsPath(BaseModel):
    """The arguments of a reload."""

    model_config = ConfigDict(extra="forbid")
    weights_path: Annotated[str, Strict(), Field(description="a directory of safetensors")]


class ReloadRequest(BaseModel):
    """The body of /collective_rpc."""

    method: Literal["reload_weights"]
    kwargs: Annotated[WeightsPath, Field(description="{'weights_path': DIR}")]
    args: Any = only([], None)


class VersionRequest(BaseModel):
    """The body of /update_weight_version."""

    new_version: Annotated[str, Strict(), Field(min_length=1, description="a non-empty string")]
