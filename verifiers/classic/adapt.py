"""Methods that are written for verifiers 0.1.x, put on once: wrappers with the signatures of the present interface.

`Environment.__init_subclass__` hands a class here when one of its own methods is written for either generation of
0.1.x; an assignment to an environment hands a method. Nothing else in the package asks how a method is written.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

from verifiers.classic.environment_api import conversation_of, next_prompt
from verifiers.envs.conversation import offered_tools, said_so_far
from verifiers.envs.environment import is_state_call
from verifiers.envs.lifecycle import marked_methods, maybe_await
from verifiers.errors import ConfigError, Error
from verifiers.types import State, as_messages

__all__ = ["adapt", "set_on"]

STEPS = frozenset(
    {
        "add_model_response", "add_trajectory_step", "get_prompt_messages", "max_turns_reached", "prompt_too_long",
        "render_completion",
    }
)  # fmt: skip


def adapt(cls: Any, names: Iterable[str]) -> None:
    """Replace or add methods of a class, so that its methods of these names take effect in the present interface."""
    for name in names:
        for place, wrapper in _wrappers(cls, name, vars(cls)[name]).items():
            setattr(cls, place, wrapper)


def set_on(env: Any, name: str, value: Any) -> None:
    """Set a method on one environment, as `adapt` does on a class."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return value(*args, **kwargs)

    for place, wrapper in _wrappers(type(env), name, method).items():
        env.__dict__[place] = MethodType(wrapper, env) if callable(wrapper) else wrapper


def _wrappers(cls: Any, name: str, method: Any) -> dict[str, Any]:
    """Return what is to stand in a class, by name, for one of its own methods."""
    if name == "rollout":
        return {"play": play_by_rollout}
    if name in STEPS:
        return {"_converse": converse}
    if name == "init_state":
        return {"setup_state": _after_init_state(cls)}
    if name == "env_response":
        # it says that it returns a tuple, so it unpacks one of `super().env_response`
        above = next((base for base in cls.__mro__[1:] if name in vars(base)), None)
        return {"replies_with_state": True} if above is not None and _is_ours(above) else {}
    if name == "run_rollouts":
        names = ", ".join(list(inspect.signature(method).parameters)[1:])
        raise ConfigError(
            f"{cls.__name__}.run_rollouts takes {names}, as in verifiers 0.1.x; write it as run_rollouts(self, "
            "requests, run), which returns a Rollout for each request, as DebateEnv in the guide on environments."
        )
    wrap = {"is_completed": _is_completed, "get_model_response": _get_model_response, "post_rollout": _post_rollout}
    return {name: _present(functools.wraps(method)(wrap[name](method)))}


def _present(wrapper: Any) -> Any:
    wrapper.__dict__["is_present"] = True
    return wrapper


# -- a rollout, and what comes before it ---------------------------------------------------------------------------


async def play_by_rollout(self: Any, state: State) -> None:
    """Play a rollout by an override of `rollout`, of either generation.

    Raises:
        TypeError: it returned neither (completion, state) nor the state.
    """
    row = {name: state[name] for name in ("prompt", "example_id", "task", "answer", "info")}
    client, model, sampling_args = state["client"], state["model"], state["sampling_args"]
    names = list(inspect.signature(self.rollout).parameters)
    if names[:1] in (["input"], ["rollout_input"]) or names[1:2] == ["client"]:
        result = await self.rollout(row, client, model, sampling_args)
    else:
        columns = {name: row[name] for name in ("answer", "task", "info")}
        result = await self.rollout(client, model, row["prompt"], **columns, sampling_args=sampling_args)
    completion, made = result if isinstance(result, tuple) and len(result) == 2 else (None, result)
    if not isinstance(made, dict):
        raise TypeError(
            f"rollout returned {result!r:.200}; it must return (completion, state), or the state as a dict"
        )
    if made is not state:
        state.update(made)
    state["completion"] = made.get("completion") if made is result else completion


def _after_init_state(cls: Any) -> Any:
    inherited = cls.setup_state

    async def setup_state(self: Any, state: State, **kwargs: Any) -> Any:
        row = state["input"]
        made = await maybe_await(self.init_state, row, state["client"], state["model"], state["sampling_args"])
        if made is not None and made is not state:
            state.update(made)
        return await maybe_await(inherited, self, state, **kwargs)

    return setup_state


# -- methods with another signature --------------------------------------------------------------------------------


def _is_completed(method: Callable[..., Any]) -> Any:
    async def is_completed(self: Any, *args: Any, **kwargs: Any) -> bool:
        if not is_state_call(args, kwargs):
            return bool(await maybe_await(method, self, *args, **kwargs))
        state = args[0] if args else kwargs["state"]
        if await maybe_await(method, self, said_so_far(state), state):
            return True
        for stop in marked_methods(self, "stop"):
            if await maybe_await(stop, state):
                state["stop_condition"] = state.get("stop_condition") or stop.__name__
                return True
        return False

    return is_completed


def _get_model_response(method: Callable[..., Any]) -> Any:
    async def get_model_response(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_state_call(args, kwargs):
            return await maybe_await(method, self, *args, **kwargs)
        given = dict(zip(("state", "prompt"), args, strict=False)) | kwargs
        state: Mapping[str, Any] = given["state"]
        return await maybe_await(
            method,
            self,
            state["client"],
            state["model"],
            given["prompt"],
            oai_tools=offered_tools(state, self.oai_tools),
            sampling_args=state["sampling_args"],
            message_type=self.message_type,
        )

    return get_model_response


def _post_rollout(method: Callable[..., Any]) -> Any:
    async def post_rollout(self: Any, *args: Any) -> Any:
        return await maybe_await(method, self, *(args if len(args) > 1 else (args[0].get("completion"), args[0])))

    return post_rollout


# -- the loop of an environment that overrides steps -----------------------------------------------------------------


async def converse(env: Any, state: State) -> None:
    """Let the policy and the environment speak in turns, each step called as the second generation does."""
    own = {name for name in STEPS if name in vars(env) or _overrides(type(env), name)}
    try:
        await _take_turns(env, state, own)
    except Error:
        # the state keeps it, and no other
        with contextlib.suppress(Exception):
            await maybe_await(env.render_completion, state)
        raise
    await maybe_await(env.render_completion, state)


def _overrides(kind: Any, name: str) -> bool:
    return any(name in vars(base) for base in kind.__mro__ if not _is_ours(base))


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "verifiers"


async def _take_turns(env: Any, state: State, own: set[str]) -> None:
    own_prompts = "get_prompt_messages" in own
    messages: Any = state["prompt"]
    said: Any = messages
    while not await _is_over(env, state, own):
        if own_prompts and not state["trajectory"]:
            messages = as_messages(await maybe_await(env.get_prompt_messages, state))
        response = await maybe_await(env.get_model_response, state, messages)
        await maybe_await(env.add_model_response, state, messages, response)
        said = messages = conversation_of(state)
        state["completion"] = messages[len(state["prompt"]) :]
        if await _is_over(env, state, own):
            break
        if own_prompts:
            prompt = as_messages(await maybe_await(env.get_prompt_messages, state))
        else:
            prompt = await next_prompt(env, messages, state)
        if state.get("final_env_response") is None:
            messages = prompt
            state["completion"] = messages[len(state["prompt"]) :]
    if len(messages) > len(said) and not own_prompts:
        # the rollout ended on the environment's reply, which no step has seen
        state["final_env_response"] = messages[len(said) :]


async def _is_over(env: Any, state: State, own: set[str]) -> bool:
    is_completed = await maybe_await(env.is_completed, state)
    reason = env.bound_reached(state)
    for name in ("prompt_too_long", "max_turns_reached"):
        # an override decides instead of the limit
        if name in own:
            reason = None if reason == name else reason
            if reason is None and await maybe_await(getattr(env, name), state):
                reason = name
    if not (is_completed or reason):
        return False
    state["stop_condition"] = state.get("stop_condition") or reason or "is_completed"
    return True
