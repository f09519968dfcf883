"""The small model of `vf-init --model tiny` plays a tool environment on the embedded server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
import tiny_world

import verifiers as vf
from verifiers.train.tiny_model.char_model import make_model

pytest.importorskip("llguidance")


def look_up(city: Literal["Rome", "Oslo"]) -> str:
    """Return a city's country.

    Args:
        city: its name
    """
    return {"Rome": "Italy", "Oslo": "Norway"}[city]


def test_a_tool_environment_runs_on_the_small_model(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny", seed=0)
    env = vf.ToolEnv(
        tools=[look_up],
        max_turns=3,
        eval_dataset=[{"question": "Where is it?"}] * 2,
        rubric=vf.Rubric(funcs=[lambda completion: float(sum(m["role"] == "tool" for m in completion))]),
        sampling_args={"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200},
    )
    with tiny_world.EmbeddedServer(tmp_path / "tiny") as server:
        results = env.evaluate_sync(server.url, "policy")
    # every turn but the last is a call that was read, executed and put into the next prompt
    assert results.reward == [2.0, 2.0]
    for completion in results.completion:
        for call, result in zip(completion[0::2], completion[1::2], strict=False):
            arguments = json.loads(call["tool_calls"][0]["function"]["arguments"])
            assert result["content"] == look_up(**arguments)
