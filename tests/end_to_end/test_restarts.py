"""A rollout server that is killed and started again: training continues, and stale weights train nothing unmarked."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_world
from ports import free_port

from verifiers.errors import ConfigError
from verifiers.inference import server_pool
from verifiers.inference.endpoint import Endpoint
from verifiers.inference.server_pool import ServerPool, backend_for, credentials
from verifiers.testing import FakeOpenAIServer
from verifiers.train.weight_sync.shared_directory import DirectorySync


class Process:
    """The embedded server as a process on one port."""

    def __init__(self, model: Path, port_file: Path) -> None:
        self.port = free_port()
        self._command = [sys.executable, "-m", "verifiers_embedded", "--model", str(model), "--threads", "1"]
        self._command += ["--port", str(self.port), "--port-file", str(port_file)]
        self._port_file = port_file
        self._running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._running = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        until = time.monotonic() + 40
        while not self._port_file.exists():
            assert self._running.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)

    def kill(self) -> None:
        if self._running is not None:
            self._running.send_signal(signal.SIGKILL)
            self._running.wait()
        self._port_file.unlink(missing_ok=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


@pytest.fixture
def process(model_dir: Path, tmp_path: Path) -> Iterator[Process]:
    made = Process(model_dir, tmp_path / "port")
    made.start()
    yield made
    made.kill()


def clients(kind: str, url: str) -> Any:
    """Everything that GRPOTrainer's docstring names as `client`, for one server."""
    if kind == "AsyncOpenAI":
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=url, api_key="EMPTY")
    return {"Endpoint": Endpoint(url), "url": url, "list": [Endpoint(url)], "pool": ServerPool([url])}[kind]


@pytest.mark.parametrize("kind", ["AsyncOpenAI", "Endpoint", "url", "list", "pool"])
def test_with_no_kind_of_client_is_an_answer_used_from_weights_that_were_not_pushed(
    wide_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # nothing but the answers themselves shows it within the test
    monkeypatch.setattr(server_pool, "CHECK_INTERVAL_S", 3600.0)
    with FakeOpenAIServer(lambda body: f"a{body['seed']}", weight_version="default") as fake:
        args = tiny_world.config(tmp_path / "run", fake.url, probe_tolerance=1e9, server_restart_timeout=20.0)
        trainer = tiny_world.ObservedTrainer(
            str(wide_model_dir), tiny_world.single_turn(), args, client=clients(kind, fake.url)
        )
        with tiny_world.closing(trainer):
            trainer.open()
            prefetcher = trainer.session.prefetcher
            assert prefetcher is not None
            prefetcher.sync(0)
            fake.weight_version = "default"  # a server that has just started has weights of that name
            prefetcher.begin(0, 0)
            block = prefetcher.take(0, 0)
    assert len(block.rollouts) == 8
    assert all(rollout.is_scored for rollout in block)
    assert trainer.weight_sync.pool.repeated_loads == 1  # type: ignore[union-attr]
    assert {version for rollout in block for row in rollout.rows for version in row.versions} == {0}


def test_servers_with_different_keys_are_refused(wide_model_dir: Path, tmp_path: Path) -> None:
    client = [Endpoint("http://127.0.0.1:1/v1", "one-key"), Endpoint("http://127.0.0.1:2/v1", "another")]
    args = tiny_world.config(tmp_path / "run", "http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match="2 different API keys"):
        tiny_world.ObservedTrainer(str(wide_model_dir), tiny_world.single_turn(), args, client=client)


def test_the_credentials_of_every_kind_of_client_are_known_to_the_redaction() -> None:
    from openai import AsyncOpenAI

    one = Endpoint("http://127.0.0.1:1/v1", "a-key", headers={"X-Token": "first"})
    two = Endpoint("http://127.0.0.1:2/v1", "a-key", headers={"X-Token": "second"})
    for client in ([one, two], ServerPool([one]), one):
        assert credentials(backend_for(client))[0] == "a-key"
    assert sorted(credentials(backend_for([one, two]))[1].values()) == ["first", "second"]
    given = AsyncOpenAI(base_url=one.base_url, api_key="a-key", default_headers={"X-Token": "third"})
    assert credentials(backend_for(given)) == ("a-key", {"0:X-Token": "third"})


def test_a_client_that_has_to_be_called_as_it_is_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    from openai import AsyncOpenAI

    class Wrapped(AsyncOpenAI):
        """A subclass may do anything."""

    url = "http://127.0.0.1:1/v1"
    sync = DirectorySync(url)
    backend = sync.route(backend_for(Wrapped(base_url=url, api_key="EMPTY")))
    sync.close()
    assert not isinstance(backend, ServerPool)
    assert "may answer from old weights" in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_training_continues_after_the_server_was_killed_with_rollouts_in_flight(
    process: Process, model_dir: Path, tmp_path: Path
) -> None:
    restarting: list[threading.Thread] = []

    class Killing(tiny_world.Dialogue):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            if not restarting and trainer.state.global_step >= 2:
                process.kill()
                restarting.append(threading.Thread(target=process.start))
                restarting[0].start()
            return await super().env_response(messages, state, **kwargs)

    args = tiny_world.config(tmp_path / "run", process.url, max_steps=5, num_batches_ahead=1, learning_rate=1e-2)
    trainer = tiny_world.ObservedTrainer(str(model_dir), Killing(), args)
    witness = tiny_world.Witness(trainer)
    trainer.train()
    restarting[0].join()
    assert trainer.state.global_step == 5
    assert trainer.weight_sync.pool.repeated_loads == 1  # type: ignore[union-attr]
    assert sum(trainer.logged("outcomes/provider_error")) == 0
    assert witness.check(model_dir, tolerance=1e-4) > 5 * 8
