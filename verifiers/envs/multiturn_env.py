"""MultiTurnEnv: the loop of model and environment; SingleTurnEnv is its shortest case."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from verifiers.envs.calling import maybe_await
from verifiers.envs.decorators import marked_methods
from verifiers.envs.environment import Environment
from verifiers.envs.model_call import assistant_message
from verifiers.rollouts.run import takes_rollout_input
from verifiers.types import Info, Messages, ModelResponse, RolloutInput, SamplingArgs, State

__all__ = ["MultiTurnEnv"]


class MultiTurnEnv(Environment):
    """An environment that answers the policy until it says that the rollout is complete.

    Override `env_response`, and where the default does not fit `is_completed` and `setup_state`; each may be
    sync or async. Methods marked `@vf.stop` end a rollout too, `@vf.cleanup` run after each one, also when it
    fails or is cancelled.

    Args:
        max_turns: answers of the policy in one rollout; -1 for no bound.
    """

    def __init__(self, max_turns: int = -1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.max_turns = max_turns

    async def setup_state(self, state: State, **kwargs: Any) -> State:
        """Prepare the state of a new rollout. The default leaves it as it is."""
        return state

    async def is_completed(self, messages: Messages, state: State, **kwargs: Any) -> bool:
        """True when no further answer of the policy is wanted; asked before and after each of them."""
        return await maybe_await(self.max_turns_reached, state) or await maybe_await(self.prompt_too_long, state)

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """What the environment says next: messages (second generation), or (messages, state) (first)."""
        raise NotImplementedError(f"{type(self).__name__} must override env_response to answer the policy.")

    def max_turns_reached(self, state: State) -> bool:
        """True when `max_turns` is a bound and is reached."""
        return 0 < self.max_turns <= state["turn"]

    def prompt_too_long(self, state: State) -> bool:
        """True when the newest prompt did not fit the model's context."""
        responses = state["responses"]
        return bool(responses) and getattr(responses[-1], "id", None) == "overlong-prompt"

    @takes_rollout_input
    async def rollout(self, *args: Any, **kwargs: Any) -> Any:
        """One rollout, called in either generation's way.

        First: `rollout(client, model, prompt, answer="", task="default", info=None, sampling_args=None)` returns
        (completion, state). Second: `rollout(input, client, model, sampling_args=None)` returns the state.
        """
        if "input" in kwargs or (args and isinstance(args[0], Mapping) and "prompt" in args[0]):
            return await self._rollout_from_input(*args, **kwargs)
        return await self._rollout_from_columns(*args, **kwargs)

    async def _rollout_from_input(
        self,
        input: RolloutInput,  # noqa: A002 - the name is the classic API's, and is passed as a keyword
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
    ) -> State:
        _, state = await self._rollout_from_columns(
            client,
            model,
            input["prompt"],
            answer=input.get("answer", ""),
            task=input.get("task", "default"),
            info=input.get("info"),
            sampling_args=sampling_args,
            example_id=input.get("example_id", 0),
        )
        return state

    async def _rollout_from_columns(
        self,
        client: Any,
        model: str,
        prompt: Messages,
        answer: Any = "",
        task: str = "default",
        info: Info | None = None,
        sampling_args: SamplingArgs | None = None,
        *,
        example_id: int = 0,
        **kwargs: Any,
    ) -> tuple[Messages, State]:
        state = _new_state(prompt, answer, task, info, example_id)
        started = time.perf_counter()

        async def clean_up(cleanup: Callable[..., Any]) -> None:
            await maybe_await(cleanup, state)

        # each runs, in order, whatever the others and the rollout raise
        async with contextlib.AsyncExitStack() as afterwards:
            for cleanup in reversed(marked_methods(self, "cleanup")):
                afterwards.push_async_callback(clean_up, cleanup)
            state = await maybe_await(self.setup_state, state, **kwargs) or state
            messages = await self._converse(client, model, state, info or {}, sampling_args, kwargs)
        elapsed_ms = (time.perf_counter() - started) * 1000
        state["timing"] = {"generation_ms": elapsed_ms, "scoring_ms": 0.0, "total_ms": elapsed_ms}
        state["is_completed"] = True
        completion: Messages = messages[len(prompt) :]
        # rewards may already be read from the state; the classic tuple is filled from the same value
        state["completion"] = completion
        return completion, state

    async def _converse(
        self,
        client: Any,
        model: str,
        state: State,
        info: Info,
        sampling_args: SamplingArgs | None,
        kwargs: dict[str, Any],
    ) -> Any:
        """The loop; returns the whole conversation, or the whole text in completion mode."""
        messages: Any = state["prompt"] if isinstance(state["prompt"], str) else list(state["prompt"])
        while not await self._is_over(messages, state, kwargs):
            response = await self.get_model_response(
                client, model, messages, info.get("oai_tools") or self.oai_tools, sampling_args, self.message_type
            )
            seen, answer = messages, self._answer_of(response)
            messages = messages + answer
            _record_turn(state, seen, answer, response, messages)
            if await self._is_over(messages, state, kwargs):
                break
            reply = await maybe_await(self.env_response, messages, state, **kwargs)
            if isinstance(reply, tuple):
                reply, state_after = reply
                if state_after is not state and state_after is not None:
                    state.update(state_after)
            if reply and state.get("final_env_response") is None:
                messages = messages + reply
                state["completion"] = messages[len(state["prompt"]) :]
        if state.get("final_env_response") is not None:
            messages = messages + state["final_env_response"]
        return messages

    def _answer_of(self, response: ModelResponse) -> Any:
        if self.message_type == "completion":
            return response.choices[0].text or ""
        return [assistant_message(response)]

    async def _is_over(self, messages: Messages, state: State, kwargs: dict[str, Any]) -> bool:
        reason = None
        # asked first, whatever else holds: overrides note in the state what they find
        if await maybe_await(self.is_completed, messages, state, **kwargs):
            reason = "is_completed"
        # an override of is_completed need not repeat these
        if await maybe_await(self.prompt_too_long, state):
            reason = "prompt_too_long"
        elif state.get("final_env_response") is not None:
            reason = "final_env_response"
        elif await maybe_await(self.max_turns_reached, state):
            reason = "max_turns_reached"
        if reason is not None:
            state["stop_condition"] = state.get("stop_condition") or reason
            return True
        for stop in marked_methods(self, "stop"):
            if await maybe_await(stop, state):
                state["stop_condition"] = state.get("stop_condition") or stop.__name__
                return True
        return False


def _new_state(prompt: Messages, answer: Any, task: str, info: Info | None, example_id: int) -> State:
    row: dict[str, Any] = {"prompt": prompt, "answer": answer, "task": task, "info": info or {}}
    return State(
        id=example_id,
        **row,
        input={**row, "example_id": example_id},
        example_id=example_id,
        completion=[] if not isinstance(prompt, str) else "",
        responses=[],
        trajectory=[],
        turn=0,
        timing={"generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0},
        is_completed=False,
        stop_condition=None,
        reward=None,
        metrics=None,
        error=None,
    )


def _record_turn(state: State, prompt: Any, answer: Any, response: ModelResponse, messages: Any) -> None:
    state["responses"].append(response)
    if isinstance(prompt, str):
        # where in the completion's text the policy's words begin
        state.setdefault("responses_start_idx", []).append(len(prompt) - len(state["prompt"]))
    state["turn"] += 1
    state["completion"] = messages[len(state["prompt"]) :]
    state["trajectory"].append(
        {
            "prompt": prompt,
            "completion": answer if isinstance(answer, list) else str(answer),
            "response": response,
            "tokens": None,
            "reward": None,
            "advantage": None,
            "is_truncated": getattr(response.choices[0], "finish_reason", None) == "length",
            "extras": {},
        }
    )
