"""The servers of MCPEnv: they end with their environment, and one that is lost is replaced or costs a rollout alone.

Most tests connect the package's client to a server in this process; one starts a stdio server and one an HTTP server.
The deaths of real servers are in the slow tier.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp_world import (
    SCRIPT,
    HttpServer,
    Pids,
    Servers,
    calls,
    environment,
    local,
    play,
    script,
    stdio,
    tool_texts,
)

import verifiers as vf
from verifiers.integrations.mcp import MCPConnection, MCPServerConfig
from verifiers.server_process import process_lives
from verifiers.testing import FakeOpenAIServer
from verifiers.types import Outcome

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


@pytest.mark.slow
def test_a_stdio_server_ends_with_its_event_loop(pids: Pids) -> None:
    env = environment(stdio(pids))
    with FakeOpenAIServer(script(calls(("add", {"a": 1, "b": 2})))) as server:
        for runs in (1, 2):
            results = asyncio.run(env.a_evaluate(server.url, "fake", num_examples=1))
            assert tool_texts(results.completion[0]) == ["3"]
            assert len(pids.all) == runs
            # the end of the loop, without a teardown, ends the server
            pids.wait_until_gone()
        assert [len(request.body["tools"]) for request in server.requests] == [13] * 4


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
        assert process_lives(pids.all[0])
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


async def test_a_server_that_does_not_start_again_is_no_tool_that_takes_long(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = environment(local(), connect_timeout_s=2.0, tool_timeout_s=0.2)
    assert tool_texts((await play(env, calls(("count", {})))).completion) == ["1"]
    servers.lose = 1

    async def hangs(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(MCPConnection, "_new_client", hangs)
    rollout = await play(env, calls(("count", {})))
    assert rollout.outcome is Outcome.ENVIRONMENT_ERROR
    assert "did not start within connect_timeout_s=2" in str(rollout.failure)
    await env.close_servers()


@pytest.mark.slow
async def test_neither_a_wrong_byte_nor_half_a_character_ends_a_server(pids: Pids) -> None:
    env = environment(stdio(pids))
    asked = calls(("garble", {}), ("echo", {"text": "\ud83d"}))
    rollout = await play(env, asked, calls(("echo", {"text": "on"})))
    assert (tool_texts(rollout.completion), len(pids.all)) == (["printed", "\ufffd", "on"], 1)
    await env.close_servers()


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


async def test_a_command_that_does_not_exist_is_a_mistake_of_the_user() -> None:
    env = environment(MCPServerConfig("files", "no-such-command"))
    with pytest.raises(vf.ConfigError, match=r"command 'no-such-command' of the MCP server 'files' was not found"):
        await play(env)


# -- secrets ---------------------------------------------------------------------------------------


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


# -- HTTP ------------------------------------------------------------------------------------------


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


async def test_a_call_that_an_http_server_fails_to_answer_takes_no_other_rollouts_along(http: HttpServer) -> None:
    env = environment({"name": "web", "url": http.url})
    http.broken = "count"
    waiting = asyncio.create_task(play(env, calls(("meet", {"parties": 2}))))
    assert await asyncio.to_thread(http.called.wait, 30)
    assert (await play(env, calls(("count", {})))).outcome is Outcome.ENVIRONMENT_ERROR
    assert tool_texts((await play(env, calls(("meet", {"parties": 2})))).completion) == ["met"]
    assert tool_texts((await waiting).completion) == ["met"]
    called = [headers["mcp-name"] for headers in http.headers if "mcp-name" in headers]
    assert called == ["meet", "count", "count", "meet"]
    await env.close_servers()


async def test_more_than_a_hundred_calls_are_at_an_http_server_at_once(http: HttpServer) -> None:
    env = environment({"name": "web", "url": http.url}, tool_timeout_s=20)
    rollout = await play(env, calls(*[("meet", {"parties": 120})] * 120))
    assert rollout.outcome is Outcome.COMPLETED
    assert tool_texts(rollout.completion) == ["met"] * 120
    await env.close_servers()


async def test_neither_long_results_nor_what_a_tool_did_not_find_are_lost_connections(http: HttpServer) -> None:
    env = environment({"name": "web", "url": http.url, "protocol": "legacy"}, max_result_chars=100)
    rollout = await play(env, calls(("long", {"length": 2_000_000}), ("find", {"text": "issue 7"})))
    assert rollout.outcome is Outcome.COMPLETED
    cut, not_found = tool_texts(rollout.completion)
    assert (cut[:9], len(cut) < 200, not_found) == ("xxxxxxxxx", True, "Not Found: issue 7")
    await env.close_servers()


async def test_a_url_without_an_mcp_server_is_an_environment_error(http: HttpServer) -> None:
    rollout = await play(environment({"name": "web", "url": http.url + "/elsewhere"}))
    assert rollout.outcome is Outcome.ENVIRONMENT_ERROR
    assert "The MCP server 'web'" in str(rollout.failure)
