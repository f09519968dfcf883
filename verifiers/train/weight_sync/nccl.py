"""Weights over NCCL, through vLLM's weight-transfer routes: servers on other GPUs, or on other hosts.

Experimental, as this project's tests do not run it on GPUs: a fake checks what is asked and in which order, and a
stand-in for NCCL what is sent (`tests/train/weight_sync/test_nccl_sync.py`).

All tensors travel in a few large broadcasts: both sides pack them, in the order that /update_weights names, into
buffers that are sent as soon as they hold more than `BUFFER_BYTES`. A copy of the newest weights stays in host
memory, so that a server that was restarted can be given them while the trainer continues.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from verifiers.concurrency import gather_owned, threads_for
from verifiers.errors import WeightSyncError
from verifiers.inference.retry import retry
from verifiers.inference.server_client import CONTROL_RETRIES, RefusedError, ServerClient, passes_in_place
from verifiers.inference.server_pool import PARTIALLY_LOADED, WeightUpdate, time_left
from verifiers.train.weight_sync.protocol import ServerSync
from verifiers.train.weight_sync.verification import Capabilities

BUFFER_BYTES = 2**29
"""Both sides send a buffer as soon as it holds more than this. NCCL takes at most 2**31 - 1 elements at once."""

NUM_BUFFERS = 2

_MOST_TRANSFERS = 64


class NcclGroup:
    """Rank 0, with the NCCL that torch brings, of a group whose other ranks are one server's workers."""

    def __init__(self, device: str) -> None:
        import torch

        self._device = torch.device(device)
        self._comm: Any = None
        self._stream: Any = None

    def unique_id(self) -> bytes:
        from torch.cuda import nccl

        return bytes(nccl.unique_id())

    def join(self, unique_id: bytes, world_size: int) -> None:
        """Enter as rank 0, and take part in the all-reduce of one float32 by which vLLM's workers begin."""
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
        """Wait until everything was sent; raise WeightSyncError at `deadline` (of time.monotonic)."""
        import torch

        with torch.cuda.device(self._device):
            done = self._stream.record_event()
        while not done.query():
            if time.monotonic() > deadline:
                raise WeightSyncError("the broadcast of the weights did not end within weight_sync_timeout.")
            time.sleep(0.001)


class NcclSync(ServerSync):
    """A weight sync that broadcasts the weights to the workers of each server. Experimental.

    The servers are vLLM 0.30 or later with --weight-transfer-config '{"backend": "nccl"}'. `make_group` gives a new
    group for each; with torch's NCCL on the present CUDA device when left out.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        timeout_s: float = 120.0,
        api_key: str = "EMPTY",
        *,
        make_group: Callable[[], NcclGroup] | None = None,
    ) -> None:
        super().__init__(base_url, timeout_s, api_key)
        self._make_group = make_group
        self._groups: dict[str, NcclGroup] = {}

    def missing_at(self, found: Capabilities, adapter_rank: int) -> list[str]:
        if found.software is None:
            return ["weight_sync='nccl' needs vLLM; use 'directory' with this server"]
        if found.transfer_backend != "nccl":
            return ['its weight transfer is off; start it with --weight-transfer-config \'{"backend": "nccl"}\'']
        return []

    def push(self, named_parameters: Iterable[tuple[str, Any]], version: int) -> None:
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named_parameters}
        if self._make_group is None:
            # here, for the present device is that of the calling thread
            self._make_group = _on_present_device()

        async def load(server: ServerClient, /, *, timeout_s: float) -> None:
            try:
                await self._load(server, tensors, time.monotonic() + timeout_s)
            except RefusedError as error:
                # for good: it may stand in a collective that the next load would wait for
                raise WeightSyncError(str(error)) from error

        self.pool.run(self.pool.push(WeightUpdate(version, load)))

    def close(self) -> None:
        super().close()
        self._groups.clear()

    async def _load(self, server: ServerClient, tensors: Mapping[str, Any], deadline: float) -> None:
        group = await self._group_with(server, deadline)
        update = {
            "names": list(tensors),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        await server.request("POST", "/start_weight_update", {}, timeout_s=time_left(deadline))

        def send() -> None:
            for buffer in packed(tensors.values(), BUFFER_BYTES):
                group.broadcast(buffer)
            group.wait(deadline)

        try:
            # the answer comes when the workers have received everything, so it is waited for beside the sending
            await _beside(server, "/update_weights", {"update_info": update}, send, deadline)
            await server.request("POST", "/finish_weight_update", {}, timeout_s=time_left(deadline))
        except BaseException:
            # a group with a rank that is still inside a collective cannot be used again
            self._groups.pop(server.root, None)
            raise

    async def _group_with(self, server: ServerClient, deadline: float) -> NcclGroup:
        group = self._groups.get(server.root)
        if group is not None:
            ask = functools.partial(server.weight_version, time_left(deadline))
            name = await retry(ask, CONTROL_RETRIES, deadline=deadline, passing=passes_in_place)
            # a server that was restarted has no group, and its weights have neither name; the second of two
            # loads in a row finds the name from before the first
            if name.isdecimal() or name == PARTIALLY_LOADED:
                return group
        answer = await server.ask("GET", "/get_world_size", timeout_s=time_left(deadline))
        workers = answer.get("world_size") if isinstance(answer, dict) else None
        if type(workers) is not int or workers < 1:
            raise WeightSyncError(
                f"GET {server.root}/get_world_size says {str(answer)[:80]}, which is no number of workers; start the "
                'server with vf-vllm, or set weight_sync="directory".'
            )
        assert self._make_group is not None
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
        join = functools.partial(group.join, unique_id, workers + 1)
        await _beside(server, "/init_weight_transfer_engine", {"init_info": settings}, join, deadline)
        self._groups[server.root] = group
        return group


def packed(tensors: Iterable[Any], buffer_bytes: int) -> Iterator[Any]:
    """Yield the tensors' bytes in one-dimensional buffers, cut where vLLM's workers expect it.

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


async def _beside(
    server: ServerClient, path: str, body: Mapping[str, Any], work: Callable[[], None], deadline: float
) -> None:
    """Run `work` while the server answers, as neither ends without the other; a refusal is raised at once.

    The work runs in a thread that is left to itself where the server refuses: a collective that the other side never
    enters cannot be called back.
    """
    try:
        async with asyncio.timeout(time_left(deadline)):
            await gather_owned(
                [
                    server.request("POST", path, body, time_left(deadline)),
                    threads_for("weight transfer", _MOST_TRANSFERS).run(work),
                ]
            )
    except TimeoutError:
        raise WeightSyncError(f"POST {path} and its collective did not end within weight_sync_timeout.") from None


def _on_present_device() -> Callable[[], NcclGroup]:
    import torch

    if not torch.cuda.is_available():
        raise WeightSyncError(
            "weight_sync='nccl' needs a CUDA device on the trainer's side; use 'directory' on one host."
        )
    return functools.partial(NcclGroup, f"cuda:{torch.cuda.current_device()}")
