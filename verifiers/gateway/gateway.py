"""The HTTP application of the gateway: keys, routes, and answers that are known to have been read."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from verifiers.concurrency import at_loop_end
from verifiers.gateway.calls import RefusedCallError, json_object, json_response
from verifiers.gateway.listener import MAX_BODY, Listener, past_proxies
from verifiers.gateway.session import OVER, Exchange, Session, WireFormat
from verifiers.http_requests import bearer_token, read_body
from verifiers.inference.endpoint import CHAT, COMPLETIONS
from verifiers.installation import install_hint

if TYPE_CHECKING:
    from aiohttp import web

    from verifiers.http_requests import Handler

logger = logging.getLogger("verifiers.gateway")

KEEP_ALIVE_S = 10.0
STALLED_S = 120.0
"""Seconds in which an agent sends the whole of a body, and reads the whole of an answer."""

SEALED_KEYS = 100_000
ANTHROPIC = ("/messages", "/messages/count_tokens")


class Gateway:
    """An HTTP server on which each rollout's agent has a session of its own.

    Args:
        keep_alive_s: seconds between the lines that keep a streamed answer's connection alive while it is generated.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        keep_alive_s: float = KEEP_ALIVE_S,
        max_connections: int | None = None,
        add_routes: Callable[[web.Application], None] | None = None,
    ) -> None:
        self.url = ""
        self._host, self._port = host, port
        self._keep_alive_s = keep_alive_s
        self._add_routes = add_routes
        self._sessions: dict[str, Session] = {}
        self._sealed: OrderedDict[str, None] = OrderedDict()
        self._close_listener: Callable[[], Awaitable[None]] | None = None
        self._formats: Mapping[str, WireFormat] = {}
        self._listener = Listener(max_connections)

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    async def start(self, on_close: Callable[[], object] = bool) -> None:
        """Listen, on the running event loop, until `close` or the loop's end."""
        # the types of the SDKs take about a second to import
        self._formats = await asyncio.to_thread(_wire_formats)
        listener = self._listener
        os.environ.update(past_proxies(os.environ))
        self.url = await listener.start(self._application(), self._host, self._port)

        async def end() -> None:
            on_close()
            await listener.close()

        self._close_listener = at_loop_end(end)

    async def unix_socket(self) -> str:
        """Return the path of a Unix socket on which the gateway listens too, from the first call on.

        A sandbox without network can have it mounted. The session's key is needed there as well.
        """
        return await self._listener.unix_socket()

    async def close(self) -> None:
        for session in list(self._sessions.values()):
            self._end(session)
        if self._close_listener is not None:
            close, self._close_listener = self._close_listener, None
            await close()

    @asynccontextmanager
    async def serving(self, session: Session) -> AsyncIterator[Session]:
        """Answer a session's calls inside; afterwards it is sealed, and its key answers 409."""
        self._sessions[session.key] = session
        try:
            yield session
        finally:
            self._end(session)

    def _end(self, session: Session) -> None:
        session.seal()
        self._sessions.pop(session.key, None)
        self._sealed[session.key] = None
        while len(self._sealed) > SEALED_KEYS:
            self._sealed.popitem(last=False)

    # -- the application ------------------------------------------------------------------------------------------

    def _application(self) -> web.Application:
        from aiohttp import web

        @web.middleware
        async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                return await handler(request)
            except RefusedCallError as error:
                refusal = error
            except web.HTTPException as error:
                code = "request_too_large" if error.status == 413 else None
                refusal = RefusedCallError(error.reason, status=error.status, code=code)
            except Exception as error:
                logger.exception("%s %s failed", request.method, request.path)
                text = f"the gateway failed: {type(error).__name__}: {error}"
                refusal = RefusedCallError(text, status=500, code="gateway_error")
            path = "/" + request.path.rpartition("/v1/")[2]
            return _refused(self._formats.get(path, self._formats[CHAT]), refusal)

        app = web.Application(client_max_size=MAX_BODY, middlewares=[answer_errors])
        # Anthropic's SDK adds the version itself: with either base URL its calls arrive
        for root in ("/v1", "/v1/v1"):
            for path, wire in self._formats.items():
                app.router.add_post(root + path, functools.partial(self._serve, wire, path))
            app.router.add_get(f"{root}/models", self._models)
            app.router.add_get(f"{root}/models/{{name:.+}}", self._models)
            for path in ANTHROPIC:
                if path not in self._formats:
                    app.router.add_post(root + path, self._without_anthropic)
        if self._add_routes is not None:
            self._add_routes(app)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        return app

    def _session_of(self, request: web.Request) -> Session:
        # a client may have a key of its own for the one, and the session's for the other
        keys = [request.headers.get("x-api-key") or "", bearer_token(request)]
        for key in keys:
            session = self._sessions.get(key)
            if session is not None:
                return session
        if any(key in self._sealed for key in keys):
            raise RefusedCallError(OVER, status=409, code="session_ended")
        raise RefusedCallError("the API key is not that of a running rollout.", status=401, code="invalid_api_key")

    async def _serve(self, wire: WireFormat, path: str, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        session = self._session_of(request)
        try:
            with session.counted_request():
                return await self._answer(wire, path, request, session)
        except ConnectionError:
            # the agent hung up while it was answered; the answer stays unread
            return web.Response()

    async def _answer(
        self, wire: WireFormat, path: str, request: web.Request, session: Session
    ) -> web.StreamResponse:
        try:
            async with asyncio.timeout(STALLED_S):
                raw = await read_body(request)
        except TimeoutError:
            raise RefusedCallError(f"the body did not arrive within {STALLED_S:g} s.", status=408) from None
        call = wire.read(json_object(raw), session)
        if path.endswith("/count_tokens"):
            return json_response({"input_tokens": await session.count_tokens(call)})
        retries = request.headers.get("x-stainless-retry-count", "0")
        async with session.exchange(call, path.encode() + raw, is_retry=retries != "0") as exchange:
            send = self._stream if call.stream else self._send
            try:
                response = await send(wire, request, session, exchange)
            except RefusedCallError as refusal:
                session.newest_refusal = str(refusal)
                response = _refused(wire, refusal)
                await _write(request, response)
            transport = request.transport
            is_open = transport is not None and not transport.is_closing()
            # what the agent has read is decided at the session's end
            exchange.is_delivered |= is_open and not session.is_sealed
            return response

    async def _answered(self, wire: WireFormat, session: Session, exchange: Exchange) -> dict[str, Any]:
        try:
            # a reader that goes away leaves the generation to the next try
            completion, _ = await asyncio.shield(exchange.task)
        except asyncio.CancelledError:
            if not session.is_sealed:
                raise
            raise RefusedCallError(OVER, status=409, code="session_ended") from None
        if exchange.body is None:
            session.remember_arguments(completion)
            exchange.body = wire.answer(completion, exchange.call, session)
        return exchange.body

    async def _send(
        self, wire: WireFormat, request: web.Request, session: Session, exchange: Exchange
    ) -> web.StreamResponse:
        response = json_response(await self._answered(wire, session, exchange))
        await _write(request, response)
        return response

    async def _stream(
        self, wire: WireFormat, request: web.Request, session: Session, exchange: Exchange
    ) -> web.StreamResponse:
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        # a refusal that comes soon has a status of its own
        await asyncio.wait({exchange.task}, timeout=self._keep_alive_s)
        while not exchange.task.done():
            await _write(request, response, wire.keep_alive, ends=False)
            await asyncio.wait({exchange.task}, timeout=self._keep_alive_s)
        try:
            answer = await self._answered(wire, session, exchange)
            events = b"".join(wire.events(answer, exchange.call))
        except RefusedCallError as refusal:
            if not response.prepared:
                raise
            events = wire.error_event(refusal)
        await _write(request, response, events)
        return response

    async def _models(self, request: web.Request) -> web.StreamResponse:
        # both SDKs have this path; Anthropic's says its version
        is_anthropic = "anthropic-version" in request.headers and ANTHROPIC[0] in self._formats
        wire = self._formats[ANTHROPIC[0] if is_anthropic else CHAT]
        try:
            session = self._session_of(request)
        except RefusedCallError as refusal:
            return _refused(wire, refusal)
        listed = _listed([session.model, *session.helpers], is_anthropic=is_anthropic)
        name = request.match_info.get("name")
        if name is None:
            return json_response(listed)
        for model in listed["data"]:
            if model["id"] == name:
                return json_response(model)
        text = f"there is no model {name!r} here; ask for {', '.join(model['id'] for model in listed['data'])}."
        return _refused(wire, RefusedCallError(text, status=404, code="model_not_found"))

    async def _without_anthropic(self, request: web.Request) -> web.StreamResponse:
        text = (
            f"Anthropic's Messages API needs the package `anthropic` beside the gateway; {install_hint('anthropic')}."
        )
        error = {"type": "api_error", "message": text}
        return json_response({"type": "error", "error": error}, status=501, headers={"x-should-retry": "false"})

    async def _unknown(self, request: web.Request) -> web.StreamResponse:
        routes = ", ".join(f"/v1{path}" for path in (*self._formats, "/models"))
        text = f"there is no {request.method} {request.path} here; the gateway has {routes}."
        raise RefusedCallError(text, status=404, code="not_found")


_of_loops: dict[asyncio.AbstractEventLoop, asyncio.Task[Gateway]] = {}


async def gateway_of_loop() -> Gateway:
    """Return the gateway of the running event loop, started at the first call and closed with the loop."""
    loop = asyncio.get_running_loop()
    starting = _of_loops.get(loop)
    if starting is None or (starting.done() and (starting.cancelled() or starting.exception())):
        starting = _of_loops[loop] = loop.create_task(_start_for(loop))
    return await asyncio.shield(starting)


async def _start_for(loop: asyncio.AbstractEventLoop) -> Gateway:
    gateway = Gateway()
    await gateway.start(on_close=lambda: _of_loops.pop(loop, None))
    return gateway


async def _write(request: web.Request, response: web.StreamResponse, data: bytes = b"", *, ends: bool = True) -> None:
    """Write to an agent until the kernel has everything; one that reads nothing for long loses its connection."""
    transport = request.transport
    if transport is None:
        raise ConnectionResetError
    try:
        async with asyncio.timeout(STALLED_S):
            await response.prepare(request)
            # what waits in this process has not been written
            transport.set_write_buffer_limits(high=0)
            if ends:
                # in one write with its end: clients hang up once they have read the last event
                await response.write_eof(data)
            else:
                await response.write(data)
    except TimeoutError:
        transport.abort()
        raise ConnectionResetError from None


def _wire_formats() -> dict[str, WireFormat]:
    from verifiers.gateway.openai_chat import OpenAIWire
    from verifiers.gateway.openai_responses import ResponsesWire

    formats: dict[str, WireFormat] = {
        CHAT: OpenAIWire(CHAT),
        COMPLETIONS: OpenAIWire(COMPLETIONS),
        "/responses": ResponsesWire(),
    }
    try:
        from verifiers.gateway.anthropic_messages import MessagesWire
    except ModuleNotFoundError as error:
        if error.name != "anthropic":
            raise
    else:
        formats |= {path: MessagesWire(counts_only=path != ANTHROPIC[0]) for path in ANTHROPIC}
    return formats


def _listed(names: Sequence[str], *, is_anthropic: bool) -> dict[str, Any]:
    models: list[dict[str, Any]]
    if is_anthropic:
        made = "1970-01-01T00:00:00Z"
        models = [{"id": name, "type": "model", "display_name": name, "created_at": made} for name in names]
        return {"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    models = [{"id": name, "object": "model", "created": 0, "owned_by": "verifiers"} for name in names]
    return {"object": "list", "data": models}


def _refused(wire: WireFormat, refusal: RefusedCallError) -> web.Response:
    # official SDKs repeat a 409, a 429 and a 5xx unless they are told
    return json_response(wire.error(refusal), refusal.status, {"x-should-retry": "false"})
