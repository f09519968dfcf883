"""Several ranks train what one rank trains, and end where rank 0 fails."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sharded_world
import tiny_world
import torch
from fault_cells import crowding
from forks import Forks

from verifiers.train.checkpoint.block_log import read_block_log

SCRIPT = Path(__file__).parent / "run_training.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OF_THE_BLOCK = ("reward", "reward_std", "rollouts/launched", "rows/trained", "completions/mean_length")
OF_THE_LOSS = ("loss", "entropy", "mismatch_kl", "grad_norm", "clip_ratio/region_mean")

Launch = Callable[..., tuple[int, Path, str]]


@pytest.fixture
def launch(model_dir: Path, server: tiny_world.EmbeddedServer, tmp_path: Path) -> Launch:
    """Run the training script on two ranks; return its exit code, its output directory and what it printed."""

    def run(env: str, url: str | None = None, **settings: Any) -> tuple[int, Path, str]:
        output_dir = tmp_path / env
        given = {
            "model": str(model_dir),
            "url": url or server.url,
            "output_dir": str(output_dir),
            "env": env,
            "settings": {"per_device_train_batch_size": 2, **settings},
        }
        command = [*sharded_world.torchrun(2), str(SCRIPT), json.dumps(given)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        return done.returncode, output_dir, done.stdout + done.stderr

    return run


def failure_of_rank_0(output_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output_dir / "failure-0.json").read_text())
    return found


@pytest.mark.parametrize(
    ("env", "ranks", "settings"),
    [
        ("single", (1, 2, 4), {"loss_type": "dapo"}),
        ("forking", (1, 2), {"loss_type": "dapo"}),
        ("single", (1, 2), {"loss_type": "dapo", "streaming": True}),
        ("forking", (1, 2), {"kl_in_reward": True, "beta": 0.5, "advantage_estimator": "reinforce_plus_plus"}),
    ],
    ids=["1, 2 and 4", "forking", "streaming", "kl in the reward"],
)
def test_any_number_of_ranks_trains_the_rows_and_reaches_the_loss_and_weights_of_one(
    forks: Forks,
    model_dir: Path,
    server: tiny_world.EmbeddedServer,
    tmp_path: Path,
    env: str,
    ranks: tuple[int, ...],
    settings: dict[str, Any],
) -> None:
    # Adam would blow rounding of gradients near 0 up to whole steps
    plain_descent = {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 1.0}
    results = {}
    for count in ranks:
        output_dir = tmp_path / f"{env}-{count}"
        of_ranks = {"per_device_train_batch_size": 4 // count, "max_steps": 3, **plain_descent, **settings}
        given = {"model": str(model_dir), "url": server.url, "output_dir": str(output_dir), "env": env}
        log = tmp_path / f"{count}.log"
        assert forks.run("run_training:run", {**given, "settings": of_ranks}, log, count) == 0, log.read_text()
        results[count] = [torch.load(output_dir / f"final-{rank}.pt") for rank in range(count)]
    one = results[1][0]
    moved = max(float((one["weights"][name] - tensor).abs().max()) for name, tensor in one["start"].items())
    assert moved > 1e-3
    for several in (results[count] for count in ranks[1:]):
        for name, tensor in several[0]["weights"].items():
            assert all(torch.equal(tensor, other["weights"][name]) for other in several[1:])
            assert torch.allclose(tensor, one["weights"][name], atol=1e-5), name
        compare_rows([result["rows"] for result in several], one["rows"])
        # measured over all ranks' rows, of which some have more than others
        for name in (*OF_THE_BLOCK, *OF_THE_LOSS):
            logged = [[entry[name] for entry in result["log"] if name in entry] for result in (one, several[0])]
            assert logged[0], name
            assert logged[0] == pytest.approx(logged[1], abs=1e-4), name


def compare_rows(by_rank: list[list[Any]], whole: list[Any]) -> None:
    """Together the ranks hold each row of the whole once, with the same advantage."""

    def identity(row: Any) -> str:
        prompt, ids, mask, _, step, _ = row
        return str((step, prompt, ids, mask))

    together = [row for rows in by_rank for row in rows]
    assert sorted(map(identity, together)) == sorted(map(identity, whole))
    assert [row[5] for row in sorted(together, key=identity)] == pytest.approx(
        [row[5] for row in sorted(whole, key=identity)], abs=1e-5, rel=3e-5
    )


def test_a_failure_of_rank_0s_generator_is_the_root_cause_and_ends_all_ranks(launch: Launch) -> None:
    code, output_dir, printed = launch("breaking", max_steps=20)
    ended_at = time.time()
    assert code != 0
    zero = failure_of_rank_0(output_dir)
    assert zero["type"] == "ConfigError", printed
    assert "rank 0's environment broke in its second block" in printed.rpartition("Root Cause")[2]
    broke_at = float((output_dir / "broke").read_text())
    assert zero["time"] - broke_at < 2.0 * crowding()
    assert ended_at - broke_at < 5.0 * crowding()


def test_an_update_that_is_not_finite_on_one_rank_is_applied_on_none(launch: Launch) -> None:
    code, output_dir, printed = launch("overflowing", max_steps=3)
    assert code == 0, printed
    ranks = [torch.load(output_dir / f"final-{rank}.pt") for rank in range(2)]
    for name, tensor in ranks[0]["weights"].items():
        assert torch.isfinite(tensor).all(), name
        assert torch.equal(tensor, ranks[1]["weights"][name]), name
    assert [entry["updates/not_finite"] for entry in ranks[0]["log"] if "loss" in entry] == [0.0, 1.0, 0.0]
    assert "the update of step 2 is not finite" in printed
    dropped = [record["dropped"] for record in read_block_log(output_dir)]
    assert [len(items) for items in dropped] == [0, 8, 0]
    assert {item["reason"] for item in dropped[1]} == {"not_finite"}


def test_a_server_that_is_down_is_the_root_cause(launch: Launch) -> None:
    code, output_dir, printed = launch("single", url="http://127.0.0.1:9/v1", server_wait=0.5)
    assert code != 0
    zero = failure_of_rank_0(output_dir)
    assert zero["type"] == "WeightSyncError", printed
    assert "did not answer within 0.5 s" in zero["text"]
    assert "did not answer within 0.5 s" in printed.rpartition("Root Cause")[2]
