"""MLflow takes the traces of an evaluation and of a training run by OTLP, and its page shows them."""

from __future__ import annotations

import asyncio
import json
import marshal
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import opened_browser
from client_world import MLFLOW, examples, running, taught_model

from verifiers import span_exporter
from verifiers.cli.evaluate import main as evaluate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ENVIRONMENT = """
import verifiers as vf


def says_3(completion):
    return float("3" in str(completion[-1]["content"]))


async def add(a: int, b: int) -> str:
    return str(a + b)


def load_environment():
    rows = [{"question": f"What is {n} + {3 - n}?", "answer": "3"} for n in range(4)]
    return vf.ToolEnv(dataset=rows, eval_dataset=rows, tools=[add], max_turns=3, rubric=vf.Rubric([says_3]))
"""
RUN = """
environment = { id = "mlflow-sums" }
model = { path = "MODEL" }

[trainer]
output_dir = "run"
per_device_train_batch_size = 4
gradient_accumulation_steps = 1
num_generations = 4
max_completion_length = 60
max_steps = 2
use_cpu = true
trace = "URL"
"""


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of an MLflow server."""
    if not (MLFLOW / "mlflow").exists():
        pytest.skip("MLflow is not installed; run: make test-clients")
    directory = tmp_path_factory.mktemp("mlflow")
    command = [str(MLFLOW / "mlflow"), "server", "--workers", "1", "--artifacts-destination", str(directory)]
    command += ["--backend-store-uri", f"sqlite:///{directory}/store.db"]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with running(command, "/health", directory, PATH=f"{MLFLOW}:{os.environ['PATH']}", **quiet) as url:
        until = time.monotonic() + 120
        # its first answers to this route take longer than the end of a run waits
        while _seconds_of_a_span(url) > span_exporter.CLOSE_S:
            assert time.monotonic() < until
        yield url


def _seconds_of_a_span(mlflow: str) -> float:
    started = time.monotonic()
    # at the first tokens MLflow reads its table of prices
    call = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.request.model": "fake"}
    call |= {"gen_ai.usage.input_tokens": 1, "gen_ai.usage.output_tokens": 1}
    span = ("first", 1, 1, 0, time.time_ns(), time.time_ns(), call)
    environ = {**os.environ, "OTEL_EXPORTER_OTLP_HEADERS": "x-mlflow-experiment-id=0"}
    sent = marshal.dumps([span]) + marshal.dumps([])
    subprocess.run([sys.executable, "-P", span_exporter.__file__, mlflow], input=sent, env=environ, check=True)
    return time.monotonic() - started


def _traces(mlflow: str) -> list[dict[str, Any]]:
    script = Path(__file__).parent / "scripts" / "mlflow_traces.py"
    environ = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "PYTHONPATH": ""}
    command = [str(MLFLOW / "python"), str(script), mlflow]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def _below(trace: dict[str, Any], parent: str | None) -> list[Any]:
    below = [span for span in trace["spans"] if span["parent"] == parent]
    return sorted((span["name"], _below(trace, span["id"])) for span in below)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught_model(tmp_path_factory.mktemp("traced") / "model", make_pairs=examples)


async def test_mlflow_shows_an_evaluation_as_it_was_played(
    mlflow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-mlflow-experiment-id=0")
    (tmp_path / "mlflow_sums.py").write_text(ENVIRONMENT)
    flags = [
        "./mlflow_sums.py",
        "-m",
        "fake",
        "-n",
        "2",
        "-r",
        "2",
        "--seed",
        "1",
        "--trace",
        mlflow,
        "--trace-content",
    ]
    # asyncio.run of its own
    assert await asyncio.to_thread(evaluate, flags) == 0
    traces = [trace for trace in _traces(mlflow) if trace["spans"][0]["name"] != "first"]
    last = ("turn", [("chat fake", [])])
    calling = ("turn", [("chat fake", []), ("execute_tool add", [])])
    assert len(traces) == 4
    for trace in traces:
        [(root, [(rollout, [says_3, *turns])])] = _below(trace, None)
        assert (root, rollout, says_3) == ("group", "rollout", ("evaluate says_3", []))
        # the built-in fake calls tools now and then
        assert turns.count(last) == 1
        assert turns.count(calling) == len(turns) - 1
    types = {span["name"]: span["type"] for trace in traces for span in trace["spans"]}
    assert (types["chat fake"], types["rollout"]) == ("CHAT_MODEL", "AGENT")
    assert all(trace["tokens"]["total_tokens"] > 0 for trace in traces)
    async with opened_browser(tmp_path / "profile") as page:
        await page.size(1500, 950)
        address = f"{mlflow}/#/experiments/0/traces?selectedEvaluationId={traces[0]['id']}"
        await page.call("Page.navigate", url=address)
        async with asyncio.timeout(60):
            while "evaluate says_3" not in (shown := await page.run("document.body?.innerText ?? ''")):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        await page.screenshot(tmp_path / "mlflow.png")
    assert all(name in shown for name in ("rollout", "turn", "chat fake"))


def test_mlflow_has_the_blocks_of_a_training_run(mlflow: str, model: Path, tmp_path: Path) -> None:
    before = {trace["id"] for trace in _traces(mlflow)}
    (tmp_path / "mlflow_sums.py").write_text(ENVIRONMENT)
    (tmp_path / "run.toml").write_text(RUN.replace("MODEL", str(model)).replace("URL", mlflow))
    environ = {"OTEL_EXPORTER_OTLP_HEADERS": "x-mlflow-experiment-id=0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "verifiers.cli.train", "run.toml"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **environ}, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    traces = [trace for trace in _traces(mlflow) if trace["id"] not in before]
    roots = [span for trace in traces for span in trace["spans"] if span["parent"] is None]
    assert [(root["name"], root["version"]) for root in sorted(roots, key=lambda root: root["version"])] == [
        ("block", 0), ("block", 1),
    ]  # fmt: skip
    for trace in traces:
        names = [span["name"] for span in trace["spans"]]
        assert (names.count("group"), names.count("rollout")) == (1, 4)
        assert names.count("evaluate says_3") == 4
        assert sum(name.startswith("chat ") for name in names) == names.count("turn") >= 4
        assert {span["run"] for span in trace["spans"] if span["name"] == "rollout"} == {"run"}
