"""Servers that are killed: training continues, and every trained token has the log-prob of its stamped weights."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import vllm_world
from transformers import TrainerCallback

from verifiers.train.processes.launch import launched_server


@pytest.fixture(scope="module")
def mortal(launch: Callable[..., Any], models: dict[str, Path]) -> Any:
    """Return a server that tests may kill; each leaves it running."""
    return launch(models["policy"])


class AfterStep(TrainerCallback):
    """Calls a function at the end of one optimizer step."""

    def __init__(self, step: int, call: Callable[[], Any]) -> None:
        self._step, self._call = step, call

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            self._call()


def test_training_continues_after_kill_dash_nine_and_no_row_is_of_other_weights(
    mortal: vllm_world.Server, make_trainer: Callable[..., Any], models: dict[str, Path]
) -> None:
    """Killed while rollouts are in flight, and once more while nothing is asked of it."""

    def kill_and_begin() -> None:
        mortal.kill()
        mortal.begin()

    class Killing(tiny_world.Dialogue):
        killed = False

        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            if not self.killed and trainer.state.global_step >= 2:
                self.killed = True
                kill_and_begin()
            return await super().env_response(messages, state, **kwargs)

    env = Killing()
    trainer = make_trainer(
        models["policy"],
        env,
        mortal.url,
        max_steps=5,
        learning_rate=2e-2,
        num_batches_ahead=1,
        max_completion_length=16,
        generation="tokens",
    )
    witness = tiny_world.Witness(trainer)
    trainer.train()
    assert env.killed
    assert trainer.weight_sync.pool.repeated_loads >= 1
    assert trainer.state.global_step == 5
    assert witness.check(models["policy"], tolerance=2e-3) > 5 * 8
    assert sum(trainer.logged("outcomes/provider_error")) == 0
    mortal.until_ready()


def test_of_two_servers_one_is_killed_and_comes_back(
    server: vllm_world.Server, mortal: vllm_world.Server, make_trainer: Callable[..., Any], models: dict[str, Path]
) -> None:
    mortal.until_ready()
    seen: dict[str, Any] = {}

    def come_back() -> None:
        seen["down"] = dict(trainer.publisher.pool.down)
        mortal.begin()
        mortal.until_ready()
        until = time.monotonic() + 15
        while trainer.publisher.pool.down and time.monotonic() < until:
            time.sleep(0.1)
        seen["up"] = dict(trainer.publisher.pool.down)

    trainer = make_trainer(
        models["policy"],
        tiny_world.Dialogue(),
        [server.url, mortal.url],
        max_steps=6,
        learning_rate=2e-2,
        num_batches_ahead=1,
        generation="tokens",
    )
    witness = tiny_world.Witness(trainer)
    trainer.add_callback(AfterStep(2, mortal.kill))
    trainer.add_callback(AfterStep(4, come_back))
    trainer.train()
    assert list(seen["down"]) == [mortal.url]
    assert seen["up"] == {}
    assert witness.check(models["policy"], tolerance=2e-3) > 6 * 8
    assert sum(trainer.logged("outcomes/provider_error")) == 0
    # both ended with the newest weights
    assert server.ask("/weight_info") == mortal.ask("/weight_info")


def test_all_processes_end_within_seconds(mortal: vllm_world.Server) -> None:
    mortal.until_ready()
    started = vllm_world.members(mortal.pid)
    assert len(started) >= 2
    assert mortal.stop() < 8.0
    until = time.monotonic() + 3
    while any(map(vllm_world.is_running, started)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [pid for pid in started if vllm_world.is_running(pid)]


def test_a_launched_server_ends_with_all_it_started_also_by_kill_dash_nine(models: dict[str, Path]) -> None:
    with launched_server("vllm", str(models["policy"]), args=["--max-model-len", "64", "--threads", "1"]) as url:
        assert url.startswith("http://127.0.0.1:")
        found = vllm_world.members(os.getpid())
        command = next(pid for pid in found if b"verifiers.servers" in _command_line(pid))
        started = vllm_world.members(command)
        assert len(started) >= 2
        os.kill(command, signal.SIGKILL)
        until = time.monotonic() + 5
        while any(map(vllm_world.is_running, started)) and time.monotonic() < until:
            time.sleep(0.05)
        assert not [pid for pid in started if vllm_world.is_running(pid)]


def _command_line(pid: int) -> bytes:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""
