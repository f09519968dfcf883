"""The NCCL kind against a stand-in for vLLM's workers, which unpack as vLLM's own consumer does."""

from __future__ import annotations

import base64
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from verifiers.errors import WeightSyncError
from verifiers.inference import server_pool
from verifiers.testing import FakeOpenAIServer, Fault
from verifiers.train.weight_sync import nccl
from verifiers.train.weight_sync.nccl import NcclSync
from verifiers.train.weight_sync.protocol import WeightSync

WEIGHTS = {
    "embed": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "norm": torch.ones(5, dtype=torch.bfloat16),
    "head": torch.arange(6, dtype=torch.float16).reshape(2, 3).t(),
}


class Recorded:
    """A group that keeps what is broadcast."""

    def __init__(self) -> None:
        self.joined: tuple[bytes, int] | None = None
        self.buffers: list[torch.Tensor] = []

    def unique_id(self) -> bytes:
        return bytes(range(128))

    def join(self, unique_id: bytes, world_size: int) -> None:
        self.joined = (unique_id, world_size)

    def broadcast(self, buffer: torch.Tensor) -> None:
        self.buffers.append(buffer.clone())

    def wait(self, deadline: float) -> None:
        return


class Groups(list[Recorded]):
    """The groups that were made, the newest last."""

    def make(self) -> Recorded:
        self.append(Recorded())
        return self[-1]


def received(update: dict[str, Any], buffers: list[torch.Tensor], buffer_bytes: int) -> dict[str, torch.Tensor]:
    """Return what vLLM's workers make of the buffers: they cut by the sizes that the update names."""
    left, out = list(buffers), {}
    group: list[tuple[str, list[int], torch.dtype]] = []
    size = 0

    def flush() -> None:
        nonlocal size
        buffer, place = left.pop(0), 0
        assert buffer.numel() == size
        for name, shape, dtype in group:
            count = math.prod(shape) * dtype.itemsize
            out[name] = buffer[place : place + count].clone().view(dtype).view(shape)
            place += count
        group.clear()
        size = 0

    for name, dtype_name, shape in zip(update["names"], update["dtype_names"], update["shapes"], strict=True):
        dtype = getattr(torch, dtype_name)
        group.append((name, shape, dtype))
        size += math.prod(shape) * dtype.itemsize
        if size > buffer_bytes:
            flush()
    if group:
        flush()
    assert not left
    return out


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeOpenAIServer]:
    ask = nccl.ServerClient.request

    async def with_world_size(self: Any, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        # the fake has no such route
        return {"world_size": 4} if path == "/get_world_size" else await ask(self, method, path, *args, **kwargs)

    monkeypatch.setattr(nccl.ServerClient, "request", with_world_size)
    with FakeOpenAIServer(weight_version="default") as fake:
        yield fake


def calls(server: FakeOpenAIServer, path: str) -> list[Any]:
    return [call.body for call in server.weight_calls if call.path == path]


@pytest.mark.parametrize("buffer_bytes", [1, 48, 10**6])
def test_the_workers_get_every_tensor_whatever_the_size_of_a_buffer(
    server: FakeOpenAIServer, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int
) -> None:
    monkeypatch.setattr(nccl, "BUFFER_BYTES", buffer_bytes)
    group = Recorded()
    sync = NcclSync(server.url, make_group=lambda: group)
    sync.push(WEIGHTS.items(), 3)
    (update,) = calls(server, "/update_weights")
    found = received(update["update_info"], group.buffers, buffer_bytes)
    assert list(found) == list(WEIGHTS)
    assert all(torch.equal(found[name], tensor) for name, tensor in WEIGHTS.items())
    (init,) = calls(server, "/init_weight_transfer_engine")
    assert base64.b64decode(init["init_info"].pop("nccl_unique_id_b64")) == bytes(range(128))
    assert init["init_info"] == {
        "rank_offset": 1,
        "world_size": 5,
        "packed": True,
        "packed_buffer_size_bytes": buffer_bytes,
        "packed_num_buffers": 2,
    }
    assert group.joined == (bytes(range(128)), 5)
    sync.close()


@pytest.mark.parametrize("answer", [{}, None, [4], {"world_size": "4"}, {"world_size": 0}])
def test_a_server_that_does_not_tell_its_workers_is_named(
    server: FakeOpenAIServer, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    ask = nccl.ServerClient.request

    async def request(self: Any, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        return answer if path == "/get_world_size" else await ask(self, method, path, *args, **kwargs)

    monkeypatch.setattr(nccl.ServerClient, "request", request)
    sync = NcclSync(server.url, make_group=Recorded)
    with pytest.raises(WeightSyncError, match=r"get_world_size says .*, which is no number of workers"):
        sync.push(WEIGHTS.items(), 3)
    sync.close()


def test_the_order_of_routes_is_vllms_and_the_group_is_made_once(server: FakeOpenAIServer) -> None:
    made = Groups()
    sync = NcclSync(server.url, make_group=made.make)
    assert isinstance(sync, WeightSync)
    sync.push(WEIGHTS.items(), 1)
    sync.push(WEIGHTS.items(), 2)
    paths = [call.path for call in server.weight_calls if call.path != "/weight_info"]
    first = ["/pause", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"]
    rest = ["/finish_weight_update", "/reset_prefix_cache", "/update_weight_version", "/resume"]
    assert paths == [*first, *rest, *(path for path in [*first, *rest] if path != first[1])]
    assert len(made) == 1
    assert server.weight_version == 2
    sync.close()


def test_a_restarted_server_joins_again_and_gets_the_kept_copy(server: FakeOpenAIServer) -> None:
    made = Groups()
    sync = NcclSync(server.url, make_group=made.make)
    live = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    sync.push(live.items(), 1)
    for tensor in live.values():
        tensor.zero_()
    server.weight_version = "default"
    assert sync.pool.run(sync.pool.wait_until_restored(server.url, 30.0))
    assert len(made) == 2
    again = received(calls(server, "/update_weights")[1]["update_info"], made[1].buffers, nccl.BUFFER_BYTES)
    assert all(torch.equal(again[name], tensor) for name, tensor in WEIGHTS.items())
    sync.close()


def test_weights_that_are_loaded_twice_travel_in_one_group(server: FakeOpenAIServer) -> None:
    made = Groups()
    # as a run before this one left it
    server.weight_version = "partially-loaded"
    sync = NcclSync(server.url, make_group=made.make)
    sync.push(WEIGHTS.items(), 1)
    assert len(calls(server, "/update_weights")) == 2
    assert len(made) == len(calls(server, "/init_weight_transfer_engine")) == 1
    sync.close()


def test_a_refusal_is_raised_while_the_broadcast_hangs(
    server: FakeOpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the server answers at once, on a machine that is not crowded
    monkeypatch.setattr(server_pool, "SHUTDOWN_S", 20.0)
    monkeypatch.setattr(server_pool, "HEALTH_S", 20.0)
    never = threading.Event()

    class Hanging(Recorded):
        def wait(self, deadline: float) -> None:
            never.wait(120)

    with FakeOpenAIServer(route_faults={"/update_weights": Fault(500, body="out of memory", times=9)}) as broken:
        sync = NcclSync(broken.url, make_group=Hanging, timeout_s=60.0)
        with pytest.raises(WeightSyncError, match=r"step 1 did not reach .*update_weights.*out of memory"):
            sync.push(WEIGHTS.items(), 1)
        assert not broken.paused
        never.set()
        sync.close()


def test_a_collective_that_never_ends_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()

    async def answer(self: Any, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        # without a round trip, so that nothing but the collective takes time
        return {"weight_version": "default", "world_size": 1}

    monkeypatch.setattr(nccl.ServerClient, "request", answer)

    class Hanging(Recorded):
        def join(self, unique_id: bytes, world_size: int) -> None:
            never.wait(120)

    sync = NcclSync("http://server", make_group=Hanging, timeout_s=2.0)
    sync.pool.stall_timeout_s = 60.0
    with pytest.raises(WeightSyncError, match="its collective did not end within weight_sync_timeout"):
        sync.push(WEIGHTS.items(), 1)
    never.set()
    sync.close()


def test_without_a_gpu_the_kind_is_refused_with_the_one_that_works(server: FakeOpenAIServer) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(WeightSyncError, match=r"needs a CUDA device.*'directory'"):
        NcclSync(server.url, timeout_s=2.0).push(WEIGHTS.items(), 1)
