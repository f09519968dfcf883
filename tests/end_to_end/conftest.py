"""Fixtures around `tiny_world`: models made once, servers started once a module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
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
def new_trainer(tmp_path: Path) -> Iterator[Callable[..., tiny_world.ObservedTrainer]]:
    """Make trainers of a model against a server, each with a recording client, or with their own; close them."""
    made: list[tiny_world.ObservedTrainer] = []

    def make(model: Path, env: Any, url: str, *, client: Any = None, **overrides: Any) -> tiny_world.ObservedTrainer:
        names = ("weight_sync", "eval_dataset", "eval_env", "processing_class", "peft_config", "curriculum")
        options = {name: overrides.pop(name) for name in names if name in overrides}
        output_dir = overrides.pop("output_dir", tmp_path / f"run-{len(made)}")
        args = tiny_world.config(output_dir, url, **overrides)
        if client is None and url:
            client = tiny_world.RecordingBackend(url)
        made.append(tiny_world.ObservedTrainer(str(model), env, args, client=client, **options))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


@pytest.fixture
def make_trainer(
    new_trainer: Callable[..., tiny_world.ObservedTrainer], model_dir: Path, server: tiny_world.EmbeddedServer
) -> Callable[..., tiny_world.ObservedTrainer]:
    """Make trainers against the module's server."""
    return lambda env, **options: new_trainer(model_dir, env, server.url, **options)


@pytest.fixture
def make_fake_trainer(
    new_trainer: Callable[..., tiny_world.ObservedTrainer], wide_model_dir: Path
) -> Callable[..., tiny_world.ObservedTrainer]:
    """Make trainers against a fake server, whose log-probs belong to no model: the probe accepts anything."""
    return lambda env, url, **options: new_trainer(wide_model_dir, env, url, **{"probe_tolerance": 1e9, **options})


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Start processes of the modules of this folder that train."""
    with fork_parent("fault_world", "run_training") as running:
        yield running


@pytest.fixture
def make_world(forks: Forks, tmp_path: Path, model_dir: Path) -> Iterator[Callable[[str, str], World]]:
    """Make cells of the fault matrix, each in a directory of its own."""
    with contextlib.ExitStack() as stack:
        made: list[World] = []

        def make(fault: str, stage: str) -> World:
            directory = tmp_path / f"cell-{len(made)}"
            directory.mkdir()
            made.append(World(forks, directory, model_dir, fault, stage))
            stack.callback(made[-1].close)
            return made[-1]

        yield make
