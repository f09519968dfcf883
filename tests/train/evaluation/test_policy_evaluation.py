"""An evaluation ends at its deadline at the latest, whatever its rollouts do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest

import verifiers as vf
from verifiers.errors import ConfigError
from verifiers.inference.endpoint import Endpoint
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.train.evaluation import evaluator
from verifiers.train.evaluation.evaluator import Measured, evaluate_sets

FOUND = Measured({"eval_reward": 0.7}, [])


class Plays:
    """A set whose rollouts take `seconds`, and `cleanup` more once they are given up."""

    def __init__(self, seconds: float, cleanup: Callable[[], float] = lambda: 0.0) -> None:
        self.seconds, self.cleanup = seconds, cleanup
        self.ended_at = 0.0

    async def run(self) -> Measured:
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.ended_at = time.monotonic()
            await asyncio.sleep(self.cleanup())
            raise
        self.ended_at = time.monotonic()
        return FOUND


@pytest.fixture
def generator() -> Iterator[AsyncBatchGenerator]:
    env = vf.SingleTurnEnv(dataset=[{"question": "a", "answer": "b"}], rubric=vf.Rubric(funcs=[]))
    running = AsyncBatchGenerator(env, Endpoint("http://127.0.0.1:9/v1"), "m", {}).start()
    yield running
    running.close()


def evaluated(generator: AsyncBatchGenerator, timeout_s: float, *sets: Plays) -> Measured:
    return evaluate_sets(generator, [one.run for one in sets], timeout_s)


def test_an_evaluation_ends_at_its_deadline(generator: AsyncBatchGenerator) -> None:
    assert evaluated(generator, 30.0, Plays(0.01)) == FOUND
    slow, started = Plays(60), time.monotonic()
    assert evaluated(generator, 0.1, slow).failures == ["it did not end within 0.1 s (eval_timeout)"]
    assert slow.ended_at - started >= 0.1


def test_rollouts_that_take_long_to_give_up_do_not_end_the_training(
    generator: AsyncBatchGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluator, "_GRACE_S", 1.0)
    monkeypatch.setattr(evaluator, "_LOOK_EVERY_S", 0.05)
    found = evaluated(generator, 0.1, Plays(60, cleanup=lambda: 60.0))
    assert found.metrics == {}
    assert found.failures == ["it did not end within 0.1 s (eval_timeout); its rollouts are still being given up"]


def test_what_breaks_while_an_evaluation_is_given_up_is_told_with_it(generator: AsyncBatchGenerator) -> None:
    def breaks() -> float:
        raise OSError("the disk is full")

    (failure,) = evaluated(generator, 0.05, Plays(60, cleanup=breaks)).failures
    assert failure.endswith("(eval_timeout); giving it up raised OSError: the disk is full")


def test_a_timeout_of_its_own_and_a_mistake_are_not_taken_for_the_deadline(generator: AsyncBatchGenerator) -> None:
    for error in (TimeoutError("of the environment"), ConfigError("a mistake")):

        class Raises(Plays):
            async def run(self, error: Exception = error) -> Measured:
                raise error

        with pytest.raises(type(error), match=str(error)):
            evaluated(generator, 5.0, Raises(0))


def test_a_generator_that_breaks_ends_the_wait(
    generator: AsyncBatchGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        raise ConfigError("generation broke")

    monkeypatch.setattr(evaluator, "_LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(generator, "check", check)
    with pytest.raises(ConfigError, match="generation broke"):
        evaluated(generator, 30.0, Plays(60))
