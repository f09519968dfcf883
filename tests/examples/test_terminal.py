"""The tasks of examples/terminal: their solutions score 1, and the transcripts are of a policy that may do so."""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.inference.endpoint import ClientBackend
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.testing import FakeClient
from verifiers.types import RolloutKey

TERMINAL = Path(__file__).parents[2] / "examples" / "terminal"
HELD_OUT = [("cup", "one"), ("pan", "log")]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(TERMINAL), *sys.path])
    monkeypatch.delitem(sys.modules, "make", raising=False)
    return importlib.import_module("make")


def test_no_held_out_pair_is_trained_or_shown(make: Any, tmp_path: Path) -> None:
    make.write_tasks(tmp_path, "debian:stable-slim", HELD_OUT)
    env = vf.HarborEnv(tmp_path, tool="podman", eval_tasks=["held-out-*"])
    evaluated, trained = set(env.get_eval_dataset()["question"]), set(env.get_dataset()["question"])
    assert evaluated == {make.instruction(*pair) for pair in HELD_OUT}
    assert len(trained) == len(make.pairs()) - len(HELD_OUT)
    shown = [pair for pair in make.pairs() if pair not in HELD_OUT]
    asked = {messages[0]["content"] for messages in make.transcripts(random.Random(0), shown, 1000)}
    # the others have made-up words
    assert asked & trained == trained
    assert not asked & evaluated


async def reward_of(env: Any, answers: list[Any]) -> float:
    row = env.get_eval_dataset()[0]
    info = json.loads(row["info"]) if isinstance(row["info"], str) else row["info"]
    request = RolloutRequest(RolloutKey(0, 0, 0), row["prompt"], task=row["task"], info=info)
    group = await Run(env, ClientBackend(FakeClient(answers)), "fake", {}).run_group([request])
    [rollout] = group.rollouts
    assert rollout.failure is None
    assert rollout.reward is not None
    return rollout.reward


def as_answered(said: str) -> Any:
    """Return an answer as a server gives it that reads tool calls."""
    if not said.startswith("<tool_call>"):
        return said
    called = json.loads(said.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    function = {"name": called["name"], "arguments": json.dumps(called["arguments"])}
    return {"content": "", "tool_calls": [{"id": "call", "type": "function", "function": function}]}


@pytest.mark.slow
@pytest.mark.usefixtures("podman")
async def test_the_solution_scores_and_careless_transcripts_do_not(make: Any, tmp_path: Path) -> None:
    make.write_tasks(tmp_path, "python:3.11-slim", HELD_OUT)
    tasks = ["held-out-cup-one"]
    assert await reward_of(vf.HarborEnv(tmp_path, "oracle", tasks=tasks, tool="podman"), ["never asked"]) == 1.0
    env = vf.HarborEnv(tmp_path, tasks=tasks, tool="podman", max_turns=3, system_prompt="")
    for read, written, reward in (("cup", "one", 1.0), ("cup", "out", 0.0), ("jar", "one", 0.0)):
        animal = make.ANIMALS[make.VESSELS.index(read)]
        messages = make.transcript("cup", "one", animal, read, written)
        said = [as_answered(message["content"]) for message in messages if message["role"] == "assistant"]
        assert await reward_of(env, said) == reward
