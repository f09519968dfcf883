"""Invariant 2: at equal weights, trainer and sampler agree about every sampled token."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import torch
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from verifiers.errors import ConfigError, WeightProbeError
from verifiers.inference.server_client import NoAnswerError, ServerClient
from verifiers.inference.wire import NEUTRAL_SAMPLING
from verifiers.testing import FakeOpenAIServer, Fault
from verifiers.train.models import disable_dropout
from verifiers.train.weight_sync import verification
from verifiers.train.weight_sync.shared_directory import DirectorySync, LoraSync

TOLERANCE = 1e-4


def test_trainer_and_sampler_agree_before_and_after_every_push(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(tiny_world.Rewriting(), temperature=0.7, max_steps=3, learning_rate=5e-3)
    trainer.keeps_logps = True
    before = tiny_world.weights(trainer)
    trainer.train()
    assert {batch["step"] for batch in trainer.seen} == {0, 1, 2}
    assert max((tiny_world.weights(trainer)[name] - before[name]).abs().max() for name in before) > 1e-3
    assert trainer.largest_difference() <= TOLERANCE
    assert max(trainer.logged("sampling/sampling_logp_difference/max")) <= TOLERANCE
    assert max(trainer.logged("sampling/probe_difference")) <= TOLERANCE
    assert trainer.logged("sampling/importance_sampling_ratio/mean") == pytest.approx([1.0] * 3, abs=TOLERANCE)


def test_the_servers_log_probs_are_those_of_a_plain_forward_pass(
    make_trainer: Callable[..., Any], model_dir: Path
) -> None:
    temperature = 0.7
    trainer = make_trainer(tiny_world.Dialogue(), temperature=temperature, max_steps=1)
    start = tiny_world.weights(trainer)
    trainer.train()
    for prompt, ids, log_probs in trainer.client.sampled():
        plain = tiny_world.plain_log_probs(start, model_dir, prompt + ids, temperature)[len(prompt) - 1 :]
        assert plain == pytest.approx(log_probs, abs=TOLERANCE)


@pytest.mark.parametrize("taken", [1, 3])
def test_a_server_that_ignores_a_push_is_found_before_the_weights_change_again(
    make_trainer: Callable[..., Any], server: Any, taken: int
) -> None:
    whole = DirectorySync(server.url)

    class IgnoringSync(DirectorySync):
        """Of later versions the server is told all but to load them, and acknowledges all of it."""

        def push(self, named_parameters: Any, version: int) -> None:
            if version < taken:
                whole.push(named_parameters, version)
            else:
                whole.close()
                body = {"new_version": str(version)}
                self.pool.run(self.pool.servers[0].request("POST", "/update_weight_version", body), 30.0)

    sync = IgnoringSync(server.url)
    trainer = make_trainer(tiny_world.single_turn(), max_steps=6, learning_rate=1e-2, weight_sync=sync)
    with pytest.raises(WeightProbeError, match=rf"acknowledged the weights of step {taken}, but its log-probs"):
        trainer.train()
    assert trainer.state.global_step == taken


def test_a_server_that_is_gone_when_it_is_probed_ends_nothing(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(tiny_world.single_turn(), max_steps=4)
    ask, gone = ServerClient.request, []

    async def request(self: Any, method: str, path: str, body: Any = None, *args: Any, **kwargs: Any) -> Any:
        if path.startswith("/v1/chat") and body["seed"] == 3:
            gone.append(path)
            raise NoAnswerError("POST got no answer: Connection refused")
        return await ask(self, method, path, body, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerClient, "request", request)
        trainer.train()
    assert len(gone) == 1
    assert trainer.state.global_step == 4
    # the metric is missing where nothing was measured
    assert len(trainer.logged("sampling/probe_difference")) == 3


def test_a_server_that_names_another_version_stops_the_run(make_trainer: Callable[..., Any], server: Any) -> None:
    class Misnaming(DirectorySync):
        def push(self, named_parameters: Any, version: int) -> None:
            super().push(named_parameters, version + 7)

    trainer = make_trainer(tiny_world.single_turn(), weight_sync=Misnaming(server.url))
    with pytest.raises(WeightProbeError, match="version 0 was pushed, but the server samples from version 7"):
        trainer.train()


# peft 0.21 reads a property that transformers 5.23 has renamed
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_dropout_is_off_for_the_run_with_a_line_that_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tiny_world.make_tokenizer()
    size = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 128}
    # dropout as GPT-2 is shipped
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, eos_token_id=0, pad_token_id=0, **size))
    adapter = LoraConfig(r=2, lora_dropout=0.3, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    with FakeOpenAIServer(lambda body: "a long answer"[: body["seed"] % 12 + 1]) as fake:
        # two updates a block: the first has old log-probs of the same weights
        args = tiny_world.config(tmp_path, fake.url, num_iterations=2, probe_tolerance=1e9, epsilon=0.01)
        trainer = tiny_world.ObservedTrainer(
            model, tiny_world.single_turn(), args, tokenizer, client=fake.url, peft_config=adapter
        )
        with tiny_world.closing(trainer):
            trainer.train()
    assert trainer.logged("clip_ratio/region_mean")[0] == 0.0
    line = next(record.message for record in caplog.records if "dropout is off" in record.message)
    assert "default=0.3" in line
    assert "attn_dropout=0.1" in line
    assert model.config.attn_pdrop == 0.1


def test_dropout_that_attention_hands_to_a_function_is_off_too() -> None:
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=32, num_key_value_heads=1, attention_dropout=0.5, **size)).train()
    disable_dropout(model)
    ids = torch.arange(32)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


# -- probes: when they are sent, and the wait for their answers ---------------------------------------------------


# a probe's seed is its version and 1, and no rollout's is as small
PROBE_SEEDS = range(1000)


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait 0.1 s for a check's answer whatever the server answers; requests keep their own deadlines."""

    class Impatient(verification.LogprobCheck):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "patience_s": 0.1})

    monkeypatch.setattr("verifiers.train.trainer.LogprobCheck", Impatient)
    monkeypatch.setattr(verification, "_POLL_S", 0.02)


def test_a_probe_behind_a_long_queue_is_waited_for_while_the_server_has_the_pushed_weights(
    make_fake_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch)
    with FakeOpenAIServer("ok", latency_s=0.4) as fake:
        trainer = make_fake_trainer(tiny_world.single_turn(), fake.url)
        trainer.open()
        trainer.session.push(0)
        assert len(trainer._metrics["train"]["sampling/probe_difference"]) == 1


@pytest.mark.parametrize("says", ["nothing", "another version"])
def test_a_probe_is_given_up_where_the_server_no_longer_says_that_it_has_the_weights(
    make_fake_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    impatient(monkeypatch)
    asked: list[Any] = []

    def answer(body: dict[str, Any]) -> Any:
        asked.append(body)
        if says == "another version":
            fake.weight_version = "other"
        return Fault.hang()

    def version(_: int) -> Fault | None:
        return Fault(404) if asked and says == "nothing" else None

    with FakeOpenAIServer(answer, route_faults={"/weight_info": version}) as fake:
        options = {"weight_sync_timeout": 60.0, "rollout_timeout": 60.0, "async_generation_timeout": 90.0}
        trainer = make_fake_trainer(tiny_world.single_turn(), fake.url, **options)
        trainer.open()
        started = time.monotonic()
        with pytest.raises(NoAnswerError, match=r"did not answer a log-prob check"):
            trainer.session.push(0)
        assert time.monotonic() - started < 30


def test_nothing_that_cuts_the_distribution_is_left_to_the_server(make_fake_trainer: Callable[..., Any]) -> None:
    """Assert that vLLM fills in what a request leaves out from the model's generation_config.json."""
    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> str:
        bodies.append(body)
        return "ok"

    env = tiny_world.single_turn(sampling_args={"presence_penalty": None, "extra_body": {"top_k": -1}})
    with FakeOpenAIServer(answer) as fake:
        trainer = make_fake_trainer(env, fake.url, max_steps=1)
        trainer.train()
        trained = len(bodies)
        trainer.evaluate(env.get_dataset())
    probes = [body for body in bodies if body["seed"] in PROBE_SEEDS]
    rollouts = [body for body in bodies if body["seed"] not in PROBE_SEEDS]
    assert probes
    assert len([body for body in bodies[:trained] if body in rollouts]) == 8
    assert [body["temperature"] for body in rollouts[8:]] == [0.0] * len(env.get_dataset())
    for body in probes:
        assert {name: body[name] for name in NEUTRAL_SAMPLING} == NEUTRAL_SAMPLING
    for body in rollouts:
        assert {name: body[name] for name in NEUTRAL_SAMPLING} == {**NEUTRAL_SAMPLING, "top_k": -1}


def test_requests_that_keep_their_old_weights_are_not_let_run_through_a_push(
    make_trainer: Callable[..., Any], server: Any
) -> None:
    sync = LoraSync(server.url)
    with pytest.raises(ConfigError, match=r"drain_before_sync is False, but with LoraSync .* stale unmarked"):
        make_trainer(tiny_world.single_turn(), weight_sync=sync, drain_before_sync=False)
    assert make_trainer(tiny_world.single_turn(), weight_sync=sync).publisher.drains()
    sync.close()


# -- the reference ------------------------------------------------------------------------------------------------


def test_the_kl_in_the_reward_is_none_at_first_and_grows_with_training(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(
        tiny_world.Rewriting(),
        max_steps=3,
        beta=0.1,
        kl_in_reward=True,
        advantage_estimator="reinforce_plus_plus",
        learning_rate=1e-3,
        max_completion_length=6,
        num_batches_ahead=0,
    )
    trainer.train()
    kl, penalty = trainer.logged("kl"), trainer.logged("reward/kl_penalty")
    assert (kl[0], penalty[0]) == (pytest.approx(0.0, abs=1e-5), pytest.approx(0.0, abs=1e-5))
    assert abs(kl[2]) > 1e-4
    assert math.copysign(1.0, kl[2]) == math.copysign(1.0, penalty[2])
