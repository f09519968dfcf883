"""The launcher ends a run whose rank fails: the first failure is named, every rank is gone within seconds."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import sharded_world
import tiny_world
from fault_cells import assert_in_time

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parent / "run_faulty_rank.py"
ENDS_WITHIN_S = 5.0


@dataclass
class Launched:
    """A run of two ranks under torchrun, of which one breaks at a place in its second step."""

    launcher: subprocess.Popen[bytes]
    directory: Path

    @property
    def printed(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def wait_until_broken(self) -> None:
        deadline = time.monotonic() + 300
        while not (self.directory / "broke").exists():
            assert time.monotonic() < deadline
            assert self.launcher.poll() is None, self.printed[-6000:]
            time.sleep(0.02)

    def assert_is_over(self) -> float:
        """All processes have ended, with an error; gives the time from the break on as a share of its bound."""
        code = self.launcher.wait(400)
        ended_at = time.time()
        assert code != 0
        assert (self.directory / "broke").exists(), self.printed[-6000:]
        assert not [process for process in psutil.process_iter(["cmdline"]) if self._is_ours(process.info)]
        return (ended_at - float((self.directory / "broke").read_text())) / ENDS_WITHIN_S

    def has_given_back(self) -> bool:
        return not list((self.directory / "pushed").iterdir())

    def root_cause(self) -> str:
        """Return what torchrun's report says of the first rank that failed."""
        return self.printed.rpartition("Root Cause (first observed failure):")[2]

    def failure(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / f"failure-{rank}.json").read_text())
        return found

    def stopped_by(self) -> str:
        return str(json.loads((self.directory / "run.json").read_text())["stopped_by"])

    def _is_ours(self, info: dict[str, Any]) -> bool:
        return any(str(self.directory) in word for word in info["cmdline"] or ())


@pytest.fixture
def start(model_dir: Path, server: tiny_world.EmbeddedServer, tmp_path: Path) -> Callable[[int, str], Launched]:
    """Start two ranks of which one breaks."""

    def run(rank: int, place: str) -> Launched:
        directory = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        (directory / "pushed").mkdir(parents=True)
        given = {
            "model": str(model_dir),
            "url": server.url,
            "output_dir": str(directory),
            "rank": rank,
            "place": place,
            "settings": {
                "max_steps": 5,
                "per_device_train_batch_size": 2,
                "save_strategy": "steps",
                "save_steps": 1,
                "weight_sync_dir": str(directory / "pushed"),
            },
        }
        command = [*sharded_world.torchrun(2), str(SCRIPT), json.dumps(given)]
        with open(directory / "log", "wb") as log:
            return Launched(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), directory)

    return run


@pytest.mark.parametrize("place", ["backward", "callback:in flight", "saving"])
def test_an_error_of_rank_1_is_the_root_cause_and_the_end_of_rank_0(
    start: Callable[[int, str], Launched], place: str
) -> None:
    def run() -> float:
        launched = start(1, place)
        share = launched.assert_is_over()
        text = f"ValueError: no more of this at {place.partition(':')[0]}"
        assert re.search(rf"rank +: 1 .*{text}", launched.root_cause(), re.S), launched.printed[-6000:]
        assert launched.has_given_back()
        zero = launched.failure(0)
        assert (zero["type"], zero["text"]) == ("RankError", f"rank 1 stopped: {text}")
        assert launched.stopped_by() == f"RankError: rank 1 stopped: {text}"
        return share

    assert_in_time(run)


@pytest.mark.parametrize(("rank", "place"), [(1, "loss:kill"), (0, "callback:kill")])
def test_a_rank_that_is_killed_is_named_and_ends_the_other(
    start: Callable[[int, str], Launched], rank: int, place: str
) -> None:
    def run() -> float:
        launched = start(rank, place)
        share = launched.assert_is_over()
        assert re.search(rf"rank +: {rank} .*Signal 9 \(SIGKILL\)", launched.printed, re.S), launched.printed[-6000:]
        if rank == 1:
            assert launched.failure(0)["type"] in ("RankError", "SystemExit")
            assert launched.has_given_back()
        return share

    assert_in_time(run)


def test_a_signal_to_the_launcher_ends_ranks_that_are_inside_collectives(
    start: Callable[[int, str], Launched],
) -> None:
    def run() -> float:
        launched = start(1, "slice:alone")
        launched.wait_until_broken()
        # both are now in collectives that nobody ends, unless they are ended from outside
        time.sleep(0.5)
        (launched.directory / "broke").write_text(str(time.time()))
        os.kill(launched.launcher.pid, signal.SIGTERM)
        share = launched.assert_is_over()
        assert launched.has_given_back()
        assert launched.stopped_by() == "ended by SIGTERM"
        return share

    assert_in_time(run)
