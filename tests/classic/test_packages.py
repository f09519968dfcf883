"""Packages of either generation, unchanged: loaded by name, evaluated by the runner, turned into tokens."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import openai
import pytest

import verifiers as vf
from verifiers.cli.evaluate import main as evaluate
from verifiers.evals.evaluation_run import iter_requests
from verifiers.evals.store import result_row
from verifiers.inference.endpoint import Endpoint, HttpBackend
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.rollouts.run import Run
from verifiers.testing import FakeOpenAIServer, decode_ids, encode_text
from verifiers.types import Outcome

pytestmark = pytest.mark.usefixtures("packages")


class CharacterTokenizer:
    """Needs no more than the classic calls do: apply_chat_template and encode."""

    def apply_chat_template(self, conversation: Any, add_generation_prompt: bool = False, **_: Any) -> list[int]:
        # templates ask which fields are there, so they must get plain dicts
        assert {type(message) for message in conversation} == {dict}
        text = "".join(f"[{message['role']}]{message['content']}" for message in conversation)
        return self.encode(text + ("[assistant]" if add_generation_prompt else ""))

    def encode(self, text: str) -> list[int]:
        return encode_text(text)


def run_modern(env: Any, server: FakeOpenAIServer, rollouts: int = 1) -> ScoredBlock:
    async def work() -> ScoredBlock:
        backend = HttpBackend(Endpoint(server.url))
        runner = Run(env, backend, "fake", {"temperature": 0.7}, require_tokens=True)
        try:
            return ScoredBlock(0, await runner.run_groups(iter_requests(env.get_eval_dataset(), rollouts, seed=1)))
        finally:
            await backend.close()

    return asyncio.run(work())


def hunter(body: dict[str, Any]) -> str:
    """Guesses wrong, then right."""
    word = "lamp" if "4 letters" in body["messages"][1]["content"] else "grape"
    guess = word if len(body["messages"]) > 2 else "plum"
    return f"<think>hm</think>\n<guess>{guess}</guess>"


def quizzed(body: dict[str, Any]) -> str:
    """Wrong at first, sure of the right answer when asked."""
    asked = json.dumps(body["messages"])
    right = "1609" if "mile" in asked else "454"
    return right if "Are you sure" in asked else "7"


def test_a_package_of_the_first_generation_is_evaluated_by_the_modern_runner() -> None:
    env = vf.load_environment("word-hunt", words="lamp,grape")
    with FakeOpenAIServer(hunter) as server:
        block = run_modern(env, server)
    assert [rollout.outcome for rollout in block] == [Outcome.COMPLETED] * 2
    first = block.rollouts[0]
    assert [message["role"] for message in first.completion] == ["assistant", "user", "assistant", "user"]
    assert first.completion[-1]["content"] == "Found it."
    assert first.metrics == {"found": 1.0, "quickness": 0.5, "format_reward_func": pytest.approx(1.0)}
    assert first.reward == pytest.approx(1.25)
    assert first.turns == 2
    assert decode_ids(first.rows[0].completion_ids).startswith("<think>hm</think>\n<guess>plum</guess>")


def test_a_package_of_the_second_generation_is_evaluated_by_the_modern_runner() -> None:
    env: Any = vf.load_environment("unit-quiz")
    with FakeOpenAIServer(quizzed) as server:
        block = run_modern(env, server, rollouts=2)
        body = server.requests[0].body
    assert [rollout.outcome for rollout in block] == [Outcome.COMPLETED] * 4
    assert [rollout.reward for rollout in block] == [1.0] * 4
    state = block.rollouts[0].state
    assert [step["reward"] for step in state["trajectory"]] == [0.0, 1.0]
    assert (state["asked"], state["tries"], state["stop_condition"]) == ([2, 4], 1, "answered_right")
    assert block.rollouts[0].prompt[-1] == {"role": "user", "content": "Answer in metres."}
    assert body["messages"] == block.rollouts[0].prompt
    assert body["temperature"] == 0.7
    assert env.open_rollouts == 0


@pytest.mark.parametrize(
    ("answer", "outcome", "said"),
    [
        ("I give up", Outcome.COMPLETED, ["I give up", "Very well."]),
        ("crash", Outcome.ENVIRONMENT_ERROR, ["crash"]),
    ],
)
def test_the_second_generations_last_words_and_errors_have_the_outcomes_they_should(
    answer: str, outcome: Outcome, said: list[str]
) -> None:
    env: Any = vf.load_environment("unit-quiz")
    answers = {"mile": answer, "pound": "454"}
    with FakeOpenAIServer(lambda body: answers["mile" if "mile" in json.dumps(body) else "pound"]) as server:
        block = run_modern(env, server)
    rollout = block.rollouts[0]
    assert (rollout.outcome, [message["content"] for message in rollout.completion]) == (outcome, said)
    assert (rollout.reward is None) == outcome.is_failure
    if outcome.is_failure:
        assert isinstance(rollout.state["error"], vf.SandboxError)
        assert str(rollout.failure) == "SandboxError: the scales broke"
    assert block.rollouts[1].reward == 1.0
    assert env.open_rollouts == 0


@pytest.mark.parametrize(("name", "policy"), [("word-hunt", hunter), ("unit-quiz", quizzed)])
def test_finished_rollouts_hold_no_connection_and_can_be_stored_and_copied(name: str, policy: Any) -> None:
    env = vf.load_environment(name)
    with FakeOpenAIServer(policy) as server:
        block = run_modern(env, server)
        results = env.evaluate_sync(openai.AsyncOpenAI(base_url=server.url, api_key="sk-not-for-the-disk"), "fake")
    for rollout in block:
        assert "client" not in rollout.state
        copy.deepcopy(rollout.state)
        assert json.loads(json.dumps(result_row(rollout)))["completion"] == rollout.completion
    assert all("client" not in state for state in results.state)
    table = env.make_dataset(results, state_columns=["turn", "sampling_args"])
    assert table.num_rows == len(results.reward)
    assert "sk-not-for-the-disk" not in json.dumps(table[:], default=str)


@pytest.mark.parametrize(("name", "policy"), [("word-hunt", hunter), ("unit-quiz", quizzed)])
def test_the_classic_loop_of_generate_and_process_gives_the_sampled_tokens(name: str, policy: Any) -> None:
    env: Any = vf.load_environment(name)
    asked = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    with FakeOpenAIServer(policy) as server:
        client = openai.AsyncOpenAI(base_url=server.url, api_key="k")
        results = env.generate(env.get_eval_dataset(), client, "fake", sampling_args=asked)
        processed = env.process_env_results_vllm(
            results.prompt, results.completion, results.state, results.reward, CharacterTokenizer(),
            mask_env_responses=True,
        )  # fmt: skip
    assert processed.rewards == results["reward"]
    for number, state in enumerate(results.state):
        sampled = [token for step in state["trajectory"] for token in step["tokens"]["completion_ids"]]
        ids, mask = processed.completion_ids[number], processed["completion_mask"][number]
        assert [token for token, kept in zip(ids, mask, strict=True) if kept] == sampled
        assert len(processed.completion_logprobs[number]) == len(ids)
        # the environment spoke in between, and is masked
        assert 0 in mask


def test_the_command_evaluates_both_and_tears_them_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made: list[Any] = []
    make = vf.load_environment

    def remember(*args: Any, **kwargs: Any) -> Any:
        made.append(make(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("verifiers.envs.registry.load_environment", remember)
    with FakeOpenAIServer(lambda body: quizzed(body) if "Answer in" in json.dumps(body) else hunter(body)) as server:
        for name in ("word-hunt", "unit-quiz"):
            assert evaluate([name, "-m", "fake", "-b", server.url, "-n", "2", "-r", "1"]) == 0
    assert made[1].teardowns == 1
    results = list(tmp_path.rglob("results.jsonl"))
    assert len(results) == 2
    lines = [json.loads(line) for path in results for line in path.read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["completed"] * 4
