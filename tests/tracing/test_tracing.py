"""Traces: every rollout is whole and in its place, in whatever process it is played, and no run waits for them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from collector import Collector, Sent

import verifiers as vf
from verifiers import tracing
from verifiers.cli.evaluate import main
from verifiers.errors import ConfigError
from verifiers.rollouts.block import BatchRequest
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.testing import FakeOpenAIServer, Fault
from verifiers.types import RolloutKey


def asks_tool(a: int = 1) -> dict[str, Any]:
    function = {"name": "add", "arguments": json.dumps({"a": a, "b": 2})}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


def answers(request: dict[str, Any]) -> Any:
    return "3" if request["messages"][-1]["role"] == "tool" else asks_tool()


Evaluate = Callable[..., int]


@pytest.fixture
def evaluate(env_path: str, collector: Collector) -> Evaluate:
    """Run vf-eval with every rollout traced, and return its exit code."""

    def run(server: FakeOpenAIServer, *flags: str, trace: str = collector.url) -> int:
        return main([env_path, "-m", "fake", "-b", server.url, "-n", "-1", "-r", "1", "--trace", trace, *flags])

    return run


TURN_WITH_TOOL = ("turn", [("chat fake", []), ("execute_tool add", [])])
ROLLOUT = [
    ("evaluate brief", []), ("evaluate right", []), ("turn", [("chat fake", [])]), TURN_WITH_TOOL,
]  # fmt: skip
TREE = [("group", [("evaluate ranks", []), ("rollout", ROLLOUT)])]


@pytest.mark.parametrize(
    "workers", ["inline", "processes:1", pytest.param("ray:1", marks=[pytest.mark.slow, pytest.mark.ray])]
)
def test_an_evaluation_is_a_tree_of_groups_rollouts_turns_calls_and_rewards(
    evaluate: Evaluate,
    collector: Collector,
    workers: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if workers.startswith("ray"):
        monkeypatch.setenv("RAY_ADDRESS", request.getfixturevalue("ray_cluster").address)
    with FakeOpenAIServer(answers) as server:
        assert evaluate(server, "-T", "0.5", "-t", "50", "--seed", "3", "--workers", workers) == 0
        sent_on = [asked.headers["traceparent"] for asked in server.requests]
    assert collector.tree() == TREE
    assert len({span.trace for span in collector.spans}) == 1
    calls = collector.named("chat")
    assert sent_on == [f"00-{call.trace}-{call.id}-01" for call in calls]
    call, last = calls
    assert call.attributes["gen_ai.operation.name"] == "chat"
    assert call.attributes["gen_ai.request.temperature"] == 0.5
    assert call.attributes["gen_ai.request.max_tokens"] == 50
    assert [one.attributes["gen_ai.response.finish_reasons"] for one in calls] == [["tool_calls"], ["stop"]]
    assert last.attributes["gen_ai.usage.input_tokens"] > last.attributes["gen_ai.usage.output_tokens"] > 0
    (rollout,) = collector.named("rollout")
    assert rollout.attributes["verifiers.outcome"] == "completed"
    assert (rollout.attributes["verifiers.example_id"], rollout.attributes["verifiers.generation"]) == (0, 0)
    (directory,) = Path("outputs/evals").glob("*/*")
    assert rollout.attributes["verifiers.run_id"] == directory.name
    scores = {one.name: one.attributes.get("gen_ai.evaluation.score.value") for one in collector.named("evaluate")}
    assert scores == {"evaluate right": 1.0, "evaluate brief": 0.5, "evaluate ranks": None}
    assert collector.named("group")[0].attributes["verifiers.rewards"] == [1.5]
    assert not any(span.failed for span in collector.spans)
    assert "question" not in str(collector.spans)


def test_contents_are_traced_where_that_is_asked_for(evaluate: Evaluate, collector: Collector) -> None:
    # policies write halves of surrogate pairs
    with FakeOpenAIServer([asks_tool() | {"content": "\ud83d"}, "3"]) as server:
        assert evaluate(server, "--trace-content") == 0
    last = collector.named("chat")[-1].attributes
    asked, called, told = json.loads(last["gen_ai.input.messages"])
    assert asked == {"role": "user", "parts": [{"type": "text", "content": "question 0"}]}
    assert called["parts"][1] | {"arguments": None} == {
        "type": "tool_call", "id": "c1", "name": "add", "arguments": None,
    }  # fmt: skip
    assert told["parts"] == [{"type": "tool_call_response", "id": "c1", "response": "3"}]
    assert json.loads(last["gen_ai.output.messages"])[0]["parts"] == [{"type": "text", "content": "3"}]
    assert collector.named("execute_tool")[0].attributes["gen_ai.tool.call.result"] == "3"


def test_what_fails_has_the_class_of_its_error(evaluate: Evaluate, collector: Collector) -> None:
    def unlucky(request: dict[str, Any]) -> Any:
        return "3" if request["messages"][-1]["role"] == "tool" else asks_tool(13)

    with FakeOpenAIServer(unlucky) as server:
        assert evaluate(server, "-a", '{"funcs": ["right", "wrong"]}') == 1
    failed = {span.name: span.attributes["error.type"] for span in collector.spans if span.failed}
    assert failed == {"execute_tool add": "ValueError", "evaluate wrong": "RuntimeError"}
    collector.spans.clear()
    with FakeOpenAIServer("3", faults=Fault(400)) as server:
        assert evaluate(server, "--fresh") == 1
    failed = {span.name: span.attributes["error.type"] for span in collector.spans if span.failed}
    assert failed == dict.fromkeys(("chat fake", "turn", "rollout"), "ProviderError")
    assert collector.named("rollout")[0].attributes["verifiers.outcome"] == "provider_error"


def test_a_share_of_the_rollouts_is_traced_and_each_of_them_whole(evaluate: Evaluate, collector: Collector) -> None:
    flags = ("-a", '{"n": 30, "funcs": ["right", "brief"]}', "-r", "2", "--trace-share", "0.4", "--fresh")
    with FakeOpenAIServer(answers) as server:
        assert evaluate(server, *flags) == 0
        flagged = {request.headers["traceparent"][-2:] for request in server.requests}
    rollouts = collector.named("rollout")
    assert 8 <= len(rollouts) <= 40
    assert flagged == {"00", "01"}
    assert all(collector.tree(rollout.id) == ROLLOUT for rollout in rollouts)
    assert {span.parent for span in collector.spans} - {span.id for span in collector.spans} == {""}
    assert all(collector.tree(group.id) for group in collector.named("group"))

    def drawn(found: list[Sent]) -> set[tuple[int, int]]:
        names = ("verifiers.example_id", "verifiers.generation")
        return {tuple(one.attributes[name] for name in names) for one in found}  # type: ignore[misc]

    first = drawn(rollouts)
    collector.spans.clear()
    with FakeOpenAIServer(answers) as server:
        assert evaluate(server, *flags) == 0
    assert drawn(collector.named("rollout")) == first


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True])
def test_a_collector_that_is_away_costs_a_line_and_a_few_seconds(
    evaluate: Evaluate, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, hangs: bool
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if hangs:
            silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with FakeOpenAIServer(answers) as server:
            assert evaluate(server, "-a", '{"n": 20}', trace=url) == 0
    told = [line for line in (capfd.readouterr().err + caplog.text).splitlines() if url in line]
    assert 1 <= len(told) <= 2
    assert all("spans may be missing" in line for line in told)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--trace", "http://127.0.0.1:1"]])
def test_a_run_imports_nothing_of_opentelemetry_and_without_a_trace_nothing_of_ours(
    env_path: str, tmp_path: Path, flags: list[str]
) -> None:
    code = (
        "import sys; from verifiers.cli.evaluate import main; code = main(sys.argv[1:]); "
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'verifiers.tracing'))]); "
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", code, env_path, "-m", "fake", "--json", "-r", "1", *flags]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(["verifiers.tracing"] if flags else [])


@pytest.fixture
def traced(collector: Collector) -> Any:
    """Trace what is played in this process; to be called when it is over."""
    settings = argparse.Namespace(trace=collector.url, trace_share=1.0, trace_content=False)
    with contextlib.ExitStack() as stack:
        stack.callback(tracing.start(settings, "a run"))
        yield stack.close


def test_a_block_of_training_holds_its_groups(traced: Callable[[], None], collector: Collector) -> None:
    env = vf.SingleTurnEnv(dataset=[{"question": "1 + 2?", "answer": "3"}], rubric=vf.Rubric([]))
    requests = [
        RolloutRequest(RolloutKey(4, example, generation), [{"role": "user", "content": "1 + 2?"}])
        for example in range(2)
        for generation in range(2)
    ]
    with FakeOpenAIServer("3") as server, AsyncBatchGenerator(env, server.url, "fake") as generator:
        generator.submit_batch(BatchRequest(4, requests, policy_version=7))
        generator.get_batch(4)
        with pytest.raises(ConfigError, match="the run 'a run' is traced in this process"):
            tracing.start(argparse.Namespace(trace=collector.url, trace_share=1.0, trace_content=False), "another")
    traced()
    rollout = ("rollout", [("turn", [("chat fake", [])])])
    assert collector.tree() == [("block", [("group", [rollout, rollout])] * 2)]
    for span in (*collector.named("block"), *collector.named("rollout")):
        assert (span.attributes["verifiers.block_id"], span.attributes["verifiers.policy_version"]) == (4, 7)


async def test_calls_of_an_agent_are_in_its_rollout_whatever_it_sends(
    traced: Callable[[], None], collector: Collector
) -> None:
    async def run(row: Any, *, base_url: str, api_key: str, model: str) -> None:
        headers = {"Authorization": f"Bearer {api_key}", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
        body = {"model": model, "messages": row["prompt"]}
        async with aiohttp.ClientSession() as session:
            for _ in range(2):
                async with session.post(f"{base_url}/chat/completions", json=body, headers=headers) as response:
                    assert response.status == 200
                body["messages"] = [*body["messages"], {"role": "user", "content": "again"}]

    env = vf.AgentEnv(run, eval_dataset=[{"question": "1 + 2?"}] * 2, rubric=vf.Rubric([]))
    with FakeOpenAIServer("3") as server:
        await env.a_evaluate(server.url, "fake", num_examples=2, rollouts_per_example=2)
    traced()
    rollouts = collector.named("rollout")
    assert len(rollouts) == 4
    for rollout in rollouts:
        assert collector.tree(rollout.id) == [("chat fake", [])] * 2


@pytest.mark.parametrize(
    ("trace", "share", "message"),
    [
        ("collector:4318", 1.0, "trace is 'collector:4318'; give a collector's address"),
        ("http://127.0.0.1:1", 0.0, "trace_share is 0.0; give .* above 0"),
    ],
)
def test_settings_that_cannot_trace_are_refused(trace: str, share: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tracing.check(argparse.Namespace(trace=trace, trace_share=share))
