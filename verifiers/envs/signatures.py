"""Calling overrides that may be sync or async, and written for either generation of the classic API."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import Any, TypeVar

from verifiers.envs.conversation import call_model, offered_tools
from verifiers.types import Messages, MessageType, ModelResponse, SamplingArgs, State

__all__ = [
    "AwaitableDict",
    "asks_by_state",
    "call_model_by_state",
    "call_rollout",
    "either_generation",
    "gives_rollout_input",
    "takes_rollout_input",
]

F = TypeVar("F", bound=Callable[..., Any])


def either_generation(
    is_second: Callable[[tuple[Any, ...], dict[str, Any]], bool], second: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a method answer to the second generation's arguments too.

    Args:
        is_second: tells by (args, kwargs), without self, whether a call is of the second generation.
        second: what such a call is handed to, with the same arguments.

    Returns:
        A decorator for the first generation's method, whose signature stays the visible one.
    """

    def decorate(first: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(first)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return (second if is_second(args, kwargs) else first)(self, *args, **kwargs)

        return method

    return decorate


# -- get_model_response(client, model, prompt, ...) and get_model_response(state, prompt, ...) ---------------------


def asks_by_state(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call is `get_model_response(state, ...)`; the first generation gives the client first."""
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
    """Call `call_model` with what is given, and take the rest from an environment and a state."""
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


class AwaitableDict(dict[str, Any]):
    """A dict that may also be awaited, from methods that overrides call in either way."""

    def __await__(self) -> Generator[Any, Any, dict[str, Any]]:
        yield from ()
        return self


# -- rollout(client, model, prompt, ...) and rollout(input, client, model, ...) -----------------------------------


def call_rollout(
    env: Any, row: Mapping[str, Any], client: Any, model: str, sampling_args: SamplingArgs
) -> Awaitable[Any]:
    """Call `env.rollout` in the generation of the classic API that it is written for.

    Args:
        row: prompt, example_id, task, answer, info.

    Returns:
        What the method returns, to be awaited: (completion, state), or the state.
    """
    if _takes_rollout_input(getattr(type(env), "rollout", env.rollout)):
        by_input: Awaitable[Any] = env.rollout(row, client, model, sampling_args)
        return by_input
    by_columns: Awaitable[Any] = env.rollout(
        client,
        model,
        row["prompt"],
        answer=row["answer"],
        task=row["task"],
        info=row["info"],
        sampling_args=sampling_args,
    )
    return by_columns


def takes_rollout_input(function: F) -> F:
    """Mark a `rollout` that may be called in the second generation's way though its signature does not say so."""
    function.__dict__["takes_rollout_input"] = True
    return function


def gives_rollout_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call is `rollout(input, client, model, ...)`; the first generation gives the client first."""
    return "input" in kwargs or bool(args and isinstance(args[0], Mapping) and "prompt" in args[0])


@functools.lru_cache(maxsize=512)
def _takes_rollout_input(function: Callable[..., Any]) -> bool:
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    input_first = names[:1] in (["input"], ["rollout_input"]) or names[1:2] == ["client"]
    return input_first or bool(getattr(function, "takes_rollout_input", False))
