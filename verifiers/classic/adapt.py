"""Methods that are written for verifiers 0.1.x, put on once: wrappers with the signatures of the present interface.

`Environment.__init_subclass__` hands a class here when one of its own methods is written for either generation of
0.1.x; an assignment to an environment hands a method. Nothing else in the package asks how a method is written.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from verifiers.classic.environment_api import call_rollout, is_state_call
from verifiers.classic.steps import STEPS, converse, marked_stop
from verifiers.classic.tool_defs import ToolDefs
from verifiers.envs.conversation import offered_tools, said_so_far
from verifiers.envs.lifecycle import maybe_await
from verifiers.errors import ConfigError
from verifiers.types import State

__all__ = ["adapt", "set_on"]


def adapt(cls: Any) -> None:
    """Replace or add methods of a class, so that what it overrides takes effect in the present interface."""
    for name, method in list(vars(cls).items()):
        for place, wrapper in _wrappers(cls, name, method).items():
            setattr(cls, place, wrapper)


def set_on(env: Any, name: str, value: Any) -> None:
    """Set a method on one environment, as `adapt` does on a class."""
    if name == "tool_defs":
        ToolDefs().__set__(env, value)
        return

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return value(*args, **kwargs)

    method.__dict__["__signature__"] = inspect.signature(value) if callable(value) else inspect.Signature()
    env.__dict__[name] = value
    for place, wrapper in _wrappers(type(env), name, method, skips_self=False).items():
        env.__dict__[place] = MethodType(wrapper, env) if callable(wrapper) else wrapper


def _wrappers(cls: Any, name: str, method: Any, *, skips_self: bool = True) -> dict[str, Any]:
    """Return what is to stand in a class, by name, for one of its own methods; nothing where it is up to date."""
    if getattr(method, "is_adapted", False) or getattr(method, "is_present", False):
        return {}
    if name == "rollout":
        return {"play": play_by_rollout}
    if name in STEPS:
        return {"_converse": _marked(converse)}
    if name == "init_state":
        return {"setup_state": _after_init_state(cls)}
    if name == "env_response":
        return {"replies_with_state": True} if skips_self and _unpacks_reply(cls, method) else {}
    wrap = {"is_completed": _is_completed, "get_model_response": _get_model_response, "post_rollout": _post_rollout}
    first = _names(method, skips_self)[:1]
    if name in wrap and first != ["state"]:
        return {name: _marked(functools.wraps(method)(wrap[name](method)))}
    if name == "run_rollouts" and first != ["requests"]:
        raise ConfigError(
            f"{cls.__name__}.run_rollouts takes {', '.join(_names(method, skips_self))}, as in verifiers 0.1.x; "
            "write it as run_rollouts(self, requests, run), which returns a Rollout for each request, as "
            "DebateEnv in the guide on environments does."
        )
    return {}


def _names(method: Any, skips_self: bool) -> list[str]:
    try:
        names = list(inspect.signature(method).parameters)
    except (TypeError, ValueError):
        return []
    is_static = isinstance(method, (staticmethod, classmethod))
    return names[1:] if skips_self and not is_static else names


def _marked(wrapper: Any) -> Any:
    wrapper.__dict__["is_adapted"] = True
    return wrapper


@_marked
async def play_by_rollout(self: Any, state: State) -> None:
    """Play a rollout by an override of `rollout`, of either generation."""
    row = {name: state[name] for name in ("prompt", "example_id", "task", "answer", "info")}
    result = await call_rollout(self, row, state["client"], state["model"], state["sampling_args"])
    completion, made = completion_and_state(result)
    if made is not state:
        state.update(made)
    state["completion"] = completion


def completion_and_state(result: Any) -> tuple[Any, State]:
    """Return what a rollout gave, (completion, state) or the state alone, as (completion, state).

    Raises:
        TypeError: neither of them.
    """
    completion, state = result if isinstance(result, tuple) and len(result) == 2 else (None, result)
    if not isinstance(state, dict):
        raise TypeError(
            f"rollout returned {result!r:.200}; it must return (completion, state), or the state as a dict"
        )
    return (state.get("completion") if state is result else completion), state  # type: ignore[return-value]


def _after_init_state(cls: Any) -> Any:
    inherited = cls.setup_state

    @_marked
    async def setup_state(self: Any, state: State, **kwargs: Any) -> Any:
        row = state["input"]
        made = await maybe_await(self.init_state, row, state["client"], state["model"], state["sampling_args"])
        if made is not None and made is not state:
            state.update(made)
        return await maybe_await(inherited, self, state, **kwargs)

    return setup_state


def _is_completed(method: Callable[..., Any]) -> Any:
    async def is_completed(self: Any, *args: Any, **kwargs: Any) -> bool:
        if not is_state_call(args, kwargs):
            return bool(await maybe_await(method, self, *args, **kwargs))
        state = args[0] if args else kwargs["state"]
        done = await maybe_await(method, self, said_so_far(state), state)
        return bool(done) or await marked_stop(self, state)

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


def _unpacks_reply(cls: Any, method: Any) -> bool:
    """Return whether an override says that it returns a tuple, so that it unpacks one of `super().env_response`."""
    returns = str(getattr(method, "__annotations__", {}).get("return", ""))
    above = next((base for base in cls.__mro__[1:] if "env_response" in vars(base)), None)
    is_tuple = re.match(r"\W*(<class ')?(\w+\.)*tuple\b", returns, re.IGNORECASE) is not None
    return is_tuple and above is not None and above.__module__.partition(".")[0] == "verifiers"
