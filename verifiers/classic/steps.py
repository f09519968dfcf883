"""The steps of a rollout that the second generation of verifiers 0.1.x lets environments override, one by one.

An environment that overrides one of them is played by `converse`, which calls each as it was called there. The
defaults of all of them are here, for overrides that call `super()`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from verifiers.envs.conversation import add_response
from verifiers.envs.lifecycle import marked_methods, maybe_await
from verifiers.types import Messages, ModelResponse, State, as_messages, joined

__all__ = ["STEPS", "AwaitableBool", "Steps", "converse"]

STEPS = frozenset(
    {
        "add_model_response", "add_trajectory_step", "get_prompt_messages", "max_turns_reached", "prompt_too_long",
        "render_completion",
    }
)  # fmt: skip


class AwaitableBool(int):
    """A bool that may also be awaited, for conditions that subclasses ask for in either way."""

    def __await__(self) -> Generator[Any, Any, bool]:
        yield from ()
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))


class Steps:
    """The default steps, as methods of `Environment`."""

    def max_turns_reached(self: Any, state: State) -> Any:
        """Return whether `max_turns` is a bound and is reached; may be awaited or not."""
        bare = State(state, error=None, prompt_too_long=False, final_env_response=None)
        return AwaitableBool(type(self).bound_reached(self, bare) is not None)

    def prompt_too_long(self: Any, state: State) -> Any:
        """Return whether the newest prompt did not fit the model's context; may be awaited or not."""
        return AwaitableBool(bool(state.get("prompt_too_long")))

    async def get_prompt_messages(self: Any, state: State) -> Messages:
        """Return what the policy is asked next: the prompt, or what was said so far and the environment's reply."""
        messages: Messages = conversation_of(state)
        return await next_prompt(self, messages, state) if state["trajectory"] else messages

    async def add_model_response(self: Any, state: State, prompt_messages: Messages, response: ModelResponse) -> None:
        """Note an answer of the policy in the state: `responses`, `turn`, and a step of the trajectory."""
        before = state["completion"]
        add_response(state, prompt_messages, response, self.message_type)
        step = state["trajectory"].pop()
        state["completion"] = before
        await maybe_await(self.add_trajectory_step, state, step)

    async def add_trajectory_step(self: Any, state: State, trajectory_step: Any) -> None:
        """Append a step to the trajectory; the next prompt continues from the newest step."""
        state["trajectory"].append(trajectory_step)

    async def render_completion(self: Any, state: State) -> None:
        """Set `state["completion"]` to all that was said after the prompt."""
        state["completion"] = conversation_of(state)[len(state["prompt"]) :]


async def converse(env: Any, state: State) -> None:
    """Let the policy and the environment speak in turns, by the steps that the environment overrides."""
    own = {name for name in STEPS if name in vars(env) or _overrides(type(env), name)}
    try:
        await _converse(env, state, own)
    finally:
        await maybe_await(env.render_completion, state)


def _overrides(kind: Any, name: str) -> bool:
    return any(name in vars(base) for base in kind.__mro__ if base.__module__.partition(".")[0] != "verifiers")


async def _converse(env: Any, state: State, own: set[str]) -> None:
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


async def marked_stop(env: Any, state: State) -> bool:
    """Ask the methods marked `@vf.stop`, and note which one holds."""
    for stop in marked_methods(env, "stop"):
        if await maybe_await(stop, state):
            state["stop_condition"] = state.get("stop_condition") or stop.__name__
            return True
    return False


async def next_prompt(env: Any, messages: Any, state: State) -> Any:
    """Return the conversation with the environment's reply."""
    reply = await maybe_await(env.env_response, messages, state)
    if isinstance(reply, tuple):
        reply, entries = reply
        if entries is not None and entries is not state:
            state.update(entries)
    return joined(messages, reply) if reply else messages


def conversation_of(state: State) -> Any:
    """Return the whole conversation so far: what the newest step saw and said, and the environment's last word."""
    final = state.get("final_env_response")
    trajectory = state["trajectory"]
    said = joined(trajectory[-1]["prompt"], trajectory[-1]["completion"]) if trajectory else state["prompt"]
    return joined(said, final) if final else said
