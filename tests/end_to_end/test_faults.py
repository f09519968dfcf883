"""The fault matrix, each cell with real processes: a run goes on or ends with its cause, and loses no row unsaid.

The cells and what they expect stand in `fault_matrix.py`; what runs in `fault_world.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_matrix import CELLS, DEADLINE_S, FAULTS, STAGES, Cell, Ends, Goes, Never, as_markdown
from forks import Forked, Forks, fork_parent

SIGNALS = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM, "kill -9": signal.SIGKILL}
OF_THE_SERVER = ("server 500s", "server hangs", "server dies", "server restarts", "sync fails")
# idle threads for users' own functions end by themselves; the last is the harness's
MAY_BE_LEFT = {"verifiers-weight check", "verifiers-reward function", "killer"}
LONGEST_S = 60.0


def test_every_fault_in_every_stage_has_a_cell() -> None:
    assert set(CELLS) == {(fault, stage) for fault in FAULTS for stage in STAGES}
    assert len(CELLS) == 14 * 5
    assert all(cell.why for cell in CELLS.values() if isinstance(cell, Never))


def test_the_documented_table_is_the_tested_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "faults.md").read_text()
    assert as_markdown() in page
    for stage, meaning in STAGES.items():
        assert f"- **{stage}**: {meaning}" in page


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with fork_parent("fault_world") as running:
        yield running


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

    def train(self, rank: int = 0, environ: dict[str, str] | None = None, **settings: Any) -> Forked:
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
            "settings": {"server_restart_timeout": DEADLINE_S, **settings},
        }
        return self._start("train", given, f"run-{rank}.log", {"TMPDIR": str(scratch), **(environ or {})})

    def train_ranks(self, ranks: int = 2) -> list[Forked]:
        """One run on several processes, as a launcher starts them."""
        common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": str(free_port()), "ACCELERATE_USE_CPU": "true"}
        return [
            self.train(rank, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, per_device_train_batch_size=2)
            for rank in range(ranks)
        ]

    def _start(self, what: str, given: dict[str, Any], log: str, environ: dict[str, str] | None = None) -> Forked:
        started = self._forks.start(f"fault_world:{what}", given, self.directory / log, environ)
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

    def inject(self, run: Forked) -> None:
        """Break what the cell says, once the run is in the stage."""
        self.wait_for("reached", run)
        if self.fault in SIGNALS:
            run.kill(SIGNALS[self.fault])
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

    def _put(self, name: str, text: str) -> None:
        partial = self.directory / f"{name}.new"
        partial.write_text(text)
        partial.rename(self.directory / name)

    def ended(self, rank: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / f"ended-{rank}.json").read_text())
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


@pytest.fixture
def make_world(forks: Forks, tmp_path: Path, model_dir: Path) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def make(fault: str, stage: str) -> World:
            world = World(forks, tmp_path, model_dir, fault, stage)
            stack.callback(world.close)
            return world

        yield make


def assert_nothing_is_left(world: World, run: Forked, rank: int = 0) -> None:
    ended = world.ended(rank)
    # who watches a server that hangs hears of the end when its question runs out of time
    may_be_left = MAY_BE_LEFT | ({"verifiers-fleet"} if world.fault == "server hangs" else set())
    assert set(ended["threads"]) <= may_be_left, ended["threads"]
    if world.fault != "rank 1 raises":
        # the ranks' own are torch's until the process ends
        assert ended["sockets"] <= ("verifiers-fleet" in ended["threads"])
    assert_no_files_are_left(world, run)


def assert_no_files_are_left(world: World, run: Forked) -> None:
    assert list((world.directory / "tmp").iterdir()) == []
    assert list(Path("/dev/shm").glob(f"verifiers-weights-{run.pid}-*")) == []
    if world.fault != "disk full at checkpoint":
        # where there is no room, what could not be written stays until it is
        assert not [path for path in (world.directory / "run").rglob("*") if "partial" in path.name]


def ledger(world: World) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (world.directory / "run" / "blocks.jsonl").read_text().splitlines()]


def assert_every_row_is_accounted_for(world: World) -> dict[str, int]:
    """Each planned rollout ended once, in order; gives how many were dropped, by reason."""
    planned, dropped = world.ended()["planned"], dict[str, int]()
    records = ledger(world)
    assert [record["block_id"] for record in records] == list(range(len(planned)))
    for record, plan in zip(records, planned, strict=True):
        ended = record["trained"] + [[item["example_id"], item["generation"]] for item in record["dropped"]]
        assert sorted(ended) == sorted(plan)
        for item in record["dropped"]:
            dropped[item["reason"]] = dropped.get(item["reason"], 0) + 1
    return dropped


def crowding() -> float:
    """How much longer a second of work takes because others want the processors too; 1 on a machine of one's own."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def settings_of(fault: str) -> dict[str, Any]:
    hangs = {"rollout_timeout": DEADLINE_S, "weight_sync_timeout": DEADLINE_S}
    if fault in ("environment hangs", "server hangs"):
        return hangs
    return {"server_restart_timeout": 30.0} if fault in ("server restarts", "sync fails") else {}


def cells() -> Iterator[Any]:
    for (fault, stage), cell in CELLS.items():
        if not isinstance(cell, Never):
            yield pytest.param(fault, stage, cell, id=f"{fault} while {stage}")


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("fault", "stage", "cell"), list(cells()))
def test_a_run_goes_on_or_ends_with_its_cause(make_world: Any, fault: str, stage: str, cell: Cell) -> None:
    world = make_world(fault, stage)
    runs = world.train_ranks() if fault == "rank 1 raises" else [world.train(**settings_of(fault))]
    world.inject(runs[0])
    for rank, run in enumerate(runs):
        code = world.wait(run)
        said = run.log.read_text()
        took_s = run.ended_at - world.injected_at()
        if isinstance(cell, Goes):
            assert code == 0, said[-3000:]
        else:
            assert isinstance(cell, Ends)
            assert code == cell.code, said[-3000:]
            told = [line for line in said.splitlines() or [""] if re.search(cell.words, line)]
            assert told, said[-3000:]
            # a kind of WeightSyncError, where it is the probe that meets it
            words = [*cell.error.split(" or "), *(["NoAnswerError"] if "WeightSyncError" in cell.error else [])]
            assert rank > 0 or any(word in line for word in words for line in told), told
            assert took_s < cell.within_s * crowding()
        if fault != "kill -9":
            assert_nothing_is_left(world, run, rank)
    if fault not in ("server hangs", "server dies", "kill -9"):
        assert not world.server_is_paused()
    if isinstance(cell, Ends):
        go_on(world, runs[0])
    dropped = assert_every_row_is_accounted_for(world)
    expected = {cell.dropped} if isinstance(cell, Goes) and cell.dropped else set()
    assert set(dropped) == expected


def go_on(world: World, ended: Forked) -> None:
    """The same command again, where nothing is broken any more."""
    if world.fault in ("server hangs", "server dies"):
        world.serve()
    world.fault = world.stage = ""
    again = world.train()
    assert world.wait(again) == 0, again.log.read_text()[-3000:]
    assert_nothing_is_left(world, again)
    assert_no_files_are_left(world, ended)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_an_environment_that_blocks_the_event_loop_ends_the_run_at_the_deadline(make_world: Any) -> None:
    world = make_world("environment blocks", "training")
    run = world.train(async_generation_timeout=DEADLINE_S)
    world.inject(run)
    assert world.wait(run) == 1
    assert "DeadlineError: block 3 was not ready within 2.5 s" in run.log.read_text()
    assert run.ended_at - world.injected_at() < (5.0 + DEADLINE_S) * crowding()
    # it sleeps on in its thread, which ends with the process
    assert set(world.ended()["threads"]) <= {*MAY_BE_LEFT, "verifiers-generator"}
    assert_no_files_are_left(world, run)
