"""A rollout as a conversation: the tools that are offered, calls of the model, and what its state keeps of them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any, cast

from verifiers.envs.tools import openai_tools
from verifiers.errors import ConfigError, EmptyModelResponseError, OverlongPromptError
from verifiers.inference.retry import is_context_overflow
from verifiers.inference.wire import assistant_message, overlong_response
from verifiers.types import (
    ChatMessage,
    Messages,
    MessageType,
    ModelResponse,
    SamplingArgs,
    State,
    TrajectoryStep,
    joined,
    message_field,
)


class OfferedTools(list[Any]):
    """The tools that a state begins with, under both names; another list there is the environment's own."""


class TurnCount(int):
    """The loop's own `state["turn"]`; an environment that counts there itself makes it a plain int."""


def begin_turns(state: State, oai_tools: list[dict[str, Any]] | None) -> None:
    """Put into a state that begins the tools that are offered, unless its row has its own, and the count of turns."""
    tools = OfferedTools(tools_of_info(state["info"]) or oai_tools or ())
    state["oai_tools"], state["tool_defs"] = tools or None, tools
    state["turn"] = TurnCount(0)


def tools_of_info(info: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools that a row brings, by either of their names."""
    return info.get("oai_tools") or info.get("tool_defs")


def offered_tools(state: Mapping[str, Any], default: list[Any] | None) -> list[Any] | None:
    """Return the tools of the next model call: what was set in the state, those it began with, or the default."""
    named = [tools for name in ("tool_defs", "oai_tools") if (tools := state.get(name)) is not None]
    own = [tools for tools in named if type(tools) is not OfferedTools]
    return own[0] if own else next((tools for tools in named if tools), default)


def said_so_far(state: State) -> Any:
    return joined(state["prompt"], state["completion"])


def add_response(state: State, prompt: Messages, response: ModelResponse, message_type: MessageType) -> None:
    """Note an answer of the policy in the state: `responses`, `turn`, `completion` and a step of the trajectory."""
    state["responses"].append(response)
    step = step_of(prompt, response, message_type)
    if getattr(response, "id", None) == "overlong-prompt":
        state["prompt_too_long"] = state["is_truncated"] = True
    if isinstance(prompt, str):
        # where in the completion's text the policy's words begin
        state.setdefault("responses_start_idx", []).append(len(prompt) - len(state["prompt"]))
    if isinstance(state.get("turn"), TurnCount):
        state["turn"] = TurnCount(state["turn"] + 1)
    step["trajectory_id"] = state.get("trajectory_id")
    state["trajectory"].append(step)
    state["completion"] = joined(state["completion"], step["completion"])


async def ask_model(env: Any, state: State, prompt: Messages) -> ModelResponse:
    """Ask the policy of a rollout for its next answer; as `call_model`, with what the state has."""
    return await call_model(
        state["client"],
        state["model"],
        prompt,
        message_type=env.message_type,
        oai_tools=offered_tools(state, env.oai_tools),
        sampling_args=state.get("sampling_args"),
        logger=getattr(env, "logger", None),
    )


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
    """Ask the policy for its next answer; one with id "overlong-prompt" for a prompt that does not fit the context.

    Chat renames max_tokens to max_completion_tokens, OpenAI's present name; None values are dropped; a prompt
    with audio asks for text back unless told otherwise.

    Raises:
        ConfigError: tools in completion mode.
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
    except Exception as error:
        status, text = getattr(error, "status_code", None), f"{error} {getattr(error, 'body', '')}"
        if not isinstance(error, OverlongPromptError) and not is_context_overflow(status, text):
            raise
        if logger is not None:
            logger.debug("prompt too long, the rollout ends as truncated: %s", error)
        return overlong_response(model, message_type)
    # a test double of the classic API may answer with a dict of its own
    if not isinstance(response, dict) and not getattr(response, "choices", None):
        raise EmptyModelResponseError(f"the answer of model {model!r} has no choices: {response!r:.300}")
    return response


class _Step(dict[str, Any]):
    """A step of the trajectory, whose `tokens` are made when they are read."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if name == "tokens" and value is None:
            from verifiers.classic.token_processing import step_tokens

            return step_tokens(self["response"], "completion" if isinstance(self["prompt"], str) else "chat")
        return value

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - `get` would not read `tokens`


def step_of(prompt: Messages, response: ModelResponse, message_type: MessageType) -> TrajectoryStep:
    choice = response.choices[0]
    step = _Step(
        prompt=prompt,
        completion=[assistant_message(choice.message)] if message_type == "chat" else choice.text or "",
        response=response,
        tokens=None,
        reward=None,
        advantage=None,
        is_truncated=getattr(choice, "finish_reason", None) == "length",
        extras={},
    )
    return cast(TrajectoryStep, step)


def _has_audio(messages: list[ChatMessage]) -> bool:
    contents = [message_field(message, "content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any("audio" in str(message_field(part, "type", "")) for part in parts)
