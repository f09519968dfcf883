"""Damaged answers of every wire, in evaluations of a tool environment and in training.

Each costs at most its own rollout, and whatever was said can be stored and read again.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anthropic
import pytest
import tiny_world
import torch
from training_faults import VOCABULARY, Spoiler, damaged

import verifiers as vf
from verifiers.cli.evaluate import main
from verifiers.errors import NothingScoredError
from verifiers.evals.store import ResultStore, read_run
from verifiers.inference.endpoint import Backend, Endpoint, HttpBackend
from verifiers.inference.responses_api import ResponsesBackend
from verifiers.inference.retry import RetryPolicy
from verifiers.inference.token_in import token_in_for
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.testing import FakeOpenAIServer, decode_ids, encode_text
from verifiers.testing.script import END_ID, fake_logprob, render_chat, response_body
from verifiers.types import Outcome, RolloutKey

ENVIRONMENT = """
import verifiers as vf


def look_up(word: str, times: int = 1) -> str:
    \"\"\"Look a word up.

    Args:
        word: the word
        times: how often
    \"\"\"
    return f"no entry for {word}" * times


def length(completion) -> float:
    return float(len(completion if isinstance(completion, str) else completion[-1]["content"] or ""))


def load_environment(n=20, text=False):
    rows = [{"prompt" if text else "question": f"{i}?", "answer": "4"} for i in range(n)]
    rubric = vf.Rubric(funcs=[length])
    if text:
        return vf.SingleTurnEnv(eval_dataset=rows, rubric=rubric, message_type="completion")
    return vf.ToolEnv(tools=[look_up], eval_dataset=rows, rubric=rubric)
"""
TIMES = int(os.environ.get("VERIFIERS_FUZZ_TIMES", "1"))
FAST, ALL = 60, {"chat": 1000, "text": 1000, "responses": 1000, "token ids": 1000, "training": 200}
ALL = {wire: TIMES * count for wire, count in ALL.items()}
AGENTS = TIMES * 300
"""Damaged answers to each wire: the fast tier's, and the slow tier's, which a release takes six times."""


def counts_of(wire: str) -> Any:
    return pytest.mark.parametrize("count", [FAST, pytest.param(ALL.get(wire, AGENTS), marks=pytest.mark.slow)])


def answer(body: dict[str, Any]) -> Any:
    """Call a tool with all that JSON may hold, then answer."""
    messages = body.get("messages")
    if messages is None or messages[-1]["role"] == "tool" or not body.get("tools"):
        return {"content": "done \u00e9\U0001f600", "reasoning_content": "so it is"}
    call = {"name": "look_up", "arguments": '{"word": "\\ud83d", "times": 2}'}
    return {"content": "", "tool_calls": [call, {"name": "look_up", "arguments": '{"word": "x"}'}]}


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.random", lambda: 0.0)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module of the environment; its folder is the current one."""
    (tmp_path / "fuzzed_env.py").write_text(ENVIRONMENT)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    sys.modules.pop("fuzzed_env", None)
    return __import__("fuzzed_env")


@pytest.mark.parametrize(("wire", "share"), [("chat", 0.5), ("text", 1.0)])
@pytest.mark.parametrize("size", ["fast", pytest.param("slow", marks=pytest.mark.slow)])
def test_no_answer_ends_more_of_an_evaluation_than_its_rollout(
    environment: Any, capsys: pytest.CaptureFixture[str], wire: str, share: float, size: str
) -> None:
    spoiler, seen = Spoiler(answer, share=share, seed=len(wire)), 0
    wanted = (FAST if size == "fast" else ALL[wire]) // 2
    with FakeOpenAIServer(spoiler) as server:
        while spoiler.count < wanted:
            command = ["fuzzed-env", "-a", json.dumps({"text": wire == "text"}), "-b", server.url, "-m", "m"]
            command += ["-n", "-1", "-r", "2", "--json", "--fresh", "-c", "20", "--output-dir", f"out/{seen}"]
            assert main(command) in (0, 1)
            printed = capsys.readouterr().out
            summary = json.loads(printed)
            assert (summary["rollouts"], summary["missing"]) == (40, 0)
            assert set(summary["outcomes"]) <= {"completed", "truncated", "provider_error"}
            (directory,) = Path(f"out/{seen}").glob("*/*")
            assert len(read_run(directory).rows) == 40
            assert (directory / "report.html").stat().st_size
            seen += 1


# -- wires below the command ----------------------------------------------------------------------------------------


def response_of(completion: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat completion as an object of the Responses API."""
    message = completion["choices"][0]["message"]
    output: list[dict[str, Any]] = [
        {"type": "function_call", "call_id": call["id"], **call["function"]}
        for call in message.get("tool_calls") or ()
    ]
    if thought := message.get("reasoning_content"):
        output.insert(0, {"type": "reasoning", "summary": [{"type": "summary_text", "text": thought}]})
    if message["content"]:
        output.append({"type": "message", "content": [{"type": "output_text", "text": message["content"]}]})
    used = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
    return {"id": "r", "status": "completed", "created_at": 1, "model": "m", "output": output, "usage": used}


class Damage:
    """What stands between a backend and its server: a share of the answers is damaged."""

    def __init__(self, seed: int, share: float = 0.5) -> None:
        self._rng, self._share, self.count = random.Random(seed), share, 0

    def __call__(self, right: dict[str, Any]) -> dict[str, Any]:
        if self._rng.random() >= self._share:
            return right
        self.count += 1
        return damaged(right, self._rng)


class Responses(ResponsesBackend):
    """The Responses API without a server."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(Endpoint("http://127.0.0.1:9/v1"))
        self._damage = damage

    async def post(self, path: str, body: Mapping[str, Any], *_: Any) -> dict[str, Any]:
        json.dumps(body).encode()
        called = any(item.get("type") == "function_call_output" for item in body["input"])
        asked = {"messages": [{"role": "tool" if called else "user", "content": ""}], "tools": body["tools"]}
        return self._damage(response_of(response_body(asked, [answer(asked)])))


class TokenRoutes(HttpBackend):
    """The routes of token ids without a server."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(Endpoint("http://127.0.0.1:9/v1"))
        self._damage = damage

    async def post(self, path: str, body: Mapping[str, Any], *_: Any) -> dict[str, Any]:
        json.dumps(body).encode()
        if path == "/tokenize":
            ids = encode_text(render_chat(body["messages"], body.get("tools")))
            answered = self._damage({"tokens": ids, "count": len(ids)})
            # nobody can tell ids of another text, or of another template, from right ones
            are_ids = isinstance(answered.get("tokens"), list) and set(map(type, answered["tokens"])) <= {int}
            return {"tokens": ids, "count": len(ids)} if are_ids else answered
        if path.endswith("/derender"):
            ids = body["generate_response"]["choices"][0]["token_ids"]
            message = {"role": "assistant", "content": decode_ids(each for each in ids if each < VOCABULARY)}
            return self._damage({"choices": [{"index": 0, "message": message}]})
        if path == "/inference/v1/generate":
            ids = [*encode_text("four"), END_ID]
            content = [{"token": chr(each), "logprob": fake_logprob(each)} for each in ids]
            choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
            generated = {"request_id": "x", "choices": [choice]}
            # without a seed a client asks what the server can do: one without ids is refused where ids are asked for
            return self._damage(generated) if "seed" in body["sampling_params"] else generated
        return self._damage(response_body(body, ["four"]))


async def play(
    env: Any, backend: Backend, directory: Path, damaged_so_far: Callable[[], int], count: int, **options: Any
) -> set[Outcome]:
    """Play rollouts until that many answers were damaged, store them, and return how they ended."""
    outcomes: set[Outcome] = set()
    policy = RetryPolicy(max_attempts=2, base_s=0.0)
    runner = Run(env, backend, "m", {"max_tokens": 300}, retry=policy, rollout_timeout_s=20.0, **options)
    number = 0
    directory.mkdir()  # noqa: ASYNC240
    with ResultStore(directory, {}) as store:
        while damaged_so_far() < count:
            requests = [
                RolloutRequest(RolloutKey(0, number, n), prompt=[{"role": "user", "content": "?"}], seed=n)
                for n in range(10)
            ]
            group = await runner.run_group(requests)
            for rollout in group.rollouts:
                store.append(rollout)
                outcomes.add(rollout.outcome)
            number += 1
            assert number <= count, "nothing reaches the server"
    assert len(read_run(directory).rows) == 10 * number
    return outcomes


@counts_of("responses")
async def test_no_answer_of_the_responses_api_ends_more_than_its_rollout(
    environment: Any, tmp_path: Path, count: int
) -> None:
    damage = Damage(1)
    env = environment.load_environment()
    outcomes = await play(env, Responses(damage), tmp_path / "run", lambda: damage.count, count)
    assert outcomes == {Outcome.COMPLETED, Outcome.PROVIDER_ERROR}


@counts_of("token ids")
@pytest.mark.parametrize("mode", ["auto", "tokens"])
async def test_no_answer_of_the_token_routes_ends_more_than_its_rollout(
    tmp_path: Path, count: int, mode: str
) -> None:
    outcomes: set[Outcome] = set()
    damage, before = Damage(2, share=0.1), 0
    while damage.count < count // 2:
        # what is known of a server holds for a run, so there are many
        backend = TokenRoutes(damage)
        policy = RetryPolicy(max_attempts=3, base_s=0.0)
        token_in = token_in_for(mode, backend, "m", require_tokens=True, retry=policy)
        outcomes |= await play(
            tiny_world.Dialogue(),
            backend,
            tmp_path / f"run-{before}",
            lambda: damage.count,
            min(count // 2, damage.count + 50),
            require_tokens=True,
            vocab_size=VOCABULARY,
            token_in=token_in,
        )
        before += 1
    assert outcomes == {Outcome.COMPLETED, Outcome.PROVIDER_ERROR}


# -- agents behind the gateway --------------------------------------------------------------------------------------


async def messages(row: Any, *, base_url: str, api_key: str, model: str) -> str:
    url = base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=api_key, max_retries=0) as client:
        tool = {"name": "look_up", "input_schema": TOOLS[0]["function"]["parameters"]}
        said: Any = [{"role": "user", "content": "2+2?"}]
        for _ in range(2):
            got = await client.messages.create(model=model, max_tokens=300, messages=said, tools=[tool])  # type: ignore[list-item]
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "none"}
                for block in got.content
                if block.type == "tool_use"
            ]
            back = [*results, {"type": "text", "text": "sure?"}]
            said += [{"role": "assistant", "content": got.model_dump()["content"]}, {"role": "user", "content": back}]
    return "done"


PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}, "times": {"type": "integer"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS, "strict": False}}]


@counts_of("agents")
async def test_no_answer_to_an_agent_ends_more_than_its_rollout(tmp_path: Path, count: int) -> None:
    spoiler = Spoiler(answer, seed=4)
    rows = [{"question": "2+2?", "answer": "4"}]
    env = vf.AgentEnv(messages, dataset=rows, eval_dataset=rows, rubric=vf.Rubric(funcs=[lambda **_: 1.0]))
    async with FakeOpenAIServer(spoiler) as server:
        backend = HttpBackend(Endpoint(server.url))
        outcomes = await play(env, backend, tmp_path / "run", lambda: spoiler.count, count // 2)
        outcomes |= await play(
            env, backend, tmp_path / "trained", lambda: spoiler.count, count, require_tokens=True, vocab_size=2**21
        )
        await backend.close()
    assert {Outcome.COMPLETED, Outcome.PROVIDER_ERROR} <= outcomes


# -- training -------------------------------------------------------------------------------------------------------


@counts_of("training")
def test_no_answer_ends_more_of_a_training_than_its_rollout(
    make_fake_trainer: Callable[..., Any], count: int
) -> None:
    words = random.Random(5)
    spoiler = Spoiler(lambda _: "".join(words.choices("abcde", k=3)), share=0.5, seed=5)

    def answer(body: dict[str, Any]) -> Any:
        version = server.weight_version
        # the trainer's own calls have a seed below that of any rollout
        return "four" if body["seed"] < 10**6 else spoiler(body, version)

    with FakeOpenAIServer(answer) as server:
        trainer = make_fake_trainer(tiny_world.single_turn(), server.url, max_steps=count // 4)
        try:
            trainer.train()
        except NothingScoredError:
            pytest.fail("half of the answers are right")
    assert spoiler.count >= count
    assert trainer.state.global_step == count // 4
    assert all(torch.isfinite(tensor).all() for tensor in tiny_world.weights(trainer).values())
