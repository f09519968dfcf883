"""MultiTurnEnv: the loop of policy and environment; SingleTurnEnv is its shortest case."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from verifiers.classic.hooks import by_state
from verifiers.envs.environment import Environment, EnvironmentOptions, OfferedTools
from verifiers.envs.lifecycle import marked_methods, maybe_await
from verifiers.errors import ConfigError, Error, OverlongPromptError
from verifiers.inference.wire import assistant_message
from verifiers.types import Messages, MessageType, ModelResponse, State, joined, names_of_classic


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


class _Step(dict[str, Any]):
    """A step of the trajectory (`TrajectoryStep`), whose `tokens` are made when they are read."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if name == "tokens" and value is None:
            from verifiers.classic.token_processing import step_tokens

            return step_tokens(self["response"])
        return value

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - `get` would not read `tokens`


def add_response(state: State, prompt: Messages, response: ModelResponse, message_type: MessageType) -> None:
    """Note an answer of the policy in the state: `responses`, `turn`, `completion` and a step of the trajectory."""
    state["responses"].append(response)
    choice = response.choices[0]
    is_truncated = getattr(choice, "finish_reason", None) == "length"
    completion: Messages = [assistant_message(choice.message)] if message_type == "chat" else choice.text or ""
    if getattr(response, "id", None) == "overlong-prompt":
        state["prompt_too_long"] = state["is_truncated"] = True
    if isinstance(prompt, str) and isinstance(state["prompt"], str):
        # where in the completion's text the policy's words begin
        state.setdefault("responses_start_idx", []).append(len(prompt) - len(state["prompt"]))
    if isinstance(state.get("turn"), TurnCount):
        state["turn"] = TurnCount(state["turn"] + 1)
    state["trajectory"].append(
        _Step(
            prompt=prompt,
            completion=completion,
            response=response,
            tokens=None,
            reward=None,
            advantage=None,
            is_truncated=is_truncated,
            extras={},
            trajectory_id=state.get("trajectory_id"),
        )
    )
    state["completion"] = joined(state["completion"], completion)


def _note_error(state: State, error: Error) -> None:
    if isinstance(error, ConfigError):
        # a mistake of the user's that every rollout would repeat
        raise error
    if isinstance(error, OverlongPromptError):
        state["prompt_too_long"] = state["is_truncated"] = True
        state["stop_condition"] = state.get("stop_condition") or "prompt_too_long"
    else:
        state["error"] = error
        state["stop_condition"] = "has_error"


class MultiTurnEnv(Environment):
    """An environment that answers the policy until it says that the rollout is complete.

    Override `env_response`, and where the default does not fit `is_completed`, `setup_state` and
    `get_model_response`; each may be sync or async. Methods marked `@vf.stop` end a rollout too, `@vf.cleanup` run
    after each one, also when it fails or is cancelled.

    Args:
        max_turns: answers of the policy in one rollout; -1 for no bound.
        timeout_seconds: seconds after which a rollout ends with what was said so far, and is scored by that; None
            for no bound.
        **kwargs: as `Environment`.

    Raises:
        TypeError: it is made itself, instead of a subclass.
    """

    def __init__(
        self, max_turns: int | None = -1, timeout_seconds: float | None = None, **kwargs: Unpack[EnvironmentOptions]
    ) -> None:
        if type(self) is MultiTurnEnv:
            raise TypeError("MultiTurnEnv is a base class; make a subclass of it that has an env_response.")
        super().__init__(**kwargs)
        if isinstance(max_turns, bool | str):
            raise ConfigError(f"max_turns is {max_turns!r}; give a number, or -1 for no bound.")
        self.max_turns = -1 if max_turns is None else max_turns
        self.timeout_seconds = timeout_seconds

    async def setup_state(self, state: State, **kwargs: Any) -> State | None:
        """Prepare the state of a new rollout in place, or return entries to add. The default leaves it as it is."""
        return state

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """Return the environment's next words: messages, or (messages, entries of the state to change)."""
        raise NotImplementedError(f"{type(self).__name__} must override env_response to answer the policy.")

    @by_state
    async def is_completed(self, state: State) -> bool:
        """Return whether no further answer of the policy is wanted; asked before and after each of them.

        The default asks every method marked `@vf.stop`, and notes in `stop_condition` which one held. An override
        need not ask for errors, `max_turns` and the like: those end a rollout in any case.
        """
        return await self._stops(state, marked_methods(self, "stop"))

    async def _stops(self, state: State, marked: Sequence[Callable[..., Any]]) -> bool:
        reason = self.bound_reached(state)
        for stop in marked if reason is None else ():
            if await maybe_await(stop, state):
                reason = stop.__name__
                break
        if reason is not None:
            state["stop_condition"] = state.get("stop_condition") or reason
        return reason is not None

    def bound_reached(self, state: State) -> str | None:
        """Return the limit that ends a rollout whatever `is_completed` says, for `stop_condition`; else None."""
        if isinstance(state.get("error"), BaseException):
            return "has_error"
        if state.get("prompt_too_long"):
            return "prompt_too_long"
        if state.get("final_env_response") is not None:
            return "final_env_response"
        # state["turn"] may be the environment's own
        counts = [len(state[name]) for name in ("responses", "trajectory") if state.get(name) is not None]
        if 0 < self.max_turns <= max(counts, default=state.get("turn", 0)):
            return "max_turns_reached"
        return None

    async def play(self, state: State) -> None:
        """Play one rollout out in its state; a `vf.Error` that is raised inside ends it and stands in `error`."""
        begin_turns(state, self.oai_tools)
        started = time.perf_counter()
        # each cleanup runs, in order, whatever the others and the rollout raise
        async with contextlib.AsyncExitStack() as afterwards:
            for cleanup in reversed(marked_methods(self, "cleanup")):
                afterwards.push_async_callback(maybe_await, cleanup, state)
            deadline = asyncio.timeout(self.timeout_seconds)
            try:
                async with deadline:
                    change(state, await maybe_await(self.setup_state, state))
                    await self._converse(state)
            except TimeoutError:
                if not deadline.expired():
                    raise
                state["timed_out"], state["stop_condition"] = True, "timeout_reached"
            except Error as error:
                _note_error(state, error)
        elapsed_ms = (time.perf_counter() - started) * 1000
        state["timing"].update(generation_ms=elapsed_ms, scoring_ms=0.0, total_ms=elapsed_ms)
        state["is_completed"] = True

    async def _converse(self, state: State) -> None:
        """Let the policy and the environment speak in turns until the rollout is over."""
        marked = marked_methods(self, "stop")
        reply: Messages | None = None
        is_over = await self._is_over(state, marked)
        while not is_over:
            is_over, reply = await self._turn(state, marked)
        if reply is not None:
            # the rollout ended on the environment's reply, which the policy has not seen
            state["final_env_response"] = reply
        elif (final := state.get("final_env_response")) is not None:
            state["completion"] = joined(state["completion"], final)

    async def _turn(self, state: State, marked: Sequence[Callable[..., Any]]) -> tuple[bool, Messages | None]:
        """Let the policy answer and the environment reply; return True where the rollout is over, and the reply."""
        messages: Messages = joined(state["prompt"], state["completion"])
        answer = self.get_model_response(state, messages)
        response = await answer if inspect.isawaitable(answer) else answer
        add_response(state, messages, response, self.message_type)
        if await self._is_over(state, marked):
            return True, None
        reply: Messages | None = None
        given = await maybe_await(self.env_response, joined(state["prompt"], state["completion"]), state)
        if isinstance(given, tuple):
            given, entries = given
            change(state, entries)
        if state.get("final_env_response") is None:
            before = state["completion"]
            state["completion"] = joined(before, given) if given else before
            reply = state["completion"][len(before) :] or None
        return await self._is_over(state, marked), reply

    async def _is_over(self, state: State, marked: Sequence[Callable[..., Any]]) -> bool:
        if getattr(self.is_completed, "__func__", None) is MultiTurnEnv.is_completed:
            return await self._stops(state, marked)
        # asked first, whatever else holds: overrides note in the state what they find
        is_completed = await maybe_await(self.is_completed, state)
        reason = self.bound_reached(state)
        if not (is_completed or reason):
            return False
        state["stop_condition"] = state.get("stop_condition") or reason or "is_completed"
        return True


def change(state: State, entries: Mapping[str, Any] | None) -> None:
    """Put what a method returned into the state: the state itself, entries to change, or None."""
    if entries is not None and entries is not state:
        state.update(entries)


class SingleTurnEnv(MultiTurnEnv):
    """An environment that wants one answer of the policy and scores it."""

    def __init__(self, **kwargs: Unpack[EnvironmentOptions]) -> None:
        super().__init__(**kwargs)
        self.max_turns = 1

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """Return an empty reply, for code that calls this directly; the loop never does."""
        return [{"role": "user", "content": ""}], state


__getattr__ = names_of_classic(__name__)
