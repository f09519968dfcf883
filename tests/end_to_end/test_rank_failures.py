"""Whatever ends one rank ends the others within seconds, with its words, wherever they are; no launcher helps."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sharded_world
import tiny_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SCRIPT = Path(__file__).parent / "run_faulty_rank.py"
ENDS_WITHIN_S = 5.0

Start = Callable[..., list[subprocess.Popen[bytes]]]


@pytest.fixture
def start(model_dir: Path, server: tiny_world.EmbeddedServer, tmp_path: Path) -> Start:
    """Starts two ranks of which one breaks at a place in its second step."""

    def run(rank: int, place: str) -> list[subprocess.Popen[bytes]]:
        given = {
            "model": str(model_dir),
            "url": server.url,
            "output_dir": str(tmp_path),
            "rank": rank,
            "place": place,
            "settings": {
                "max_steps": 5,
                "per_device_train_batch_size": 2,
                "save_strategy": "steps",
                "save_steps": 1,
                "weight_sync_dir": str(tmp_path / "pushed"),
            },
        }
        (tmp_path / "pushed").mkdir()
        return sharded_world.start_ranks([sharded_world.PYTHON, str(SCRIPT), json.dumps(given)], 2, tmp_path)

    return run


def failures(output_dir: Path) -> dict[int, dict[str, Any]]:
    """What training raised on each rank that lived to say it, and how long after the break."""
    assert (output_dir / "broke").exists(), sharded_world.printed(output_dir, 2)[-6000:]
    broke_at = float((output_dir / "broke").read_text())
    found = {}
    for rank in range(2):
        path = output_dir / f"failure-{rank}.json"
        if path.exists():
            found[rank] = json.loads(path.read_text())
            found[rank]["after_s"] = found[rank]["time"] - broke_at
    return found


def wait_until_broken(output_dir: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + 60
    while not (output_dir / "broke").exists():
        assert time.monotonic() < deadline
        assert all(rank.poll() is None for rank in ranks), sharded_world.printed(output_dir, 2)
        time.sleep(0.02)


@pytest.mark.parametrize("place", ["backward", "callback", "saving"])
def test_an_error_of_rank_1_is_raised_on_it_and_said_on_rank_0(start: Start, tmp_path: Path, place: str) -> None:
    codes = sharded_world.wait_for(start(1, place), 100)
    assert codes == [1, 1]
    zero, one = failures(tmp_path)[0], failures(tmp_path)[1]
    assert (one["type"], one["text"]) == ("ValueError", f"no more of this at {place}")
    assert (zero["type"], zero["text"]) == ("RankError", f"rank 1 stopped: ValueError: no more of this at {place}")
    assert max(zero["after_s"], one["after_s"]) < ENDS_WITHIN_S
    # where it was on rank 1 stands in rank 0's output too, where people look
    assert "in reach" in (tmp_path / "rank-0.log").read_text()
    assert not list((tmp_path / "pushed").iterdir())


@pytest.mark.parametrize(("rank", "place"), [(1, "loss:kill"), (0, "callback:kill")])
def test_a_rank_that_is_killed_is_missed_by_the_other(start: Start, tmp_path: Path, rank: int, place: str) -> None:
    codes = sharded_world.wait_for(start(rank, place), 100)
    other = 1 - rank
    assert codes[rank] == -signal.SIGKILL
    assert codes[other] == 1
    said = failures(tmp_path)[other]
    assert said["type"] == "RankError"
    assert f"rank {rank} stopped: its process vanished" in said["text"]
    assert said["after_s"] < ENDS_WITHIN_S


def test_a_signal_ends_all_ranks_also_when_it_finds_one_inside_a_collective(start: Start, tmp_path: Path) -> None:
    ranks = start(1, "slice:alone")
    wait_until_broken(tmp_path, ranks)
    # both are now in collectives that nobody ends, unless it is ended from outside
    time.sleep(0.5)
    (tmp_path / "broke").write_text(str(time.time()))
    ranks[1].send_signal(signal.SIGTERM)
    assert sharded_world.wait_for(ranks, 60) == [1, 1]
    zero, one = failures(tmp_path)[0], failures(tmp_path)[1]
    assert one["type"] == "SystemExit"
    assert "SIGTERM" in zero["text"]
    assert max(zero["after_s"], one["after_s"]) < ENDS_WITHIN_S
