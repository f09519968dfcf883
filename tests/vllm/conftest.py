"""A real vLLM on the CPU, in a virtual environment of its own: what `make test-vllm` runs against.

The environment is `.venv-vllm`, or the interpreter that VERIFIERS_VLLM_PYTHON names; without it these tests are
skipped. A server takes half a minute to start, so tests share them: one for what changes nothing that others see,
and servers of their own for those that kill them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("VERIFIERS_VLLM_PYTHON") or str(ROOT / ".venv-vllm/bin/python")

collect_ignore_glob = [] if Path(PYTHON).is_file() else ["test_*.py"]

os.environ["VERIFIERS_VLLM_PYTHON"] = PYTHON
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

START_S = 240.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            # a start alone takes longer than other tests may
            item.add_marker(pytest.mark.timeout(420))
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random policies of one architecture: "policy", and "other" with other weights."""
    import vllm_world

    directory = tmp_path_factory.mktemp("models")
    return {
        "policy": vllm_world.make_model(directory / "policy", seed=0),
        "other": vllm_world.make_model(directory / "other", seed=1),
    }


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Start servers that end with the tests."""
    import vllm_world

    with ExitStack() as stack:

        def start(model: Path, *args: str, dtype: str = "float32") -> vllm_world.Server:
            log = tmp_path_factory.mktemp("logs") / "vllm.log"
            server = vllm_world.Server(model, [*args, "--dtype", dtype], log, START_S)
            stack.callback(server.stop)
            return server.start()

        yield start


@pytest.fixture(scope="session")
def server(launch: Callable[..., Any], models: dict[str, Path]) -> Any:
    """One server in float32, with adapters, for all tests that leave it running."""
    return launch(models["policy"], "--enable-lora", "--max-lora-rank", "8")


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Make observed trainers against a URL, and close them."""
    import tiny_world

    made: list[tiny_world.ObservedTrainer] = []

    def make(
        model: Path, env: Any, url: str | list[str], *, peft_config: Any = None, **overrides: Any
    ) -> tiny_world.ObservedTrainer:
        first = url if isinstance(url, str) else url[0]
        urls = None if isinstance(url, str) else url
        overrides = {"server_urls": urls, "server_wait": 60.0, "max_completion_length": 12, **overrides}
        args = tiny_world.config(tmp_path / f"run-{len(made)}", first, **overrides)
        trainer = tiny_world.ObservedTrainer(str(model), env, args, peft_config=peft_config)
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.close()
