"""A generator that is closed leaves nothing open, from whatever thread and however often it is closed."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import warnings
from collections.abc import Callable

import pytest

import verifiers as vf
from verifiers.errors import GenerationError
from verifiers.rollouts.block import BatchRequest
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.testing import FakeOpenAIServer
from verifiers.types import RolloutKey

PROMPT: vf.Messages = [{"role": "user", "content": "x"}]


def left_open() -> list[str]:
    """Return what the collector finds open."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        gc.collect()
    return [str(warning.message) for warning in found]


@pytest.mark.slow
@pytest.mark.parametrize("latency_s", [0.0, 5.0])
def test_threads_that_close_a_generator_at_once_leave_no_connection_open(latency_s: float) -> None:
    env = vf.SingleTurnEnv(eval_dataset=[{"prompt": PROMPT, "answer": "x"}], rubric=vf.Rubric())
    left_open()  # what other tests left is not ours
    with FakeOpenAIServer("x", latency_s=latency_s) as server:
        for round_number in range(4):
            generator = AsyncBatchGenerator(env, server.url, "fake")
            generator.submit_batch(
                BatchRequest(
                    0, [RolloutRequest(RolloutKey(0, e, g), PROMPT, "x") for e in range(4) for g in range(8)]
                )
            )
            if latency_s:
                wanted = 32 * (round_number + 1)
                server.wait_until(lambda fake, wanted=wanted: fake.request_count >= wanted, 60.0)  # type: ignore[misc]
            else:
                generator.get_batch(0, 60.0)
            threads = [threading.Thread(target=generator.close) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert generator._thread is not None
            assert generator._thread.loop.is_closed()
            del generator
            assert left_open() == []


def interrupt() -> None:
    raise KeyboardInterrupt


def stop() -> None:
    asyncio.get_running_loop().stop()


@pytest.mark.parametrize(
    ("end", "how"), [(sys.exit, "SystemExit"), (interrupt, "KeyboardInterrupt"), (stop, "a stop of its event loop")]
)
def test_every_waiter_is_told_at_once_that_the_generators_thread_has_ended(end: Callable[[], None], how: str) -> None:
    class Ending(vf.SingleTurnEnv):
        async def rollout(self, *args: object, **kwargs: object) -> object:
            asyncio.get_running_loop().call_soon(end)
            return await asyncio.Event().wait()

    env = Ending(eval_dataset=[{"prompt": PROMPT, "answer": "x"}], rubric=vf.Rubric())
    left_open()
    with FakeOpenAIServer("x") as server, AsyncBatchGenerator(env, server.url, "fake") as generator:
        generator.submit_batch(BatchRequest(0, [RolloutRequest(RolloutKey(0, 0, g), PROMPT, "x") for g in range(2)]))
        with pytest.raises(GenerationError, match=f"{how}.* ended the generator's thread"):
            generator.get_batch(0, 30.0)
    assert generator._thread is not None
    assert generator._thread.loop.is_closed()
    assert left_open() == []
