"""Probes of the weights on the servers: when they are sent, and the wait for their answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import tiny_world

from verifiers.errors import ConfigError
from verifiers.inference.server_client import NoAnswerError
from verifiers.inference.wire import NEUTRAL_SAMPLING
from verifiers.testing import FakeOpenAIServer, Fault
from verifiers.train.weight_sync import LoraSync, verification

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


def test_a_push_after_a_doubtful_load_is_probed_and_waited_for(
    make_fake_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeOpenAIServer("ok") as fake:
        trainer = make_fake_trainer(tiny_world.single_turn(), fake.url, probe_every=0)
        trainer.open()
        probed: list[int] = []
        trainer.publisher.check = probed.append
        for version in range(3):
            trainer.session.push(version)
        trainer.weight_sync.pool.replicas[0].repeated_loads += 1
        trainer.session.push(3)
        trainer.session.push(4)
        assert trainer.check.finish() is None
    assert probed == [0, 1, 3]


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
