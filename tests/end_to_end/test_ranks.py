"""Several ranks train what one rank trains; the first failure is named, and every rank is gone within seconds."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import torch
from fault_cells import assert_in_time, crowding
from forks import Forked, Forks

from verifiers.train.checkpoint.block_log import read_block_log

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OF_THE_BLOCK = ("reward", "reward_std", "rollouts/launched", "rows/trained", "completions/mean_length")
OF_THE_LOSS = ("loss", "entropy", "mismatch_kl", "grad_norm", "clip_ratio/region_mean")

ENDS_WITHIN_S = 5.0


@dataclass
class Launched:
    """A run of two ranks under the supervision that torchrun is made of."""

    forks: Forks
    launcher: Forked
    directory: Path

    @property
    def printed(self) -> str:
        return self.launcher.log.read_text(errors="replace")

    def broke_at(self) -> float:
        return float((self.directory / "broke").read_text())

    def assert_ended_with(self, cause: str) -> float:
        """All processes have ended, and the launcher names the cause; gives the time as a share of its bound."""
        code, ended_at = self.forks.wait(self.launcher, 400), time.time()
        assert code != 0
        assert re.search(cause, self.printed.rpartition("Root Cause")[2], re.S), self.printed[-6000:]
        with pytest.raises(ProcessLookupError):
            os.killpg(self.launcher.pid, 0)
        return (ended_at - self.broke_at()) / ENDS_WITHIN_S

    def has_given_back(self) -> bool:
        return not list((self.directory / "pushed").iterdir())

    def failure_of_rank_0(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "failure-0.json").read_text())
        return found

    def stopped_by(self) -> str:
        return str(json.loads((self.directory / "run.json").read_text())["stopped_by"])


@pytest.fixture
def start(
    forks: Forks, model_dir: Path, server: tiny_world.EmbeddedServer, tmp_path: Path
) -> Callable[..., Launched]:
    """Start a training on two ranks; the second one may break in some way."""

    def run(env: str, breaks: str | None = None) -> Launched:
        directory = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        (directory / "pushed").mkdir(parents=True)
        settings = {"per_device_train_batch_size": 2, "max_steps": 5, "weight_sync_dir": str(directory / "pushed")}
        given = {"model": str(model_dir), "url": server.url, "output_dir": str(directory), "env": env}
        given |= {"settings": settings, "breaks": breaks}
        return Launched(forks, forks.start("run_training:run", given, directory / "log", ranks=2), directory)

    return run


@pytest.mark.parametrize(
    ("env", "ranks", "settings"),
    [
        ("single", (1, 4), {"loss_type": "dapo"}),
        ("forking", (1, 2), {"loss_type": "dapo", "streaming": True, "max_tokens_per_micro_batch": 80}),
        ("forking", (1, 2), {"kl_in_reward": True, "beta": 0.5, "advantage_estimator": "reinforce_plus_plus"}),
    ],
    ids=["four", "forking, streaming and a budget", "kl in the reward"],
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


def test_a_failure_of_rank_0s_generator_is_the_root_cause_and_ends_all_ranks(start: Callable[..., Launched]) -> None:
    def run() -> float:
        launched = start("breaking")
        share = launched.assert_ended_with("rank 0's environment broke in its second block")
        zero = launched.failure_of_rank_0()
        assert zero["type"] == "ConfigError"
        assert zero["time"] - launched.broke_at() < 2.0 * crowding()
        return share

    assert_in_time(run)


def test_an_error_of_rank_1_is_the_root_cause_and_the_end_of_rank_0(start: Callable[..., Launched]) -> None:
    def run() -> float:
        launched = start("single", "error")
        share = launched.assert_ended_with(r"rank +: 1 .*ValueError: no more of this")
        assert launched.has_given_back()
        zero = launched.failure_of_rank_0()
        assert (zero["type"], zero["text"]) == ("RankError", "rank 1 stopped: ValueError: no more of this")
        assert launched.stopped_by() == "RankError: rank 1 stopped: ValueError: no more of this"
        return share

    assert_in_time(run)


def test_a_signal_to_the_launcher_ends_ranks_that_are_inside_collectives(start: Callable[..., Launched]) -> None:
    def run() -> float:
        launched = start("single", "alone")
        deadline = time.monotonic() + 300
        while not (launched.directory / "broke").exists():
            assert time.monotonic() < deadline
            assert launched.launcher.code is None, launched.printed[-6000:]
            time.sleep(0.02)
        # both are now in collectives that nobody ends, unless they are ended from outside
        time.sleep(0.5)
        (launched.directory / "broke").write_text(str(time.time()))
        launched.launcher.kill(signal.SIGTERM)
        share = launched.assert_ended_with("")
        assert launched.has_given_back()
        assert launched.stopped_by() == "ended by SIGTERM"
        return share

    assert_in_time(run)


def test_an_update_that_is_not_finite_on_one_rank_is_applied_on_none(
    forks: Forks, model_dir: Path, server: tiny_world.EmbeddedServer, tmp_path: Path
) -> None:
    given = {"model": str(model_dir), "url": server.url, "output_dir": str(tmp_path / "run"), "env": "overflowing"}
    given["settings"] = {"per_device_train_batch_size": 2, "max_steps": 3}
    log = tmp_path / "log"
    assert forks.run("run_training:run", given, log, ranks=2) == 0, log.read_text()
    ranks = [torch.load(tmp_path / "run" / f"final-{rank}.pt") for rank in range(2)]
    for name, tensor in ranks[0]["weights"].items():
        assert torch.isfinite(tensor).all(), name
        assert torch.equal(tensor, ranks[1]["weights"][name]), name
    assert [entry["updates/not_finite"] for entry in ranks[0]["log"] if "loss" in entry] == [0.0, 1.0, 0.0]
    assert "the update of step 2 is not finite" in log.read_text()
    dropped = [record["dropped"] for record in read_block_log(tmp_path / "run")]
    assert [len(items) for items in dropped] == [0, 8, 0]
    assert {item["reason"] for item in dropped[1]} == {"not_finite"}
