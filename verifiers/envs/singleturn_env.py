"""SingleTurnEnv: one prompt, one answer, one score."""

from __future__ import annotations

from typing import Any, Unpack

from verifiers.envs.conversation import default_step
from verifiers.envs.multiturn_env import MultiTurnEnv, gives_state_alone, is_completed_by_state
from verifiers.envs.signatures import either_generation
from verifiers.keywords import EnvironmentOptions
from verifiers.types import Messages, State

__all__ = ["SingleTurnEnv"]


class SingleTurnEnv(MultiTurnEnv):
    """An environment that wants one answer of the policy and scores it.

    Args:
        **kwargs: as `Environment`.
    """

    def __init__(self, **kwargs: Unpack[EnvironmentOptions]) -> None:
        super().__init__(**kwargs)
        self.max_turns = 1

    @default_step
    @either_generation(gives_state_alone, is_completed_by_state)
    async def is_completed(self, messages: Messages, state: State, **kwargs: Any) -> bool:
        """Return whether the policy has answered."""
        return len(state["responses"]) > 0

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> tuple[Messages, State]:
        """Return the classic API's empty reply, for code that calls this directly; the loop never does."""
        return [{"role": "user", "content": ""}], state
