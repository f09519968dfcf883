"""MultiTurnEnv: the loop of model and environment; SingleTurnEnv is its shortest case."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from verifiers.envs.classic.signatures import (
    default_step,
    either_generation,
    gives_rollout_input,
    overridden_steps,
    takes_rollout_input,
    takes_state_first,
)
from verifiers.envs.classic.tool_defs import offered_tools
from verifiers.envs.datasets import TurnCount, new_state
from verifiers.envs.environment import Environment
from verifiers.envs.lifecycle import FUNCTION_TYPES, AwaitableBool, marked_methods, marked_names, maybe_await
from verifiers.envs.model_call import call_model, step_of
from verifiers.errors import ConfigError, Error, MissingTokenIdsError, OverlongPromptError
from verifiers.types import (
    Info,
    Messages,
    ModelResponse,
    RolloutInput,
    SamplingArgs,
    State,
    TrajectoryStep,
    as_messages,
    joined,
)

__all__ = ["Conversation", "MultiTurnEnv", "conversation_of", "note_error"]

STEPS = (
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
)
"""Steps of a rollout that subclasses may override, each sync or async, and of either generation."""


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
        self.stops = _marked(env, "stop")

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
        if getattr(response, "id", None) == "overlong-prompt":
            state["prompt_too_long"] = state["is_truncated"] = True
        if isinstance(prompt, str):
            # where in the completion's text the policy's words begin
            state.setdefault("responses_start_idx", []).append(len(prompt) - len(state["prompt"]))
        if isinstance(state.get("turn"), TurnCount):
            state["turn"] = TurnCount(state["turn"] + 1)
        step = step_of(prompt, response, self.env.message_type)
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
        """Return True where the rollout ends here; `stop_condition` then has the reason."""
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
        at_end: Any = _turns_are_over(env, state)
        if "max_turns_reached" in self.own:
            at_end = await maybe_await(env.max_turns_reached, state)
        if at_end:
            return "max_turns_reached"
        for stop in self.stops if asks_marked else ():
            if await maybe_await(stop, state):
                return stop.__name__
        return None


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


def _turns_are_over(env: MultiTurnEnv, state: State) -> bool:
    if env.max_turns <= 0:
        return False
    # state["turn"] may be the environment's own
    counts = [len(state[name]) for name in ("responses", "trajectory") if state.get(name) is not None]
    return env.max_turns <= max(counts, default=state.get("turn", 0))


def _marked(env: MultiTurnEnv, kind: str) -> list[Callable[..., Any]]:
    # nearly no environment has marked methods, and every rollout asks
    cls: Any = type(env)
    if marked_names(cls, kind) or any(type(value) in FUNCTION_TYPES for value in vars(env).values()):
        return marked_methods(env, kind)
    return []


def gives_state_alone(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True for `is_completed(state)`; the first generation gives the messages before it."""
    return "messages" not in kwargs and len(args) + ("state" in kwargs) == 1


async def is_completed_by_state(self: MultiTurnEnv, state: State, **_: Any) -> bool:
    """Ask every condition there is, as `is_completed` of the second generation, and note which one held."""
    reason = await Conversation(self, state, overridden_steps(self, STEPS), {}).stop_reason()
    if reason is not None:
        state["stop_condition"] = state.get("stop_condition") or reason
    return reason is not None


async def _rollout_from_input(
    self: MultiTurnEnv,
    input: RolloutInput,  # noqa: A002 - the name is the classic API's, and is passed as a keyword
    client: Any,
    model: str,
    sampling_args: SamplingArgs | None = None,
) -> State:
    return await self._play(input, client, model, sampling_args, {}, keeps_errors=True)


class MultiTurnEnv(Environment):
    """An environment that answers the policy until it says that the rollout is complete.

    Override `env_response`, and where the default does not fit `is_completed` and `setup_state`; each may be
    sync or async. Methods marked `@vf.stop` end a rollout too, `@vf.cleanup` run after each one, also when it
    fails or is cancelled. What the second generation of the classic API lets subclasses override is called as there:
    `init_state`, `get_prompt_messages`, `get_model_response(state, prompt)`, `is_completed(state)`,
    `add_model_response`, `add_trajectory_step`, `render_completion`.

    Args:
        max_turns: answers of the policy in one rollout; -1 for no bound.
        timeout_seconds: seconds after which a rollout ends with what was said so far, and is scored by that; None
            for no bound.
    """

    def __init__(self, max_turns: int = -1, timeout_seconds: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.max_turns = max_turns
        self.timeout_seconds = timeout_seconds

    # -- what environments override ---------------------------------------------------------------------------

    @default_step
    async def setup_state(self, state: State, **kwargs: Any) -> State:
        """Prepare the state of a new rollout. The default leaves it as it is."""
        return state

    @default_step
    @either_generation(gives_state_alone, is_completed_by_state)
    async def is_completed(self, messages: Messages, state: State, **kwargs: Any) -> bool:
        """Return True when no further answer of the policy is wanted; asked before and after each of them.

        Called as `is_completed(state)`, as in the second generation, it asks every condition there is.
        """
        return await maybe_await(self.max_turns_reached, state) or await maybe_await(self.prompt_too_long, state)

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """Return the environment's next words: messages (second generation), or (messages, state) (first)."""
        raise NotImplementedError(f"{type(self).__name__} must override env_response to answer the policy.")

    @default_step
    def max_turns_reached(self, state: State) -> Any:
        """Return True when `max_turns` is a bound and is reached; may be awaited or not."""
        return AwaitableBool(_turns_are_over(self, state))

    @default_step
    def prompt_too_long(self, state: State) -> Any:
        """Return True when the newest prompt did not fit the model's context; may be awaited or not."""
        return AwaitableBool(bool(state.get("prompt_too_long")))

    # -- steps of the loop, which the second generation may override -------------------------------------------

    @default_step
    async def get_prompt_messages(self, state: State) -> Messages:
        """Return what the policy is asked next: the prompt, or what was said so far and the environment's reply."""
        messages: Messages = conversation_of(state)
        return await next_prompt(self, messages, state, {}) if state["trajectory"] else messages

    @default_step
    async def add_model_response(self, state: State, prompt_messages: Messages, response: ModelResponse) -> None:
        """Note an answer of the policy in the state: `responses`, `turn`, and a step of the trajectory."""
        await Conversation(self, state, overridden_steps(self, STEPS), {}).add_response(prompt_messages, response)

    @default_step
    async def add_trajectory_step(self, state: State, trajectory_step: TrajectoryStep) -> None:
        """Append a step to the trajectory; the next prompt goes on from the newest step."""
        state["trajectory"].append(trajectory_step)

    @default_step
    async def render_completion(self, state: State) -> None:
        """Set `state["completion"]` to all that was said after the prompt."""
        state["completion"] = conversation_of(state)[len(state["prompt"]) :]

    # -- the rollout ------------------------------------------------------------------------------------------

    @takes_rollout_input
    @either_generation(gives_rollout_input, _rollout_from_input)
    async def rollout(
        self,
        client: Any,
        model: str,
        prompt: Messages,
        answer: Any = "",
        task: str = "default",
        info: Info | None = None,
        sampling_args: SamplingArgs | None = None,
        **kwargs: Any,
    ) -> tuple[Messages, State]:
        """One rollout, called in either generation's way.

        First: `rollout(client, model, prompt, answer="", task="default", info=None, sampling_args=None)` returns
        (completion, state). Second: `rollout(input, client, model, sampling_args=None)` returns the state; an
        `Error` that is raised inside stands in `state["error"]`, and the conversation so far is kept.
        """
        row: RolloutInput = {
            "prompt": prompt,
            "answer": answer,
            "task": task,
            "info": info or {},
            "example_id": kwargs.pop("example_id", 0),
        }
        state = await self._play(row, client, model, sampling_args, kwargs, keeps_errors=False)
        return state["completion"], state

    async def _play(
        self,
        row: RolloutInput,
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None,
        kwargs: Mapping[str, Any],
        *,
        keeps_errors: bool,
    ) -> State:
        own = overridden_steps(self, STEPS)
        if "init_state" in own:
            state = await maybe_await(self.init_state, row, client, model, sampling_args)
        else:
            state = new_state(row, client, model, sampling_args, self.oai_tools)
        started = time.perf_counter()

        async def clean_up(cleanup: Callable[..., Any]) -> None:
            await maybe_await(cleanup, state)

        # each runs, in order, whatever the others and the rollout raise
        async with contextlib.AsyncExitStack() as afterwards:
            for cleanup in reversed(_marked(self, "cleanup")):
                afterwards.push_async_callback(clean_up, cleanup)
            deadline = asyncio.timeout(self.timeout_seconds)
            try:
                async with deadline:
                    if "setup_state" in own:
                        state = await maybe_await(self.setup_state, state, **kwargs) or state
                    await Conversation(self, state, own, kwargs).play()
            except TimeoutError:
                if not deadline.expired():
                    raise
                state["timed_out"], state["stop_condition"] = True, "timeout_reached"
                await Conversation(self, state, own, kwargs).render()
            except Error as error:
                if not keeps_errors:
                    raise
                note_error(state, error)
                await Conversation(self, state, own, kwargs).render()
        elapsed_ms = (time.perf_counter() - started) * 1000
        state["timing"].update(generation_ms=elapsed_ms, scoring_ms=0.0, total_ms=elapsed_ms)
        state["is_completed"] = True
        return state
