"""Generation and training at the same time: what runs when, how stale it may be, and how stale tokens are trained."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny_world
import torch

from verifiers.testing import FakeOpenAIServer, Fault
from verifiers.train.checkpoint.block_log import read_block_log
from verifiers.train.weight_sync.shared_directory import DirectorySync


def texts_of_blocks(trainer: Any) -> list[list[str]]:
    rows = trainer.env.get_dataset()
    plan = trainer.plan
    return [[rows[e]["prompt"][-1]["content"] for e in plan.example_ids(block)] for block in range(plan.blocks)]


class Holding:
    """Holds the answers to some prompts until it is told to let go."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.let_go = threading.Event()
        self.asked: list[str] = []
        self.on_ask: Callable[[str], None] = lambda text: None

    async def __call__(self, body: dict[str, Any]) -> str:
        text = body["messages"][-1]["content"]
        self.asked.append(text)
        self.on_ask(text)
        if text in self.held:
            await asyncio.to_thread(self.let_go.wait, 120)
        return str(tiny_world.letters(body))


@pytest.fixture
def holding() -> Iterator[Holding]:
    answers = Holding()
    yield answers
    answers.let_go.set()


# -- what runs when ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drains", [True, False])
def test_rollouts_in_flight_end_before_a_push_only_where_pushes_drain(
    make_fake_trainer: Callable[..., Any], holding: Holding, drains: bool
) -> None:
    with FakeOpenAIServer(holding, latency_s=0.02) as fake:
        trainer = make_fake_trainer(
            tiny_world.single_turn(), fake.url, num_batches_ahead=2, max_steps=5, drain_before_sync=drains
        )
        if not drains:
            # block 2 is asked for before the first push after a step, and answered after it
            holding.held = {texts_of_blocks(trainer)[2][0]}
        in_flight: list[int] = []
        push = trainer.session.push

        def watched(version: int) -> None:
            if version and not drains:
                fake.wait_until(lambda server: server.in_flight > 0 or holding.let_go.is_set(), 30.0)
            in_flight.append(fake.in_flight)
            if version:
                holding.let_go.set()
            push(version)

        trainer.session.push = watched
        trainer.train()
    assert len(in_flight) == 5
    assert (max(in_flight) == 0) == drains


def test_a_streamed_micro_batch_trains_while_the_rest_of_its_block_is_generated(
    make_fake_trainer: Callable[..., Any], holding: Holding
) -> None:
    """The block's last group is answered only when its first micro-batch is trained."""
    with FakeOpenAIServer(holding) as fake:
        trainer = make_fake_trainer(
            tiny_world.single_turn(), fake.url, streaming=True, max_steps=1, async_generation_timeout=60.0
        )
        holding.held = {texts_of_blocks(trainer)[0][-1]}
        compute = trainer._compute_loss

        def watched(*args: Any, **kwargs: Any) -> Any:
            loss = compute(*args, **kwargs)
            holding.let_go.set()
            return loss

        trainer._compute_loss = watched
        trainer.train()
    assert trainer.state.global_step == 1
    assert [batch["step"] for batch in trainer.seen] == [0, 0]


def test_streaming_reaches_the_weights_and_the_loss_of_whole_blocks(make_fake_trainer: Callable[..., Any]) -> None:
    plain = {"optim": "sgd", "learning_rate": 0.3, "loss_type": "grpo", "max_steps": 3, "beta": 0.02}
    results = []

    def some_fail(body: dict[str, Any]) -> Any:
        # so that fewer rollouts count than were planned
        return Fault(400) if body["seed"] > 1000 and body["seed"] % 5 == 0 else tiny_world.letters(body)

    with FakeOpenAIServer(some_fail) as fake:
        for streaming in (False, True):
            trainer = make_fake_trainer(tiny_world.Rewriting(), fake.url, streaming=streaming, **plain)
            before = tiny_world.weights(trainer)
            trainer.train()
            results.append((trainer, tiny_world.weights(trainer)))
    (one, whole), (other, streamed) = results
    moved = max(float((whole[name] - tensor).abs().max()) for name, tensor in before.items())
    assert moved > 1e-3
    assert all(torch.allclose(whole[name], streamed[name], atol=1e-5) for name in whole)
    assert sum(one.logged("rollouts/failed")) > 0
    for name in ("loss", "grad_norm", "reward", "rows/trained"):
        assert one.logged(name) == pytest.approx(other.logged(name), rel=1e-3, abs=1e-5), name


# -- how stale ----------------------------------------------------------------------------------------------------


def test_rollouts_of_a_server_that_lags_are_dropped_and_counted_by_length(
    make_fake_trainer: Callable[..., Any], tmp_path: Any
) -> None:
    class Lags(DirectorySync):
        """The second push does not arrive, and nobody says so."""

        def push(self, named_parameters: Any, version: int) -> None:
            if version != 1:
                super().push(named_parameters, version)

    with FakeOpenAIServer(tiny_world.letters) as fake:
        trainer = make_fake_trainer(
            tiny_world.single_turn(),
            fake.url,
            output_dir=tmp_path,
            num_batches_ahead=2,
            max_staleness=1,
            drain_before_sync=True,
            max_steps=4,
            weight_sync=Lags(fake.url),
        )
        trainer.check.run = lambda version, pool: None
        trainer.train()
    # block 2 was begun at step 1, whose weights the server never had
    assert trainer.logged("rows/dropped/stale") == [8.0]
    assert trainer.logged("rows/dropped_tokens/stale")[0] > 10
    stale = [record for record in read_block_log(tmp_path) if record["dropped"]]
    assert [(record["block_id"], record["trained"]) for record in stale] == [(2, [])]
    assert {item["reason"] for item in stale[0]["dropped"]} == {"stale"}


STORED = ("two passes", "two updates a pass", "streaming, two passes")
"""Paths on which rows are trained under several versions, so that the proximal log-probs have to be kept."""

PATHS = {
    "one update": {},
    "two passes": {"num_iterations": 2},
    "two updates a pass": {"steps_per_generation": 4},
    "streaming, two updates": {"streaming": True, "steps_per_generation": 4},
    "streaming, two passes": {"streaming": True, "num_iterations": 2},
}


@pytest.mark.parametrize("path", PATHS)
def test_the_advantage_of_a_stale_token_is_weighted_by_proximal_over_sampler(
    make_fake_trainer: Callable[..., Any], path: str
) -> None:
    """The fake server's log-probs belong to no model: every sampled token is off policy."""
    with FakeOpenAIServer(tiny_world.letters) as fake:
        trainer = make_fake_trainer(
            tiny_world.single_turn(), fake.url, num_batches_ahead=1, max_steps=4, **PATHS[path]
        )
        trainer.keeps_logps = True
        trainer.train()
    first_seen: dict[str, torch.Tensor] = {}
    ratios: dict[int, list[float]] = {}
    for batch in trainer.seen:
        mask = batch["loss_mask"].bool()
        # the proximal policy of a micro-batch stays what it was when it was first trained, or its block was
        identity = str(batch["input_ids"].tolist())
        assert ("old_logps" in batch) == (path in STORED)
        proximal = batch.get("old_logps", batch["current_logps"])
        if identity not in first_seen and path != "two updates a pass":
            assert torch.allclose(proximal[mask], batch["current_logps"][mask], atol=1e-5)
        assert torch.equal(first_seen.setdefault(identity, proximal), proximal)
        ratio = (proximal - batch["sampler_logps"]).exp()[mask]
        assert ((ratio - 1).abs() > 1e-3).all()
        ratios.setdefault(batch["step"], []).extend(ratio.tolist())
    assert len(trainer.seen) == 8
    means = [sum(of_step) / len(of_step) for of_step in ratios.values()]
    assert trainer.logged("sampling/importance_sampling_ratio/mean") == pytest.approx(means, rel=1e-4)
    assert min(trainer.logged("mismatch_kl")) > 0
