"""Settings that cannot work are refused with one sentence that names the thing, its value and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_world

import verifiers as vf
from verifiers.errors import ConfigError, WeightProbeError, WeightSyncError
from verifiers.testing import FakeClient, FakeOpenAIServer, Fault

URL = "http://127.0.0.1:9/v1"


def is_one_sentence(text: str) -> bool:
    return "\n" not in text and ". " not in text.replace("e.g. ", "")


def test_settings_that_contradict_the_environment_are_refused(tmp_path: Path, model_dir: Path) -> None:
    env = tiny_world.single_turn(sampling_args={"temperature": 0.5})
    with pytest.raises(ConfigError, match=r"environment samples at temperature 0\.5.* 1") as raised:
        vf.GRPOTrainer(str(model_dir), env, tiny_world.config(tmp_path, URL))
    assert is_one_sentence(str(raised.value))


class AsksItself(vf.SingleTurnEnv):
    """An environment with arguments of its own in its own call; it swallows what goes wrong."""

    def __init__(self, arguments: dict[str, Any], *, trained: bool = True) -> None:
        super().__init__(dataset=tiny_world.rows(), rubric=vf.Rubric(funcs=[tiny_world.vowels]))
        self.arguments, self.trained = arguments, trained

    async def rollout(self, client: Any, model: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        policy = {"model": model, "messages": prompt, "temperature": 0.6, "max_tokens": 8}
        answer = await client.chat.completions.create(**policy)
        with contextlib.suppress(Exception):
            asked = client if self.trained else client.untrained
            await asked.chat.completions.create(**{**policy, **self.arguments})
        return [{"role": "assistant", "content": answer.choices[0].message.content}], {}


def test_a_trained_call_with_sampling_that_the_trainer_does_not_assume_ends_the_run(
    make_fake_trainer: Callable[..., Any],
) -> None:
    with FakeOpenAIServer("ok") as fake:
        trainer = make_fake_trainer(AsksItself({"temperature": 0.3}), fake.url, temperature=0.6)
        with pytest.raises(
            ConfigError, match=r"samples at temperature=0\.3, and the trainer scores it at temperature=0\.6"
        ) as raised:
            trainer.train()
    assert is_one_sentence(str(raised.value))
    assert trainer.seen == []


def test_calls_on_the_untrained_handle_sample_as_they_like(make_fake_trainer: Callable[..., Any]) -> None:
    with FakeOpenAIServer("ok") as fake:
        env = AsksItself({"top_p": 0.5, "temperature": 2.0}, trained=False)
        trainer = make_fake_trainer(env, fake.url, temperature=0.6, max_steps=1)
        trainer.train()
    assert trainer.logged("rows/trained") == [8.0]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
LOOK = [{"role": "user", "content": [{"type": "text", "text": "look"}, IMAGE]}]


class ShowsImages(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return LOOK, state


@pytest.mark.parametrize("where", ["prompt", "reply"])
def test_images_are_refused_in_training_and_passed_on_in_evaluation(
    make_fake_trainer: Callable[..., Any], where: str
) -> None:
    rubric = vf.Rubric(funcs=[tiny_world.vowels])
    if where == "prompt":
        env: Any = vf.SingleTurnEnv(dataset=[{"prompt": LOOK, "answer": "a"}] * 8, rubric=rubric)
    else:
        env = ShowsImages(dataset=tiny_world.rows(8), rubric=rubric, max_turns=2)
    with FakeOpenAIServer("ok") as fake:
        whose = "the prompt of training row 0" if where == "prompt" else "a call of the environment"
        with pytest.raises(ConfigError, match=f"{whose} has more images than max_images=0") as raised:
            make_fake_trainer(env, fake.url).train()
        assert is_one_sentence(str(raised.value))
        sent = [request.body for request in fake.requests if "messages" in request.body]
        assert not any("image_url" in str(body["messages"]) for body in sent)
        results = env.evaluate_sync(fake.url, "fake", num_examples=1, rollouts_per_example=1)
        assert len(results.reward) == 1
        assert "image_url" in str(fake.requests[-1].body["messages"])


class AsksElsewhere(vf.SingleTurnEnv):
    """An environment with a client of its own beside the one that it is given."""

    async def rollout(self, client: Any, model: str, *args: Any, **kwargs: Any) -> Any:
        return await super().rollout(FakeClient("an answer of mine"), model, *args, **kwargs)


@pytest.mark.parametrize("streaming", [False, True])
def test_rewards_without_recorded_calls_end_the_run_at_the_first_block(
    make_fake_trainer: Callable[..., Any], streaming: bool
) -> None:
    env = AsksElsewhere(dataset=tiny_world.rows(), rubric=vf.Rubric(funcs=[tiny_world.vowels]))
    with FakeOpenAIServer("ok") as fake:
        trainer = make_fake_trainer(env, fake.url, streaming=streaming)
        with pytest.raises(
            ConfigError, match=r"8 of 8 scored rollouts of task 'default' .*not a client of its own"
        ) as raised:
            trainer.train()
    assert is_one_sentence(str(raised.value).removeprefix("block 0: "))
    assert trainer.state.global_step == 0


class AsksElsewhereAtTimes(AsksElsewhere):
    """An environment that takes its own client for every second rollout."""

    begun = 0

    async def rollout(self, client: Any, model: str, *args: Any, **kwargs: Any) -> Any:
        self.begun += 1
        play = super().rollout if self.begun % 2 else super(AsksElsewhere, self).rollout
        return await play(client, model, *args, **kwargs)


def test_rewards_without_recorded_calls_beside_others_are_warned_of_once(
    make_fake_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    env = AsksElsewhereAtTimes(dataset=tiny_world.rows(), rubric=vf.Rubric(funcs=[tiny_world.vowels]))
    with FakeOpenAIServer("ok") as fake:
        trainer = make_fake_trainer(env, fake.url, max_steps=2)
        trainer.train()
    assert trainer.logged("rows/trained") == [4.0, 4.0]
    warned = [record.getMessage() for record in caplog.records if "no recorded call" in record.getMessage()]
    assert len(warned) == 1
    assert warned[0].startswith("block 0: 4 of 8 scored rollouts of task 'default' have")
    assert "must ask the client and the model that rollout was given" in warned[0]


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./nowhere"])
def test_a_model_path_that_does_not_exist_is_named(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match=rf"the model path '{path}' does not exist") as raised:
        vf.GRPOTrainer(path, tiny_world.single_turn(), tiny_world.config(tmp_path, URL))
    assert is_one_sentence(str(raised.value))


def test_a_server_that_is_down_is_named_with_how_to_start_it(tmp_path: Path, model_dir: Path) -> None:
    args = tiny_world.config(tmp_path, URL, server_wait=0.3)
    trainer = vf.GRPOTrainer(str(model_dir), tiny_world.single_turn(), args)
    with pytest.raises(
        WeightSyncError, match=r"127\.0\.0\.1:9 did not answer within 0\.3 s \(server_wait\).*vf-serve"
    ):
        trainer.train()


def test_a_server_without_weight_routes_is_refused(make_fake_trainer: Callable[..., Any]) -> None:
    with FakeOpenAIServer("ok", route_faults={"/weight_info": Fault(404, times=9)}) as fake:
        trainer = make_fake_trainer(tiny_world.single_turn(), fake.url)
        with pytest.raises(WeightSyncError, match=r"has no weight routes.*use vf-serve, vf-vllm, or vLLM"):
            trainer.train()


def test_a_server_that_wants_a_key_is_refused_as_such(make_fake_trainer: Callable[..., Any]) -> None:
    with FakeOpenAIServer("ok", route_faults={"/weight_info": Fault(401, times=9)}) as fake:
        trainer = make_fake_trainer(tiny_world.single_turn(), fake.url)
        with pytest.raises(WeightSyncError, match=r"wants a key .*api_key"):
            trainer.train()


def test_a_server_that_sends_no_token_ids_is_refused_at_once(make_fake_trainer: Callable[..., Any]) -> None:
    with FakeOpenAIServer("ok", token_ids=False) as fake:
        trainer = make_fake_trainer(tiny_world.single_turn(), fake.url)
        with pytest.raises(WeightProbeError, match=r"sends no token ids or log-probs.*use a server") as raised:
            trainer.train()
    assert is_one_sentence(str(raised.value))
    assert trainer.seen == []
