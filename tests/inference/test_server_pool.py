"""Several servers in training: one that dies is out until it has the weights again, and no rollout is lost."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pool_world import until

import verifiers as vf
from verifiers.errors import ConfigError, ProviderError
from verifiers.inference.load_balancer import LoadBalancer
from verifiers.inference.retries import RetryPolicy
from verifiers.inference.server_pool import ServerPool
from verifiers.inference.wire import WireObject
from verifiers.rollouts.block import BatchRequest
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.rollouts.rollout import RolloutRequest, ScoredBlock
from verifiers.rollouts.run import Run
from verifiers.testing import FakeOpenAIServer
from verifiers.types import Outcome, RolloutKey

CHAT = "/chat/completions"
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


def test_a_server_that_dies_in_mid_request_takes_no_rollout_with_it_and_gets_none_until_it_is_up(
    generate: Callable[..., AsyncBatchGenerator],
) -> None:
    holds = Holds(8)
    with FakeOpenAIServer("4", latency_s=holds) as one, FakeOpenAIServer("4", latency_s=0.05) as two:
        pool = ServerPool([one.url, two.url])
        generator = generate(pool)
        generator.submit_batch(BatchRequest(0, block()))
        holds.stop(one)
        assert_nothing_lost(generator.get_batch(0))
        assert list(pool.down()) == [one.url]
        # it is back, but nobody has pushed weights to it
        one.start()
        before = one.request_count
        generator.submit_batch(BatchRequest(1, block(1)))
        assert_nothing_lost(generator.get_batch(1))
        assert one.request_count == before
        pool.mark_up(one.url)
        assert pool.down() == {}
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
        generator.submit_batch(BatchRequest(0, block()))
        holds.stop(server)
        until(pool.down)
        server.start()
        before = server.request_count
        # it listens again, and still gets nothing
        with pytest.raises(vf.Error, match="not ready"):
            generator.get_batch(0, timeout_s=0.3)
        assert server.request_count == before
        pool.mark_up(server.url)
        assert_nothing_lost(generator.get_batch(0))


def test_a_list_of_urls_is_enough_where_nobody_pushes_weights(generate: Callable[..., AsyncBatchGenerator]) -> None:
    holds = Holds(8)
    with FakeOpenAIServer("4", latency_s=holds) as one, FakeOpenAIServer("4", latency_s=0.03) as two:
        generator = generate([one.url, two.url])
        generator.submit_batch(BatchRequest(0, block()))
        holds.stop(one)
        assert_nothing_lost(generator.get_batch(0))
        assert two.request_count > 0


@pytest.mark.slow
def test_a_process_that_is_killed_takes_no_rollout_with_it(
    tmp_path: Path, generate: Callable[..., AsyncBatchGenerator]
) -> None:
    processes = [_process(tmp_path / f"port-{number}") for number in range(2)]
    try:
        urls = [f"http://127.0.0.1:{_port(tmp_path / f'port-{number}')}/v1" for number in range(2)]
        pool = ServerPool(urls)
        generator = generate(pool)
        killed = []

        def kill() -> None:
            if not killed and generator.finished > COUNT / 4:
                killed.append(True)
                processes[0].send_signal(signal.SIGKILL)

        for number in range(20):
            generator.submit_batch(BatchRequest(number, block(number)))
            kill()
            assert_nothing_lost(generator.get_batch(number))
        assert killed
        assert list(pool.down()) == [urls[0]]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _process(port_file: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "verifiers.testing.fake_server", "--answer", "4"]
    return subprocess.Popen([*command, "--port-file", str(port_file), "--parent-pid", str(os.getpid())])


def _port(path: Path) -> int:
    waited = threading.Event()
    for _ in range(1000):
        if path.exists():
            return int(path.read_text())
        waited.wait(0.01)
    raise AssertionError("the server did not start")


# -- the pool by itself ----------------------------------------------------------------------------------------


class Gated:
    """A backend whose calls wait for `gate`, counted; it is its own answer."""

    api_key = "EMPTY"
    choices = (WireObject({"message": {"role": "assistant", "content": "4"}}),)

    def __init__(self, name: str) -> None:
        self.base_url = f"http://{name}/v1"
        self.gate = asyncio.Event()
        self.calls = 0

    async def call(self, path: str, arguments: Any) -> Any:
        self.calls += 1
        await self.gate.wait()
        return self

    async def close(self) -> None: ...


def pool_of(count: int, kind: Any = ServerPool, **options: Any) -> tuple[list[Gated], Any]:
    servers = [Gated(f"s{number}") for number in range(count)]
    return servers, kind(servers, **options)


async def run_pending() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_server_that_is_down_gets_nothing_and_says_why() -> None:
    servers, pool = pool_of(2)
    servers[1].gate.set()
    pool.mark_down("http://s0/v1/", "pulled out")
    pool.mark_down("http://s0/v1", "again")
    assert pool.down() == {"http://s0/v1": "pulled out"}
    for _ in range(10):
        assert await pool.call(CHAT, ASK) is servers[1]
    assert servers[0].calls == 0
    assert pool.urls == ["http://s0/v1", "http://s1/v1"]
    with pytest.raises(ConfigError, match="'http://other/v1'"):
        pool.mark_up("http://other/v1")
    with pytest.raises(ConfigError, match="twice"):
        ServerPool([servers[0], servers[0]])


async def test_calls_wait_while_none_is_up_and_go_on_when_another_thread_marks_one_up() -> None:
    servers, pool = pool_of(2)
    for url in pool.urls:
        pool.mark_down(url, "gone")
    calls = [asyncio.create_task(pool.call(CHAT, ASK)) for _ in range(20)]
    await run_pending()
    assert [server.calls for server in servers] == [0, 0]
    servers[1].gate.set()
    # nothing else wakes this loop before the deadline
    thread = threading.Timer(0.01, pool.mark_up, [pool.urls[1]])
    thread.start()
    async with asyncio.timeout(10.0):
        assert await asyncio.gather(*calls) == [servers[1]] * 20
    thread.join()
    assert servers[0].calls == 0


async def test_waiting_for_a_server_has_an_end_that_names_the_reasons() -> None:
    _, pool = pool_of(1, up_timeout_s=0.02)
    pool.mark_down(pool.urls[0], "it burned")
    client = RolloutClient(pool, model="fake")
    with pytest.raises(ProviderError, match="it burned"):
        await client.chat.completions.create(**ASK)
    assert client.retries == 0
    # and so has a rollout's own deadline
    _, pool = pool_of(1)
    pool.mark_down(pool.urls[0], "it burned")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await pool.call(CHAT, ASK)


async def test_what_a_server_was_answering_when_it_was_marked_down_is_asked_elsewhere() -> None:
    servers, pool = pool_of(2)
    calls = [asyncio.create_task(pool.call(CHAT, ASK)) for _ in range(10)]
    await run_pending()
    assert pool.in_flight == {"http://s0/v1": 5, "http://s1/v1": 5}
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        await asyncio.wrap_future(thread.submit(pool.mark_down, pool.urls[0], "it does not answer"))
    await run_pending()
    assert pool.in_flight == {"http://s0/v1": 0, "http://s1/v1": 10}
    servers[1].gate.set()
    assert await asyncio.gather(*calls) == [servers[1]] * 10


async def test_what_a_server_is_answering_is_left_to_end_where_that_is_asked() -> None:
    servers, pool = pool_of(1)
    call = asyncio.create_task(pool.call(CHAT, ASK))
    await run_pending()
    pool.mark_down(pool.urls[0], "it rests", give_up_calls=False)
    servers[0].gate.set()
    assert await call is servers[0]


# -- affinity --------------------------------------------------------------------------------------------------


async def test_the_rollouts_of_a_group_begin_where_its_prompt_is_held() -> None:
    servers, pool = pool_of(3, kind=LoadBalancer)
    for server in servers:
        server.gate.set()
    for group in range(12):
        before = [server.calls for server in servers]
        for _ in range(4):
            client = RolloutClient(pool, model="fake", group=("block", group))
            await client.chat.completions.create(**ASK)
        assert sorted(server.calls - b for server, b in zip(servers, before, strict=True)) == [0, 0, 4]
    assert all(server.calls for server in servers)


async def test_a_run_keeps_the_rollouts_of_a_prompt_together() -> None:
    servers, pool = pool_of(3, kind=LoadBalancer)
    for server in servers:
        server.gate.set()
    runner = Run(environment(), pool, "fake", retry=QUICK)
    for requests in (block()[start : start + GENERATIONS] for start in range(0, COUNT, GENERATIONS)):
        before = [server.calls for server in servers]
        for request in requests:
            await runner.play([request])
        made = sorted(server.calls - b for server, b in zip(servers, before, strict=True))
        assert made == [0, 0, 3 * GENERATIONS]
    assert all(server.calls for server in servers)


async def test_a_group_spreads_where_its_server_is_much_busier_than_another() -> None:
    _, pool = pool_of(2, kind=LoadBalancer)
    calls = [asyncio.create_task(pool.for_rollout("one group").call(CHAT, ASK)) for _ in range(40)]
    await run_pending()
    most, least = sorted(pool.in_flight.values(), reverse=True)
    assert most + least == 40
    # the rule: 4 + 1.5 x the least loaded, and the call that goes beyond it
    assert least > 0
    assert most <= 4 + 1.5 * least + 1
    assert most > least
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert set(pool.in_flight.values()) == {0}


async def test_a_group_whose_server_is_gone_finds_another_home() -> None:
    servers, pool = pool_of(3)
    for server in servers:
        server.gate.set()
    first = await pool.for_rollout("group").call(CHAT, ASK)
    pool.mark_down(first.base_url, "gone")
    second = await pool.for_rollout("group").call(CHAT, ASK)
    assert second is not first
    assert {await pool.for_rollout("group").call(CHAT, ASK) for _ in range(8)} == {second}
