"""Section "Environment", down to the dataset's columns."""

from __future__ import annotations

from typing import Any

import pytest

import verifiers as vf
from verifiers.testing import FakeClient

Rows = list[dict[str, Any]]
ASK = [{"role": "user", "content": "2+2?"}]


def length(completion: Any) -> float:
    return float(len(completion[-1]["content"]))


# -- get_model_response ----------------------------------------------------------------------------------------


async def test_the_second_generations_model_call_takes_from_the_state_what_is_not_given(
    client: FakeClient, rows: Rows
) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    env = vf.SingleTurnEnv(dataset=rows, oai_tools=tools)
    state = await env.init_state({"prompt": ASK, "example_id": 3}, client, "m", {"temperature": 0.5})
    assert (state["client"], state["model"], state["sampling_args"]) == (client, "m", {"temperature": 0.5})
    assert (state["oai_tools"], state["example_id"], state["trajectory"]) == (tools, 3, [])
    await env.get_model_response(state, ASK)
    await env.get_model_response(
        state=state, prompt=ASK, model="other", sampling_args={"temperature": 1.0}, oai_tools=[]
    )
    assert client.requests[0].body == {"model": "m", "messages": ASK, "temperature": 0.5, "tools": tools}
    assert client.requests[1].body == {"model": "other", "messages": ASK, "temperature": 1.0}
    another = FakeClient("hi")
    await env.get_model_response(state, ASK, another)
    assert len(another.requests) == 1


# -- batches -----------------------------------------------------------------------------------------------------


def test_a_rubric_may_be_added_to_the_one_that_is_there(client: FakeClient, rows: Rows) -> None:
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([length]))
    env.add_rubric(vf.Rubric([lambda completion: 0.5]))
    env.add_rubric(vf.Rubric([lambda completion: 0.25]))
    assert len(env.rubric.rubrics) == 3  # type: ignore[attr-defined]
    assert env.evaluate_sync(client, "m").reward == [6.75] * 3


# -- teardown, rubrics added ------------------------------------------------------------------------------------


async def test_teardown_runs_marked_methods_once_whatever_they_raise(
    rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []

    class Env(vf.SingleTurnEnv):
        @vf.teardown(priority=2)
        def first(self) -> None:
            done.append("first")
            raise OSError("stuck")

        @vf.teardown
        async def second(self) -> None:
            done.append("second")

    env = Env(dataset=rows)
    await env.teardown()
    await env.teardown()
    assert done == ["first", "second"]
    assert "Env.first failed: OSError: stuck" in caplog.text


def test_a_script_that_never_tears_down_has_it_done_at_its_end() -> None:
    import subprocess
    import sys

    code = """
import verifiers as vf
from verifiers.testing import FakeClient
class Env(vf.SingleTurnEnv):
    @vf.teardown
    async def bye(self):
        print("torn down")
env = Env(dataset=[{"question": "q"}])
print(env.evaluate_sync(FakeClient("a"), "m").reward)
unused = Env(dataset=[{"question": "q"}])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.split("\n")[:2] == ["[0.0]", "torn down"]
    assert done.stdout.count("torn down") == 1
