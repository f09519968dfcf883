"""Weights over NCCL, through vLLM's weight-transfer routes: servers on other GPUs, or on other hosts.

Not run on GPUs by this project's tests: there, a fake checks what is asked and in which order, and a stand-in for
NCCL what is sent (`tests/train/weight_sync/test_nccl_sync.py`).

All tensors travel in a few large broadcasts: both sides pack them, in the order that /update_weights names, into
buffers that are sent as soon as they hold more than `BUFFER_BYTES`. A copy of the newest weights stays in host
memory, so that a server that was started again can be given them while the trainer goes on.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol

from verifiers.errors import WeightSyncError
from verifiers.train.weight_sync.fleet import Fleet, Held
from verifiers.train.weight_sync.giving import HALF_LOADED
from verifiers.train.weight_sync.members import begin
from verifiers.train.weight_sync.server import ServerControl

__all__ = ["BUFFER_BYTES", "NcclGroup", "NcclSync", "TorchNcclGroup", "packed"]

BUFFER_BYTES = 2**29
"""Both sides send a buffer as soon as it holds more than this. NCCL takes at most 2**31 - 1 elements at once."""

NUM_BUFFERS = 2

_THREADS = "verifiers-nccl"


class NcclGroup(Protocol):
    """Rank 0 of a group whose other ranks are one server's workers."""

    def unique_id(self) -> bytes:
        """A new id by which the group's ranks find each other."""
        ...

    def join(self, unique_id: bytes, world_size: int) -> None:
        """Enter as rank 0, and take part in the all-reduce of one float32 by which vLLM's workers begin."""
        ...

    def broadcast(self, buffer: Any) -> None:
        """Begin to send a tensor of bytes to all ranks; the tensor must live until `wait`."""
        ...

    def wait(self, deadline: float) -> None:
        """Return when everything was sent; raise WeightSyncError at `deadline` (of time.monotonic)."""
        ...


class TorchNcclGroup:
    """`NcclGroup` with the NCCL that torch brings.

    Args:
        device: such as "cuda:0"; the trainer's.
    """

    def __init__(self, device: str) -> None:
        import torch

        self._device = torch.device(device)
        self._comm: Any = None
        self._stream: Any = None

    def unique_id(self) -> bytes:
        from torch.cuda import nccl

        return bytes(nccl.unique_id())

    def join(self, unique_id: bytes, world_size: int) -> None:
        import torch
        from torch.cuda import nccl

        with torch.cuda.device(self._device):
            self._comm = nccl.init_rank(world_size, unique_id, 0)
            self._stream = torch.cuda.Stream()
            warm_up = torch.zeros(1, device=self._device)
            self._stream.wait_stream(torch.cuda.current_stream())
            nccl.all_reduce([warm_up], streams=[self._stream], comms=[self._comm])
            self._stream.synchronize()

    def broadcast(self, buffer: Any) -> None:
        import torch
        from torch.cuda import nccl

        with torch.cuda.device(self._device):
            on_device = buffer.to(self._device)
            self._stream.wait_stream(torch.cuda.current_stream())
            nccl.broadcast([on_device], root=0, streams=[self._stream], comms=[self._comm])
            on_device.record_stream(self._stream)

    def wait(self, deadline: float) -> None:
        import torch

        with torch.cuda.device(self._device):
            done = self._stream.record_event()
        while not done.query():
            if time.monotonic() > deadline:
                raise WeightSyncError("the broadcast of the weights did not end within weight_sync_timeout.")
            time.sleep(0.001)


class NcclSync:
    """Broadcasts the weights to the workers of each server.

    Args:
        base_url: of the rollout server, or of several; vLLM 0.30 or later with
            --weight-transfer-config '{"backend": "nccl"}'.
        make_group: gives a new group for each server; with torch's NCCL on the present CUDA device when left out.
        timeout_s: deadline for one push, in seconds.

    Attributes:
        fleet: the servers.
        sends_tied: tied weights are sent under each of their names.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        timeout_s: float = 120.0,
        api_key: str = "EMPTY",
        *,
        make_group: Callable[[], NcclGroup] | None = None,
    ) -> None:
        urls = [base_url] if isinstance(base_url, str) else list(base_url)
        self.fleet = Fleet(urls, api_key, timeout_s)
        self.sends_tied = False
        self._make_group = make_group or _on_present_device
        self._groups: dict[str, NcclGroup] = {}

    @property
    def server(self) -> ServerControl:
        """One of the servers that are up."""
        return self.fleet.servers[0]

    def connect(self, deadline_s: float) -> None:
        self.fleet.connect(deadline_s)

    def push(self, named_parameters: Iterable[tuple[str, Any]], version: int) -> None:
        tensors = {name: _on_host(tensor) for name, tensor in named_parameters}

        def load(server: ServerControl, timeout_s: float) -> None:
            self._load(server, tensors, time.monotonic() + timeout_s)

        # a server that refused may stand in a collective that the next one would wait for
        self.fleet.push(Held(version, load, repeatable=False))

    def close(self) -> None:
        self.fleet.close()
        self._groups.clear()

    def _load(self, server: ServerControl, tensors: Mapping[str, Any], deadline: float) -> None:
        group = self._group_with(server, deadline)
        update = {
            "names": list(tensors),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        server.request("POST", "/start_weight_update", {}, timeout_s=_left(deadline))

        def send() -> None:
            for buffer in packed(tensors.values(), BUFFER_BYTES):
                group.broadcast(buffer)
            group.wait(deadline)

        try:
            # the answer comes when the workers have received everything, so it is waited for beside the sending
            _while_asking(server, "/update_weights", {"update_info": update}, send, deadline)
            server.request("POST", "/finish_weight_update", {}, timeout_s=_left(deadline))
        except BaseException:
            # whoever is still inside a collective cannot be joined again
            self._groups.pop(server.root, None)
            raise

    def _group_with(self, server: ServerControl, deadline: float) -> NcclGroup:
        group = self._groups.get(server.root)
        if group is not None:
            name = server.weight_version(_left(deadline))
            # one that was started again knows of no group, and is called neither; the second of two loads in a row
            # finds the name from before the first
            if name.isdecimal() or name == HALF_LOADED:
                return group
        workers = int(server.request("GET", "/get_world_size", timeout_s=_left(deadline))["world_size"])
        group = self._make_group()
        unique_id = group.unique_id()
        settings = {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "rank_offset": 1,
            "world_size": workers + 1,
            "packed": True,
            "packed_buffer_size_bytes": BUFFER_BYTES,
            "packed_num_buffers": NUM_BUFFERS,
        }
        joining = group

        def join() -> None:
            joining.join(unique_id, workers + 1)

        _while_asking(server, "/init_weight_transfer_engine", {"init_info": settings}, join, deadline)
        self._groups[server.root] = group
        return group


def packed(tensors: Iterable[Any], buffer_bytes: int) -> Iterator[Any]:
    """The tensors' bytes in one-dimensional buffers, cut where vLLM's workers expect it.

    A buffer ends after the tensor with which it holds more than `buffer_bytes`.
    """
    import torch

    held: list[Any] = []
    size = 0
    for tensor in tensors:
        held.append(tensor.contiguous().view(-1).view(torch.uint8))
        size += held[-1].numel()
        if size > buffer_bytes:
            yield torch.cat(held)
            held, size = [], 0
    if held:
        yield torch.cat(held)


def _while_asking(
    server: ServerControl, path: str, body: Mapping[str, Any], work: Callable[[], None], deadline: float
) -> None:
    """Do `work` while the server answers, for neither ends without the other; a refusal is raised at once.

    Both run in threads of their own: a collective that the other side never enters cannot be called back.
    """
    asked = begin(lambda: server.request("POST", path, body, _left(deadline)), _THREADS)
    _first_to_fail(asked, begin(work, _THREADS), path, deadline)


def _first_to_fail(asked: Future[Any], working: Future[Any], path: str, deadline: float) -> None:
    while not (asked.done() and working.done()):
        for future in (asked, working):
            if future.done():
                future.result()
        try:
            (working if asked.done() else asked).result(timeout=0.01)
        except FutureTimeoutError:
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"POST {path} and its collective did not end within weight_sync_timeout."
                ) from None
    asked.result()
    working.result()


def _on_host(tensor: Any) -> Any:
    host = tensor.detach().to("cpu", copy=True)
    return host.contiguous()


def _on_present_device() -> NcclGroup:
    import torch

    if not torch.cuda.is_available():
        raise WeightSyncError(
            "weight_sync='nccl' needs a CUDA device on the trainer's side; use 'directory' on one host."
        )
    return TorchNcclGroup(f"cuda:{torch.cuda.current_device()}")


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())
