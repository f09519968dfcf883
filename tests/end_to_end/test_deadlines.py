"""Invariant 6: every wait has a deadline, and whatever breaks the generator reaches the trainer at once."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import tiny_world

import verifiers as vf
from verifiers.errors import DeadlineError
from verifiers.testing import FakeOpenAIServer, Fault


class Breaking(vf.SingleTurnEnv):
    """Plays its first `good` rows well; all others raise a mistake of the user's as soon as they may."""

    def __init__(self, good: int) -> None:
        super().__init__(dataset=tiny_world.rows(), rubric=vf.Rubric(funcs=[tiny_world.vowels]))
        self.good = {row["question"] for row in tiny_world.rows()[:good]}
        self.may_break = threading.Event()
        self.may_break.set()
        self.broke = threading.Event()

    async def rollout(self, client: Any, model: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if prompt[-1]["content"] not in self.good:
            await asyncio.to_thread(self.may_break.wait, 60)
            self._stumble()
        return await super().rollout(client, model, prompt, *args, **kwargs)

    def _stumble(self) -> None:
        self.broke.set()
        raise vf.ConfigError("the environment was configured badly")


def test_a_failure_ahead_stops_the_trainer_at_its_next_micro_step(make_trainer: Callable[..., Any]) -> None:
    env = Breaking(good=2)
    env.may_break.clear()
    trainer = make_trainer(
        env,
        num_batches_ahead=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        shuffle_dataset=False,
    )
    loss = trainer._compute_loss

    def waits_in_the_third(model: Any, inputs: Any) -> Any:
        if len(trainer.seen) == 2:
            env.may_break.set()
            assert env.broke.wait(60)
            while trainer.session.generator._failure is None:
                time.sleep(0.001)
        return loss(model, inputs)

    trainer._compute_loss = waits_in_the_third
    with pytest.raises(vf.ConfigError, match="configured badly") as raised:
        trainer.train()
    assert len(trainer.seen) == 3
    assert trainer.state.global_step == 0
    assert "_stumble" in [frame.name for frame in traceback.extract_tb(raised.tb)]
    # closing waits a second for it to hear
    until = time.monotonic() + 30
    while "verifiers-servers" in (names := [thread.name for thread in threading.enumerate()]):
        assert time.monotonic() < until, names
        time.sleep(0.01)


def test_the_trainer_stops_at_the_deadline_of_a_block(make_fake_trainer: Callable[..., Any]) -> None:
    def hangs_but_for_the_probe(body: dict[str, Any]) -> Any:
        return "ok" if body["seed"] < 1000 else Fault.hang()

    with FakeOpenAIServer(hangs_but_for_the_probe) as fake:
        trainer = make_fake_trainer(tiny_world.single_turn(), fake.url, async_generation_timeout=60.0)
        connect = trainer.publisher.connect

        def connects(on_version: Callable[[int], None]) -> None:
            connect(on_version)
            # only now: it is also the time for which code may block the loop during a push
            trainer.args.async_generation_timeout = 0.5

        trainer.publisher.connect = connects
        with pytest.raises(DeadlineError, match=r"block 0 .* 0\.5 s \(async_generation_timeout\)"):
            trainer.train()
