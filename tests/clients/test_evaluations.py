"""Evaluations whose endpoint is someone else's: the SDK's client objects, and litellm's proxy before the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from client_world import KEY, PROXY_KEY

import verifiers as vf
from verifiers.cli.evaluate import main
from verifiers.evals.store import read_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

GREEDY = {"temperature": 0, "max_tokens": 100}
QUESTIONS = [f"What is {n} + {4 - n}?" for n in range(5)]

ENVIRONMENT = """
import verifiers as vf


def says_4(completion):
    return float(completion[-1]["content"] == "It is 4.")


def says_3(completion):
    return float(completion[-1]["content"] == "The sum is 3.")


async def add(a: int, b: int) -> str:
    return str(a + b)


def load_environment(kind="sums"):
    questions = [f"What is {n} + {4 - n}?" for n in range(5)]
    if kind == "long":
        questions[2] = "x" * 5000
    rows = [{"question": question, "answer": "4"} for question in questions]
    if kind == "tools":
        return vf.ToolEnv(eval_dataset=rows, tools=[add], max_turns=3, rubric=vf.Rubric([says_3]))
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([says_4]))
"""


def says_4(completion: Any) -> float:
    return float(completion[-1]["content"] == "It is 4.")


Make = Callable[[str], Any]

CLIENTS: dict[str, Make] = {
    "AsyncOpenAI": lambda url: openai.AsyncOpenAI(base_url=url, api_key=KEY),
    "OpenAI": lambda url: openai.OpenAI(base_url=url, api_key=KEY),
    "AsyncOpenAI over an HTTP client of its user's": lambda url: openai.AsyncOpenAI(
        base_url=url, api_key=KEY, http_client=openai.DefaultAsyncHttpxClient(timeout=30)
    ),
    "OpenAI over an HTTP client of its user's": lambda url: openai.OpenAI(
        base_url=url, api_key=KEY, http_client=openai.DefaultHttpxClient(timeout=30)
    ),
    "AsyncOpenAI with query parameters": lambda url: openai.AsyncOpenAI(
        base_url=url, api_key=KEY, default_query={"tenant": "tests"}
    ),
}


@pytest.fixture
def client(server: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    made = CLIENTS[request.param](f"{server}/v1")
    yield made
    if isinstance(made, openai.OpenAI):
        made.close()


@pytest.mark.parametrize("client", CLIENTS, indirect=True)
async def test_the_sdks_clients_are_endpoints_of_an_evaluation(client: Any) -> None:
    rows = [{"question": question, "answer": "4"} for question in QUESTIONS]
    env = vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([says_4]))
    results = await env.evaluate(client, "taught", sampling_args=GREEDY, rollouts_per_example=8, max_concurrent=16)
    assert results.reward == [1.0] * 40
    assert {len(state["responses"]) for state in results.state} == {1}
    if isinstance(client, openai.AsyncOpenAI):
        # it was used and not used up: it belongs to its maker
        models = await client.models.list()
        assert [model.id for model in models.data] == ["taught"]
        await client.close()


@pytest.mark.parametrize("kind", [openai.AsyncOpenAI, openai.OpenAI], ids=lambda kind: str(kind.__name__))
async def test_tool_calls_go_through_the_sdks_clients_too(server: str, kind: Any) -> None:
    async def add(a: int, b: int) -> str:
        return str(a + b)

    def says_3(completion: Any) -> float:
        return float(completion[-1]["content"] == "The sum is 3.")

    rows = [{"question": question, "answer": "3"} for question in QUESTIONS]
    env = vf.ToolEnv(eval_dataset=rows, tools=[add], max_turns=3, rubric=vf.Rubric([says_3]))
    client = kind(base_url=f"{server}/v1", api_key=KEY)
    results = await env.evaluate(client, "taught", sampling_args=GREEDY, rollouts_per_example=2)
    assert results.reward == [1.0] * 10


async def test_a_wrong_key_in_a_client_is_a_failure_and_no_zero(server: str) -> None:
    rows = [{"question": question, "answer": "4"} for question in QUESTIONS]
    env = vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([says_4]))
    async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="wrong-key-of-the-tests") as client:
        with pytest.raises(vf.Error) as caught:
            await env.evaluate(client, "taught", sampling_args=GREEDY)
    assert "401" in str(caught.value)
    assert "wrong-key-of-the-tests" not in str(caught.value)


@pytest.fixture
def evaluate(
    proxy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """vf-eval against the proxy; its summary."""
    (tmp_path / "environments" / "taught_sums").mkdir(parents=True)
    (tmp_path / "environments" / "taught_sums" / "taught_sums.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VF_PROXY_KEY", PROXY_KEY)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def run(*flags: str, kind: str = "sums", code: int = 0) -> dict[str, Any]:
        command = ["taught-sums", "-b", f"{proxy}/v1", "-k", "VF_PROXY_KEY", "-a", json.dumps({"kind": kind})]
        command += ["-m", "taught", "-T", "0", "-t", "100", "-n", "5", "-r", "4", "--json", *flags]
        assert main(command) == code
        shown = capsys.readouterr()
        assert PROXY_KEY not in shown.out + shown.err
        return json.loads(shown.out) if shown.out else {"error": shown.err}

    return run


@pytest.mark.parametrize("kind", ["sums", "tools"])
def test_litellms_proxy_is_an_endpoint(evaluate: Callable[..., dict[str, Any]], kind: str) -> None:
    summary = evaluate("--seed", "1", kind=kind)
    assert (summary["outcomes"], summary["rewards"]["reward"]["mean"]) == ({"completed": 20}, 1.0)
    assert summary["completion_tokens"] > 100
    run = read_run(summary["results"])
    assert {row["turns"] for row in run.rows} == {2 if kind == "tools" else 1}
    files = "".join(path.read_text() for path in Path(summary["results"]).iterdir())
    assert PROXY_KEY not in files
    assert KEY not in files
