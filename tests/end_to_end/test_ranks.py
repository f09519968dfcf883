"""Several ranks: they train what one rank trains, and where one fails all end and say why."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import torch

SCRIPT = Path(__file__).parent / "run_training.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

Launch = Callable[..., tuple[int, Path, str]]


@pytest.fixture
def launch(model_dir: Path, server: tiny_world.EmbeddedServer, tmp_path: Path) -> Launch:
    """Runs the training script on some ranks; gives its exit code, its output directory and what it printed."""

    def run(ranks: int, env: str, url: str | None = None, **settings: Any) -> tuple[int, Path, str]:
        output_dir = tmp_path / f"{env}-{ranks}"
        given = {
            "model": str(model_dir),
            "url": url or server.url,
            "output_dir": str(output_dir),
            "env": env,
            "settings": {"per_device_train_batch_size": 4 // ranks, **settings},
        }
        start = [sys.executable]
        if ranks > 1:
            start += ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", "0"]
            start += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"]
        done = subprocess.run(
            [*start, str(SCRIPT), json.dumps(given)], capture_output=True, text=True, timeout=100, check=False
        )
        return done.returncode, output_dir, done.stdout + done.stderr

    return run


def failures(output_dir: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((output_dir / f"failure-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("env", ["single", "forking"])
def test_two_ranks_train_the_rows_and_reach_the_weights_of_one(launch: Launch, env: str) -> None:
    # Adam would blow rounding of gradients near 0 up to whole steps
    plain_descent = {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 1.0}
    results = {}
    for ranks in (1, 2):
        code, output_dir, printed = launch(ranks, env, max_steps=3, **plain_descent)
        assert code == 0, printed
        results[ranks] = [torch.load(output_dir / f"final-{rank}.pt") for rank in range(ranks)]
    one, (first, second) = results[1][0], results[2]
    for name, tensor in first["weights"].items():
        assert torch.equal(tensor, second["weights"][name])
        assert torch.allclose(tensor, one["weights"][name], atol=1e-5), name

    moved = max(float((one["weights"][name] - tensor).abs().max()) for name, tensor in one["start"].items())
    assert moved > 1e-3

    def identity(row: Any) -> tuple[Any, ...]:
        prompt, ids, mask, _, step = row
        return step, prompt, ids, mask

    assert sorted(map(identity, first["rows"] + second["rows"])) == sorted(map(identity, one["rows"]))
    assert not {str(identity(row)) for row in first["rows"]} & {str(identity(row)) for row in second["rows"]}
    for name in ("reward", "rollouts/launched", "rows/trained"):
        logged = [[entry[name] for entry in result["log"] if name in entry] for result in (one, first)]
        assert logged[0] == pytest.approx(logged[1], abs=1e-4)


def test_a_failure_of_rank_0s_generator_ends_rank_1_within_5_seconds_and_says_why(launch: Launch) -> None:
    code, output_dir, printed = launch(2, "breaking", max_steps=20)
    assert code != 0
    zero, one = failures(output_dir, 2)
    assert zero["type"] == "ConfigError", printed
    assert one["type"] == "GenerationError"
    assert "rank 0 stopped: ConfigError: rank 0's environment broke in its second block" in one["text"]
    broke_at = float((output_dir / "broke").read_text())
    assert zero["time"] - broke_at < 2.0
    assert one["time"] - broke_at < 5.0


def test_a_server_that_is_down_is_said_on_every_rank(launch: Launch) -> None:
    code, output_dir, printed = launch(2, "single", url="http://127.0.0.1:9/v1", server_wait=0.5)
    assert code != 0
    zero, one = failures(output_dir, 2)
    assert zero["type"] == "WeightSyncError", printed
    assert "did not answer within 0.5 s" in zero["text"]
    assert "rank 0 stopped: WeightSyncError" in one["text"]
    assert one["time"] - zero["time"] < 5.0
