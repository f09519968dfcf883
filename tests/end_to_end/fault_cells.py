"""The processes of a cell of the fault matrix, and what must be so when they have ended."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fault_matrix import DEADLINE_S, Ends
from forks import Forked, Forks

from verifiers.train.checkpoint.block_log import read_block_log

__all__ = [
    "MAY_BE_LEFT",
    "World",
    "assert_ended_as",
    "assert_every_row_is_accounted_for",
    "assert_in_time",
    "assert_no_files_are_left",
    "assert_nothing_is_left",
    "assert_recorded",
    "go_on",
    "settings_of",
]

OF_THE_SERVER = ("server 500s", "server hangs", "server dies", "server restarts", "sync fails")
# idle threads for users' own functions end by themselves; the last is the harness's
MAY_BE_LEFT = {"verifiers-weight check", "verifiers-reward function", "killer"}
LONGEST_S = 150.0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


class World:
    """The processes of one cell: a server, and runs that share an output directory."""

    def __init__(self, forks: Forks, directory: Path, model: Path, fault: str, stage: str) -> None:
        self._forks, self.directory, self._model = forks, directory, model
        self.fault, self.stage = fault, stage
        self._port = free_port()
        self._started: list[Forked] = []
        self.server: Any = None
        self.serve()

    def wait(self, process: Forked) -> int:
        return self._forks.wait(process, LONGEST_S)

    def serve(self) -> None:
        """Start the server; one that is there is killed."""
        if self.server is not None:
            self._forks.end(self.server)
        (self.directory / "listening").unlink(missing_ok=True)
        given = {"directory": str(self.directory), "model": str(self._model), "port": self._port}
        self.server = self._start("serve", given, "server.log")

    def train(self, ranks: int = 1, **settings: Any) -> Forked:
        """Start the run; on several ranks, what is started is their launcher."""
        self.wait_for("listening", self.server)
        (self.directory / "mode").unlink(missing_ok=True)
        for path in self.directory.glob("ended-*"):
            path.unlink()
        scratch = self.directory / "tmp"
        scratch.mkdir(exist_ok=True)
        given = {
            "directory": str(self.directory),
            "output_dir": str(self.directory / "run"),
            "model": str(self._model),
            "url": f"http://127.0.0.1:{self._port}/v1",
            "fault": self.fault,
            "stage": self.stage,
            "settings": {
                "server_restart_timeout": DEADLINE_S,
                "per_device_train_batch_size": 4 // ranks,
                **settings,
            },
        }
        environ = {"TMPDIR": str(scratch), "ACCELERATE_USE_CPU": "true"}
        return self._start("train", given, "run.log", environ, ranks)

    def pids(self) -> dict[int, int]:
        """Return the processes that trained last, by rank."""
        return {int(path.name.removeprefix("pid-")): int(path.read_text()) for path in self.directory.glob("pid-*")}

    def _start(
        self, what: str, given: dict[str, Any], log: str, environ: dict[str, str] | None = None, ranks: int = 1
    ) -> Forked:
        started = self._forks.start(f"fault_world:{what}", given, self.directory / log, environ, ranks)
        self._started.append(started)
        return started

    def wait_for(self, name: str, process: Forked) -> None:
        self._wait_until((self.directory / name).exists, process)

    def _wait_until(self, condition: Callable[[], bool], process: Forked) -> None:
        until = time.monotonic() + LONGEST_S
        while not condition():
            assert process.code is None, process.log.read_text()[-3000:]
            assert time.monotonic() < until, f"it never came: {process.log.read_text()[-3000:]}"
            time.sleep(0.002)

    def inject(self, run: Forked, rank: int = 0) -> None:
        """Break what the cell says, once the run is in the stage.

        Args:
            run: what `train` gave. A terminal sends Ctrl-C to all of its processes, a scheduler SIGTERM to the first.
            rank: which rank is killed.
        """
        self.wait_for("reached", run)
        if self.fault == "kill -9":
            os.kill(self.pids()[rank], signal.SIGKILL)
        elif self.fault == "Ctrl-C":
            os.killpg(run.pid, signal.SIGINT)
        elif self.fault == "SIGTERM":
            run.kill(signal.SIGTERM)
        elif self.fault == "server 500s":
            kind = "weights 1" if self.stage == "syncing" else "generation 3"
            self._put("mode", kind)
        elif self.fault == "server hangs":
            self.server.kill(signal.SIGSTOP)
        elif self.fault == "server dies":
            self._forks.end(self.server)
        elif self.fault == "server restarts" or (self.fault == "sync fails" and self.stage != "syncing"):
            if self.fault == "sync fails":
                self._put("mode", "weights 1")
            self.serve()
            if self.fault == "sync fails":
                self._wait_until(lambda: (self.directory / "mode").read_text() == "weights 0", run)
        elif self.fault not in OF_THE_SERVER:
            # by the run itself
            self.wait_for("injected", run)
            return
        self._put("injected", repr(time.monotonic()))

    def interrupt_twice(self, run: Forked, apart_s: float) -> None:
        self.wait_for("reached", run)
        run.kill(signal.SIGINT)
        first_at = time.monotonic()
        time.sleep(apart_s)
        # the rollouts that wait for the fault are being ended
        assert run.code is None
        run.kill(signal.SIGINT)
        self._put("injected", repr(first_at))

    def _put(self, name: str, text: str) -> None:
        partial = self.directory / f"{name}.new"
        partial.write_text(text)
        partial.rename(self.directory / name)

    def ended(self, rank: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / f"ended-{rank}.json").read_text())
        return found

    def record(self) -> dict[str, Any]:
        """Return what the run says of itself."""
        found: dict[str, Any] = json.loads((self.directory / "run" / "run.json").read_text())
        return found

    def server_is_paused(self) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/is_paused", timeout=5.0) as answer:
            paused: bool = json.load(answer)["is_paused"]
        return paused

    def injected_at(self) -> float:
        return float((self.directory / "injected").read_text())

    def close(self) -> None:
        for process in self._started:
            self._forks.end(process)


def assert_nothing_is_left(world: World) -> None:
    """Rank 0 has closed the run: no thread, no connection, no file."""
    ended = world.ended()
    # a thread that asks a server that hangs ends when its question runs out of time
    may_be_left = MAY_BE_LEFT | ({"verifiers-servers"} if world.fault == "server hangs" else set())
    assert set(ended["threads"]) <= may_be_left, ended["threads"]
    if len(world.pids()) == 1:
        # several have some of torch's until the process ends
        assert ended["sockets"] <= len(may_be_left.intersection(ended["threads"]) - MAY_BE_LEFT)
    assert_no_files_are_left(world)


def assert_no_files_are_left(world: World) -> None:
    assert list((world.directory / "tmp").iterdir()) == []
    for pid in world.pids().values():
        assert list(Path("/dev/shm").glob(f"verifiers-weights-{pid}-*")) == []
        assert not Path(f"/proc/{pid}").exists()
    if world.fault != "disk full at checkpoint":
        # where there is no room, what could not be written stays until it is
        assert not [path for path in (world.directory / "run").rglob("*") if "partial" in path.name]


def block_log(world: World) -> list[dict[str, Any]]:
    return read_block_log(world.directory / "run")


def assert_every_row_is_accounted_for(world: World) -> dict[str, int]:
    """Each planned rollout ended once, in order; gives how many were dropped, by reason."""
    planned, dropped = world.ended()["planned"], dict[str, int]()
    records = block_log(world)
    assert [record["block_id"] for record in records] == list(range(len(planned)))
    for record, plan in zip(records, planned, strict=True):
        ended = record["trained"] + [[item["example_id"], item["generation"]] for item in record["dropped"]]
        assert sorted(ended) == sorted(plan)
        for item in record["dropped"]:
            dropped[item["reason"]] = dropped.get(item["reason"], 0) + 1
    return dropped


def crowding() -> float:
    """Return how much longer a second of work takes while other work shares the processors; 1 on an idle machine."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def assert_in_time(cell: Callable[[], float]) -> None:
    """Run a cell, which gives the time it took as a share of its bound.

    One that was late on a crowded machine is run once more, and may then take four times its bound at most.
    """
    share = cell()
    if share >= 1.0 and crowding() > 1.0:
        share = cell() / min(4.0, crowding())
    assert share < 1.0


def assert_ended_as(world: World, run: Forked, expected: Ends, codes: Sequence[int] = ()) -> float:
    """Assert that the process has ended with the cause; return the time that took as a share of the bound."""
    code = world.wait(run)
    said = run.log.read_text()
    assert code in (codes or (expected.code,)), said[-3000:]
    told = [line for line in said.splitlines() or [""] if re.search(expected.words, line)]
    assert told, said[-3000:]
    # a kind of WeightSyncError, where it is the probe that meets it
    words = [*expected.error.split(" or "), *(["NoAnswerError"] if "WeightSyncError" in expected.error else [])]
    assert any(word in line for word in words for line in told), told
    return (run.ended_at - world.injected_at()) / expected.within_s


def settings_of(fault: str) -> dict[str, Any]:
    hangs = {"rollout_timeout": DEADLINE_S, "weight_sync_timeout": DEADLINE_S}
    if fault in ("environment hangs", "server hangs"):
        return hangs
    return {"server_restart_timeout": 30.0} if fault in ("server restarts", "sync fails") else {}


def assert_recorded(world: World) -> None:
    """run.json says that the run has ended, where that could be written."""
    if world.fault not in ("kill -9", "disk full at checkpoint"):
        assert world.record()["status"] == "stopped"


def go_on(world: World, ranks: int = 1, **settings: Any) -> None:
    """Give the same command again, where nothing is broken any more."""
    if world.fault in ("server hangs", "server dies"):
        world.serve()
    world.fault = world.stage = ""
    run = world.train(ranks, **settings)
    assert world.wait(run) == 0, run.log.read_text()[-3000:]
    assert_nothing_is_left(world)
