"""The faults of a run and what becomes of it, the processes of a cell, and what must be so when they have ended.

A run that `Goes` on ends as if nothing had been, but for rollouts that are recorded as dropped. One that `Ends` does
within `within_s` seconds, with that error and those words; the same command, given again, finishes it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_world
from forks import Forked, Forks
from ports import free_port

from verifiers.train.checkpoint.block_log import read_block_log

STAGES = {
    "generating": "the trainer waits for a block whose rollouts are in flight",
    "scoring": "a group of the block that the trainer waits for is being scored",
    "training": "in a forward pass; rollouts of the next block are in flight",
    "syncing": "the server is paused and is to load the weights; rollouts are in flight",
    "saving": "a checkpoint is half written; rollouts of the next block are in flight",
}


@dataclass(frozen=True, slots=True)
class Goes:
    """The run continues; rollouts that met the fault are recorded as dropped for this reason, or none are lost."""

    dropped: str | None = None

    def __str__(self) -> str:
        return f"continues; `{self.dropped}`" if self.dropped else "continues"


@dataclass(frozen=True, slots=True)
class Ends:
    """The run ends.

    Attributes:
        error: the error's class, or the command's word, in one line of the output; one of several.
        words: what else that line says, as a regular expression.
        code: of the process.
        within_s: from the fault to the end of the process.
    """

    error: str
    words: str = ""
    code: int = 1
    within_s: float = 5.0

    def __str__(self) -> str:
        if self.code < 0:
            return "ends"
        if self.error.endswith("Error"):
            return "ends: " + " or ".join(f"`{error}`" for error in self.error.split(" or "))
        return f"ends: \u201c{self.error}\u201d"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that breaks.

    Attributes:
        stages: in which it is tried: each fault in the stages that differ for it, each stage by several faults.
        other: the outcome in some stage, where that is another one.
    """

    meaning: str
    outcome: Goes | Ends
    stages: Sequence[str]
    other: Mapping[str, Goes | Ends]


def fault(meaning: str, outcome: Goes | Ends, *stages: str, **other: Goes | Ends) -> Fault:
    return Fault(meaning, outcome, stages, other)


# the deadlines that the tests set: a fault that only a deadline can find out takes as long
DEADLINE_S = 4.0


def _found_out(words: str) -> Ends:
    """By the next push, or by the rollouts in flight: whichever runs out of time first."""
    return Ends("WeightSyncError or NothingScoredError", words, within_s=5.0 + 2 * DEADLINE_S)


FAULTS = {
    "rollout raises": fault("the environment's code raises", Goes("environment_error"), "generating"),
    "reward raises": fault("a reward function raises", Goes("grading_error"), "scoring"),
    "environment hangs": fault("the environment's code never returns", Goes("timed_out"), "training"),
    "server 500s": fault("the server answers 500 for a moment", Goes(), "generating", "syncing"),
    "server hangs": fault(
        "the server's process is stopped: connections open, nothing is answered",
        _found_out("got no answer|did not answer|timed_out"),
        "generating",
        "saving",
        generating=Ends("NothingScoredError", "8 timed_out", within_s=5.0 + DEADLINE_S),
    ),
    "server dies": fault(
        "the server's process is killed and nobody starts it again",
        _found_out("did not reach|no rollout server was up"),
        "generating",
        "training",
        generating=Ends("NothingScoredError", "no rollout server was up", within_s=5.0 + DEADLINE_S),
    ),
    "server restarts": fault(
        "the server's process is killed and started again, with its first weights", Goes(), "training", "syncing"
    ),
    # a server that was started again is given the weights by another thread, in whatever stage the trainer is
    "sync fails": fault(
        "the server does not take the weights",
        Goes(),
        "scoring",
        "syncing",
        syncing=Ends("WeightSyncError", "did not reach the rollout server"),
    ),
    "generator thread killed": fault(
        "the thread that owns all rollouts ends",
        Ends("GenerationError", "generator's thread"),
        "generating",
        "scoring",
    ),
    "disk full at checkpoint": fault(
        "no room is left on the disk of the checkpoints, while one is written",
        Ends("CheckpointError", "checkpoint-4"),
        "saving",
    ),
    "rank 1 raises": fault(
        "user code raises on the second of two processes",
        Ends("RankError", "the second rank's own mistake"),
        "training",
        "syncing",
    ),
    "Ctrl-C": fault("SIGINT", Ends("interrupted", code=130), "scoring", "saving"),
    "SIGTERM": fault(
        "what a scheduler sends before it kills", Ends("ended by SIGTERM", code=143), "training", "syncing"
    ),
    "kill -9": fault("SIGKILL", Ends("", code=-9), "generating", "saving"),
}

CELLS = {(name, stage): one.other.get(stage, one.outcome) for name, one in FAULTS.items() for stage in one.stages}


def as_markdown() -> str:
    """Return the table as docs/concepts/faults.md has it."""
    lines = ["| what breaks | what the run does |", "|---|---|"]
    for name, one in FAULTS.items():
        others = "".join(f"; while {stage} {outcome}" for stage, outcome in one.other.items())
        lines.append(f"| **{name}**: {one.meaning} | {one.outcome}{others} |")
    return "\n".join(lines) + "\n"


# -- processes ----------------------------------------------------------------------------------------------------

OF_THE_SERVER = ("server 500s", "server hangs", "server dies", "server restarts", "sync fails")
# idle threads for users' own functions end by themselves; the last is the harness's
MAY_BE_LEFT = {"verifiers-weight check", "verifiers-reward function", "killer"}
LONGEST_S = 150.0


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
        assert tiny_world.ended(record) == sorted(map(tuple, plan))
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
