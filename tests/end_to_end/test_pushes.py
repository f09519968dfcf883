"""Invariants 7, 11 and 12: which weights a token came from, and that nothing else moves the server."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import torch
from safetensors.torch import load_file
from step_gate import StepGate

from verifiers.errors import GenerationError
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.rollouts.rollout import Turn
from verifiers.train.weight_sync.protocol import policy_tensors
from verifiers.train.weight_sync.shared_directory import DirectorySync


@pytest.fixture
def fresh_server(model_dir: Path) -> Iterator[tiny_world.EmbeddedServer]:
    with tiny_world.EmbeddedServer(model_dir) as running:
        yield running


def ask(url: str, temperature: float = 1.0) -> tuple[list[int], list[float]]:
    """Ids and log-probs of one answer with a fixed seed."""
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": "what"}],
        "temperature": temperature,
        "max_tokens": 16,
        "seed": 11,
        "logprobs": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        choice = json.load(response)["choices"][0]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


def long_turns(server: tiny_world.EmbeddedServer, push: Callable[[], None], count: int = 4) -> list[Turn]:
    """Return the turns of `count` rollouts that are in the middle of their answers when `push` is called."""

    async def roll(backend: Any, seed: int) -> Turn:
        client = RolloutClient(backend, model="policy", seed=seed, require_tokens=True, policy_version=lambda: 0)
        await client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": f"tell {seed}"}],
            temperature=0.7,
            max_tokens=200,
            extra_body={"ignore_eos": True},
        )
        return client.turns[0]

    gate = StepGate(server.engine)

    async def play() -> list[Turn]:
        backend = tiny_world.RecordingBackend(server.url)
        pushing = threading.Thread(target=push_in_the_middle)
        pushing.start()
        turns = await asyncio.gather(*(roll(backend, seed) for seed in range(count)))
        await asyncio.to_thread(pushing.join)
        await backend.close()
        return list(turns)

    def push_in_the_middle() -> None:
        until = time.monotonic() + 60
        while gate.held < count and time.monotonic() < until:
            time.sleep(0.0005)
        push()

    return asyncio.run(play())


def test_no_token_after_a_push_comes_from_the_old_cache(
    fresh_server: tiny_world.EmbeddedServer, model_dir: Path, other_model_dir: Path
) -> None:
    old = load_file(model_dir / "model.safetensors")
    new = load_file(other_model_dir / "model.safetensors")
    sync = DirectorySync(fresh_server.url)
    sync.connect(60.0)
    sync.push(old.items(), 6)
    turns = long_turns(fresh_server, lambda: sync.push(new.items(), 7))
    sync.close()
    assert all(set(turn.versions) == {6, 7} for turn in turns)
    for turn in turns:
        assert list(turn.versions) == sorted(turn.versions)
        assert len(turn.versions) == len(turn.completion_ids) == 200
        ids = [*turn.prompt_ids, *turn.completion_ids]
        by_version = {
            version: tiny_world.plain_log_probs(state, model_dir, ids, 0.7)[len(turn.prompt_ids) - 1 :]
            for version, state in ((6, old), (7, new))
        }
        expected = [by_version[version][place] for place, version in enumerate(turn.versions)]
        assert expected == pytest.approx(list(turn.logprobs), abs=1e-4)
        assert max(abs(a - b) for a, b in zip(by_version[6], by_version[7], strict=True)) > 0.1


def test_every_trained_token_has_the_log_prob_of_the_weights_it_is_stamped_with(
    make_trainer: Callable[..., Any], model_dir: Path
) -> None:
    ahead, updates = 1, 2
    trainer = make_trainer(
        tiny_world.Dialogue(),
        num_batches_ahead=ahead,
        num_iterations=updates,
        max_steps=6,
        learning_rate=5e-3,
        max_completion_length=6,
    )
    witness = tiny_world.Witness(trainer)
    trainer.train()
    assert witness.check(model_dir, tolerance=1e-4) > 0
    firsts = [(step // updates * updates, row) for step, row in witness.rows]
    staleness = {first - version for first, row in firsts for version in row.versions if version >= 0}
    assert min(staleness) >= 0
    # without staleness this would be the on-policy test again
    assert max(staleness) == ahead * updates
    assert max(trainer.logged("staleness")) == ahead * updates


def test_tokens_staler_than_allowed_stop_the_run(make_trainer: Callable[..., Any], server: Any) -> None:
    class PushesOnce(DirectorySync):
        def push(self, named_parameters: Any, version: int) -> None:
            if version == 0:
                super().push(named_parameters, version)

    trainer = make_trainer(tiny_world.single_turn(), weight_sync=PushesOnce(server.url), max_steps=3)
    trainer.check.run = lambda version, pool: None
    with pytest.raises(GenerationError, match=r"policy version 0 at optimizer step 1, .* a staleness of 0"):
        trainer.train()


def test_the_server_does_not_move_when_the_trainers_model_does(
    make_trainer: Callable[..., Any], server: tiny_world.EmbeddedServer
) -> None:
    trainer = make_trainer(tiny_world.single_turn(), max_steps=1)
    trainer.train()
    before = ask(server.url)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    assert ask(server.url) == before
    trainer.weight_sync.push(policy_tensors(trainer.model).items(), 2)
    after = ask(server.url)
    assert after != before
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(0.5)
    assert ask(server.url) == after


@pytest.mark.slow
def test_training_on_a_clear_reward_improves_it(make_trainer: Callable[..., Any]) -> None:
    """The counterpart of the test above: the same machinery does learn."""
    trainer = make_trainer(tiny_world.single_turn(), learning_rate=5e-3, max_steps=25, num_batches_ahead=1)
    trainer.train()
    rewards = trainer.logged("reward")
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 5
