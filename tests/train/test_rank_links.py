"""What ranks hear of each other on their lines."""

from __future__ import annotations

import dataclasses
import errno
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from verifiers.train.rank_links import HubLinks, LeafLinks, Links, RankFailure, WireAddress, join_hub, open_hub

FAILURE = RankFailure(1, "ValueError: no", "Traceback\n  here")


class World:
    """Rank 0 and the ranks that joined it, each with the failures that it heard of."""

    def __init__(self) -> None:
        self.hub, self.address = open_hub()
        self.heard: dict[int, list[RankFailure]] = {}
        self.links: list[Links] = []
        self._add(self.hub)

    def join(self, rank: int) -> LeafLinks:
        leaf = join_hub(rank, self.address, 5.0)
        self._add(leaf)
        self.until(lambda: rank in self.hub._lines)
        return leaf

    def until(self, reached: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Let every rank read its lines until something is so."""
        deadline = time.monotonic() + timeout_s
        while not reached():
            assert time.monotonic() < deadline
            self.read()

    def read(self) -> None:
        for links in self.links:
            for key, _ in links.selector.select(0.01):
                links.handle(key.fileobj)

    def _add(self, links: Links) -> None:
        self.links.append(links)
        self.heard[links.rank] = []
        links.on_failure = self.heard[links.rank].append

    def leave(self, links: Links) -> None:
        """As when a process dies: its system closes its lines."""
        self.links.remove(links)
        links.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for links in list(made.links):
        made.leave(links)


@pytest.fixture(autouse=True)
def on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def test_a_failure_of_any_rank_reaches_all_others_and_not_itself(world: World) -> None:
    one, two = world.join(1), world.join(2)
    one.say_failure(FAILURE)
    world.until(lambda: bool(world.heard[0] and world.heard[2]))
    assert world.heard == {0: [FAILURE], 1: [], 2: [FAILURE]}
    assert FAILURE.sentence == "rank 1 stopped: ValueError: no"
    world.hub.say_failure(RankFailure(0, "own"))
    world.until(lambda: bool(world.heard[1]) and len(world.heard[2]) == 2)
    assert world.heard[1] == [RankFailure(0, "own")]
    assert isinstance(two, LeafLinks)


def test_a_rank_that_dies_is_missed_by_all_and_one_that_is_done_by_none(world: World) -> None:
    one, _, three = world.join(1), world.join(2), world.join(3)
    three.say_ended()
    world.until(lambda: 3 in world.hub.ended)
    world.leave(three)
    world.leave(one)
    world.until(lambda: bool(world.heard[0] and world.heard[2]))
    assert [failure.rank for failure in world.heard[0] + world.heard[2]] == [1, 1]
    assert "vanished" in world.heard[0][0].text


def test_rank_0_is_missed_where_it_dies_and_not_where_it_is_done(world: World) -> None:
    world.join(1)
    world.leave(world.hub)
    world.until(lambda: bool(world.heard[1]))
    assert world.heard[1][0].rank == 0

    other = World()
    leaf = other.join(1)
    other.hub.say_ended()
    other.until(lambda: 0 in leaf.ended)
    other.leave(other.hub)
    other.until(lambda: not leaf.selector.get_map())
    assert other.heard[1] == []
    other.leave(leaf)


def test_strangers_on_the_port_are_sent_away_and_change_nothing(world: World) -> None:
    one = world.join(1)
    address = world.address
    stranger = join_hub(2, dataclasses.replace(address, token="guessed"), 5.0)
    with socket.create_connection((address.host, address.port)) as rude:
        rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
        world.until(lambda: rude_was_closed(rude))
    world.until(lambda: bool(stranger.selector.select(0)))
    assert set(world.hub._lines) == {1}
    assert world.heard == {0: [], 1: []}
    one.say_failure(FAILURE)
    world.until(lambda: bool(world.heard[0]))
    stranger.close()


def test_a_process_that_may_open_no_more_files_hears_its_ranks_all_the_same(world: World) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    one, listener = world.join(1), world.hub._listener
    world.hub._listener = SimpleNamespace(accept=refuse)  # type: ignore[assignment]
    try:
        world.hub.handle(world.hub._listener)
    finally:
        world.hub._listener = listener
    one.say_failure(FAILURE)
    world.until(lambda: bool(world.heard[0]))
    assert world.join(2).rank == 2


def rude_was_closed(line: socket.socket) -> bool:
    line.setblocking(False)
    try:
        return line.recv(10) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_a_long_traceback_is_cut_to_its_end(world: World) -> None:
    one = world.join(1)
    one.say_failure(RankFailure(1, "x" * 10**6, "begin" + "y" * 10**6 + "end"))
    world.until(lambda: bool(world.heard[0]))
    assert world.heard[0][0].traceback.endswith("end")
    assert len(world.heard[0][0].text) < 10**4


def test_ranks_of_several_hosts_meet_at_the_address_that_torch_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    hub, address = open_hub()
    try:
        assert address.host == "localhost"
        assert isinstance(hub, HubLinks)
        assert isinstance(address, WireAddress)
    finally:
        hub.close()
