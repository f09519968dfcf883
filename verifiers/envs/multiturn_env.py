"""MultiTurnEnv: what an environment of several turns may override; SingleTurnEnv is its shortest case."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Unpack

from verifiers.envs.conversation import (
    Conversation,
    conversation_of,
    default_step,
    marked_methods_of,
    new_state,
    next_prompt,
    overridden_steps,
    turns_are_over,
)
from verifiers.envs.environment import Environment
from verifiers.envs.lifecycle import AwaitableBool, maybe_await
from verifiers.envs.signatures import (
    call_rollout,
    either_generation,
    gives_rollout_input,
    takes_rollout_input,
)
from verifiers.errors import ConfigError, Error, OverlongPromptError
from verifiers.keywords import EnvironmentOptions
from verifiers.types import Info, Messages, ModelResponse, RolloutInput, SamplingArgs, State, TrajectoryStep

__all__ = ["MultiTurnEnv", "note_error"]


def note_error(state: State, error: Error) -> None:
    """Keep an error in the state, as the second generation does; the rollout ends there.

    Raises:
        Error: a mistake of the user's that every rollout would repeat is raised instead.
    """
    if isinstance(error, ConfigError):
        raise error
    if isinstance(error, OverlongPromptError):
        state["prompt_too_long"] = state["is_truncated"] = True
        state["stop_condition"] = state.get("stop_condition") or "prompt_too_long"
    else:
        state["error"] = error
        state["stop_condition"] = "has_error"


def gives_state_alone(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call is `is_completed(state)`; the first generation gives the messages before it."""
    return "messages" not in kwargs and len(args) + ("state" in kwargs) == 1


async def is_completed_by_state(self: MultiTurnEnv, state: State, **_: Any) -> bool:
    """Ask every condition there is, as `is_completed` of the second generation, and note which one held."""
    reason = await Conversation(self, state, overridden_steps(self), {}).stop_reason()
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
        **kwargs: as `Environment`.

    Raises:
        TypeError: it is made itself, instead of a subclass.
    """

    def __init__(
        self, max_turns: int = -1, timeout_seconds: float | None = None, **kwargs: Unpack[EnvironmentOptions]
    ) -> None:
        if type(self) is MultiTurnEnv:
            raise TypeError("MultiTurnEnv is a base class; make a subclass of it that has an env_response.")
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
        """Return whether no further answer of the policy is wanted; asked before and after each of them.

        Called as `is_completed(state)`, as in the second generation, it asks every condition there is.
        """
        return await maybe_await(self.max_turns_reached, state) or await maybe_await(self.prompt_too_long, state)

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """Return the environment's next words: messages (second generation), or (messages, state) (first)."""
        raise NotImplementedError(f"{type(self).__name__} must override env_response to answer the policy.")

    @default_step
    def max_turns_reached(self, state: State) -> Any:
        """Return whether `max_turns` is a bound and is reached; may be awaited or not."""
        return AwaitableBool(turns_are_over(self, state))

    @default_step
    def prompt_too_long(self, state: State) -> Any:
        """Return whether the newest prompt did not fit the model's context; may be awaited or not."""
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
        await Conversation(self, state, overridden_steps(self), {}).add_response(prompt_messages, response)

    @default_step
    async def add_trajectory_step(self, state: State, trajectory_step: TrajectoryStep) -> None:
        """Append a step to the trajectory; the next prompt continues from the newest step."""
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
        """Play one rollout, called in either generation's way.

        First: `rollout(client, model, prompt, answer="", task="default", info=None, sampling_args=None)` returns
        (completion, state), where the state's own `completion` is empty as it was then. Second:
        `rollout(input, client, model, sampling_args=None)` returns the state; an `Error` that is raised inside stands
        in `state["error"]`, and the conversation so far is kept.
        """
        row: RolloutInput = {
            "prompt": prompt,
            "answer": answer,
            "task": task,
            "info": info or {},
            "example_id": kwargs.pop("example_id", 0),
        }
        state = await self._play(row, client, model, sampling_args, kwargs, keeps_errors=False)
        completion, state["completion"] = state["completion"], type(state["completion"])()
        return completion, state

    def _play_row(self, row: RolloutInput, model: str, sampling_args: SamplingArgs, client: Any) -> Awaitable[Any]:
        if type(self).rollout is MultiTurnEnv.rollout and "rollout" not in vars(self):
            return self._play(row, client, model, sampling_args, {}, keeps_errors=True)
        return call_rollout(self, row, client, model, sampling_args)

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
        own = overridden_steps(self)
        if "init_state" in own:
            state = await maybe_await(self.init_state, row, client, model, sampling_args)
        else:
            state = new_state(row, client, model, sampling_args, self.oai_tools)
        started = time.perf_counter()

        async def clean_up(cleanup: Callable[..., Any]) -> None:
            await maybe_await(cleanup, state)

        # each runs, in order, whatever the others and the rollout raise
        async with contextlib.AsyncExitStack() as afterwards:
            for cleanup in reversed(marked_methods_of(self, "cleanup")):
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


def __getattr__(name: str) -> Any:
    from verifiers.envs.classic.import_paths import classic_name

    return classic_name(__name__, name)
