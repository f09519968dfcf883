"""Training with environments in worker processes has the rows, rewards and weights of training inline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_world
import torch
from test_order import logged_without_clocks

from verifiers.workers.settings import WorkerSettings


@pytest.mark.slow
def test_three_steps_in_processes_train_the_weights_of_three_steps_inline(
    new_trainer: Callable[..., Any], model_dir: Any
) -> None:
    trained = []
    for engine in ("inline", "processes:2"):
        env = tiny_world.Dialogue()
        workers = WorkerSettings.parse(engine).open([(env, tiny_world.Dialogue)], blocked_s=60.0)
        with tiny_world.EmbeddedServer(model_dir, slots=1) as server:
            trainer = new_trainer(model_dir, workers.of(env, env.get_dataset()), server.url, max_steps=3)
            trainer.train()
        trained.append(trainer)
    inline, processes = trained
    assert all(len(trainer.seen) == 6 for trainer in trained)
    for one, other in zip(inline.seen, processes.seen, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one)
    assert logged_without_clocks(inline) == logged_without_clocks(processes)
    before, after = (tiny_world.weights(trainer) for trainer in trained)
    assert all(torch.equal(before[name], after[name]) for name in before)
