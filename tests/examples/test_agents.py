"""The agents of examples/agents, evaluated against an endpoint and trained for two steps."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verifiers.cli import evaluate
from verifiers.testing import FakeOpenAIServer

AGENTS = Path(__file__).parents[2] / "examples" / "agents"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(AGENTS), *sys.path])
    yield
    for name in ("sdk_agent", "shell_agent", "start_model"):
        sys.modules.pop(name, None)


def clerk(body: dict[str, Any]) -> Any:
    """Answer as a policy that knows the codes."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return last["content"]
    name = re.fullmatch(r"Price of ([a-z]+)\?", last["content"])
    assert name is not None
    assert [tool["function"]["name"] for tool in body["tools"]] == ["price"]
    function = {"name": "price", "arguments": json.dumps({"code": name[1][::-1]})}
    return {"content": "", "tool_calls": [{"id": f"call_{name[1]}", "type": "function", "function": function}]}


def backwards(body: dict[str, Any]) -> str:
    word = re.sub(".* ", "", body["messages"][-1]["content"])
    return f"<answer>{word[::-1]}</answer>"


def require_programs(agent: str) -> None:
    if agent == "sdk_agent":
        pytest.importorskip("agents", reason="needs openai-agents")
    elif not (shutil.which("curl") and shutil.which("jq")):
        pytest.skip("needs curl and jq")


@pytest.mark.parametrize(("name", "answer", "calls"), [("sdk_agent", clerk, 2), ("shell_agent", backwards, 1)])
def test_vf_eval_runs_the_agent_against_an_endpoint(name: str, answer: Any, calls: int, tmp_path: Path) -> None:
    require_programs(name)
    with FakeOpenAIServer(answer) as server:
        command = [str(AGENTS / f"{name}.py"), "-m", "fake", "-b", server.url, "-n", "4", "-r", "1"]
        assert evaluate.main([*command, "--output-dir", str(tmp_path)]) == 0
        assert len(server.requests) == 4 * calls
    [path] = tmp_path.rglob("results.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["outcome"], row["reward"]) for row in rows] == [("completed", 1.0)] * 4


@pytest.mark.parametrize("name", ["sdk_agent", "shell_agent"])
def test_vf_train_trains_the_agent(name: str, tmp_path: Path) -> None:
    require_programs(name)
    pytest.importorskip("verifiers_embedded", reason="needs the embedded server")
    from verifiers.cli import train
    from verifiers.train.tiny_model.char_model import make_model

    # with random weights: what is seen is that its answers are trained, not that it learns
    make_model(tmp_path / "start", seed=0)
    run = tomllib.loads((AGENTS / f"{name}.toml").read_text())
    run["model"]["path"] = str(tmp_path / "start")
    run["trainer"] |= {
        "output_dir": str(tmp_path / "run"),
        "max_steps": 2,
        "warmup_steps": 0,
        "lr_scheduler_kwargs": {"num_decay_steps": 1},
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 24,
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "no",
        "eval_on_start": False,
        "skip_zero_advantage_rows": False,
    }
    # examples stand beside their run files
    for file in AGENTS.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "run.toml").write_text(toml(run))
    assert train.main([str(tmp_path / "run.toml")]) == 0
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [entry for entry in logged if "loss" in entry]
    assert len(steps) == 2
    for entry in steps:
        assert entry["outcomes/completed"] + entry["outcomes/truncated"] == 8
        assert entry["rows/trained"] >= 8


def toml(tables: dict[str, dict[str, Any]]) -> str:
    lines = []
    for table, fields in tables.items():
        lines += [f"[{table}]", *(f"{name} = {toml_value(value)}" for name, value in fields.items())]
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml_value(of)}" for name, of in value.items()) + "}"
    return json.dumps(value)


def test_the_start_model_is_shown_no_eval_article() -> None:
    pytest.importorskip("agents", reason="needs openai-agents")
    pytest.importorskip("trl", reason="needs the train extra")
    agent, start = importlib.import_module("sdk_agent"), importlib.import_module("start_model")
    env = agent.load_environment()
    trained, eval_rows = (set(rows["question"]) for rows in (env.get_dataset(), env.get_eval_dataset()))
    assert len(eval_rows) == agent.NUM_EVAL
    assert not trained & eval_rows
    shown = start.conversations(start.shown_names(), start.random.Random(0))
    assert {messages[0]["content"] for messages, _ in shown} <= trained
