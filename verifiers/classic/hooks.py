"""The hooks by which environments that are written for verifiers 0.1.x, and calls of that interface, are served.

`Environment` imports this module alone of `verifiers.classic`; the rest is imported where a class or a call needs it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

PRESENT_FIRST = {
    "env_response": "messages", "get_model_response": "state", "is_completed": "state", "post_rollout": "state",
    "run_rollouts": "requests",
}  # fmt: skip
"""The first parameter of methods of the present interface that had another one in verifiers 0.1.x."""

CLASSIC_METHODS = PRESENT_FIRST.keys() | {
    "add_model_response", "add_trajectory_step", "get_prompt_messages", "init_state", "max_turns_reached",
    "prompt_too_long", "render_completion", "rollout",
}  # fmt: skip


class _ClassicCall:
    """A method of `verifiers.classic.environments.ClassicCalls`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, env: Any, owner: Any = None) -> Any:
        from verifiers.classic import environments

        return vars(environments.ClassicCalls)[self._name].__get__(env, owner)


if TYPE_CHECKING:
    from verifiers.classic.environments import ClassicCalls
else:
    _CALLS = (
        "a_evaluate", "a_generate", "add_model_response", "add_trajectory_step", "evaluate", "evaluate_sync",
        "generate", "generate_sync", "get_prompt_messages", "init_state", "make_dataset", "max_turns_reached",
        "parse_chat_completion_logprobs", "parse_chat_completion_tokens", "parse_completion_logprobs",
        "parse_completion_tokens", "process_chat_format_vllm", "process_completion_format_vllm",
        "process_env_results", "process_env_results_vllm", "prompt_too_long", "render_completion", "rollout",
    )  # fmt: skip
    ClassicCalls = type("ClassicCalls", (), {name: _ClassicCall(name) for name in _CALLS})


def adapt_class(cls: Any) -> None:
    """Let methods of verifiers 0.1.x, a class's own and a mixin's, take effect in the present interface."""
    found = {}
    for name in CLASSIC_METHODS:
        owner = next((base for base in cls.__mro__ if name in vars(base)), None)
        if owner is not None and (owner is cls or not issubclass(owner, ClassicCalls)):
            method = vars(owner)[name]
            if _is_classic(name, method, _parameters(method)[1:]):
                found[name] = method
    if found:
        from verifiers.classic.environments import adapt

        adapt(cls, found)


def adapt_attribute(env: Any, name: str, value: Any) -> None:
    """Let a method of verifiers 0.1.x that was set on one environment take effect, as `adapt_class` does."""
    if name in CLASSIC_METHODS and name != "env_response" and _is_classic(name, value, _parameters(value)):
        from verifiers.classic.environments import set_on

        set_on(env, name, value)


def _is_classic(name: str, method: Any, parameters: Sequence[str]) -> bool:
    # a mock has any attribute
    if getattr(method, "is_present", False) is True:
        return False
    if name == "env_response":
        return "tuple" in str(getattr(method, "__annotations__", {}).get("return", "")).lower()
    return name not in PRESENT_FIRST or list(parameters[:1]) != [PRESENT_FIRST[name]]


def _parameters(method: Any) -> list[str]:
    try:
        return list(inspect.signature(method).parameters)
    except (TypeError, ValueError):
        return []


def is_state_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a method is called with the state first."""
    return isinstance(args[0], Mapping) if args else "state" in kwargs and "messages" not in kwargs


def _or_classic(is_present: Callable[[tuple[Any, ...], dict[str, Any]], bool]) -> Callable[[F], F]:
    """Let a method be called with the arguments of verifiers 0.1.x, too, which `is_present` tells from its own."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_present(args, kwargs):
                return method(self, *args, **kwargs)
            from verifiers.classic.environments import classic_call

            return classic_call(method, self, *args, **kwargs)

        call.__dict__["is_present"] = True
        return call  # type: ignore[return-value]

    return decorate


by_state = _or_classic(is_state_call)
by_requests = _or_classic(lambda args, kwargs: len(args) + len(kwargs) == 2)
