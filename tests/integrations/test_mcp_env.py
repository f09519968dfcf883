"""MCPEnv: the policy is offered the tools of MCP servers, and a call of them is a message."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp_world import (
    Servers,
    calls,
    environment,
    local,
    play,
    script,
    tool_texts,
)

import verifiers as vf
from verifiers.integrations import mcp
from verifiers.integrations.mcp import MCPServerConfig, chat_names, parameters_of, result_text
from verifiers.testing import FakeOpenAIServer
from verifiers.types import Outcome

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
    env = environment(local(), error_formatter=lambda error: f"! {error}", max_result_chars=90)
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
    assert long == "x" * 45 + "\n[... 10 characters left out ...]\n" + "x" * 45
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


# -- configuration ---------------------------------------------------------------------------------


def test_tools_of_one_name_are_told_apart_by_their_servers(servers: Servers) -> None:
    env = environment(local("one", tools=["add", "pid"]), local("two", tools=["add"]))
    assert env.connect() == ["one__add", "pid", "two__add"]


def test_tools_can_be_left_out_and_unknown_names_are_refused(servers: Servers) -> None:
    assert "fail" not in environment(local(exclude_tools=["fail"])).connect()
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
        (
            {"name": "x", "command": "y", "env": {"PIN": 987}},
            r"env\['PIN'\] of the MCP server 'x' is of type int",
        ),
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


# -- names and results -----------------------------------------------------------------------------


def test_names_fit_what_endpoints_take() -> None:
    names = chat_names([("files", "read.text"), ("files", "x" * 80), ("web", "add")], taken=["add"])
    assert list(names.values()) == ["read_text", "x" * 64, "web__add"]


def test_tools_whose_names_endpoints_cannot_tell_apart_are_numbered() -> None:
    tools = [
        ("web", "read file"),
        ("web", "read.file"),
        ("a", "文件"),
        ("a", "目录"),
        ("b", "y" * 70),
        ("b", "y" * 71),
    ]
    by_tool = chat_names(tools)
    names = [by_tool[tool] for tool in tools]
    assert names[:4] == ["web__read_file", "web__read_file_2", "a____", "a_____2"]
    assert names[4:] == ["b__" + "y" * 61, "b__" + "y" * 59 + "_2"]
    # servers may list them in another order in the next run
    assert chat_names(tools[::-1]) == by_tool


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
