"""Blocks are produced ahead in a thread of their own, and every wait for one ends."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from verifiers.envs.environment import Environment
from verifiers.errors import (
    ConfigError,
    DeadlineError,
    GenerationError,
    GeneratorClosedError,
)
from verifiers.inference.retry import RetryPolicy
from verifiers.rollouts.block import BatchRequest
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.rubrics.rubric import Rubric
from verifiers.testing import FakeOpenAIServer, decode_ids
from verifiers.types import RolloutKey, State


class Asks(Environment):
    """Asks the policy once; the reward is the length of its answer."""

    def __init__(self) -> None:
        self.rubric = Rubric([lambda completion: float(len(completion[0]["content"]))])
        self.sampling_args: dict[str, Any] = {}

    async def rollout(self, client: Any, model: str, prompt: Any, **kwargs: Any) -> Any:
        response = await client.chat.completions.create(model=model, messages=prompt)
        return [{"role": "assistant", "content": response.choices[0].message.content}], State()


def requests(block_id: int, prompts: int = 2, size: int = 2) -> list[RolloutRequest]:
    return [
        RolloutRequest(RolloutKey(block_id, example, generation), [{"role": "user", "content": f"{block_id}"}])
        for example in range(prompts)
        for generation in range(size)
    ]


def asked_block(body: dict[str, Any]) -> int:
    return int(body["messages"][0]["content"])


class Gates:
    """Answers of a block come when its gate is opened."""

    def __init__(self, *open_blocks: int) -> None:
        self._open = {block: threading.Event() for block in range(8)}
        for block in open_blocks:
            self._open[block].set()

    def open(self, block: int) -> None:
        self._open[block].set()

    async def __call__(self, body: dict[str, Any]) -> str:
        block = asked_block(body)
        await asyncio.to_thread(self._open[block].wait, 60)
        return "x" * (block + 1)

    def open_all(self) -> None:
        for gate in self._open.values():
            gate.set()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        # a server cannot stop while one of its answers waits here
        self.open_all()


@pytest.fixture
def gates() -> Gates:
    return Gates()


def generator(server: FakeOpenAIServer, env: Any = None, **options: Any) -> AsyncBatchGenerator:
    options = {"retry": RetryPolicy(max_attempts=1), "generation_timeout_s": 60.0, **options}
    return AsyncBatchGenerator(env or Asks(), server.url, "policy", **options)


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def test_a_block_is_submitted_and_taken_scored_in_the_plans_order() -> None:
    with FakeOpenAIServer("four", weight_version=3) as server, generator(server) as blocks:
        blocks.submit_batch(BatchRequest(0, requests(0), policy_version=3))
        block = blocks.get_batch(0)
        assert [rollout.key for rollout in block.rollouts] == [request.key for request in requests(0)]
        assert [rollout.reward for rollout in block] == [4.0] * 4
        assert decode_ids(block.rollouts[0].rows[0].completion_ids) == "four\x03"
        assert (block.policy_version, blocks.policy_version) == (3, 3)
        assert block.generation_s > 0
        assert (blocks.launched, blocks.finished) == (4, 4)


def test_blocks_are_taken_by_their_id_in_any_order() -> None:
    server = FakeOpenAIServer(lambda body: "x" * (asked_block(body) + 1))
    with server, generator(server.start(), num_batches_ahead=2) as blocks:
        for number in range(3):
            blocks.submit_batch(BatchRequest(number, requests(number)))
        for number in (2, 0, 1):
            block = blocks.get_batch(number)
            assert block.block_id == number
            assert {rollout.reward for rollout in block} == {number + 1.0}


def test_no_more_blocks_are_held_than_may_be_ahead() -> None:
    with FakeOpenAIServer("four") as server, generator(server, num_batches_ahead=1) as blocks:
        blocks.submit_batch(BatchRequest(0, requests(0)))
        blocks.submit_batch(BatchRequest(1, requests(1)))
        with pytest.raises(
            ConfigError, match="with block 2 there would be 3 held at once, and num_batches_ahead=1 allows 2"
        ):
            blocks.submit_batch(BatchRequest(2, requests(2)))
        blocks.get_batch(0)
        blocks.submit_batch(BatchRequest(2, requests(2)))
        assert blocks.get_batch(1).block_id == 1
        assert blocks.get_batch(2).block_id == 2


def test_a_block_is_generated_and_taken_once() -> None:
    with FakeOpenAIServer("four") as server, generator(server) as blocks:
        blocks.submit_batch(BatchRequest(0, requests(0)))
        with pytest.raises(ConfigError, match="block 0 was submitted before"):
            blocks.submit_batch(BatchRequest(0, requests(0)))
        blocks.get_batch(0)
        for number in (0, 7):
            with pytest.raises(ConfigError, match=f"block {number} was never submitted, or was taken before"):
                blocks.get_batch(number)


def test_a_straggler_of_one_block_does_not_keep_the_next_from_running(gates: Gates) -> None:
    gates.open(1)
    with FakeOpenAIServer(gates) as server, gates, generator(server, max_concurrent=4, num_batches_ahead=1) as blocks:
        blocks.submit_batch(BatchRequest(0, requests(0, prompts=1, size=1)))
        server.wait_until(lambda s: s.in_flight == 1, 60.0)
        blocks.submit_batch(BatchRequest(1, requests(1, prompts=4)))
        assert blocks.get_batch(1).block_id == 1
        assert server.in_flight == 1
        gates.open(0)
        assert blocks.get_batch(0).block_id == 0


def test_all_blocks_share_one_limit(gates: Gates) -> None:
    with FakeOpenAIServer(gates) as server, gates, generator(server, max_concurrent=3, num_batches_ahead=1) as blocks:
        blocks.submit_batch(BatchRequest(0, requests(0)))
        blocks.submit_batch(BatchRequest(1, requests(1)))
        server.wait_until(lambda s: s.in_flight == 3, 60.0)
        gates.open_all()
        blocks.get_batch(0)
        blocks.get_batch(1)
        assert server.max_in_flight == 3


def test_an_error_surfaces_at_once_with_its_own_traceback(gates: Gates) -> None:
    def bad_callback(*_: Any) -> None:
        raise LookupError("in the callback")

    with FakeOpenAIServer(gates) as server, gates, generator(server, num_batches_ahead=1) as blocks:
        blocks._count = bad_callback  # type: ignore[method-assign]
        gates.open(1)
        blocks.submit_batch(BatchRequest(0, requests(0)))
        blocks.submit_batch(BatchRequest(1, requests(1)))
        # block 0 hangs, and yet its taker learns of block 1's failure
        with pytest.raises(GenerationError, match="generation failed with LookupError: in the callback") as caught:
            blocks.get_batch(0)
        cause = caught.value.__cause__
        assert isinstance(cause, LookupError)
        assert traceback.extract_tb(cause.__traceback__)[-1].name == "bad_callback"
        with pytest.raises(GenerationError):
            blocks.check()
        with pytest.raises(GenerationError):
            blocks.submit_batch(BatchRequest(2, requests(2)))


def test_a_deadline_says_what_was_waited_for_and_which_setting_it_is(gates: Gates) -> None:
    with FakeOpenAIServer(gates) as server, gates, generator(server) as blocks:
        blocks.submit_batch(BatchRequest(0, requests(0)))
        server.wait_until(lambda s: s.in_flight == 4, 60.0)
        with pytest.raises(DeadlineError) as caught:
            blocks.get_batch(0, timeout_s=0.02)
        assert str(caught.value) == (
            "block 0 was not ready within 0.02 s (async_generation_timeout): 0 of 4 rollouts launched so far have "
            "ended, 4 are in flight; is the rollout server still answering?"
        )
        gates.open(0)
        assert blocks.get_batch(0).block_id == 0


def test_close_wakes_every_waiter(gates: Gates) -> None:
    with FakeOpenAIServer(gates) as server, gates:
        blocks = generator(server).start()
        blocks.submit_batch(BatchRequest(0, requests(0)))
        begun = threading.Event()

        async def forever() -> None:
            begun.set()
            await asyncio.get_running_loop().create_future()

        waiting = [in_thread(lambda: blocks.get_batch(0)), in_thread(lambda: blocks.run(forever(), 60))]
        server.wait_until(lambda s: s.in_flight == 4, 60.0)
        assert begun.wait(60)
        blocks.close()
        for thread, raised in waiting:
            thread.join(60)
            assert [type(error) for error in raised] == [GeneratorClosedError]
        # what was in flight is cancelled: the server sees its callers go
        server.wait_until(lambda s: s.in_flight == 0, 60.0)


def test_a_closed_generator_says_so_and_may_be_closed_again() -> None:
    # another test may have left one behind
    before = set(threading.enumerate())
    with FakeOpenAIServer("4") as server:
        blocks = generator(server).start()
        blocks.close()
        blocks.close()
        for call in (
            blocks.start,
            lambda: blocks.submit_batch(BatchRequest(0, requests(0))),
            blocks.rollout_run,
            blocks.check,
        ):
            with pytest.raises(GeneratorClosedError):
                call()
        after = set(threading.enumerate()) - before
        assert not any(thread.name == "verifiers-generator" for thread in after)


def test_blocks_ahead_are_none_or_more() -> None:
    with pytest.raises(ConfigError, match="num_batches_ahead is -1"):
        AsyncBatchGenerator(Asks(), "http://127.0.0.1:9/v1", "policy", num_batches_ahead=-1)


def test_other_work_runs_on_the_loop_under_the_same_limit_and_a_deadline() -> None:
    with FakeOpenAIServer("four", latency_s=0.0) as server, generator(server) as blocks:
        group = blocks.run(blocks.rollout_run(require_tokens=False).run_group(requests(0)), 60)
        assert [rollout.reward for rollout in group.rollouts] == [4.0] * 4
        assert blocks.rollout_run().limiter is blocks.rollout_run(model="other").limiter
        with pytest.raises(DeadlineError, match=r"did not end within 0\.01 s"):
            blocks.run(asyncio.sleep(15), 0.01)
