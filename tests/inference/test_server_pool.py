"""Several servers in training: one that dies is out until it has the weights again, and no rollout is lost."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pool_world import push, until

import verifiers as vf
from verifiers.errors import ProviderError
from verifiers.inference.retry import RetryPolicy
from verifiers.inference.server_pool import ServerPool
from verifiers.rollouts.block import BatchRequest
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.rollouts.rollout import RolloutRequest, ScoredBlock
from verifiers.testing import FakeOpenAIServer
from verifiers.types import Outcome, RolloutKey

ASK: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "2+2?"}]}
QUICK = RetryPolicy(base_s=0.01)
PROMPTS, GENERATIONS = 8, 4
COUNT = PROMPTS * GENERATIONS


def block(number: int = 0) -> list[RolloutRequest]:
    return [
        RolloutRequest(RolloutKey(number, prompt, generation), prompt=ASK["messages"], answer="4", seed=generation)
        for prompt in range(PROMPTS)
        for generation in range(GENERATIONS)
    ]


def environment() -> vf.Environment:
    """Three turns, so that a server dies between turns and in the middle of them."""

    class Dialogue(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            return [{"role": "user", "content": "and now?"}], state

    rubric = vf.Rubric(funcs=[lambda completion, answer, **_: float(completion[-1]["content"] == answer)])
    return Dialogue(max_turns=3, dataset=[{"prompt": ASK["messages"], "answer": "4"}], rubric=rubric)


@pytest.fixture
def generate() -> Iterator[Callable[..., AsyncBatchGenerator]]:
    made: list[AsyncBatchGenerator] = []

    def make(client: Any) -> AsyncBatchGenerator:
        generator = AsyncBatchGenerator(environment(), client, "fake", retry=QUICK, generation_timeout_s=120.0)
        made.append(generator)
        return generator.start()

    yield make
    for generator in made:
        generator.close()


def assert_nothing_lost(done: ScoredBlock) -> None:
    assert done.outcomes() == Counter({Outcome.COMPLETED: COUNT}), done.commonest_failure()
    assert sum(done.outcomes().values()) == COUNT
    assert [rollout.reward for rollout in done] == [1.0] * COUNT
    assert [rollout.turns for rollout in done] == [3] * COUNT
    assert {(len(rollout.rows), rollout.forks) for rollout in done} == {(1, 0)}


# -- faults, over real sockets ---------------------------------------------------------------------------------


class Holds:
    """Latencies: the first requests are answered, and all others wait until the server dies."""

    def __init__(self, answered: int) -> None:
        self.answered = answered
        self.is_over = False

    def __call__(self, number: int) -> float:
        return 0.05 if self.is_over or number < self.answered else 60.0

    def stop(self, server: FakeOpenAIServer) -> None:
        """Stop the server while some wait, and others go on to their second turn."""
        server.wait_until(lambda it: it.request_count - it.in_flight >= self.answered and it.in_flight > 4, 60.0)
        self.is_over = True
        server.stop()


def test_a_server_that_dies_in_mid_request_takes_no_rollout_with_it_and_gets_none_until_it_has_the_weights(
    generate: Callable[..., AsyncBatchGenerator],
) -> None:
    holds, loads = Holds(8), threading.Event()

    async def load(server: Any, timeout_s: float) -> None:
        if server.url == one.url and holds.is_over:
            await asyncio.to_thread(loads.wait, 30)

    with FakeOpenAIServer("4", latency_s=holds) as one, FakeOpenAIServer("4", latency_s=0.05) as two:
        pool = ServerPool([one.url, two.url])
        generator = generate(pool)
        push(pool, 0, load)
        generator.submit_batch(BatchRequest(0, block()))
        holds.stop(one)
        assert_nothing_lost(generator.get_batch(0))
        # it is back, with other weights than were pushed
        one.weight_version = "default"
        one.start()
        before = one.request_count
        generator.submit_batch(BatchRequest(1, block(1)))
        assert_nothing_lost(generator.get_batch(1))
        assert list(pool.down) == [one.url]
        assert one.request_count == before
        loads.set()
        until(lambda: not pool.down)
        generator.submit_batch(BatchRequest(2, block(2)))
        assert_nothing_lost(generator.get_batch(2))
        assert one.request_count > before


def test_with_the_only_server_gone_rollouts_wait_for_it_and_go_on(
    generate: Callable[..., AsyncBatchGenerator],
) -> None:
    # of the first turn half are answered
    holds = Holds(COUNT // 2)
    with FakeOpenAIServer("4", latency_s=holds) as server:
        pool = ServerPool([server.url])
        generator = generate(pool)
        push(pool, 0)
        generator.submit_batch(BatchRequest(0, block()))
        holds.stop(server)
        until(lambda: pool.down)
        with pytest.raises(vf.Error, match="not ready"):
            generator.get_batch(0, timeout_s=0.3)
        server.start()
        assert_nothing_lost(generator.get_batch(0))


async def test_waiting_for_a_server_has_an_end_that_names_the_reasons() -> None:
    with FakeOpenAIServer("4") as server:
        pool = ServerPool([server.url], timeout_s=30.0)
        push(pool, 0)
        pool.configure(restart_timeout_s=0.02, stall_timeout_s=30.0)
        server.stop()
        client = RolloutClient(pool, model="fake", retry=QUICK)
        work = client.chat.completions.create(**ASK)
        with pytest.raises(
            ProviderError, match=r"no rollout server was up for 0.02 s \(http://127\S+: .*could not be"
        ):
            await asyncio.to_thread(pool.run, work, 30.0)
        # the try that lost it, and none while waiting
        assert client.retries == 1
        pool.stop()
