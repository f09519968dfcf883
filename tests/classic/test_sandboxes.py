"""Sandbox environments as packages of the classic API write them, on sandboxes of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.testing import FakeClient

ROWS = [{"question": "q", "info": {"word": "plum"}}]
LOCAL = vf.SandboxSpec(isolation="process")


def called(name: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"name": name, "arguments": arguments}]}


class Workshop(vf.SandboxEnv):
    """Prepares files by the hosted client's calls, has a tool of its own, and reads a result at the end."""

    def __init__(self, source: Path, **kwargs: Any) -> None:
        super().__init__(spec=LOCAL, dataset=ROWS, environment_vars={"COLOUR": "red"}, **kwargs)
        self.source = source
        self.add_tool(self.count, args_to_skip=["sandbox_id", "sandbox_state"])

    async def setup_state(self, state: vf.State, **kwargs: Any) -> vf.State:
        state = await super().setup_state(state, **kwargs)
        await self.sandbox_client.upload_file(state["sandbox_id"], "notes/words.txt", str(self.source))
        state["working_dir"] = "notes"
        return state

    async def count(self, path: str, sandbox_id: str, sandbox_state: dict[str, Any]) -> str:
        """Count the words of a file.

        Args:
            path: the file.
        """
        return await self.bash(f"wc -w < {path}; echo $COLOUR", sandbox_id, sandbox_state, working_dir="notes")

    def update_tool_args(self, tool_name: str, tool_args: Any, messages: Any, state: vf.State, **kwargs: Any) -> Any:
        arguments = super().update_tool_args(tool_name, tool_args, messages, state, **kwargs)
        arguments["path" if tool_name == "count" else "command"] += "" if tool_name == "count" else " | head -1"
        return arguments

    async def post_rollout(self, messages: Any, state: vf.State) -> None:  # type: ignore[override]
        done = await self.sandbox_client.execute_command(
            state["sandbox_id"], "cat words.txt; echo $WHO", working_dir="notes", env={"WHO": "me"}, timeout=20
        )
        state["read"] = (len(messages), done.stdout, done.exit_code)


async def test_the_hosted_clients_calls_hooks_and_hidden_arguments_are_served(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("two words\nmore\n")
    env = Workshop(tmp_path / "words.txt")
    policy = FakeClient([called("bash", command="cat words.txt"), called("count", path="words.txt"), "done"])
    (state,) = (await env.evaluate(policy, "m")).state
    said = [message["content"] for message in state["completion"] if message["role"] == "tool"]
    assert said == ["two words", "3\nred"]
    assert state["read"] == (5, "two words\nmore\nme\n", 0)
    times = state["sandbox_state"]
    assert (times["ready"], len(times["command_execution_times"]), times["ready_wait_time"] > 0) == (True, 2, True)
    offered = {tool.name: list(tool.parameters["properties"]) for tool in env.tool_defs or ()}
    assert offered == {"bash": ["command"], "count": ["path"]}
    assert env._slots == {}


async def test_each_rollout_gets_the_sandbox_that_it_requests() -> None:
    class Requests(vf.SandboxEnv):
        def get_sandbox_request(self, state: vf.State) -> Any:
            return self.sandbox_request.model_copy(update={"environment_vars": state["info"]})

        @vf.cleanup
        async def destroy_sandbox(self, state: vf.State) -> None:
            state["destroyed"] = state.get("destroyed", 0) + 1
            await super().destroy_sandbox(state)

    env = Requests(spec=LOCAL, dataset=ROWS)
    policy = FakeClient([called("bash", command="echo $word"), "done"])
    (state,) = (await env.evaluate(policy, "m")).state
    assert (state["completion"][1]["content"], state["destroyed"], env._slots) == ("plum", 1, {})


async def test_a_call_of_the_hosted_service_alone_says_what_there_is_instead() -> None:
    env = vf.SandboxEnv(spec=LOCAL, dataset=ROWS)
    with pytest.raises(AttributeError, match=r"expose is a call of the hosted sandbox service; .* execute_command"):
        await env.sandbox_client.expose("id", 80)
