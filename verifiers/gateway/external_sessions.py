"""Sessions of agents that are started elsewhere: opened, rewarded and ended over HTTP by who holds the admin key."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from verifiers.errors import AgentError, ConfigError
from verifiers.gateway.calls import RefusedCallError, json_object, json_response, validated
from verifiers.gateway.session import Session
from verifiers.http_requests import has_key, read_body
from verifiers.server_process import url_of
from verifiers.types import Messages

if TYPE_CHECKING:
    from aiohttp import web

KEY_VARIABLE = "VF_GATEWAY_KEY"
SHORTEST_KEY = 16
ENDED_SESSIONS = 10_000

Number = Annotated[float, Field(allow_inf_nan=False)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Reward(_Body):
    """The body of /sessions/{id}/reward."""

    reward: Number
    metrics: dict[str, Number] = {}


class _End(_Body):
    """The body of /sessions/{id}/end."""

    reward: Number | None = None
    metrics: dict[str, Number] = {}
    completion: str | list[dict[str, Any]] | None = None
    error: str | None = None


_REWARD, _END = TypeAdapter(_Reward), TypeAdapter(_End)


@dataclass(slots=True, eq=False)
class ExternalSession:
    """A session whose agent is started elsewhere, and what was posted of it.

    Attributes:
        id: public name; the session's key is the agent's secret.
        session: None once the rollout is over: of its calls the numbers are kept.
        error: why the agent failed, as far as who started it says so.
        is_cancelled: `cancel` was called before the end was posted.
        began_at: seconds on the monotonic clock.
        result: set where the finished rollout is recorded: what became of it.
    """

    id: str
    session: Session | None
    row: Mapping[str, Any]
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    completion: Messages | None = None
    error: str | None = None
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    is_cancelled: bool = False
    began_at: float = field(default_factory=time.monotonic)
    result: asyncio.Future[dict[str, Any]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _counts: dict[str, int] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether it takes what is posted."""
        return self.session is not None and not self.has_ended.is_set()

    def close(self) -> None:
        """Keep the numbers alone."""
        self.counts()
        self.session, self.row, self.completion = None, {}, None

    def cancel(self, why: str) -> None:
        """End the session without its program's word."""
        if not self.has_ended.is_set():
            self.is_cancelled, self.error = True, why
            self.has_ended.set()

    async def posted(self) -> dict[str, Any]:
        """Wait for the end, and return what was posted as items of a rollout's state.

        Raises:
            AgentError: an error was posted.
        """
        await self.has_ended.wait()
        if self.error is not None:
            raise AgentError(self.error)
        items: dict[str, Any] = {"posted_reward": self.reward, "posted_metrics": self.metrics}
        if isinstance(self.completion, str) and not isinstance(self.row["prompt"], str):
            items["completion"] = [{"role": "assistant", "content": self.completion}]
        elif self.completion is not None:
            items["completion"] = self.completion
        return items

    def counts(self) -> dict[str, int]:
        """Return calls and tokens of the answers that were read."""
        if self.session is not None:
            usages = [call.answer.get("usage") or {} for call in self.session.calls]
            names = ("prompt_tokens", "completion_tokens")
            tokens = {name: sum(used.get(name) or 0 for used in usages) for name in names}
            self._counts = {"calls": len(usages), **tokens}
        return self._counts


def admin_key() -> tuple[str, bool]:
    """Return the key that opens sessions, and whether it was made here because `KEY_VARIABLE` is not set."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if key and len(key) < SHORTEST_KEY:
        raise ConfigError(
            f"{KEY_VARIABLE} has {len(key)} characters; give at least {SHORTEST_KEY}, or unset it to have one made."
        )
    return (key, False) if key else (f"vfg-{secrets.token_urlsafe(32)}", True)


class SessionRoutes:
    """`POST /sessions`, `/sessions/{id}/reward` and `/sessions/{id}/end`, and `GET /sessions/{id}`.

    Args:
        begin: opens a session as the body of `POST /sessions` asks.
        give_back: takes a session whose caller hung up before it was told of it.
        report: gives what is answered of a session that has ended.
    """

    def __init__(
        self,
        key: str,
        begin: Callable[[dict[str, Any]], Awaitable[ExternalSession]],
        give_back: Callable[[ExternalSession], object],
        report: Callable[[ExternalSession], Awaitable[dict[str, Any]]] | None = None,
    ) -> None:
        self._key = key
        self._begin = begin
        self._report = report or _counts
        self._give_back = give_back
        # also those that are over: an answer that was lost on its way is asked for again
        self._sessions: dict[str, ExternalSession] = {}
        self._over: deque[str] = deque()

    @contextlib.contextmanager
    def opened(self, external: ExternalSession) -> Iterator[None]:
        """Take what is posted of a session inside."""
        self._sessions[external.id] = external
        try:
            yield
        finally:
            external.close()
            self._over.append(external.id)
            while len(self._over) > ENDED_SESSIONS:
                del self._sessions[self._over.popleft()]

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/sessions", self._answering(self._post_session))
        app.router.add_get("/sessions/{id}", self._answering(self._get_session))
        app.router.add_post("/sessions/{id}/reward", self._answering(self._post_reward))
        app.router.add_post("/sessions/{id}/end", self._answering(self._post_end))

    def _answering(
        self, answer: Callable[[web.Request, dict[str, Any]], Awaitable[dict[str, Any]]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            if not has_key(request, self._key):
                text = "send the gateway's own key as `Authorization: Bearer KEY`; a session's key is not enough."
                raise RefusedCallError(text, status=401, code="invalid_api_key")
            raw = await read_body(request)
            return json_response(await answer(request, json_object(raw) if raw.strip() else {}))

        return handle

    def _of(self, request: web.Request) -> ExternalSession:
        name = request.match_info["id"]
        if name not in self._sessions:
            raise RefusedCallError(f"there is no session {name!r}.", status=404, code="not_found")
        return self._sessions[name]

    async def _post_session(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
        external = await self._begin(body)
        if request.transport is None or request.transport.is_closing():
            self._give_back(external)
            raise RefusedCallError("the caller hung up.", status=503)
        row, session = external.row, external.session
        if session is None:
            raise RefusedCallError("the session ended before it was told of.", status=503, code="session_ended")
        return {
            "id": external.id,
            "key": session.key,
            # of the addresses that the gateway listens on, the one that this caller has reached
            "base_url": f"{url_of(request.transport.get_extra_info('socket'))}/v1",
            "model": session.model,
            **{name: row[name] for name in ("example_id", "prompt", "answer", "task", "info")},
        }

    async def _get_session(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
        external = self._of(request)
        return {"id": external.id, "is_open": external.is_open, "reward": external.reward, **external.counts()}

    async def _post_reward(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
        given: _Reward = validated(_REWARD, body)
        external = self._of(request)
        if not external.is_open:
            text = f"the session {external.id!r} is over; its reward can no longer change."
            raise RefusedCallError(text, status=409, code="session_ended")
        external.reward, external.metrics = given.reward, given.metrics
        return {"id": external.id, "reward": external.reward, "metrics": external.metrics}

    async def _post_end(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
        given: _End = validated(_END, body)
        external = self._of(request)
        if external.is_open:
            if given.reward is not None:
                external.reward = given.reward
            external.metrics = given.metrics or external.metrics
            external.completion, external.error = given.completion, given.error
            external.has_ended.set()
        return {"id": external.id, **await self._report(external)}


async def _counts(external: ExternalSession) -> dict[str, Any]:
    return {**external.counts(), "reward": external.reward}
