"""One rollout as a conversation: its state, the loop of model and environment, and the calls of the model."""

from __future__ import annotations

import functools
import inspect
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from verifiers.envs.classic.token_processing import object_tokens
from verifiers.envs.lifecycle import FUNCTION_TYPES, marked_methods, marked_names, maybe_await
from verifiers.envs.tools import openai_tools
from verifiers.errors import ConfigError, EmptyModelResponseError, OverlongPromptError
from verifiers.inference.context_overflow import is_context_overflow
from verifiers.inference.wire import WireObject, assistant_message, overlong_response, plain_data, sampled_tokens
from verifiers.types import (
    ChatMessage,
    Info,
    Messages,
    MessageType,
    ModelResponse,
    SamplingArgs,
    State,
    TrajectoryStep,
    as_messages,
    joined,
    message_field,
)

if TYPE_CHECKING:
    from verifiers.envs.multiturn_env import MultiTurnEnv

__all__ = [
    "Conversation",
    "call_model",
    "conversation_of",
    "default_step",
    "marked_methods_of",
    "new_state",
    "next_prompt",
    "offered_tools",
    "overridden_steps",
    "tools_of_info",
    "turns_are_over",
]

F = TypeVar("F", bound=Callable[..., Any])

STEPS = frozenset(
    {
        "add_model_response",
        "add_trajectory_step",
        "get_model_response",
        "get_prompt_messages",
        "init_state",
        "is_completed",
        "max_turns_reached",
        "prompt_too_long",
        "render_completion",
        "setup_state",
    }
)
"""Steps of a rollout that subclasses may override, each sync or async, and of either generation."""


def default_step(method: F) -> F:
    """Mark a method as a default step of the rollout loop, which then need not call it."""
    method.__dict__["_is_default_step"] = True
    return method


def overridden_steps(env: Any) -> frozenset[str]:
    """Return the steps that the environment's class, or the environment itself, has methods of its own for."""
    kind: Any = type(env)
    own, set_on_env = _class_overrides(kind), vars(env).keys() & STEPS
    return own | set_on_env if set_on_env else own


@functools.lru_cache(maxsize=512)
def _class_overrides(kind: Any) -> frozenset[str]:
    return frozenset(name for name in STEPS if not getattr(getattr(kind, name), "_is_default_step", False))


def takes_state_first(method: Callable[..., Any]) -> bool:
    """Return whether a method is written for the second generation: its first argument is the state."""
    return _takes_state_first(getattr(method, "__func__", method))


@functools.lru_cache(maxsize=512)
def _takes_state_first(function: Callable[..., Any]) -> bool:
    try:
        names = [name for name in inspect.signature(function).parameters if name != "self"]
    except (TypeError, ValueError):
        return False
    return names[:1] == ["state"]


class OfferedTools(list[Any]):
    """The tools that a state begins with, under both names; another list there is the environment's own."""


class TurnCount(int):
    """The loop's own `state["turn"]`; an environment that counts there itself makes it a plain int."""


def tools_of_info(info: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools that a row brings, by the name of either generation."""
    return info.get("oai_tools") or info.get("tool_defs")


def offered_tools(state: Mapping[str, Any], default: list[Any] | None) -> list[Any] | None:
    """Return the tools of the next model call: what the environment has set in the state, else those it began with.

    Args:
        default: the environment's, for a state that names none.
    """
    named = [tools for name in ("tool_defs", "oai_tools") if (tools := state.get(name)) is not None]
    own = [tools for tools in named if type(tools) is not OfferedTools]
    return own[0] if own else next((tools for tools in named if tools), default)


def new_state(
    row: Mapping[str, Any],
    client: Any,
    model: str,
    sampling_args: SamplingArgs | None,
    oai_tools: list[dict[str, Any]] | None,
) -> State:
    """Return the state of a rollout that begins.

    Args:
        row: `prompt`, and where given `answer`, `task`, `info`, `example_id`.
        oai_tools: offered unless the row's info has its own.
    """
    prompt = as_messages(row["prompt"])
    info: Info = row.get("info") or {}
    example_id = row.get("example_id", 0)
    tools = OfferedTools(tools_of_info(info) or oai_tools or ())
    fields = {
        "prompt": prompt,
        "answer": row.get("answer", ""),
        "task": row.get("task") or "default",
        "info": info,
    }
    return State(
        id=example_id,
        **fields,
        input={**fields, "example_id": example_id},
        example_id=example_id,
        completion="" if isinstance(prompt, str) else [],
        responses=[],
        trajectory=[],
        trajectory_id=uuid.uuid4().hex,
        turn=TurnCount(0),
        timing={"generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0},
        is_completed=False,
        is_truncated=False,
        stop_condition=None,
        final_env_response=None,
        reward=None,
        metrics=None,
        error=None,
        client=client,
        model=model,
        sampling_args=dict(sampling_args or {}),
        oai_tools=tools or None,
        tool_defs=tools,
    )


class Conversation:
    """The loop of model and environment over one state.

    A step that the environment does not override is done here; an override is called as its generation expects.

    Args:
        kwargs: passed on to the overrides of the first generation.
    """

    __slots__ = ("env", "kwargs", "own", "state", "stops")

    def __init__(self, env: MultiTurnEnv, state: State, own: frozenset[str], kwargs: Mapping[str, Any]) -> None:
        self.env = env
        self.state = state
        self.kwargs = kwargs
        self.own = own
        self.stops = marked_methods_of(env, "stop")

    async def play(self) -> None:
        """Play the rollout out in its state."""
        env, state = self.env, self.state
        messages: Any = state["prompt"]
        own_prompts = "get_prompt_messages" in self.own
        said: Any = messages
        while not await self.is_over(messages):
            if own_prompts and not state["trajectory"]:
                messages = as_messages(await maybe_await(env.get_prompt_messages, state))
            response = await self.ask_model(messages)
            if "add_model_response" in self.own:
                await maybe_await(env.add_model_response, state, messages, response)
            else:
                await self.add_response(messages, response)
            said = messages = conversation_of(state)
            state["completion"] = messages[len(state["prompt"]) :]
            if await self.is_over(messages):
                break
            if own_prompts:
                prompt = as_messages(await maybe_await(env.get_prompt_messages, state))
            else:
                prompt = await next_prompt(env, messages, state, self.kwargs)
            if state.get("final_env_response") is None:
                messages = prompt
                state["completion"] = messages[len(state["prompt"]) :]
        if len(messages) > len(said) and not own_prompts:
            # the rollout ended on the environment's reply, which no step has seen
            state["final_env_response"] = messages[len(said) :]
        await self.render()

    async def ask_model(self, messages: Any) -> ModelResponse:
        """Return the policy's answer, by `get_model_response` in the generation that it is written for."""
        env, state = self.env, self.state
        arguments: dict[str, Any] = {
            "oai_tools": offered_tools(state, env.oai_tools),
            "sampling_args": state["sampling_args"],
            "message_type": env.message_type,
        }
        if "get_model_response" not in self.own:
            return await call_model(
                state["client"], state["model"], messages, **arguments, logger=getattr(env, "logger", None)
            )
        if takes_state_first(env.get_model_response):
            return await maybe_await(env.get_model_response, state, messages)
        return await maybe_await(env.get_model_response, state["client"], state["model"], messages, **arguments)

    async def add_response(self, prompt: Messages, response: ModelResponse) -> None:
        """Note an answer of the policy in the state: `responses`, `turn`, and a step of the trajectory."""
        state = self.state
        state["responses"].append(response)
        step = step_of(prompt, response, self.env.message_type)
        if getattr(response, "id", None) == "overlong-prompt":
            state["prompt_too_long"] = state["is_truncated"] = True
        if isinstance(prompt, str):
            # where in the completion's text the policy's words begin
            state.setdefault("responses_start_idx", []).append(len(prompt) - len(state["prompt"]))
        if isinstance(state.get("turn"), TurnCount):
            state["turn"] = TurnCount(state["turn"] + 1)
        step["trajectory_id"] = state.get("trajectory_id")
        if "add_trajectory_step" in self.own:
            await maybe_await(self.env.add_trajectory_step, state, step)
        else:
            state["trajectory"].append(step)

    async def render(self) -> None:
        """Set `state["completion"]` to all that was said after the prompt."""
        if "render_completion" in self.own:
            await maybe_await(self.env.render_completion, self.state)
        else:
            self.state["completion"] = conversation_of(self.state)[len(self.state["prompt"]) :]

    async def is_over(self, messages: Any) -> bool:
        """Return whether the rollout ends here; `stop_condition` then has the reason."""
        env, state = self.env, self.state
        completed, asks_marked = False, True
        # asked first, whatever else holds: overrides note in the state what they find
        if "is_completed" in self.own:
            if takes_state_first(env.is_completed):
                completed, asks_marked = await maybe_await(env.is_completed, state), False
            else:
                completed = await maybe_await(env.is_completed, messages, state, **self.kwargs)
        # an override need not repeat these
        reason = await self.stop_reason(asks_marked=asks_marked and not completed)
        if completed or reason:
            state["stop_condition"] = state.get("stop_condition") or reason or "is_completed"
            return True
        return False

    async def stop_reason(self, *, asks_marked: bool = True) -> str | None:
        """Return the condition that ends the rollout, or None.

        Args:
            asks_marked: ask the methods marked `@vf.stop` too.
        """
        env, state = self.env, self.state
        if isinstance(state.get("error"), BaseException):
            return "has_error"
        overlong: Any = bool(state.get("prompt_too_long"))
        if "prompt_too_long" in self.own:
            overlong = await maybe_await(env.prompt_too_long, state)
        if overlong:
            return "prompt_too_long"
        if state.get("final_env_response") is not None:
            return "final_env_response"
        at_end: Any = turns_are_over(env, state)
        if "max_turns_reached" in self.own:
            at_end = await maybe_await(env.max_turns_reached, state)
        if at_end:
            return "max_turns_reached"
        for stop in self.stops if asks_marked else ():
            if await maybe_await(stop, state):
                return stop.__name__
        return None


async def next_prompt(env: MultiTurnEnv, messages: Any, state: State, kwargs: Mapping[str, Any]) -> Any:
    """Return the conversation with the environment's reply, given as messages, or as (messages, state)."""
    reply = await maybe_await(env.env_response, messages, state, **kwargs)
    if isinstance(reply, tuple):
        reply, state_after = reply
        if state_after is not state and state_after is not None:
            state.update(state_after)
    return joined(messages, reply) if reply else messages


def conversation_of(state: State) -> Any:
    """Return the whole conversation so far: what the newest step saw and said, and the environment's last word."""
    final = state.get("final_env_response")
    trajectory = state["trajectory"]
    said = joined(trajectory[-1]["prompt"], trajectory[-1]["completion"]) if trajectory else state["prompt"]
    return joined(said, final) if final else said


def turns_are_over(env: MultiTurnEnv, state: State) -> bool:
    if env.max_turns <= 0:
        return False
    # state["turn"] may be the environment's own
    counts = [len(state[name]) for name in ("responses", "trajectory") if state.get(name) is not None]
    return env.max_turns <= max(counts, default=state.get("turn", 0))


def marked_methods_of(env: MultiTurnEnv, kind: str) -> list[Callable[..., Any]]:
    # nearly no environment has marked methods, and every rollout asks
    cls: Any = type(env)
    if marked_names(cls, kind) or not FUNCTION_TYPES.isdisjoint(map(type, vars(env).values())):
        return marked_methods(env, kind)
    return []


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


def step_of(prompt: Messages, response: ModelResponse, message_type: MessageType) -> TrajectoryStep:
    """Return an answer of the policy as a step of the trajectory."""
    tokens = step_tokens(response, message_type)
    choice = response.choices[0]
    return {
        "prompt": prompt,
        "completion": [assistant_message(choice.message)] if message_type == "chat" else choice.text or "",
        "response": response,
        "tokens": tokens,
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
        sampled = sampled_tokens(plain_data(response))
        prompt_ids, completion_ids, logprobs = sampled.prompt_ids, sampled.completion_ids, sampled.logprobs
    else:
        prompt_ids, completion_ids, logprobs = object_tokens(response, message_type) or (None, None, None)
    if prompt_ids is None or completion_ids is None or logprobs is None:
        return None
    return {
        "prompt_ids": list(prompt_ids),
        "prompt_mask": [0] * len(prompt_ids),
        "completion_ids": list(completion_ids),
        "completion_mask": [1] * len(completion_ids),
        "completion_logprobs": list(logprobs),
        "overlong_prompt": getattr(response, "id", None) == "overlong-prompt",
        "is_truncated": getattr(response.choices[0], "finish_reason", None) == "length",
    }


def _has_audio(messages: list[ChatMessage]) -> bool:
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else getattr(message, "content", None)
        if isinstance(content, list) and any("audio" in str(message_field(part, "type", "")) for part in content):
            return True
    return False
