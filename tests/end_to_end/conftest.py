"""Fixtures around `tiny_world`: models made once, servers started once a module."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# test modules are imported without a package (import mode importlib), so what they share is found by path
sys.path.insert(0, str(Path(__file__).parent))

import tiny_world
from fault_cells import World
from forks import Forks, fork_parent


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_world.make_model(tmp_path_factory.mktemp("models") / "policy", seed=0)


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same architecture with other weights."""
    return tiny_world.make_model(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture(scope="session")
def wide_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a policy whose vocabulary holds the fake server's token ids: the code points of ASCII."""
    return tiny_world.make_model(tmp_path_factory.mktemp("models") / "wide", seed=2, vocab_size=128)


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[tiny_world.EmbeddedServer]:
    with tiny_world.EmbeddedServer(model_dir) as running:
        yield running


@pytest.fixture
def make_trainer(
    model_dir: Path, server: tiny_world.EmbeddedServer, tmp_path: Path
) -> Iterator[Callable[..., tiny_world.ObservedTrainer]]:
    """Make trainers against the module's server, each with a recording client, and close them."""
    made: list[tiny_world.ObservedTrainer] = []

    def make(
        env: Any, *, client: Any = None, weight_sync: Any = None, **overrides: Any
    ) -> tiny_world.ObservedTrainer:
        evaluated = {name: overrides.pop(name) for name in ("eval_dataset", "eval_env") if name in overrides}
        output_dir = overrides.pop("output_dir", tmp_path / f"run-{len(made)}")
        args = tiny_world.config(output_dir, server.url, **overrides)
        client = client if client is not None else tiny_world.RecordingBackend(server.url)
        options = {"client": client, "weight_sync": weight_sync, **evaluated}
        trainer = tiny_world.ObservedTrainer(str(model_dir), env, args, **options)
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.close()


@pytest.fixture
def make_fake_trainer(wide_model_dir: Path, tmp_path: Path) -> Iterator[Callable[..., tiny_world.ObservedTrainer]]:
    """Make trainers against a fake server, whose log-probs belong to no model: the probe accepts anything."""
    made: list[tiny_world.ObservedTrainer] = []

    def make(env: Any, url: str, *, weight_sync: Any = None, **overrides: Any) -> tiny_world.ObservedTrainer:
        output_dir = overrides.pop("output_dir", tmp_path / f"fake-{len(made)}")
        args = tiny_world.config(output_dir, url, **{"probe_tolerance": 1e9, **overrides})
        client = tiny_world.RecordingBackend(url)
        options = {"client": client, "weight_sync": weight_sync}
        trainer = tiny_world.ObservedTrainer(str(wide_model_dir), env, args, **options)
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.close()


@pytest.fixture(scope="module")
def fault_forks() -> Iterator[Forks]:
    with fork_parent("fault_world") as running:
        yield running


@pytest.fixture
def make_world(fault_forks: Forks, tmp_path: Path, model_dir: Path) -> Iterator[Callable[[str, str], World]]:
    """Make cells of the fault matrix, each in a directory of its own."""
    with contextlib.ExitStack() as stack:
        made: list[World] = []

        def make(fault: str, stage: str) -> World:
            directory = tmp_path / f"cell-{len(made)}"
            directory.mkdir()
            made.append(World(fault_forks, directory, model_dir, fault, stage))
            stack.callback(made[-1].close)
            return made[-1]

        yield make
