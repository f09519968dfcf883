"""MultiTurnEnv: the loop of model and environment; SingleTurnEnv is its shortest case."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from verifiers.envs.calling import AwaitableBool, either_generation, maybe_await
from verifiers.envs.conversation import (
    conversation_of,
    converse,
    default_step,
    next_prompt,
    note_error,
    step_of,
    stop_reason,
)
from verifiers.envs.decorators import marked_methods
from verifiers.envs.environment import Environment
from verifiers.errors import Error
from verifiers.rollouts.run import gives_rollout_input, takes_rollout_input
from verifiers.types import Info, Messages, ModelResponse, RolloutInput, SamplingArgs, State, TrajectoryStep

__all__ = ["MultiTurnEnv"]


def gives_state_alone(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True for `is_completed(state)`; the first generation gives the messages before it."""
    return "messages" not in kwargs and len(args) + ("state" in kwargs) == 1


async def is_completed_by_state(self: MultiTurnEnv, state: State, **_: Any) -> bool:
    """`is_completed` of the second generation: asks every condition there is, and notes which one held."""
    reason = await stop_reason(self, state)
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
    state = await maybe_await(self.init_state, input, client, model, sampling_args)
    return await self._play(state, {}, keeps_errors=True)


class MultiTurnEnv(Environment):
    """An environment that answers the policy until it says that the rollout is complete.

    Override `env_response`, and where the default does not fit `is_completed` and `setup_state`; each may be
    sync or async. Methods marked `@vf.stop` end a rollout too, `@vf.cleanup` run after each one, also when it
    fails or is cancelled. What the second generation of the classic API lets subclasses override is called as there:
    `init_state`, `get_prompt_messages`, `get_model_response(state, prompt)`, `is_completed(state)`,
    `add_model_response`, `add_trajectory_step`, `render_completion`.

    Args:
        max_turns: answers of the policy in one rollout; -1 for no bound.
    """

    def __init__(self, max_turns: int = -1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.max_turns = max_turns

    # -- what environments override ---------------------------------------------------------------------------

    async def setup_state(self, state: State, **kwargs: Any) -> State:
        """Prepare the state of a new rollout. The default leaves it as it is."""
        return state

    @default_step
    @either_generation(gives_state_alone, is_completed_by_state)
    async def is_completed(self, messages: Messages, state: State, **kwargs: Any) -> bool:
        """True when no further answer of the policy is wanted; asked before and after each of them.

        Called as `is_completed(state)`, as in the second generation, it asks every condition there is.
        """
        return await maybe_await(self.max_turns_reached, state) or await maybe_await(self.prompt_too_long, state)

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """What the environment says next: messages (second generation), or (messages, state) (first)."""
        raise NotImplementedError(f"{type(self).__name__} must override env_response to answer the policy.")

    def max_turns_reached(self, state: State) -> Any:
        """True when `max_turns` is a bound and is reached; may be awaited or not."""
        return AwaitableBool(0 < self.max_turns <= state["turn"])

    def prompt_too_long(self, state: State) -> Any:
        """True when the newest prompt did not fit the model's context; may be awaited or not."""
        return AwaitableBool(bool(state.get("prompt_too_long")))

    # -- steps of the loop, which the second generation may override -------------------------------------------

    @default_step
    async def get_prompt_messages(self, state: State) -> Messages:
        """What the policy is asked next: the prompt, or what was said so far and the environment's reply."""
        messages: Messages = conversation_of(state)
        return await next_prompt(self, messages, state, {}) if state["trajectory"] else messages

    async def add_model_response(self, state: State, prompt_messages: Messages, response: ModelResponse) -> None:
        """Note an answer of the policy in the state: `responses`, `turn`, and a step of the trajectory."""
        state["responses"].append(response)
        if getattr(response, "id", None) == "overlong-prompt":
            state["prompt_too_long"] = state["is_truncated"] = True
        if isinstance(prompt_messages, str):
            # where in the completion's text the policy's words begin
            state.setdefault("responses_start_idx", []).append(len(prompt_messages) - len(state["prompt"]))
        state["turn"] += 1
        await maybe_await(self.add_trajectory_step, state, step_of(self, prompt_messages, response))

    async def add_trajectory_step(self, state: State, trajectory_step: TrajectoryStep) -> None:
        """Append a step to the trajectory; the next prompt goes on from the newest step."""
        state["trajectory"].append(trajectory_step)

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
        state = await maybe_await(self.init_state, row, client, model, sampling_args)
        state = await self._play(state, kwargs, keeps_errors=False)
        return state["completion"], state

    async def _play(self, state: State, kwargs: Mapping[str, Any], *, keeps_errors: bool) -> State:
        started = time.perf_counter()

        async def clean_up(cleanup: Callable[..., Any]) -> None:
            await maybe_await(cleanup, state)

        # each runs, in order, whatever the others and the rollout raise
        async with contextlib.AsyncExitStack() as afterwards:
            for cleanup in reversed(marked_methods(self, "cleanup")):
                afterwards.push_async_callback(clean_up, cleanup)
            try:
                state = await maybe_await(self.setup_state, state, **kwargs) or state
                await converse(self, state, kwargs)
            except Error as error:
                if not keeps_errors:
                    raise
                note_error(state, error)
                await maybe_await(self.render_completion, state)
        elapsed_ms = (time.perf_counter() - started) * 1000
        state["timing"].update(generation_ms=elapsed_ms, scoring_ms=0.0, total_ms=elapsed_ms)
        state["is_completed"] = True
        return state
