"""SingleTurnEnv: one prompt, one answer, one score."""

from __future__ import annotations

from typing import Any, Unpack

from verifiers.envs.multiturn_env import MultiTurnEnv
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

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """Return an empty reply, for code that calls this directly; the loop never does."""
        return [{"role": "user", "content": ""}], state
