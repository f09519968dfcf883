"""What becomes of a push that a server refuses: asked again, waited for, loaded until it is whole, or the end."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from fleet_world import NEVER_PUSHED, SOME, loads, restarted, until

from verifiers.errors import WeightSyncError
from verifiers.testing import FakeOpenAIServer, Fault
from verifiers.train.weight_sync import DirectorySync, Fleet, ServerControl
from verifiers.train.weight_sync.fleet import Held
from verifiers.train.weight_sync.server import RefusedError

pytestmark = pytest.mark.usefixtures("in_fast_motion")


@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/update_weight_version", "/resume"])
def test_an_error_that_passes_does_not_end_the_push(tmp_path: Path, path: str, status: int) -> None:
    faults = {path: [Fault(status, times=2)]}
    with FakeOpenAIServer(weight_version=NEVER_PUSHED, route_faults=faults) as server:
        sync = DirectorySync(server.url, str(tmp_path), timeout_s=5.0)
        sync.connect(5.0)
        sync.push(SOME.items(), 1)
        assert server.weight_version == 1
        assert not server.paused
        # it stayed paused in between: nothing was sampled from weights that were half loaded
        assert [call.path for call in server.weight_calls if call.path in ("/pause", "/resume")].count("/pause") == (
            3 if path == "/pause" else 1
        )
        sync.close()


@pytest.mark.parametrize(("status", "times"), [(500, 4), (400, 1), (501, 1)])
def test_an_error_that_stays_or_cannot_pass_ends_the_push(tmp_path: Path, status: int, times: int) -> None:
    faults = {"/collective_rpc": [Fault(status, times=times, body="out of order")]}
    with FakeOpenAIServer(weight_version=NEVER_PUSHED, route_faults=faults) as server:
        sync = DirectorySync(server.url, str(tmp_path), timeout_s=5.0)
        sync.connect(5.0)
        with pytest.raises(WeightSyncError, match="out of order"):
            sync.push(SOME.items(), 1)
        assert loads(server) == times
        assert not server.paused
        sync.close()


def test_what_may_not_be_repeated_is_not(tmp_path: Path) -> None:
    tries: list[float] = []

    def load(server: ServerControl, timeout_s: float) -> None:
        tries.append(timeout_s)
        raise RefusedError("it stands in a collective", 500)

    with FakeOpenAIServer() as server:
        fleet = Fleet([server.url], timeout_s=5.0)
        with pytest.raises(WeightSyncError, match="collective"):
            fleet.push(Held(1, load, repeatable=False))
        assert len(tries) == 1
        assert not server.paused


class Layers:
    """A load that breaks off leaves layers open, and the next one closes them with tensors of both, as vLLM does."""

    def __init__(self, broken: int) -> None:
        self.broken = broken
        self.are_open = False
        self.held = "old"

    def load(self, server: ServerControl, timeout_s: float) -> None:
        if self.broken:
            self.broken -= 1
            self.are_open = True
            raise RefusedError("the disk hiccups", 500)
        self.held = "torn" if self.are_open else "whole"
        self.are_open = False


@pytest.mark.parametrize("broken", [0, 1, 3])
def test_weights_are_whole_after_loads_that_broke_off(servers: list[FakeOpenAIServer], broken: int) -> None:
    layers = Layers(broken)
    fleet = Fleet([servers[0].url], timeout_s=5.0)
    fleet.push(Held(1, layers.load))
    assert layers.held == "whole"
    # whoever pushes proves by a probe that they are
    assert fleet.repeated_loads == (1 if broken else 0)
    assert servers[0].weight_version == 1


def test_whoever_pushes_after_a_load_that_stayed_broken_loads_until_the_weights_are_whole(
    servers: list[FakeOpenAIServer],
) -> None:
    layers, url = Layers(4), servers[0].url
    fleet = Fleet([url], timeout_s=5.0)
    with pytest.raises(WeightSyncError, match="hiccups"):
        fleet.push(Held(1, layers.load))
    assert not servers[0].paused
    # the next run does not know what this one met, but for the name of the weights
    Fleet([url], timeout_s=5.0).push(Held(1, layers.load))
    assert layers.held == "whole"
    layers.broken = 5
    with pytest.raises(WeightSyncError, match="hiccups"):
        fleet.push(Held(2, layers.load))
    fleet._giving._ending.set()
    with pytest.raises(WeightSyncError, match="hiccups"):
        fleet.push(Held(3, layers.load))
    assert layers.broken == 0
    fleet.push(Held(4, layers.load))
    assert layers.held == "whole"


def test_the_watch_too_loads_until_the_weights_are_whole(servers: list[FakeOpenAIServer]) -> None:
    layers = Layers(0)
    fleet = Fleet([servers[0].url], timeout_s=5.0)
    fleet.push(Held(1, layers.load))
    restarted(servers[0])
    layers.broken, layers.held = 4, "first"
    member = fleet._members[0]
    with pytest.raises(WeightSyncError, match="hiccups"):
        fleet._watch.look_after(member)
    fleet._watch.look_after(member)
    assert layers.held == "whole"
    assert servers[0].weight_version == 1
    assert fleet.repeated_loads > fleet.restarts == 1


def test_an_engine_that_crashed_is_waited_for_as_one_that_starts_again(tmp_path: Path) -> None:
    """Its server answers 500 for a moment before it ends."""
    questions_left = 3

    def health(number: int) -> Fault | None:
        nonlocal questions_left
        if number == 0:
            return None
        questions_left -= 1
        return Fault(503) if questions_left > 0 else None

    def load(number: int) -> Fault | None:
        return Fault(500, body="EngineDead") if number > 0 and questions_left > 0 else None

    faults = {"/collective_rpc": load, "/health": health}
    with FakeOpenAIServer(weight_version=NEVER_PUSHED, route_faults=faults) as server:
        sync = DirectorySync(server.url, str(tmp_path), timeout_s=5.0)
        sync.connect(5.0)
        sync.push(SOME.items(), 1)
        sync.push(SOME.items(), 2)
        assert server.weight_version == 2
        assert not server.paused
        sync.close()


def test_what_a_server_refused_is_not_given_to_one_that_comes_back(tmp_path: Path) -> None:
    faults = {"/collective_rpc": [None, Fault(400, body="no tensor of that name")]}
    with FakeOpenAIServer(weight_version=NEVER_PUSHED, route_faults=faults) as server:
        sync = DirectorySync(server.url, str(tmp_path), timeout_s=5.0)
        sync.connect(5.0)
        sync.push(SOME.items(), 1)
        with pytest.raises(WeightSyncError, match="no tensor of that name"):
            sync.push(SOME.items(), 2)
        assert not server.paused
        restarted(server)
        until(lambda: server.weight_version == 1)
        last = [call for call in server.weight_calls if call.path == "/collective_rpc"][-1]
        assert last.body["kwargs"]["weights_path"].endswith("version-1")
        sync.close()


def test_a_slow_answer_to_the_question_of_the_version_does_not_end_a_push(
    servers: list[FakeOpenAIServer], sync: DirectorySync
) -> None:
    sync.push(SOME.items(), 1)
    control = sync.fleet._members[0].control
    given: list[float] = []

    def noting(timeout_s: float | None = None) -> str:
        if threading.current_thread().name != "verifiers-fleet":
            given.append(timeout_s or 0.0)
        return "1"

    control.weight_version = noting  # type: ignore[method-assign]
    sync.fleet.timeout_s = 60.0
    sync.push(SOME.items(), 2)
    assert given
    assert min(given) > 50.0
