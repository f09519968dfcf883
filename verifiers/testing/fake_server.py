"""An OpenAI-compatible server without a model, for tests, examples and benchmarks.

It speaks real HTTP on a loopback port, from a thread and event loop of its own, so that clients meet real
connections, statuses and disconnects. It does not stream, and it ignores sampling settings and stop strings.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from verifiers.errors import DeadlineError
from verifiers.testing.faults import Fault, Faults, fault_schedule
from verifiers.testing.script import Answers, RecordedRequest, Script, response_body


def _error_reply(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "fake_server", "code": status}}, status=status)


async def _fault_reply(fault: Fault, request: web.Request, stopping: asyncio.Event) -> web.StreamResponse:
    """Answer `request` by `fault`; a hang lasts until `stopping` is set."""
    if fault.kind == "hang":
        await stopping.wait()
    if fault.kind in ("hang", "disconnect") and request.transport is not None:
        request.transport.abort()
    return web.Response(status=fault.status, text=fault.text, headers=fault.headers, content_type="application/json")


async def _read_object(request: web.Request) -> dict[str, Any]:
    """Return the JSON object in the request's body, {} for an empty body; answer anything else with 400."""
    raw = await request.read()
    try:
        body = json.loads(raw) if raw else {}
    except ValueError:
        body = None
    if not isinstance(body, dict):
        text = json.dumps({"error": {"message": "the request body is not a JSON object", "code": 400}})
        raise web.HTTPBadRequest(text=text, content_type="application/json")
    return body


def _recorded(number: int, request: web.Request, body: dict[str, Any]) -> RecordedRequest:
    headers = {name.lower(): value for name, value in request.headers.items()}
    return RecordedRequest(number, request.path, body, headers, dict(request.query))


_GENERATION_ROUTES = ("/v1/chat/completions", "/v1/completions")
_WEIGHT_ROUTES = (
    "/pause",
    "/resume",
    "/collective_rpc",
    "/update_weight_version",
    "/weight_info",
    "/is_paused",
    "/reset_prefix_cache",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
_MAX_BODY_BYTES = 2**28
_CLOSING_S = 0.2
_BACKLOG = 4096


class FakeOpenAIServer:
    """A scripted server: `async with FakeOpenAIServer("4") as server`, the same with `with`, or `start`/`stop`.

    Routes: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics, and vLLM's routes for weights and
    pauses, which record their calls. While paused, generation requests wait for /resume. Token ids are code points of
    the rendered conversation (`testing.script`), so that turns extend one another. A function among the
    answers or faults runs on the server's thread; what it raises is answered with 500 and kept in `errors`.

    Args:
        answers: what is answered (see `testing.script.Answers`); default "ok".
        latency_s: seconds before each answer, or a function of the request number; default 0.
        faults: when generation requests fail (see `testing.faults.Faults`); default never.
        token_ids: False makes it a provider that reports no token ids.
        route_faults: faults of the other routes, by path, e.g. {"/collective_rpc": Fault(500)}.

    Attributes:
        weight_calls: calls of the weight and pause routes in order of arrival.
        in_flight, max_in_flight: generation requests being answered, now and at most.
        weight_version: set by /update_weight_version; an int where the text is one.
        paused: between /pause and /resume.
        errors: what scripted functions raised.
    """

    def __init__(
        self,
        answers: Answers = None,
        *,
        latency_s: float | Callable[[int], float] = 0.0,
        faults: Faults = None,
        model: str = "fake",
        token_ids: bool = True,
        weight_version: int | str = 0,
        route_faults: Mapping[str, Faults] | None = None,
        port: int = 0,
    ) -> None:
        self._script = Script(answers)
        self._latency_s = latency_s
        self._fault_of = fault_schedule(faults)
        self._route_schedules = {path: fault_schedule(plan) for path, plan in (route_faults or {}).items()}
        self._route_counts: dict[str, int] = {}
        self._port = port
        self._reported: dict[str, Any] = {"model": model, "token_ids": token_ids}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event
        self._running: asyncio.Event
        self.requests: list[RecordedRequest] = []
        self.weight_calls: list[RecordedRequest] = []
        self.request_count = 0
        self.in_flight = 0
        self.max_in_flight = 0
        self.weight_version: int | str = weight_version
        self.paused = False
        self.errors: list[Exception] = []

    @property
    def port(self) -> int:
        """The port it listens on; after a stop, the one it had, which a new `start` takes again."""
        return self._port

    @property
    def root_url(self) -> str:
        """Address of the routes that are not under /v1."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        """Base URL for OpenAI clients, with /v1."""
        return f"{self.root_url}/v1"

    def start(self) -> FakeOpenAIServer:
        """Listen, and return once requests are answered. Raises OSError where the port is taken."""
        if self._thread is None:
            ready: concurrent.futures.Future[int] = concurrent.futures.Future()
            self._thread = threading.Thread(target=self._run, args=(ready,), name="fake-openai-server", daemon=True)
            self._thread.start()
            try:
                self._port = ready.result()
            except Exception:
                self._thread = None
                raise
        return self

    def stop(self) -> None:
        """End what is in flight, close the port and the thread. May be called twice."""
        thread, self._thread = self._thread, None
        if thread is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed where the server ended by itself
                self._loop.call_soon_threadsafe(self._stopping.set)
            thread.join()

    def wait_until(self, condition: Callable[[FakeOpenAIServer], bool], timeout_s: float = 10.0) -> None:
        """Block until `condition(self)` holds; it is checked whenever a request comes or goes.

        From a coroutine: `await asyncio.to_thread(server.wait_until, lambda s: s.in_flight == 4)`.

        Raises:
            DeadlineError: it did not hold within `timeout_s` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self), timeout_s):
                raise DeadlineError(
                    f"the fake server's condition did not hold within timeout_s={timeout_s:g}: it saw "
                    f"{self.request_count} requests, {self.in_flight} are in flight."
                )

    def __enter__(self) -> FakeOpenAIServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> FakeOpenAIServer:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    def _run(self, ready: concurrent.futures.Future[int]) -> None:
        try:
            asyncio.run(self._serve(ready))
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)

    async def _serve(self, ready: concurrent.futures.Future[int]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping, self._running = asyncio.Event(), asyncio.Event()
        self._running.set()
        self.paused = False
        runner = self._runner()
        await runner.setup()
        try:
            listening = socket.create_server(("127.0.0.1", self._port), backlog=_BACKLOG)
            await web.SockSite(runner, listening, backlog=_BACKLOG).start()
            ready.set_result(listening.getsockname()[1])
            await self._stopping.wait()
            # asyncio leaks a connection whose listening socket is closed in the round in which it was accepted
            self._loop.remove_reader(listening)
            for _ in range(3):
                await asyncio.sleep(0)
        finally:
            await runner.cleanup()

    def _runner(self) -> web.BaseRunner:
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        for path in _GENERATION_ROUTES:
            app.router.add_post(path, self._generate)
        for path in _WEIGHT_ROUTES:
            app.router.add_route("*", path, self._weights)
        for path in ("/health", "/v1/models", "/metrics"):
            app.router.add_get(path, self._describe)
        # cancellation tells a fake that its caller has gone, so that in_flight is true
        return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_CLOSING_S)

    def _models(self) -> dict[str, Any]:
        entry = {"id": self._reported["model"], "object": "model", "created": 0, "owned_by": "verifiers"}
        return {"object": "list", "data": [entry]}

    async def _describe(self, request: web.Request) -> web.StreamResponse:
        fault = self._route_fault(request.path)
        if fault is not None:
            return await _fault_reply(fault, request, self._stopping)
        if request.path == "/metrics":
            waiting = self.in_flight if self.paused else 0
            counts = {"running": self.in_flight - waiting, "waiting": waiting}
            lines = [f'vllm:num_requests_{name}{{engine="0"}} {count:.1f}\n' for name, count in counts.items()]
            return web.Response(text="".join(lines))
        return web.json_response(self._models() if request.path == "/v1/models" else {"status": "ok"})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await _read_object(request)
        number = self.request_count
        record = _recorded(number, request, body)
        with self._changed:
            self.request_count += 1
            self.requests.append(record)
            self.in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self.in_flight)
            self._changed.notify_all()
        try:
            return await self._answer(request, body, number)
        except Exception as error:
            self.errors.append(error)
            return _error_reply(500, f"the fake server's script raised {type(error).__name__}: {error}")
        finally:
            with self._changed:
                self.in_flight -= 1
                self._changed.notify_all()

    async def _answer(self, request: web.Request, body: dict[str, Any], number: int) -> web.StreamResponse:
        latency_s = self._latency_s(number) if callable(self._latency_s) else self._latency_s
        if latency_s:
            await asyncio.sleep(latency_s)
        await self._running.wait()
        fault = self._fault_of(number)
        if fault is not None:
            return await _fault_reply(fault, request, self._stopping)
        if body.get("stream"):
            return _error_reply(400, "the fake server does not stream; leave stream out")
        if ("messages" in body) != request.path.endswith("/chat/completions"):
            return _error_reply(400, "chats take messages, completions take a prompt")
        answers = await self._script.answers(body)
        if isinstance(answers, Fault):
            return await _fault_reply(answers, request, self._stopping)
        options = {"number": number, "weight_version": self.weight_version, **self._reported}
        return web.json_response(response_body(body, answers, **options))

    async def _weights(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        body = await _read_object(request)
        number = self._route_counts.get(path, 0)
        fault = self._route_fault(path)
        with self._changed:
            self.weight_calls.append(_recorded(number, request, body))
            self._changed.notify_all()
        if fault is not None:
            return await _fault_reply(fault, request, self._stopping)
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
            (self._running.clear if self.paused else self._running.set)()
            return web.json_response({"status": "paused" if self.paused else "resumed"})
        if path == "/update_weight_version":
            version = body.get("new_version")
            if not isinstance(version, str):
                return _error_reply(400, f"new_version must be a text, not {version!r}")
            self.weight_version = int(version) if version.isdecimal() else version
            return web.json_response({"success": True, "new_version": version})
        if path == "/weight_info":
            return web.json_response({"weight_version": str(self.weight_version)})
        if path == "/is_paused":
            return web.json_response({"is_paused": self.paused})
        return web.json_response({"results": [None]} if path == "/collective_rpc" else {})

    def _route_fault(self, path: str) -> Fault | None:
        number = self._route_counts.get(path, 0)
        self._route_counts[path] = number + 1
        schedule = self._route_schedules.get(path)
        return schedule(number) if schedule is not None else None
