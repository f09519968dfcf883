"""MCP servers for the tests of `MCPEnv`: in this process, as processes with stdio, and over HTTP."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import verifiers as vf
from verifiers.inference.server_pool import backend_for
from verifiers.integrations.mcp import MCPConnection, MCPEnv, MCPServerConfig
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.server_process import process_lives
from verifiers.testing import FakeOpenAIServer
from verifiers.types import RolloutKey

SCRIPT = str(Path(__file__).with_name("mcp_server.py"))
ROWS = [{"question": f"q{number}"} for number in range(5)]


def calls(*asked: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """Return an answer that calls tools."""
    return {"tool_calls": [{"name": name, "arguments": arguments, "id": name} for name, arguments in asked]}


def script(*answers: Any) -> Any:
    """Answers by the number of turns so far, so that concurrent rollouts each get them in order."""

    def answer(body: dict[str, Any]) -> Any:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        return answers[turn] if turn < len(answers) else "done"

    return answer


def environment(*servers: Any, **settings: Any) -> MCPEnv:
    return MCPEnv(list(servers), **{"dataset": ROWS, "rubric": vf.Rubric(), **settings})


async def play(env: MCPEnv, *answers: Any) -> Rollout:
    """One rollout on the path of the trainer and the evaluator."""
    request = RolloutRequest(RolloutKey(0, 0, 0), [{"role": "user", "content": "go"}])
    with FakeOpenAIServer(script(*answers)) as server:
        backend = backend_for(server.url)
        try:
            return (await Run(env, backend, "fake").play([request]))[0]
        finally:
            await backend.close()


def tool_texts(completion: Any) -> list[str]:
    return [message["content"] for message in completion if message["role"] == "tool"]


def local(name: str = "tools", **fields: Any) -> MCPServerConfig:
    return MCPServerConfig(name, "in-this-process", **fields)


class Servers:
    """Servers in this process, one for each connection; `lose` makes the next calls find their connection closed."""

    def __init__(self) -> None:
        self.started = self.open = self.lose = 0

    async def client(self, connection: MCPConnection, stack: contextlib.AsyncExitStack, stderr: Any) -> Any:
        from mcp import Client
        from mcp_server import build

        self.started += 1
        self.open += 1
        stack.callback(self._ended)
        client = Client(build())
        call_tool = client.call_tool
        client.call_tool = lambda *args: self._call(call_tool, *args)  # type: ignore[method-assign]
        return client

    async def _call(self, call_tool: Any, *args: Any) -> Any:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        if self.lose:
            self.lose -= 1
            raise MCPError(CONNECTION_CLOSED, "Connection closed")
        return await call_tool(*args)

    def _ended(self) -> None:
        self.open -= 1


def stdio(pids: Pids, *flags: str, name: str = "tools", **fields: Any) -> MCPServerConfig:
    return MCPServerConfig(name, sys.executable, [SCRIPT, "--pid-file", str(pids.path), *flags], **fields)


class Pids:
    """The processes of the servers that were started."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def all(self) -> list[int]:
        return [int(line) for line in self.path.read_text().split()] if self.path.exists() else []

    def wait_until_gone(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while alive := [pid for pid in self.all if process_lives(pid)]:
            assert time.monotonic() < deadline, f"still running: {alive}"
            time.sleep(0.01)


class HttpServer:
    """The same tools over streamable HTTP, in a thread; can be stopped, and started again on its port.

    Calls of the tool `broken` are answered with 500; `called` is set at the first call of another.
    """

    def __init__(self) -> None:
        self.port = 0
        self.broken = ""
        self.called = threading.Event()
        self.headers: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    def start(self) -> None:
        import uvicorn
        from mcp_server import build

        app = build().streamable_http_app()

        async def noting(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
                tool = self.headers[-1].get("mcp-name")
                if tool == self.broken:
                    await send({"type": "http.response.start", "status": 500, "headers": []})
                    await send({"type": "http.response.body"})
                    return
                if tool is not None:
                    self.called.set()
            await app(scope, receive, send)

        self._socket = socket.create_server(("127.0.0.1", self.port))
        self.port = self._socket.getsockname()[1]
        config = uvicorn.Config(noting, log_level="critical", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self._server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
