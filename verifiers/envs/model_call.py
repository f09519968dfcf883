"""One call to the policy, as `Environment.get_model_response` makes it: any client, chat or completion."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from verifiers.envs.classic.token_processing import object_tokens
from verifiers.envs.classic.tool_defs import offered_tools, openai_tools
from verifiers.errors import ConfigError, EmptyModelResponseError, OverlongPromptError
from verifiers.inference.endpoint import is_context_overflow
from verifiers.inference.wire import WireObject, overlong_response, plain_data
from verifiers.types import (
    AssistantMessage,
    ChatMessage,
    MessageRecord,
    Messages,
    MessageType,
    ModelResponse,
    SamplingArgs,
    State,
    TrajectoryStep,
    message_field,
)

__all__ = ["asks_by_state", "call_model", "call_model_by_state", "step_of"]


async def call_model(
    client: Any,
    model: str,
    prompt: Messages,
    *,
    message_type: MessageType,
    oai_tools: list[dict[str, Any]] | None = None,
    sampling_args: SamplingArgs | None = None,
    logger: logging.Logger | None = None,
) -> ModelResponse:
    """Ask the policy for its next answer.

    Chat renames max_tokens to max_completion_tokens, OpenAI's present name; None values are dropped; a prompt
    with audio asks for text back unless told otherwise.

    Returns:
        The response; for a prompt that does not fit the context one with id "overlong-prompt" and
        finish_reason "length".

    Raises:
        ConfigError: tools in completion mode.
        Exception: whatever else the client raises.
    """
    arguments = {name: value for name, value in (sampling_args or {}).items() if value is not None}
    if message_type == "chat":
        if "max_tokens" in arguments:
            arguments.setdefault("max_completion_tokens", arguments["max_tokens"])
            del arguments["max_tokens"]
        if oai_tools:
            arguments["tools"] = openai_tools(oai_tools)
        if isinstance(prompt, list) and _has_audio(prompt):
            arguments.setdefault("modalities", ["text"])
        create, content = client.chat.completions.create, {"messages": prompt}
    else:
        if oai_tools:
            raise ConfigError("oai_tools are not supported for completion tasks; use message_type='chat'.")
        create, content = client.completions.create, {"prompt": prompt}
    try:
        result = create(model=model, **content, **arguments)
        response = await result if inspect.isawaitable(result) else result
    except OverlongPromptError as error:
        _note_overlong(logger, error)
        return overlong_response(model, message_type)
    except Exception as error:
        if is_context_overflow(getattr(error, "status_code", None), f"{error} {getattr(error, 'body', '')}"):
            _note_overlong(logger, error)
            return overlong_response(model, message_type)
        raise
    if not getattr(response, "choices", None):
        raise EmptyModelResponseError(f"the answer of model {model!r} has no choices: {response!r:.300}")
    return response


def asks_by_state(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True for `get_model_response(state, prompt, ...)`; the first generation gives the client first."""
    return "state" in kwargs or bool(args and isinstance(args[0], Mapping))


async def call_model_by_state(
    env: Any,
    state: State,
    prompt: Messages,
    client: Any = None,
    model: str | None = None,
    oai_tools: list[dict[str, Any]] | None = None,
    sampling_args: SamplingArgs | None = None,
    message_type: MessageType | None = None,
    tool_defs: list[Any] | None = None,
    **_: Any,
) -> ModelResponse:
    """`call_model` for an environment and a state, which has whatever is not given."""
    given = tool_defs if oai_tools is None else oai_tools
    tools = offered_tools(state, env.oai_tools) if given is None else given
    return await call_model(
        client if client is not None else state["client"],
        model if model is not None else state["model"],
        prompt,
        message_type=message_type or env.message_type,
        oai_tools=tools,
        sampling_args=sampling_args if sampling_args is not None else state.get("sampling_args"),
        logger=getattr(env, "logger", None),
    )


def step_of(prompt: Messages, response: ModelResponse, message_type: MessageType) -> TrajectoryStep:
    """Return an answer of the policy as a step of the trajectory."""
    choice = response.choices[0]
    return {
        "prompt": prompt,
        "completion": [assistant_message(choice.message)] if message_type == "chat" else choice.text or "",
        "response": response,
        "tokens": step_tokens(response, message_type),
        "reward": None,
        "advantage": None,
        "is_truncated": getattr(choice, "finish_reason", None) == "length",
        "extras": {},
    }


def step_tokens(response: ModelResponse, message_type: MessageType) -> dict[str, Any] | None:
    """Return the tokens of an answer as a trajectory's step holds them; None where the server sent no ids.

    Returns:
        prompt_ids, prompt_mask, completion_ids, completion_mask, completion_logprobs (nats), overlong_prompt,
        is_truncated.
    """
    if isinstance(response, WireObject):
        lists = _wire_tokens(plain_data(response))
    else:
        lists = object_tokens(response, message_type)
    if lists is None:
        return None
    prompt_ids, completion_ids, logprobs = lists
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": [0] * len(prompt_ids),
        "completion_ids": completion_ids,
        "completion_mask": [1] * len(completion_ids),
        "completion_logprobs": logprobs,
        "overlong_prompt": getattr(response, "id", None) == "overlong-prompt",
        "is_truncated": getattr(response.choices[0], "finish_reason", None) == "length",
    }


def _wire_tokens(answer: Mapping[str, Any]) -> tuple[list[int], list[int], list[float]] | None:
    """Return prompt ids, sampled ids and log-probs of plain JSON: an object a token would cost more than the turn."""
    choice = answer["choices"][0]
    logprobs, completion_ids = choice.get("logprobs"), choice.get("token_ids")
    prompt_ids = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    if not logprobs or completion_ids is None or prompt_ids is None:
        return None
    entries = logprobs.get("content")
    chosen = [entry["logprob"] for entry in entries] if entries is not None else logprobs.get("token_logprobs")
    return None if chosen is None else (list(prompt_ids), list(completion_ids), list(chosen))


def assistant_message(message: Any) -> MessageRecord:
    """Return the chat message of a response as plain data; tool calls and reasoning are kept."""
    plain = AssistantMessage(role="assistant", content=getattr(message, "content", None) or "")
    tool_calls = getattr(message, "tool_calls", None)
    if isinstance(tool_calls, list) and tool_calls:
        plain["tool_calls"] = [_plain_tool_call(call) for call in tool_calls]
        # read once, they answer to attributes also where they are then reached through items
        for call in plain.tool_calls:
            _ = call.function
    reasoning = getattr(message, "reasoning_content", None)
    if isinstance(reasoning, str) and reasoning:
        plain["reasoning_content"] = reasoning
    return plain


def _plain_tool_call(call: Any) -> dict[str, Any]:
    if isinstance(call, dict):
        return call
    function = call.function
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": function.name, "arguments": function.arguments},
    }


def _has_audio(messages: list[ChatMessage]) -> bool:
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else getattr(message, "content", None)
        if isinstance(content, list) and any("audio" in str(message_field(part, "type", "")) for part in content):
            return True
    return False


def _note_overlong(logger: logging.Logger | None, error: Exception) -> None:
    if logger is not None:
        logger.debug("prompt too long, the rollout ends as truncated: %s", error)
