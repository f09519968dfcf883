"""MCPEnv: tools of MCP servers, that end with their environment.

Most tests connect the package's client to a server in this process; one starts a stdio server and one an HTTP server.
The deaths of real servers are in the slow tier.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.inference.load_balancer import backend_for
from verifiers.integrations import mcp
from verifiers.integrations.mcp import MCPEnv, MCPServerConfig, chat_names, parameters_of, result_text
from verifiers.integrations.mcp_servers import MCPConnection
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.runner import RolloutRunner
from verifiers.testing import FakeOpenAIServer
from verifiers.types import Outcome, RolloutKey

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


class Pids:
    """The processes of the servers that were started."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def all(self) -> list[int]:
        return [int(line) for line in self.path.read_text().split()] if self.path.exists() else []

    def wait_until_gone(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while alive := [pid for pid in self.all if is_alive(pid)]:
            assert time.monotonic() < deadline, f"still running: {alive}"
            time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    with contextlib.suppress(FileNotFoundError):
        return not Path("/proc").exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Pids]:
    started = Pids(tmp_path / "pids")
    yield started
    for pid in started.all:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def stdio(pids: Pids, *flags: str, name: str = "tools", **fields: Any) -> MCPServerConfig:
    return MCPServerConfig(name, sys.executable, [SCRIPT, "--pid-file", str(pids.path), *flags], **fields)


def environment(*servers: Any, **settings: Any) -> MCPEnv:
    return MCPEnv(list(servers), **{"dataset": ROWS, "rubric": vf.Rubric(), **settings})


async def play(env: MCPEnv, *answers: Any) -> Rollout:
    """One rollout on the path of the trainer and the evaluator."""
    request = RolloutRequest(RolloutKey(0, 0, 0), [{"role": "user", "content": "go"}])
    with FakeOpenAIServer(script(*answers)) as server:
        backend = backend_for(server.url)
        try:
            return await RolloutRunner(env, backend, "fake").run_one(request)
        finally:
            await backend.close()


def tool_texts(completion: Any) -> list[str]:
    return [message["content"] for message in completion if message["role"] == "tool"]


class Servers:
    """Servers in this process, one for each connection; `lose` makes the next calls find their connection closed."""

    def __init__(self) -> None:
        self.started = self.open = self.lose = 0

    async def client(self, connection: MCPConnection, stack: contextlib.AsyncExitStack, stderr: Any) -> Any:
        from mcp import Client

        self.started += 1
        self.open += 1
        stack.callback(self._ended)
        client = Client(load_script().build())
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


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("mcp_test_server", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    found = Servers()
    monkeypatch.setattr(MCPConnection, "_new_client", lambda *args: found.client(*args))
    return found


def local(name: str = "tools", **fields: Any) -> MCPServerConfig:
    return MCPServerConfig(name, "in-this-process", **fields)


# -- calls -----------------------------------------------------------------------------------------


async def test_the_policy_calls_the_tools_of_a_server(servers: Servers) -> None:
    env = environment(local())
    with FakeOpenAIServer(script(calls(("add", {"a": 2, "b": 3}), ("point", {})), calls(("parts", {})))) as server:
        results = await env.a_evaluate(server.url, "fake", num_examples=1)
        offered = {tool["function"]["name"]: tool for tool in server.requests[0].body["tools"]}
    added, point, parts = tool_texts(results.completion[0])
    assert (added, json.loads(point), parts) == ("5", {"x": 1, "y": 2}, "one\ntwo")
    assert offered["add"]["function"]["description"] == "Add two numbers."
    assert offered["add"]["function"]["parameters"]["required"] == ["a", "b"]
    assert [tool["function"]["name"] for tool in env.oai_tools or []] == list(offered)
    await env.close_servers()
    assert (servers.started, servers.open) == (1, 0)


async def test_a_failed_call_is_a_message_to_the_policy(servers: Servers) -> None:
    env = environment(local(), error_formatter=lambda error: f"! {error}", max_result_chars=60)
    rollout = await play(
        env,
        calls(("fail", {})),
        calls(("add", {"a": "x", "b": 1})),
        calls(("nope", {})),
        calls(("long", {"length": 100})),
        calls(("add", {"a": 1, "b": 1})),
    )
    assert rollout.outcome is Outcome.COMPLETED
    failed, wrong, unknown, long, right = tool_texts(rollout.completion)
    assert failed.startswith("! Error executing tool fail")
    assert "validation error" in wrong
    assert unknown.startswith("! There is no tool 'nope'")
    assert long == "x" * 60 + "\n[40 characters left out]"
    assert right == "2"
    await env.close_servers()


async def test_a_call_that_hangs_ends_at_its_deadline_and_the_server_lives_on(servers: Servers) -> None:
    env = environment(local(), tool_timeout_s=0.2)
    late = await play(env, calls(("wait", {"seconds": 60})))
    assert tool_texts(late.completion) == ["The tool 'wait' did not finish within 0.2 s."]
    env.tool_timeout_s = 60.0
    rollout = await play(env, calls(("count", {})))
    assert (tool_texts(rollout.completion), servers.started) == (["1"], 1)
    await env.close_servers()


async def test_python_tools_stand_beside_those_of_servers(servers: Servers) -> None:
    def shout(text: str) -> str:
        """Loud."""
        return text.upper()

    env = environment(local(tools=["add"]), tools=[shout])
    rollout = await play(env, calls(("shout", {"text": "hi"}), ("add", {"a": 1, "b": 2})))
    assert tool_texts(rollout.completion) == ["HI", "3"]
    assert list(env.tool_map) == ["shout", "add"]
    await env.close_servers()


# -- scopes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scope", "expected"), [("process", ["1", "2", "3", "4", "5"]), ("rollout", ["1"] * 5)])
async def test_five_rollouts_at_once_share_a_server_or_have_their_own(
    servers: Servers, scope: Any, expected: list[str]
) -> None:
    env = environment(local(), scope=scope)
    with FakeOpenAIServer(script(calls(("count", {})))) as server:
        results = await env.a_evaluate(server.url, "fake")
    assert sorted(tool_texts(completion)[0] for completion in results.completion) == expected
    assert servers.started == (1 if scope == "process" else 5)
    # a rollout's own servers end with it, not with the environment
    assert servers.open == (1 if scope == "process" else 0)
    assert not any("mcp_connections" in state for state in results.state)
    await env.close_servers()
    assert servers.open == 0


def test_a_stdio_server_ends_with_its_event_loop(pids: Pids) -> None:
    env = environment(stdio(pids))
    with FakeOpenAIServer(script(calls(("add", {"a": 1, "b": 2})))) as server:
        for runs in (1, 2):
            results = asyncio.run(env.a_evaluate(server.url, "fake", num_examples=1))
            assert tool_texts(results.completion[0]) == ["3"]
            assert len(pids.all) == runs
            # the end of the loop, without a teardown, ends the server
            pids.wait_until_gone()
        assert [len(request.body["tools"]) for request in server.requests] == [10] * 4


def test_synchronous_calls_share_a_server_until_the_teardown(pids: Pids) -> None:
    env = environment(stdio(pids))
    with FakeOpenAIServer(script(calls(("add", {"a": 1, "b": 2})))) as server:
        for _ in range(2):
            results = env.evaluate_sync(server.url, "fake", num_examples=1)
            assert tool_texts(results.completion[0]) == ["3"]
    assert len(pids.all) == 1
    asyncio.run(env.teardown())
    pids.wait_until_gone()


def test_loops_of_several_threads_use_one_environment(servers: Servers) -> None:
    env = environment(local())
    found: list[Any] = []
    with FakeOpenAIServer(script(calls(("add", {"a": 1, "b": 2})))) as server:
        threads = [
            threading.Thread(target=lambda: found.append(asyncio.run(env.a_evaluate(server.url, "fake"))))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [tool_texts(completion) for results in found for completion in results.completion] == [["3"]] * 10
    assert (servers.started, servers.open) == (2, 0)
    assert len(env.tools) == 10


async def test_teardown_ends_the_servers_of_other_loops_too(servers: Servers) -> None:
    env = environment(local())
    played, ended = threading.Event(), threading.Event()

    async def elsewhere() -> None:
        await play(env, calls(("add", {"a": 1, "b": 2})))
        played.set()
        await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
    thread.start()
    try:
        assert await asyncio.to_thread(played.wait, 30)
        assert servers.open == 1
        await env.teardown()
        assert servers.open == 0
    finally:
        ended.set()
        thread.join()


async def test_a_cancelled_rollout_ends_its_own_servers(servers: Servers) -> None:
    env = environment(local(), scope="rollout")
    with FakeOpenAIServer(script(calls(("wait", {"seconds": 60})))) as server:
        task = asyncio.create_task(env.a_evaluate(server.url, "fake", num_examples=1))
        await asyncio.to_thread(server.wait_until, lambda it: it.request_count == 1, 60.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (servers.started, servers.open) == (1, 0)


def test_connect_returns_the_tools_and_ends_the_servers(servers: Servers) -> None:
    env = environment(local())
    assert env.oai_tools == []
    names = env.connect()
    assert "add" in names
    assert [tool["function"]["name"] for tool in env.oai_tools or []] == names == env.connect()
    assert (servers.started, servers.open) == (2, 0)


@pytest.mark.slow
def test_a_server_that_ignores_its_end_is_killed(pids: Pids) -> None:
    env = environment(stdio(pids, "--stubborn"))
    with FakeOpenAIServer() as server:
        asyncio.run(env.a_evaluate(server.url, "fake", num_examples=1))
    assert len(pids.all) == 1
    pids.wait_until_gone()


@pytest.mark.slow
def test_a_killed_parent_leaves_no_process(pids: Pids, tmp_path: Path) -> None:
    program = f"""
import asyncio, sys
from verifiers.integrations.mcp import MCPEnv
async def main():
    env = MCPEnv([{{"name": "t", "command": sys.executable, "args": {[SCRIPT, "--pid-file", str(pids.path)]!r}}}],
                 dataset=[{{"question": "q"}}])
    await env._shared_connection(env.mcp_servers[0])
    print("ready", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        assert is_alive(pids.all[0])
        parent.kill()
    pids.wait_until_gone()


# -- failures --------------------------------------------------------------------------------------


async def test_a_lost_connection_is_replaced_and_the_call_made_once_more(servers: Servers) -> None:
    env = environment(local())
    servers.lose = 1
    rollout = await play(env, calls(("count", {})), calls(("count", {})))
    assert (rollout.outcome, tool_texts(rollout.completion)) == (Outcome.COMPLETED, ["1", "2"])
    assert servers.started == 2
    await env.close_servers()
    assert servers.open == 0


@pytest.mark.parametrize(("scope", "started"), [("process", 2), ("rollout", 1)])
async def test_a_connection_that_is_lost_again_is_an_environment_error(
    servers: Servers, scope: Any, started: int
) -> None:
    env = environment(local(), scope=scope)
    servers.lose = 2
    rollout = await play(env, calls(("count", {})))
    assert (rollout.outcome, rollout.reward) == (Outcome.ENVIRONMENT_ERROR, None)
    assert "The MCP server 'tools' failed: the connection was lost" in str(rollout.failure)
    assert servers.started == started
    servers.lose = 0
    # the next rollout finds a server again
    assert tool_texts((await play(env, calls(("count", {})))).completion) == ["1"]
    await env.close_servers()


@pytest.mark.slow
async def test_a_server_that_ends_is_started_again_and_the_call_made_once_more(pids: Pids, tmp_path: Path) -> None:
    env = environment(stdio(pids))
    rollout = await play(env, calls(("crash", {"if_missing": str(tmp_path / "crashed")})), calls(("pid", {})))
    alive, pid = tool_texts(rollout.completion)
    assert (rollout.outcome, alive, len(pids.all)) == (Outcome.COMPLETED, "alive", 2)
    assert int(pid) == pids.all[1]
    await env.close_servers()
    pids.wait_until_gone()


@pytest.mark.slow
async def test_a_server_that_died_between_calls_is_started_again(pids: Pids) -> None:
    env = environment(stdio(pids))
    await play(env, calls(("pid", {})))
    os.kill(pids.all[0], signal.SIGKILL)
    rollout = await play(env, calls(("count", {})), calls(("count", {})))
    assert (tool_texts(rollout.completion), len(pids.all)) == (["1", "2"], 2)
    await env.close_servers()


async def test_a_server_that_does_not_start_is_an_error_with_its_stderr(pids: Pids) -> None:
    rollout = await play(environment(stdio(pids, "--die")))
    assert rollout.outcome is Outcome.ENVIRONMENT_ERROR
    assert "The MCP server 'tools' failed" in str(rollout.failure)
    assert "its stderr: no licence found" in str(rollout.failure)


@pytest.mark.slow
async def test_a_server_that_hangs_at_its_start_is_killed_at_the_deadline(pids: Pids) -> None:
    rollout = await play(environment(stdio(pids, "--sleep"), connect_timeout_s=1.5))
    assert rollout.outcome is Outcome.ENVIRONMENT_ERROR
    assert "connect_timeout_s=1.5" in str(rollout.failure)
    assert len(pids.all) == 1
    pids.wait_until_gone()


async def test_a_command_that_does_not_exist_is_a_mistake_of_the_user() -> None:
    env = environment(MCPServerConfig("files", "no-such-command"))
    with pytest.raises(vf.ConfigError, match=r"command 'no-such-command' of the MCP server 'files' was not found"):
        await play(env)


# -- configuration ---------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_server_sees_nothing_of_the_parents_environment_but_what_it_is_given(
    pids: Pids, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    env = environment(stdio(pids, env={"GIVEN": "yes"}))
    text = tool_texts((await play(env, calls(("environ", {})))).completion)[0]
    names = {line.partition("=")[0] for line in text.splitlines()}
    assert "sk-secret" not in text
    assert "GIVEN=yes" in text.splitlines()
    inherited = {"GIVEN", "HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER"}
    assert names - inherited <= {"LC_CTYPE", "__CF_USER_TEXT_ENCODING", "PWD", "SHLVL", "_"}
    await env.close_servers()


def test_tools_of_one_name_are_told_apart_by_their_servers(servers: Servers) -> None:
    env = environment(local("one", tools=["add", "pid"]), local("two", tools=["add"]))
    assert env.connect() == ["one__add", "pid", "two__add"]


def test_tools_can_be_left_out_and_unknown_names_are_refused(servers: Servers) -> None:
    assert "crash" not in environment(local(exclude_tools=["crash"])).connect()
    with pytest.raises(vf.ConfigError, match=r"has no tool 'ad'; did you mean add"):
        environment(local(tools=["ad"])).connect()
    assert servers.open == 0


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"command": "x"}, "has no name"),
        ({"name": "x"}, "either a command or a url"),
        ({"name": "x", "command": "y", "url": "http://z"}, "either a command or a url"),
        ({"name": "x", "command": "y", "args": "--flag"}, "give a list"),
        ({"name": "x", "comand": "y"}, "no field 'comand'"),
        ("x", "is 'x'"),
    ],
)
def test_configurations_that_cannot_work_are_refused(server: Any, message: str) -> None:
    with pytest.raises(vf.ConfigError, match=message):
        environment(server)


def test_settings_that_cannot_work_are_refused() -> None:
    server = MCPServerConfig("x", "y", None, {"KEY": "secret"}, "what it is for")
    assert "secret" not in repr(server)
    with pytest.raises(vf.ConfigError, match="no servers"):
        environment()
    with pytest.raises(vf.ConfigError, match="Two MCP servers are named 'x'"):
        environment(server, server)
    with pytest.raises(vf.ConfigError, match="scope is 'thread'"):
        environment(server, scope="thread")


async def test_a_rollouts_own_servers_cannot_be_called_outside_of_it(servers: Servers) -> None:
    env = environment(local(), scope="rollout")
    await asyncio.to_thread(env.connect)
    with pytest.raises(vf.ConfigError, match="in a rollout only"):
        await env.call_tool("add", {"a": 1, "b": 2}, "id")


def test_without_mcp_the_class_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    source = Path(mcp.__file__).read_text()
    with pytest.raises(ImportError, match="verifiers\\[mcp\\]") as missing:
        exec(compile(source, mcp.__file__, "exec"), {"__name__": "again"})
    assert missing.value.name == "mcp"


def test_importing_the_class_does_not_import_mcp() -> None:
    program = "import sys, verifiers.integrations.mcp; sys.exit('mcp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# -- HTTP ------------------------------------------------------------------------------------------


class HttpServer:
    """The same tools over streamable HTTP, in a thread; can be stopped, and started again on its port."""

    def __init__(self) -> None:
        self.port = 0
        self.headers: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    def start(self) -> None:
        import uvicorn

        app = load_script().build().streamable_http_app()

        async def noting(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
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


@pytest.fixture
def http() -> Iterator[HttpServer]:
    server = HttpServer()
    server.start()
    yield server
    server.stop()


async def test_the_policy_calls_the_tools_of_an_http_server(http: HttpServer) -> None:
    env = environment({"name": "web", "url": http.url, "headers": {"X-Key": "k1"}})
    with FakeOpenAIServer(script(calls(("add", {"a": 2, "b": 3}), ("fail", {})))) as server:
        results = await env.a_evaluate(server.url, "fake")
    for completion in results.completion:
        assert tool_texts(completion) == ["5", "Error executing tool fail"]
    assert http.headers
    assert {headers["x-key"] for headers in http.headers} == {"k1"}
    await env.close_servers()


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["auto", "legacy"])
async def test_an_http_server_that_was_restarted_is_connected_to_again(http: HttpServer, protocol: str) -> None:
    env = environment({"name": "web", "url": http.url, "protocol": protocol})
    assert tool_texts((await play(env, calls(("count", {})))).completion) == ["1"]
    await asyncio.to_thread(http.stop)
    await asyncio.to_thread(http.start)
    rollout = await play(env, calls(("count", {})))
    assert (rollout.outcome, tool_texts(rollout.completion)) == (Outcome.COMPLETED, ["1"])
    await env.close_servers()


@pytest.mark.slow
async def test_an_http_server_that_is_gone_is_an_environment_error(http: HttpServer) -> None:
    env = environment({"name": "web", "url": http.url})
    await play(env, calls(("count", {})))
    await asyncio.to_thread(http.stop)
    for _ in range(2):
        rollout = await play(env, calls(("count", {})))
        assert rollout.outcome is Outcome.ENVIRONMENT_ERROR
        assert "The MCP server 'web' failed" in str(rollout.failure)
    http.start()
    assert tool_texts((await play(env, calls(("count", {})))).completion) == ["1"]
    await env.close_servers()


async def test_a_url_without_an_mcp_server_is_an_environment_error(http: HttpServer) -> None:
    rollout = await play(environment({"name": "web", "url": http.url + "/elsewhere"}))
    assert rollout.outcome is Outcome.ENVIRONMENT_ERROR
    assert "The MCP server 'web'" in str(rollout.failure)


# -- names and results -----------------------------------------------------------------------------


def test_names_fit_what_endpoints_take() -> None:
    names = chat_names([("files", "read.text"), ("files", "x" * 80), ("web", "add")], taken=["add"])
    assert list(names.values()) == ["read_text", "x" * 64, "web__add"]


def test_schemas_without_properties_are_objects_nevertheless() -> None:
    schema = {"$schema": "s", "title": "T", "type": "object", "additionalProperties": False}
    assert parameters_of(schema) == {"type": "object", "properties": {}, "additionalProperties": False}


def test_results_become_text() -> None:
    from mcp import types

    text = types.TextContent(type="text", text="hello")
    image = types.ImageContent(type="image", data="aGk=", mime_type="image/png")
    link = types.ResourceLink(type="resource_link", name="notes", uri="file:///notes")
    inside = types.EmbeddedResource(
        type="resource", resource=types.TextResourceContents(uri="file:///a", text="inside")
    )
    several = types.CallToolResult(content=[text, image, link, inside], structured_content={"x": 1})
    assert result_text(several, 1000) == (
        "hello\n[image of type image/png, not shown]\n[resource file:///notes: notes]\ninside"
    )
    assert result_text(types.CallToolResult(content=[], structured_content={"x": "é"}), 100) == '{"x": "é"}'
    assert result_text(types.CallToolResult(content=[]), 100) == ""
