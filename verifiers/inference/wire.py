"""OpenAI's wire format without the `openai` package: what goes into a request or may not, and what comes back.

`import openai` costs half a second and validating one response with it costs more CPU than the whole call over
aiohttp, so the hot path answers with `WireObject`: the same names, read the same way, built only where touched.

Answers are checked where they arrive, so that nothing behind has to expect anything else: a message, its tool calls
and `usage` at the HTTP client, the tokens of a turn where a rollout's calls are tried. What can be mended is (tool
arguments given as an object, content in parts, half of a surrogate pair); anything else that no server should send is
a failed try, which the one retry of model calls repeats.
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verifiers.errors import ConfigError
from verifiers.inference.retry import RetryableError, status_error
from verifiers.types import AssistantMessage, MessageRecord, ToolCall, Usage, content_text, message_field

# Fields that OpenAI's objects always have, if only as None: environments read them without asking first.
_OPTIONAL = frozenset(
    {
        "annotations", "audio", "content", "created", "finish_reason", "function_call", "id", "logprobs", "model",
        "name", "object", "prompt_token_ids", "reasoning_content", "refusal", "role", "sampling_mask", "service_tier",
        "system_fingerprint", "text", "token_ids", "tool_calls", "usage", "weight_versions",
    }
)  # fmt: skip

_FORMS: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"), ()),
    **dict.fromkeys(("json_schema", "regex", "ebnf"), ()),
    "tool_choice": ("auto", "none"),
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "top_a": (0.0,),
    "top_n_sigma": (0.0, -1.0),
    **dict.fromkeys(("tfs", "tfs_z"), (1.0,)),
    "xtc_probability": (0.0,),
    **dict.fromkeys(("mirostat", "mirostat_mode"), (0,)),
    "dynatemp_range": (0.0,),
    "repetition_penalty": (1.0,),
    "repeat_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "dry_multiplier": (0.0,),
    "no_repeat_ngram_size": (0,),
    "logit_bias": ({},),
    **dict.fromkeys(("min_tokens", "min_new_tokens"), (0,)),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
    "thinking_token_budget": (-1,),
    "use_beam_search": (False,),
    "best_of": (1,),
    **_FORMS,
}
"""Sampling arguments that change the sampler's distribution, with the values under which they do not; where the
argument is in `NEUTRAL_SAMPLING`, the first value is the one that is sent.

Left out is what does nothing by itself (`length_penalty` without beams; `xtc_threshold`, `mirostat_tau` and
`mirostat_eta` without what they belong to), and `ignore_eos`, which ends a text later and moves no probability."""

NEUTRAL_SAMPLING: dict[str, Any] = {
    name: NEUTRAL[name][0]
    for name in ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
}
"""Asks for the model's own distribution. What a request leaves out, a server may take from the model's
generation_config.json, as vLLM does by default, and cut or shift the distribution."""


def neutral_where_unset(given: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `NEUTRAL_SAMPLING` that neither sampling arguments nor their `extra_body` set."""
    return {
        name: value for name, value in NEUTRAL_SAMPLING.items() if given.get(name) is None and extra.get(name) is None
    }


def refuse_biased_call(trained_at: float, assumed: Sequence[Mapping[str, Any]], sent: Mapping[str, Any]) -> None:
    """Refuse a call of a training rollout that samples otherwise than the trainer assumes.

    An answer in free form, or without a forced tool, is never refused: turns of one rollout may differ in that.

    Args:
        trained_at: the temperature at which the trainer scores.
        assumed: the fields of the sampling arguments that rollouts are given, one for each environment of a group.
        sent: the fields of the call's body. Without a temperature they stand for 1.0.
    """
    untrained = "or ask client.untrained, whose calls are not trained."
    passed_on = f"pass on the sampling_args that rollout was given, {untrained}"
    temperature = sent.get("temperature")
    if temperature != trained_at and (temperature is not None or trained_at != 1.0):
        samples = "leaves temperature out" if temperature is None else f"samples at temperature={temperature!r}"
        raise ConfigError(
            f"a call of the environment {samples}, and the trainer scores it at temperature={trained_at:g}; "
            f"{passed_on}"
        )
    named = set(sent).union(*assumed)
    # nearly always none: this is asked at every call
    for name in [name for name in NEUTRAL if name in named]:
        value, given = unless_neutral(name, sent), [unless_neutral(name, fields) for fields in assumed]
        if value in given or (value is None and name in _FORMS):
            continue
        samples = f"samples with {name}={sent[name]!r}" if sent.get(name) is not None else f"leaves {name} out"
        if None in given:
            raise ConfigError(
                f"a call of the environment {samples}, which the trainer does not assume; "
                f"leave {name} out, {untrained}"
            )
        raise ConfigError(
            f"a call of the environment {samples}, and the run samples with {name}={given[0]!r}; {passed_on}"
        )


def unless_neutral(name: str, fields: Mapping[str, Any]) -> Any:
    value = fields.get(name)
    return None if value in NEUTRAL[name] else value


CUTS = ("top_p", "top_k", "min_p")
"""Sampling arguments that leave tokens out; the trainer normalises over those that are kept."""


MaskSource = Literal["sampling_mask", "logprobs"]
"""How a server tells which tokens were left to draw from: by that field, or by its likeliest tokens, as vLLM does."""

_TIES = 8
"""Alternatives that are asked for beyond `top_k`: vLLM also keeps what is as likely as the last of these."""


def mask_fields(fields: Mapping[str, Any], source: MaskSource, vocab_size: int | None = None) -> dict[str, Any]:
    """Return the fields that ask a chat call for the tokens that were left to draw from; none where nothing is cut.

    Args:
        fields: of the call's body.

    Raises:
        ConfigError: vLLM cannot tell them, as there is no `top_k`.
    """
    cut = [name for name in CUTS if unless_neutral(name, fields) is not None]
    if not cut or source == "sampling_mask":
        return {"return_sampling_mask": True} if cut else {}
    if "top_k" not in cut:
        raise ConfigError(
            f"a call of the policy samples with {cut[0]!r} of {fields[cut[0]]!r}, and vLLM tells which tokens that "
            "leaves only within a top_k: set top_k too, such as 20."
        )
    asked = min(int(fields["top_k"]) + _TIES, vocab_size or _LARGEST)
    return {"top_logprobs": max(asked, fields.get("top_logprobs") or 0), "return_tokens_as_token_ids": True}


# Arguments of the SDK's `create` that are about the call, not part of the body.
_CALL_ARGUMENTS = frozenset({"extra_headers", "extra_query", "extra_body", "timeout"})


class WireObject:
    """A JSON object read like one of openai's models: `response.choices[0].message.content`.

    Fields may also be assigned; `model_dump()` gives plain data with what was assigned included.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.__dict__["_data"] = data

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # asked by copy and pickle of an object that is not filled yet
            raise AttributeError(name)
        data = self.__dict__["_data"]
        if name in data:
            value = _wrapped(data[name])
        elif name in _OPTIONAL:
            value = None
        elif name == "message" and data.get("choices"):
            return _first_message(self.choices[0])
        else:
            raise AttributeError(f"the server's answer has no field {name!r}; it has {sorted(data)}")
        self.__dict__[name] = value
        return value

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError as error:
            raise KeyError(str(error)) from None

    def get(self, name: str, default: Any = None) -> Any:
        """Return the field, or `default` where the server did not send it."""
        value = getattr(self, name, None)
        return default if value is None else value

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """Return plain dicts and lists, as openai's models do."""
        fields = {**self._data, **{k: v for k, v in self.__dict__.items() if k != "_data"}}
        plain = {name: _plain(value) for name, value in fields.items()}
        return {k: v for k, v in plain.items() if v is not None} if exclude_none else plain

    def model_dump_json(self, **kwargs: Any) -> str:
        return json.dumps(self.model_dump(**kwargs))

    dict = model_dump
    to_dict = model_dump

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WireObject) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"WireObject({self.model_dump(exclude_none=True)!r})"


class RecordedResponse(WireObject):
    """An answer without its tokens, which `turn` holds; they are made when they are read here."""

    __slots__ = ("turn",)

    def __init__(self, data: Mapping[str, Any], turn: Any) -> None:
        super().__init__(data)
        self.turn = turn

    def __getattr__(self, name: str) -> Any:
        if name == "prompt_token_ids":
            return list(self.turn.prompt_ids)
        value = super().__getattr__(name)
        if name == "choices":
            value[0] = _RecordedChoice(value[0].__dict__["_data"], self.turn)
        return value


class _RecordedChoice(RecordedResponse):
    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name == "token_ids":
            return list(self.turn.completion_ids)
        if name == "logprobs":
            tokens = [f"token_id:{token_id}" for token_id in self.turn.completion_ids]
            logprobs = list(self.turn.logprobs)
            content = [{"token": token, "logprob": logprob} for token, logprob in zip(tokens, logprobs, strict=True)]
            return WireObject({"content": content, "tokens": tokens, "token_logprobs": logprobs})
        return WireObject.__getattr__(self, name)


def without_tokens(response: Mapping[str, Any], arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an answer without the token ids and log-probs that the environment has not asked for."""
    extra = arguments.get("extra_body") or {}
    asked = any((arguments.get(name) or extra.get(name)) for name in ("logprobs", "return_token_ids"))
    if asked or "choices" not in response:
        return response
    lean = {name: value for name, value in response.items() if name not in _TOKEN_FIELDS}
    lean["choices"] = [
        {name: value for name, value in choice.items() if name not in _TOKEN_FIELDS} for choice in response["choices"]
    ]
    return lean


_TOKEN_FIELDS = ("logprobs", "prompt_token_ids", "sampling_mask", "token_ids", "weight_versions")


def _first_message(choice: Any) -> MessageRecord:
    """Return the answer as the late classic API has it: `response.message`, with its `finish_reason`."""
    message = assistant_message(choice.message)
    message.update(finish_reason=choice.finish_reason, is_truncated=choice.finish_reason == "length")
    return message


def plain_data(response: Any) -> Mapping[str, Any]:
    """Return a response as plain JSON data: as the server sent it, or as another SDK's object dumps itself.

    Test doubles give what they have: an object without `model_dump` is read by its attributes, one level at a time.
    """
    if isinstance(response, WireObject):
        data: Mapping[str, Any] = response.__dict__["_data"]
        return data
    if isinstance(response, Mapping):
        return response
    dump = getattr(response, "model_dump", None)
    if callable(dump):
        dumped = dump()
        if isinstance(dumped, Mapping):
            return dumped
    fields = vars(response) if hasattr(response, "__dict__") else {}
    return {name: _plain_field(value) for name, value in fields.items() if not name.startswith("_")}


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Token ids and log-probs of an answer's first choice; None for what the server does not send.

    Attributes:
        versions: spans of the sampled ids with the version of the weights that sampled them, as vLLM names them.
        usage: as the server counted, else the number of ids.
        refusal: the model's words where it refused, "content_filter" where the server filtered the answer, else None.
        kept: the ids that each token was drawn from, empty where nothing was left out; None where nobody needs them.
    """

    prompt_ids: Sequence[int] | None
    completion_ids: list[int] | None
    logprobs: list[float] | None
    versions: Sequence[Mapping[str, Any]] = ()
    finish_reason: str | None = None
    usage: Usage = field(default_factory=Usage)
    refusal: str | None = None
    kept: list[list[int]] | None = None


def version_spans(answer: Mapping[str, Any]) -> Sequence[Any]:
    """Return the spans of tokens of an answer's first choice, with the version of their weights, as they came."""
    choices = answer.get("choices")
    spans = choices[0].get("weight_versions") or () if choices else ()
    return spans if isinstance(spans, (list, tuple)) else [spans]


def sampled_tokens(answer: Mapping[str, Any]) -> SampledTokens:
    """Return the tokens of a chat or text completion that has a choice, given as plain data."""
    choice = answer["choices"][0]
    shown = choice.get("logprobs") or {}
    try:
        content = shown.get("content")
        logprobs = shown.get("token_logprobs") if content is None else [entry["logprob"] for entry in content]
    except (AttributeError, KeyError, TypeError):
        # as it came, for `check_tokens` to name
        logprobs = shown
    prompt_ids = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    completion_ids = choice.get("token_ids")
    counted = _counted_tokens(answer)
    message = choice.get("message")
    refusal = message.get("refusal") if isinstance(message, Mapping) else None
    filtered = "content_filter" if choice.get("finish_reason") == "content_filter" else None
    return SampledTokens(
        prompt_ids,
        completion_ids,
        logprobs,
        versions=version_spans(answer),
        finish_reason=choice.get("finish_reason"),
        usage=Usage(
            counted.get("prompt_tokens", _length(prompt_ids)),
            counted.get("completion_tokens", _length(completion_ids)),
        ),
        refusal=refusal if isinstance(refusal, str) and refusal else filtered,
    )


def _kept_by_logprobs(choice: Mapping[str, Any]) -> list[list[int]] | None:
    """Return the ids that each token was drawn from, by its likeliest tokens; None where they are not told."""
    shown = choice.get("logprobs") or {}
    try:
        content = shown.get("content")
        if content is None:
            tops: Any = [list(top.items()) for top in shown["top_logprobs"]]
        else:
            # the id is a field of its own or, where it is asked for, the name
            named = [[{"token_id": one.get("token"), **one} for one in entry["top_logprobs"]] for entry in content]
            tops = [[(str(one["token_id"]), one["logprob"]) for one in top] for top in named]
        alive = [
            {int(name.removeprefix("token_id:")): value for name, value in top if value > _LEFT_OUT} for top in tops
        ]
        told = [math.fsum(map(math.exp, each.values())) for each in alive]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None
    if any(abs(mass - 1) > _MASS for mass in told):
        raise RetryableError(
            f"the likeliest tokens that came have a probability of {min(told):.4f} together, and those that were "
            "left to draw from have 1; give a larger --max-logprobs to vLLM, or a smaller top_k"
        )
    return [sorted(each) for each in alive]


_LEFT_OUT = -9000.0
"""vLLM's log-prob of a token that was left out is -9999."""
_MASS = 1e-3


def _length(ids: Any) -> int | None:
    return len(ids) if isinstance(ids, list) else None


def whole_characters(text: str) -> str:
    """Return a text in which each half of a surrogate pair, which models do write, is U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _plain_field(value: Any) -> Any:
    if isinstance(value, (str, int, float, bool, Mapping, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain_field(item) for item in value]
    return plain_data(value)


def _wrapped(value: Any) -> Any:
    if isinstance(value, dict):
        return WireObject(value)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [WireObject(item) if isinstance(item, dict) else item for item in value]
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, WireObject):
        return value.model_dump()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def given_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without those that have openai's own markers for "left out"."""
    # recognised by name because importing them costs 0.5 s
    return {name: value for name, value in arguments.items() if type(value).__name__ not in ("NotGiven", "Omit")}


def request_body(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON body for the keyword arguments of `chat.completions.create` or `completions.create`.

    As the SDK does: `extra_body` is merged in last, arguments about the call itself stay out, and arguments that
    were left out are dropped. Messages given as objects are turned into plain dicts.
    """
    body = {k: v for k, v in given_arguments(arguments).items() if k not in _CALL_ARGUMENTS}
    extra = arguments.get("extra_body")
    if extra:
        body.update(extra)
    messages = body.get("messages")
    if messages is not None:
        body["messages"] = [m if isinstance(m, dict) else _message_dict(m) for m in messages]
    return body


def with_readable_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message as it is sent: the arguments of its tool calls are JSON objects, as far as they are text.

    vLLM and others read the arguments in earlier answers too, and refuse a conversation for those that a model got
    wrong.
    """
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_readable_call(call) for call in calls]} if isinstance(calls, list) else message


def _readable_call(call: Any) -> Any:
    function = message_field(call, "function")
    text = message_field(function, "arguments")
    if not (isinstance(text, str) and isinstance(call, Mapping) and isinstance(function, Mapping)):
        return call
    try:
        if isinstance(json.loads(text), dict):
            return call
    except (ValueError, RecursionError):
        pass
    mended = json.dumps({"not_json": text}) if text.strip() else "{}"
    return {**call, "function": {**function, "arguments": mended}}


def _message_dict(message: Any) -> Any:
    dump = getattr(message, "model_dump", None)
    return dump(exclude_none=True) if dump is not None else dict(message)


def overlong_response(model: str, message_type: str) -> WireObject:
    """Return the answer that stands for a prompt longer than the model's context: empty, ended by "length"."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None}
    if message_type == "chat":
        choice["message"] = {"role": "assistant", "content": ""}
    else:
        choice["text"] = ""
    kind = "chat.completion" if message_type == "chat" else "text_completion"
    return WireObject(
        {
            "id": "overlong-prompt",
            "object": kind,
            "created": 0,
            "model": model,
            "choices": [choice],
            "usage": None,
        }
    )


def assistant_message(message: Any) -> MessageRecord:
    """Return the chat message of a response as plain data; tool calls and reasoning are kept."""
    content, tool_calls = getattr(message, "content", None), getattr(message, "tool_calls", None)
    reasoning, refusal = (getattr(message, name, None) for name in ("reasoning_content", "refusal"))
    plain = AssistantMessage(role="assistant", content=content_text(content))
    if isinstance(tool_calls, list) and tool_calls:
        plain["tool_calls"] = [
            call if isinstance(call, dict) else ToolCall(call.id, call.function.name, call.function.arguments)
            for call in tool_calls
        ]
        # read once, they answer to attributes also where they are then reached through items
        for call in plain.tool_calls:
            _ = call.function
    if isinstance(reasoning, str) and reasoning:
        plain["reasoning_content"] = reasoning
    if isinstance(refusal, str) and refusal:
        plain["refusal"] = refusal
    return plain


# -- answers, checked ------------------------------------------------------------------------------------------------

# of a log-prob; vLLM writes -9999 for minus infinity, which no sampled token can have
_LEAST, _MOST = -9998.0, 1e-3
_LARGEST = 2**31
_SPAN = ("version", "start", "end")
# what a message may hold instead of content
_OTHER_CONTENT = ("tool_calls", "function_call", "refusal", "reasoning_content", "audio")
# of an answer that the server broke off: OpenRouter's and Mistral's; vLLM's, SGLang's and vf-serve's; DeepSeek's
_BROKEN_OFF = ("error", "abort", "insufficient_system_resource")
UNREADABLE = (AttributeError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError)
"""What code raises that reads an answer which is not as it should be."""

Converts = Callable[[dict[str, Any], str], dict[str, Any]]


def read_completion(
    data: dict[str, Any], url: str, field: str | None, *, convert: Converts | None = None, may_be_empty: bool = False
) -> dict[str, Any]:
    """Return a completion, in place, with fields of the types that OpenAI's have.

    A `usage`, or a number in it, that is none is left out: it is unknown.

    Args:
        field: what its choices must have: "message", "text", or None for neither.
        convert: makes the completion of an answer of another API.
        may_be_empty: an answer of which nothing was sampled is one, too.

    Raises:
        RetryableError: it is no completion, or stands for a failure of the provider's.
    """
    try:
        answer = convert(data, url) if convert is not None else data
        choices = answer.get("choices")
        if not choices or not isinstance(choices, list):
            failure = answer.get("error")
            if isinstance(failure, Mapping) and isinstance(failure.get("code"), int) and failure["code"] >= 400:
                # OpenRouter's way: the status of what it asked is in the body
                raise status_error(url, failure["code"], json.dumps(answer), None)
            raise RetryableError(f"{url} answered without a choice: {reprlib.repr(data)}", empty=True)
        for choice in choices:
            ended, failure = choice.get("finish_reason"), choice.get("error")
            if failure or ended in _BROKEN_OFF:
                said = message_field(failure, "message") or failure or ended
                raise RetryableError(f"{url} answered with a choice that failed: {said!r:.300}")
            if ended == "model_length":
                # Mistral's, of an answer that fills the context
                choice["finish_reason"] = "length"
            elif not isinstance(ended, str):
                choice["finish_reason"] = None
            if field == "text":
                choice["text"] = whole_characters(choice["text"])
            elif field is not None and choice.get("message"):
                _mend_message(choice["message"])
        answer["usage"] = _counted_tokens(answer) or None
        is_empty = not may_be_empty and field != "text" and _is_empty(choices[0], answer["usage"] or {})
    except UNREADABLE as error:
        text = f"{url} answered with what is no completion ({error!r:.200}): {reprlib.repr(data)}"
        raise RetryableError(text) from error
    if is_empty:
        raise RetryableError(f"{url} answered without a choice: {reprlib.repr(data)}", empty=True)
    return answer


def _mend_message(message: dict[str, Any]) -> None:
    message["role"] = "assistant"
    # OpenRouter's name, and vLLM's
    reasoning, content = message.pop("reasoning", None), message.get("content")
    if isinstance(content, list):
        message["content"] = content_text(content)
    reasoning = message.pop("reasoning_content", None) or reasoning
    if reasoning and isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    for name in ("content", "refusal", "reasoning_content"):
        if message.get(name) is not None:
            message[name] = whole_characters(message[name])
    if message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(place, call) for place, call in enumerate(message["tool_calls"])]


def _tool_call(place: int, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = {} if function.get("arguments") in (None, "") else function["arguments"]
    # Ollama and others give the object that the text stands for
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    named = {"name": whole_characters(function["name"]), "arguments": whole_characters(text)}
    call_id = whole_characters(str(call.get("id") or f"call_{place}"))
    return {**call, "id": call_id, "type": "function", "function": {**function, **named}}


def _counted_tokens(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of an answer's `usage` that are numbers of tokens."""
    used = answer.get("usage")
    counts = used.items() if isinstance(used, Mapping) else ()
    return {name: value for name, value in counts if type(value) is int and 0 <= value < _LARGEST}


def _is_empty(choice: Mapping[str, Any], used: Mapping[str, Any]) -> bool:
    """Return whether a choice has no message, or one of which nothing was sampled.

    A model may well end its turn at once, but then it has sampled a token, or its content is "" and not null.
    """
    message = choice.get("message")
    if not message:
        return True
    if message.get("content") is not None or any(message.get(name) for name in _OTHER_CONTENT):
        return False
    sampled = used.get("completion_tokens") or choice.get("token_ids")
    return not sampled and choice.get("finish_reason") not in ("length", "content_filter")


def version_number(value: Any) -> int | None:
    """Return a version of weights as a number; None for a name, as of a server that was never pushed to."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def check_tokens(
    answer: Mapping[str, Any],
    url: str,
    *,
    needed: bool,
    vocab_size: int | None,
    has_prompt: bool,
    mask_source: MaskSource | None = None,
) -> SampledTokens | None:
    """Return the tokens of an answer's first choice, checked, or None where it has no choice.

    `needed` refuses an answer without them (training); `has_prompt` says that the route gives the prompt's ids, too;
    `mask_source` how to find the tokens that were left to draw from, where some were not.

    Raises:
        RetryableError: with what is wrong.
    """
    if not answer.get("choices"):
        return None
    sampled = sampled_tokens(answer)
    if mask_source is not None:
        choice = answer["choices"][0]
        kept = _kept_by_logprobs(choice) if mask_source == "logprobs" else choice.get("sampling_mask")
        sampled = dataclasses.replace(sampled, kept=kept)
    given: dict[str, Any] = {"prompt_token_ids": sampled.prompt_ids} if has_prompt else {}
    given |= {"token_ids": sampled.completion_ids, "logprobs": sampled.logprobs}
    missing = [name for name, value in given.items() if value is None]
    if missing and needed:
        raise RetryableError(
            f"{url} answered without {' and '.join(missing)}, which training needs; use a server that honours "
            "return_token_ids and logprobs, such as vf-serve or vf-vllm, with no proxy before it that drops fields."
        )
    if mask_source is not None and sampled.kept is None:
        raise RetryableError(
            f"{url} answered without the tokens that were left to draw from (sampling_mask), which training with "
            f"{', '.join(CUTS)} needs; use vf-serve or vLLM, or leave them out."
        )
    problems = () if missing else _problems(given, sampled.versions, vocab_size or _LARGEST, sampled.kept)
    for problem in problems:
        raise RetryableError(f"{url} answered with {problem}.")
    return sampled


def _problems(given: Mapping[str, Any], spans: Sequence[Any], vocab_size: int, kept: Any = None) -> Iterator[str]:
    for name, values in given.items():
        types, least, most = ((int, float), _LEAST, _MOST) if name == "logprobs" else ((int,), 0, vocab_size - 1)
        values = values if isinstance(values, list) else [[values]]
        wrong = [each for each in values if type(each) not in types or not least <= each <= most]
        if wrong:
            yield f"{reprlib.repr(wrong[0])} among its {name}, which are numbers from {least} to {most}"
    ids, logprobs = len(given["token_ids"]), len(given["logprobs"])
    if ids != logprobs:
        yield f"{ids} token ids but {logprobs} log-probs, which must belong to the same tokens"
    if kept is not None:
        sets = kept if isinstance(kept, list) and len(kept) == ids else [kept]
        for drawn, left in zip(given["token_ids"], sets, strict=False):
            known = isinstance(left, list) and set(map(type, left)) <= {int}
            within = known and (not left or (min(left) >= 0 and max(left) < vocab_size and drawn in left))
            if not within or len(sets) != ids:
                yield f"{reprlib.repr(left)} as the tokens that {drawn} was drawn from: ids, with it among them"
    after: Any = 0
    for span in spans:
        version, start, last = [span.get(name) if isinstance(span, Mapping) else None for name in _SPAN]
        number: Any = version_number(version) if isinstance(version, str) else version
        is_name = isinstance(version, str) and number is None
        is_known = is_name or (type(number) is int and 0 <= number < _LARGEST)
        if not is_known or type(start) is not int or type(last) is not int or not after <= start <= last:
            yield f"{reprlib.repr(span)} among its weight_versions, which are spans of tokens with a version"
        after = last
