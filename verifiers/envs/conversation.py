"""The loop of policy and environment, for overrides of either generation of the classic API.

The environment is asked whether the rollout is over before and after each answer of the policy; in between come
the model call, the step that is recorded, and the environment's reply. The methods called on it are those that its
class may override: `is_completed`, marked stops, `get_prompt_messages`, `get_model_response`,
`add_trajectory_step`, `env_response`, `render_completion`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from verifiers.envs.calling import maybe_await, takes_state_first
from verifiers.envs.decorators import marked_methods
from verifiers.envs.model_call import assistant_message
from verifiers.envs.processing import step_tokens
from verifiers.errors import ConfigError, Error, MissingTokenIdsError, OverlongPromptError
from verifiers.parsers.messages import as_messages, joined
from verifiers.types import Messages, MessageType, ModelResponse, State, TrajectoryStep

__all__ = [
    "Converses",
    "conversation_of",
    "converse",
    "default_step",
    "is_overridden",
    "model_call_of",
    "next_prompt",
    "note_error",
    "step_of",
    "stop_reason",
]


F = TypeVar("F", bound=Callable[..., Any])


class Converses(Protocol):
    """What the loop asks of an environment; each method may be sync or async, and of either generation."""

    message_type: MessageType
    oai_tools: list[dict[str, Any]] | None

    @property
    def is_completed(self) -> Callable[..., Any]: ...

    @property
    def get_prompt_messages(self) -> Callable[..., Any]: ...

    @property
    def get_model_response(self) -> Callable[..., Any]: ...

    @property
    def add_model_response(self) -> Callable[..., Any]: ...

    @property
    def env_response(self) -> Callable[..., Any]: ...

    @property
    def render_completion(self) -> Callable[..., Any]: ...

    @property
    def max_turns_reached(self) -> Callable[..., Any]: ...

    @property
    def prompt_too_long(self) -> Callable[..., Any]: ...


def default_step(method: F) -> F:
    """Mark a method as the loop's own: where it is not overridden, the loop may take its shortcut."""
    method.__dict__["_is_default_step"] = True
    return method


async def converse(env: Converses, state: State, kwargs: Mapping[str, Any]) -> None:
    """Play a rollout out in its state; `kwargs` are passed on to the overrides of the first generation."""
    messages: Any = state["prompt"]
    own_prompts = is_overridden(env, "get_prompt_messages")
    said: Any = messages
    while not await is_over(env, messages, state, kwargs):
        if own_prompts and not state["trajectory"]:
            messages = as_messages(await maybe_await(env.get_prompt_messages, state))
        response = await model_call_of(env, state, messages)
        await maybe_await(env.add_model_response, state, messages, response)
        said = messages = conversation_of(state)
        state["completion"] = messages[len(state["prompt"]) :]
        if await is_over(env, messages, state, kwargs):
            break
        if own_prompts:
            prompt = as_messages(await maybe_await(env.get_prompt_messages, state))
        else:
            prompt = await next_prompt(env, messages, state, kwargs)
        if state.get("final_env_response") is None:
            messages = prompt
            state["completion"] = messages[len(state["prompt"]) :]
    if len(messages) > len(said) and not own_prompts:
        # the rollout ended on the environment's reply, which no step has seen
        state["final_env_response"] = messages[len(said) :]
    await maybe_await(env.render_completion, state)


def note_error(state: State, error: Error) -> None:
    """Keep an error in the state, as the second generation does; the rollout ends there.

    Raises:
        Error: a mistake of the user's that every rollout would repeat is raised instead.
    """
    if isinstance(error, (ConfigError, MissingTokenIdsError)):
        raise error
    if isinstance(error, OverlongPromptError):
        state["prompt_too_long"] = state["is_truncated"] = True
        state["stop_condition"] = state.get("stop_condition") or "prompt_too_long"
    else:
        state["error"] = error
        state["stop_condition"] = "has_error"


# -- one turn -------------------------------------------------------------------------------------------------


async def next_prompt(env: Converses, messages: Any, state: State, kwargs: Mapping[str, Any]) -> Any:
    """The conversation with the environment's reply, given as messages, or as (messages, state)."""
    reply = await maybe_await(env.env_response, messages, state, **kwargs)
    if isinstance(reply, tuple):
        reply, state_after = reply
        if state_after is not state and state_after is not None:
            state.update(state_after)
    return joined(messages, reply) if reply else messages


async def model_call_of(env: Converses, state: State, messages: Any) -> ModelResponse:
    """The policy's answer, through `get_model_response` in the generation that it is written for."""
    if takes_state_first(env.get_model_response):
        return await maybe_await(env.get_model_response, state, messages)
    tools = state.get("oai_tools")
    return await maybe_await(
        env.get_model_response,
        state["client"],
        state["model"],
        messages,
        oai_tools=env.oai_tools if tools is None else tools,
        sampling_args=state["sampling_args"],
        message_type=env.message_type,
    )


def step_of(env: Converses, prompt: Messages, response: ModelResponse) -> TrajectoryStep:
    """A model call as a step of the trajectory."""
    is_chat = env.message_type == "chat"
    return {
        "prompt": prompt,
        "completion": [assistant_message(response)] if is_chat else response.choices[0].text or "",
        "response": response,
        "tokens": step_tokens(response, env.message_type),
        "reward": None,
        "advantage": None,
        "is_truncated": getattr(response.choices[0], "finish_reason", None) == "length",
        "extras": {},
    }


def conversation_of(state: State) -> Any:
    """The whole conversation so far: what the newest step saw and said, and the environment's last word."""
    final = state.get("final_env_response")
    trajectory = state["trajectory"]
    said = joined(trajectory[-1]["prompt"], trajectory[-1]["completion"]) if trajectory else state["prompt"]
    return joined(said, final) if final else said


# -- the end --------------------------------------------------------------------------------------------------


async def is_over(env: Converses, messages: Any, state: State, kwargs: Mapping[str, Any]) -> bool:
    """Whether the rollout ends here; `stop_condition` then says why."""
    completed, asks_marked = False, True
    # asked first, whatever else holds: overrides note in the state what they find
    if takes_state_first(env.is_completed):
        completed, asks_marked = await maybe_await(env.is_completed, state), False
    elif is_overridden(env, "is_completed"):
        completed = await maybe_await(env.is_completed, messages, state, **kwargs)
    # an override need not repeat these
    reason = await stop_reason(env, state, asks_marked=asks_marked and not completed)
    if completed or reason:
        state["stop_condition"] = state.get("stop_condition") or reason or "is_completed"
        return True
    return False


async def stop_reason(env: Converses, state: State, *, asks_marked: bool = True) -> str | None:
    """The condition that ends the rollout, or None.

    Args:
        asks_marked: ask the methods marked `@vf.stop` too.
    """
    if isinstance(state.get("error"), BaseException):
        return "has_error"
    if await maybe_await(env.prompt_too_long, state):
        return "prompt_too_long"
    if state.get("final_env_response") is not None:
        return "final_env_response"
    if await maybe_await(env.max_turns_reached, state):
        return "max_turns_reached"
    for stop in marked_methods(env, "stop") if asks_marked else ():
        if await maybe_await(stop, state):
            return stop.__name__
    return None


def is_overridden(env: Any, name: str) -> bool:
    """True where an environment's method is not the loop's own."""
    kind: Any = type(env)
    return name in vars(env) or _class_overrides(kind, name)


@functools.lru_cache(maxsize=512)
def _class_overrides(kind: Any, name: str) -> bool:
    return not getattr(getattr(kind, name), "_is_default_step", False)
