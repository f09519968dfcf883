"""SingleTurnEnv: one prompt, one answer, one score."""

from __future__ import annotations

from typing import Any

from verifiers.envs.multiturn_env import MultiTurnEnv
from verifiers.types import Messages, State

__all__ = ["SingleTurnEnv"]


class SingleTurnEnv(MultiTurnEnv):
    """An environment that wants one answer of the policy and scores it."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("max_turns", 1)
        super().__init__(**kwargs)

    async def is_completed(self, messages: Messages, state: State, **kwargs: Any) -> bool:
        return len(state["responses"]) > 0

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> tuple[Messages, State]:
        """Never asked by the loop; the classic API's empty reply for code that calls it directly."""
        return [{"role": "user", "content": ""}], state
