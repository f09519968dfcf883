"""Finished rollouts as token lists, in the classic layout: one prompt and one completion each.

For training loops of one's own that were written for the classic API; the trainer here uses
`rollouts.recording_client.rows_from_turns`.
Sampled tokens are those of the server's answers. What the environment wrote is taken from the next answer's
`prompt_token_ids` where the server sent them; otherwise it is tokenized here, which needs a chat template that
leaves history alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifiers.errors import ConfigError, MissingTokenIdsError
from verifiers.parsers.messages import sanitize_tool_calls
from verifiers.rollouts.rollout import Turn
from verifiers.types import MessageRecord, MessageType, ModelResponse, State, message_field

_TOKEN_ID = re.compile(r"(?:token_)?id:(\d+)")

TokenLists = tuple[list[int], list[int], list[int], list[int], list[float]]
"""prompt_ids, prompt_mask, completion_ids, completion_mask, completion_logprobs."""


# -- one answer -----------------------------------------------------------------------------------------------


def sampled_ids(response: ModelResponse) -> list[int]:
    """Return the sampled token ids of an answer: `token_ids`, or log-prob entries such as "token_id:123".

    An answer that has neither is a MissingTokenIdsError.
    """
    if _is_overlong(response):
        return []
    if (turn := _turn(response)) is not None:
        return list(turn.completion_ids)
    ids = _list_field(_choice(response), "token_ids")
    if ids is not None:
        return [int(token_id) for token_id in ids]
    shown = message_field(_choice(response), "logprobs")
    entries = _list_field(shown, "content")
    entries = _list_field(shown, "tokens") if entries is None else entries
    tokens = [_TOKEN_ID.fullmatch(str(message_field(entry, "token", entry))) for entry in entries or ()]
    # a bare number may be text that was sampled
    if entries is None or not all(tokens):
        raise MissingTokenIdsError(
            "an answer has neither token_ids nor tokens written as 'token_id:123'; ask the server for them with "
            "extra_body={'return_token_ids': True} or {'return_tokens_as_token_ids': True}."
        )
    return [int(token[1]) for token in tokens if token is not None]


def sampled_logprobs(response: ModelResponse) -> list[float]:
    """Return the log-probs of an answer's sampled tokens, in nats; MissingTokenIdsError without any."""
    if _is_overlong(response):
        return []
    if (turn := _turn(response)) is not None:
        return list(turn.logprobs)
    shown = message_field(_choice(response), "logprobs")
    entries = _list_field(shown, "content")
    if entries is not None:
        return [float(message_field(entry, "logprob")) for entry in entries]
    values = _list_field(shown, "token_logprobs")
    if values is None:
        raise MissingTokenIdsError(
            "an answer has no logprobs; ask for them with logprobs=True, or logprobs=0 of a text completion."
        )
    return [float(value) for value in values]


def step_tokens(response: ModelResponse) -> dict[str, Any] | None:
    """Return the tokens of an answer as a trajectory's step holds them; None where the server sent no ids."""
    prompt_ids = _sent_ids(response)
    try:
        completion_ids, logprobs = sampled_ids(response), sampled_logprobs(response)
    except (MissingTokenIdsError, TypeError, ValueError):
        return None
    if prompt_ids is None:
        return None
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": [0] * len(prompt_ids),
        "completion_ids": completion_ids,
        "completion_mask": [1] * len(completion_ids),
        "completion_logprobs": logprobs,
        "overlong_prompt": _is_overlong(response),
        "is_truncated": getattr(response.choices[0], "finish_reason", None) == "length",
    }


async def parse_response_tokens(
    response: ModelResponse, message_type: MessageType, max_seq_len: int | None = None
) -> dict[str, Any] | None:
    """Return `step_tokens`, with what is behind `max_seq_len` tokens of prompt and completion cut off."""
    tokens = step_tokens(response)
    if tokens is None or max_seq_len is None:
        return tokens
    prompt, completion = len(tokens["prompt_ids"]), len(tokens["completion_ids"])
    room = max(0, max_seq_len - prompt)
    kept = {name: tokens[name][:max_seq_len] for name in ("prompt_ids", "prompt_mask")}
    kept |= {name: tokens[name][:room] for name in ("completion_ids", "completion_mask", "completion_logprobs")}
    flags = {"overlong_prompt": prompt > max_seq_len, "is_truncated": tokens["is_truncated"] or completion > room}
    return {**tokens, **kept, **flags}


def _turn(response: ModelResponse) -> Turn | None:
    """Return the tokens of an answer that a training rollout holds apart from it."""
    turn = getattr(response, "turn", None)
    return turn if isinstance(turn, Turn) else None


def _sent_ids(response: ModelResponse) -> list[int] | None:
    if (turn := _turn(response)) is not None:
        return list(turn.prompt_ids)
    ids = _list_field(response, "prompt_token_ids") or _list_field(_choice(response), "prompt_token_ids")
    return None if ids is None else list(ids)


def _choice(response: ModelResponse) -> Any:
    choices = message_field(response, "choices")
    return choices[0] if choices else None


def _list_field(owner: Any, name: str) -> Sequence[Any] | None:
    # test doubles answer to every name, so only what is a list counts
    value = message_field(owner, name)
    return value if isinstance(value, (list, tuple)) else None


def _is_overlong(response: ModelResponse) -> bool:
    return bool(message_field(response, "id") == "overlong-prompt")


# -- one rollout ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Tokens:
    """The tokens of a rollout so far."""

    prompt_ids: list[int]
    mask_environment: bool
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def append_sampled(self, response: ModelResponse) -> None:
        ids, logprobs = sampled_ids(response), sampled_logprobs(response)
        if len(ids) != len(logprobs):
            raise MissingTokenIdsError(f"an answer has {len(ids)} token ids but {len(logprobs)} log-probs.")
        self.ids += ids
        self.mask += [1] * len(ids)
        self.logprobs += logprobs

    def append_environment(self, ids: list[int]) -> None:
        self.ids += ids
        self.mask += [0 if self.mask_environment else 1] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def lists(self) -> TokenLists:
        return self.prompt_ids, [0] * len(self.prompt_ids), self.ids, self.mask, self.logprobs


def process_chat(
    prompt: Sequence[Any],
    completion: Sequence[Any],
    state: State,
    processing_class: Any,
    mask_env_responses: bool = False,
    tools: list[dict[str, Any]] | None = None,
) -> TokenLists:
    """Return the token lists of a chat rollout, whose `responses` belong to its assistant messages, in order.

    Args:
        processing_class: a tokenizer with `apply_chat_template`.
        mask_env_responses: the environment's tokens get mask 0 instead of 1.
        tools: offered in the rollout, for the template.

    Raises:
        ConfigError: more or fewer responses than assistant messages, or a template that rewrites history.
        MissingTokenIdsError: an answer without token ids or log-probs.
    """
    answers = sum(message_field(message, "role") == "assistant" for message in completion)
    responses = list(state["responses"])
    if answers != len(responses):
        raise ConfigError(f"the completion has {answers} assistant messages, its state {len(responses)} responses.")
    render = _renderer(processing_class, tools)
    prompt_ids = _sent_ids(responses[0]) if responses else None
    held = _Tokens(prompt_ids or render(prompt, add_generation_prompt=True), mask_env_responses)
    consumed = list(prompt)
    said: list[Any] = []
    for message in completion:
        if message_field(message, "role") != "assistant":
            said.append(message)
            continue
        response = responses.pop(0)
        if said:
            held.append_environment(_environment_ids(held, _sent_ids(response), consumed, said, render))
            consumed, said = consumed + said, []
        held.append_sampled(response)
        consumed.append(message)
    if said:
        held.append_environment(_environment_ids(held, None, consumed, said, render))
    return held.lists()


def _environment_ids(
    held: _Tokens,
    sent: list[int] | None,
    consumed: list[Any],
    said: list[Any],
    render: Callable[..., list[int]],
) -> list[int]:
    """Return the tokens of messages that the environment said after what is held."""
    before = held.prompt_ids + held.ids
    if sent is not None and sent[: len(before)] == before:
        return sent[len(before) :]
    return _added(render(consumed), render(consumed + said))


def _added(before: list[int], after: list[int]) -> list[int]:
    if after[: len(before)] != before:
        raise ConfigError(
            "the tokens of a longer conversation do not begin with those of the shorter one (the chat template or "
            "the tokenizer rewrites history), so it is not a single row; use "
            "verifiers.rollouts.recording_client.rows_from_turns."
        )
    return after[len(before) :]


def _renderer(processing_class: Any, tools: list[dict[str, Any]] | None) -> Callable[..., list[int]]:
    with_tools: dict[str, Any] = {"tools": tools} if tools else {}

    def render(messages: Sequence[Any], **options: Any) -> list[int]:
        # templates ask which fields are defined, and for those of a message record all would be
        conversation = [_with_parsed_arguments(_bare(message)) for message in messages]
        rendered = processing_class.apply_chat_template(conversation=conversation, **options, **with_tools)
        # a stand-in may give text, and transformers from version 5 gives a mapping
        if isinstance(rendered, str):
            rendered = processing_class.encode(rendered)
        elif isinstance(rendered, Mapping):
            rendered = rendered["input_ids"]
        return list(rendered)

    return render


def _bare(message: Any) -> Any:
    return message.model_dump() if isinstance(message, MessageRecord) else message


def _with_parsed_arguments(message: Any) -> Any:
    """Return the message with tool-call arguments as data, as templates such as Qwen3's expect them."""
    if not message_field(message, "tool_calls"):
        return message
    plain: Any = sanitize_tool_calls([message])[0]
    calls = []
    for call in plain["tool_calls"]:
        function = dict(call["function"])
        try:
            function["arguments"] = json.loads(function["arguments"])
        except (TypeError, ValueError):
            pass  # the policy wrote what is not JSON, or it is data already: the template gets it as it is
        calls.append({**call, "function": function})
    return {**plain, "tool_calls": calls}


def process_completion(
    prompt: str, completion: str, state: State, processing_class: Any, mask_env_responses: bool = False
) -> TokenLists:
    """Return the token lists of a rollout in completion mode; as `process_chat`, by a tokenizer with `encode`.

    The state has `responses`, and where the environment spoke in between `responses_start_idx`: at which character of
    `completion` each of them begins.
    """
    responses = list(state["responses"])
    starts = state.get("responses_start_idx")
    prompt_ids = _sent_ids(responses[0]) if responses else None
    held = _Tokens(prompt_ids or list(processing_class.encode(prompt)), mask_env_responses)
    place = 0

    def append_environment(until: int) -> None:
        if until > place:
            before = list(processing_class.encode(prompt + completion[:place]))
            held.append_environment(_added(before, list(processing_class.encode(prompt + completion[:until]))))

    for number, response in enumerate(responses):
        text = message_field(_choice(response), "text") or ""
        start = completion.find(text, place) if starts is None else starts[number]
        if start < place or completion[start : start + len(text)] != text:
            raise ConfigError(f"response {number} ({text[:80]!r}) is not where it should be in the completion.")
        append_environment(start)
        held.append_sampled(response)
        place = start + len(text)
    append_environment(len(completion))
    return held.lists()


def cut(lists: TokenLists, max_seq_len: int, mask_truncated: bool) -> TokenLists:
    """Return the first `max_seq_len` tokens of prompt and completion; the latter's get mask 0 where that is asked."""
    room = max(0, max_seq_len - len(lists[0]))
    mask = [0] * len(lists[3][:room]) if mask_truncated else lists[3][:room]
    return lists[0][:max_seq_len], lists[1][:max_seq_len], lists[2][:room], mask, lists[4][:room]
