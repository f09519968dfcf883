"""The bodies that ask for tokens, as values: chat completions, completions, and generation from token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verifiers_embedded.errors import ApiError
from verifiers_embedded.fields import integer, number, read_fields, short, typed, whole
from verifiers_embedded.grammars import read_forced, read_response_format
from verifiers_embedded.messages import read_messages, read_template_kwargs, read_tools

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP = 4
_MAX_TOP_K = 2**24
MAX_TEMPERATURE = 1000.0
_COMPLETIONS_MAX_TOKENS = 16

_DECODING = frozenset(
    {
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "stop_token_ids",
        "seed",
        "n",
        "logprobs",
        "ignore_eos",
    }
)
_ANSWERING = frozenset({"model", "stream", "stream_options", "return_token_ids"})
_CHAT = frozenset(
    {
        "messages",
        "max_completion_tokens",
        "top_logprobs",
        "chat_template_kwargs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
    }
)
_TEXT = frozenset({"prompt", "echo", "add_special_tokens", "response_format"})
_TOKENS = frozenset({"token_ids", "sampling_params"})


@dataclass(frozen=True)
class Decoding:
    """How a completion is sampled, and how many.

    Args:
        max_tokens: None for the room left in the context.
        n: completions of the prompt.
        logprobs: whether log-probabilities are answered.
        top_logprobs: alternatives a token, beside the sampled one.
        stop_token_ids: ids that end a completion, beside the model's own.
    """

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    seed: int | None
    n: int
    logprobs: bool
    top_logprobs: int
    ignore_eos: bool


@dataclass(frozen=True)
class Delivery:
    """How the answer is sent. `include_usage` adds a last event with the counts of tokens to a stream."""

    model: str
    stream: bool
    include_usage: bool
    return_token_ids: bool


@dataclass(frozen=True)
class ChatRequest:
    """A chat-completion request as the server understands it.

    Args:
        schema: JSON text of the schema that the answer must fit; None where it is free.
        forced: names of the tools one of which must be called; none where none must.
    """

    decoding: Decoding
    delivery: Delivery
    messages: list[dict[str, Any]]
    chat_template_kwargs: dict[str, Any]
    tools: list[dict[str, Any]]
    parallel_tool_calls: bool
    schema: str | None = None
    forced: tuple[str, ...] = ()

    @property
    def text_length(self) -> int:
        """Characters that the chat template will print, roughly."""
        said = sum(
            len(message["content"]) + len(repr(message.get("tool_calls", ""))) for message in self.messages
        )
        return said + len(repr(self.tools))


@dataclass(frozen=True)
class TextRequest:
    """A completion request: one or more prompts, each a text or token ids; `schema` as in `ChatRequest`."""

    decoding: Decoding
    delivery: Delivery
    prompts: list[str | list[int]]
    echo: bool
    add_special_tokens: bool
    schema: str | None = None


@dataclass(frozen=True)
class TokenRequest:
    """Generation from token ids, under vLLM's names."""

    decoding: Decoding
    delivery: Delivery
    token_ids: list[int]


def parse_chat_request(body: Any) -> ChatRequest:
    """Checks a chat-completion body and reads it. A field that is null counts as absent.

    Raises:
        ApiError: status 400; the message names the field, the value and what is expected.
    """
    fields = read_fields(body, _DECODING | _ANSWERING | _CHAT, {"best_of": (1,), "echo": (False,)})
    delivery = _delivery(fields)
    # both are checked where both are given
    limits = [_max_tokens(fields, name) for name in ("max_completion_tokens", "max_tokens") if name in fields]
    logprobs = typed(fields, "logprobs", bool, False)
    top = integer(fields, "top_logprobs", 0, least=0, most=MAX_TOP_LOGPROBS)
    if top and not logprobs:
        raise ApiError(f"field 'top_logprobs' is {top}, which needs 'logprobs': true", param="top_logprobs")
    tools = read_tools(fields)
    return ChatRequest(
        decoding=_decoding(fields, limits[0] if limits else None, logprobs, top),
        delivery=delivery,
        messages=read_messages(fields.get("messages")),
        chat_template_kwargs=read_template_kwargs(fields),
        tools=tools,
        parallel_tool_calls=typed(fields, "parallel_tool_calls", bool, True),
        schema=read_response_format(fields),
        forced=read_forced(fields, tools),
    )


def parse_text_request(body: Any) -> TextRequest:
    """Checks a completion body and reads it.

    Raises:
        ApiError: as `parse_chat_request`.
    """
    neutral = {"best_of": (1,), "suffix": ("",)}
    if isinstance(body, dict) and body.get("best_of") == body.get("n"):
        neutral["best_of"] = (body.get("n"),)
    fields = read_fields(body, _DECODING | _ANSWERING | _TEXT, neutral)
    delivery = _delivery(fields)
    top = integer(fields, "logprobs", 0, least=0, most=MAX_TOP_LOGPROBS)
    echo = typed(fields, "echo", bool, False)
    if echo and "logprobs" in fields:
        raise ApiError(
            "field 'echo' with 'logprobs' would need log-probabilities of the prompt, which this server does "
            "not compute; leave one of them out",
            param="echo",
            code="unsupported_parameter",
        )
    limit = _max_tokens(fields, "max_tokens")
    return TextRequest(
        decoding=_decoding(
            fields, _COMPLETIONS_MAX_TOKENS if limit is None else limit, "logprobs" in fields, top
        ),
        delivery=delivery,
        prompts=_prompts(fields.get("prompt")),
        echo=echo,
        add_special_tokens=typed(fields, "add_special_tokens", bool, True),
        schema=read_response_format(fields),
    )


def parse_token_request(body: Any) -> TokenRequest:
    """Checks a body of /inference/v1/generate and reads it. `model` may be left out.

    Raises:
        ApiError: as `parse_chat_request`.
    """
    fields = read_fields(body, _ANSWERING | _TOKENS, {"features": (), "kv_transfer_params": ()})
    sampling = read_fields(
        typed(fields, "sampling_params", dict, {}),
        _DECODING,
        {"detokenize": (True, False), "output_kind": ()},
    )
    top = sampling.get("logprobs")
    if top is not None:
        top = integer(sampling, "logprobs", 0, least=0, most=MAX_TOP_LOGPROBS)
    return TokenRequest(
        decoding=_decoding(sampling, _max_tokens(sampling, "max_tokens"), top is not None, top or 0),
        delivery=_delivery({"model": "", **fields}),
        token_ids=_ids(fields.get("token_ids"), "token_ids"),
    )


def _delivery(fields: Mapping[str, Any]) -> Delivery:
    if "model" not in fields:
        raise ApiError("field 'model' is missing; GET /v1/models lists the name to give", param="model")
    stream = typed(fields, "stream", bool, False)
    options = typed(fields, "stream_options", dict, {})
    if options and not stream:
        raise ApiError("field 'stream_options' needs 'stream': true", param="stream_options")
    if unknown := sorted(set(options) - {"include_usage", "include_obfuscation"}):
        raise ApiError(f"stream_options has unknown fields {', '.join(unknown)}", param="stream_options")
    return Delivery(
        model=typed(fields, "model", str, ""),
        stream=stream,
        include_usage=typed(options, "include_usage", bool, False),
        return_token_ids=typed(fields, "return_token_ids", bool, False),
    )


def _decoding(fields: Mapping[str, Any], max_tokens: int | None, logprobs: bool, top: int) -> Decoding:
    return Decoding(
        max_tokens=max_tokens,
        temperature=number(
            fields, "temperature", 1.0, "in [0, 1000]", lambda value: 0 <= value <= MAX_TEMPERATURE
        ),
        top_p=number(fields, "top_p", 1.0, "in (0, 1]", lambda value: 0 < value <= 1),
        top_k=min(max(integer(fields, "top_k", 0, least=-1), 0), _MAX_TOP_K),
        min_p=number(fields, "min_p", 0.0, "in [0, 1]", lambda value: 0 <= value <= 1),
        stop=_stop(fields.get("stop", [])),
        stop_token_ids=frozenset(_ids(fields.get("stop_token_ids", []), "stop_token_ids", least=0)),
        # modulo 2**64: any whole number is a seed
        seed=integer(fields, "seed", 0) % 2**64 if "seed" in fields else None,
        n=integer(fields, "n", 1, least=1, most=MAX_CHOICES),
        logprobs=logprobs,
        top_logprobs=top,
        ignore_eos=typed(fields, "ignore_eos", bool, False),
    )


def _max_tokens(fields: Mapping[str, Any], name: str) -> int | None:
    return integer(fields, name, 1, least=1) if name in fields else None


def _stop(value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
        raise ApiError(
            f"field 'stop' must be a non-empty string or a list of them, not {short(value)}", param="stop"
        )
    if len(items) > MAX_STOP:
        raise ApiError(f"field 'stop' holds {len(items)} strings; give at most {MAX_STOP}", param="stop")
    return tuple(items)


def _prompts(value: Any) -> list[str | list[int]]:
    """OpenAI's four forms: a text, texts, the ids of one prompt, or those of several."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ApiError(
            f"field 'prompt' must be a text, a list of token ids, or a list of either, not {short(value)}",
            param="prompt",
        )
    if isinstance(value[0], int | float):
        return [_ids(value, "prompt")]
    if len(value) > MAX_CHOICES:
        raise ApiError(
            f"field 'prompt' holds {len(value)} prompts; give at most {MAX_CHOICES}", param="prompt"
        )
    return [item if isinstance(item, str) else _ids(item, f"prompt[{at}]") for at, item in enumerate(value)]


def token_ids_of(fields: Mapping[str, Any], name: str) -> list[int]:
    """A field of at least one token id."""
    return _ids(fields.get(name), name)


def _ids(value: Any, name: str, least: int = 1) -> list[int]:
    fits = isinstance(value, list) and len(value) >= least
    ids = [whole(item) for item in value] if fits else []
    # bool is an int; the largest id that any tensor of ids can hold
    if not fits or not all(type(item) is int and 0 <= item < 2**31 for item in ids):
        raise ApiError(
            f"field {name!r} must be a list of {'at least one token id' if least else 'token ids'}, "
            f"whole numbers from 0, not {short(value)}",
            param=name.partition("[")[0],
        )
    return ids
