"""ExternalEnv: rollouts whose agents are started elsewhere, and take them from the gateway over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Unpack

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from verifiers.envs.agent_env import AgentOptions, GatewayEnv
from verifiers.errors import ConfigError, GradingError
from verifiers.gateway.calls import RefusedCallError, validated
from verifiers.gateway.external_sessions import ExternalSession, SessionRoutes, admin_key
from verifiers.gateway.gateway import Gateway
from verifiers.gateway.session import Session
from verifiers.rubrics.rubric import Rubric
from verifiers.types import RolloutInput, RolloutScore, State

LONGEST_WAIT_S = 600.0


class _Take(BaseModel):
    """The body of /sessions."""

    model_config = ConfigDict(extra="forbid", strict=True)
    wait_s: float = Field(30.0, ge=0.0, le=LONGEST_WAIT_S)


_TAKE = TypeAdapter(_Take)


class ReportedRubric(Rubric):
    """A reward that was reported from outside and stands in the state, beside it the metrics that were."""

    def __init__(
        self, reward: Callable[[State], Awaitable[float]], metrics: Callable[[State], Mapping[str, float]]
    ) -> None:
        super().__init__(funcs=[reward])
        self._reported = metrics

    async def score_states(self, states: Sequence[State]) -> list[RolloutScore]:
        scores = await super().score_states(states)
        for state, score in zip(states, scores, strict=True):
            score["metrics"] = {**self._reported(state), **score["metrics"]}
        return scores


async def posted_reward(state: State) -> float:
    """Return the reward that was posted for a session; one without a reward is a failed grade."""
    reward = state.get("posted_reward")
    if reward is None:
        raise GradingError("the session was ended without a reward; post one to /sessions/{id}/reward or /end.")
    return float(reward)


def _posted_metrics(state: State) -> dict[str, float]:
    metrics: dict[str, float] = state.get("posted_metrics", {})
    return metrics


class ExternalEnv(GatewayEnv):
    """An environment whose agents are programs that are started elsewhere.

    A program takes a rollout by `POST /sessions`, which gives it a row, a base URL and a key. Then it posts
    a reward, or leaves that to the rubric, and ends the session by `POST /sessions/{id}/end`. A session that is not
    ended before the rollout's deadline is timed out; the time for which a rollout waits to be taken counts.

    Args:
        host: address on which the gateway listens.
        port: of the gateway; 0 for a free one.
        **kwargs: as `AgentEnv`, without `run`. Where no rubric is given, it is that of posted rewards.

    The admin key is the value of VF_GATEWAY_KEY; where that is not set, one is made and printed to standard error.
    """

    not_in_workers = "its programs take rollouts from one gateway, which listens on rank 0"

    def __init__(self, *, host: str = "127.0.0.1", port: int = 8100, **kwargs: Unpack[AgentOptions]) -> None:
        if kwargs.get("rubric") is None:
            kwargs["rubric"] = ReportedRubric(posted_reward, _posted_metrics)
        super().__init__(**kwargs)
        if not 0 <= port <= 65535:
            raise ConfigError(f"port is {port!r}; give a number from 0 to 65535.")
        self.host, self.port = host, port
        # the number decides between equal times
        self._waiting: asyncio.PriorityQueue[tuple[float, int, ExternalSession]] = asyncio.PriorityQueue()
        self._numbers = itertools.count()
        self._routes: SessionRoutes | None = None
        self._starting: asyncio.Task[Gateway] | None = None

    async def start(self) -> Gateway:
        """Return the gateway, which listens from the first call on."""
        if self._starting is None or self._starting.get_loop().is_closed():
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> Gateway:
        key, is_new = admin_key()
        self._waiting = asyncio.PriorityQueue()
        self._routes = self._routes_for(key)
        gateway = Gateway(self.host, self.port, add_routes=self._routes.add_to)
        await gateway.start()
        told = f"; the key of POST /sessions is {key}" if is_new else ""
        print(f"POST /sessions at {gateway.url}{told}", file=sys.stderr, flush=True)
        return gateway

    async def _gateway(self) -> Gateway:
        return await self.start()

    async def _run_agent(self, row: RolloutInput, session: Session, gateway: Gateway) -> Any:
        assert self._routes is not None
        external = ExternalSession(self._id_of(row), session, row)
        with self._routes.opened(external):
            self._offer(external)
            return await self._within_budget(session, external.posted(), wind_up_s=math.inf)

    def _routes_for(self, key: str) -> SessionRoutes:
        return SessionRoutes(key, self._take, self._offer)

    def _id_of(self, row: RolloutInput) -> str:
        return new_session_id()

    def _offer(self, external: ExternalSession) -> None:
        self._waiting.put_nowait((external.began_at, next(self._numbers), external))

    async def _take(self, body: dict[str, Any]) -> ExternalSession:
        """Return the oldest rollout that no program has taken."""
        wait_s = validated(_TAKE, body).wait_s
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    *_, external = await self._waiting.get()
                    # the rollout's deadline may be over
                    if external.is_open:
                        return external
        except TimeoutError:
            text = f"no rollout waits for a program now, nor did one within {wait_s:g} s; ask again."
            raise RefusedCallError(text, status=503, code="no_rollout") from None

    def _finish(self, state: State, session: Session, result: Any) -> None:
        super()._finish(state, session, result)
        _show_conversation(state, has_completion=isinstance(result, Mapping) and "completion" in result)


def new_session_id() -> str:
    return f"session-{secrets.token_hex(8)}"


def _show_conversation(state: State, *, has_completion: bool) -> None:
    """Show a finished session as the one conversation that it was, where it was one.

    Without a prompt of its own it gets that of its first call; without a posted completion, all that came after.
    """
    steps = state["trajectory"]
    if not steps:
        return
    first, last = steps[0]["prompt"], steps[-1]["prompt"]
    state["prompt"] = state["prompt"] or first
    asked = state["prompt"]
    if not has_completion and isinstance(asked, list) and isinstance(last, list) and last[: len(asked)] == asked:
        state["completion"] = [*last[len(asked) :], *state["completion"]]
