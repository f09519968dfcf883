"""From a loaded model to a listening server, and back to nothing."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import socket
import sys
from pathlib import Path

import torch
from aiohttp import web

from verifiers.http_requests import app_runner, is_loopback_host
from verifiers.server_process import cannot_listen, end_by_signals, is_loopback_address, url_of, write_port_file
from verifiers_embedded.engine.decoding import CudaGraphs
from verifiers_embedded.engine.engine import Engine
from verifiers_embedded.engine.loading import LoadedModel, load_model
from verifiers_embedded.errors import StartError
from verifiers_embedded.routes.app import MAX_BODY_BYTES, Routes
from verifiers_embedded.text.prompts import ChatText

_BACKLOG = 2048
_SHUTDOWN_S = 2.0
_SWITCH_S = 0.0005


class Service:
    """A loaded model behind the server's routes, not listening yet.

    Args:
        name: of the model in requests.
        slots: most sequences at once; None for 256 on a GPU and 64 on a CPU. Fewer where their states would take more
            than half of the cache.
        threads: CPU threads of torch for the engine; None leaves torch's choice.
        prefix_bytes: memory for keys and values of finished sequences.
        tool_format, splits_reasoning: as in `ChatText`.
        seed: of the stream from which requests without a seed get theirs.
        cuda_graphs: replay passes of one token a sequence as CUDA graphs; None where they can be, on a GPU.
        api_key: what requests must bring as a bearer token; None asks for none.
        max_images: most images of a prompt, where the model was loaded with its tower.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        name: str = "policy",
        slots: int | None = None,
        threads: int | None = None,
        prefix_bytes: int = 2**28,
        tool_format: str = "auto",
        splits_reasoning: bool = False,
        seed: int = 0,
        cuda_graphs: bool | None = None,
        api_key: str | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_images: int = 0,
    ) -> None:
        on_gpu = loaded.device.type == "cuda"
        slots = (256 if on_gpu else 64) if slots is None else slots
        if loaded.state_bytes:
            # states are kept room for in every slot, and half of it is for keys and values
            slots = min(slots, max(1, loaded.cache_tokens * loaded.cache_bytes_per_token // 2 // loaded.state_bytes))
        self.loaded, self.name, self.slots, self.prefix_bytes = loaded, name, slots, prefix_bytes
        if cuda_graphs and not loaded.can_be_recorded:
            raise StartError(
                f"no pass of model type {loaded.model.config.model_type!r} can be recorded: each moves the states of "
                "its layers on, or waits for the device; leave --cuda-graphs (rollout_cuda_graphs) out"
            )
        if cuda_graphs is None:
            cuda_graphs = on_gpu and loaded.can_be_recorded
        self.text = ChatText(loaded.tokenizer, tool_format, splits_reasoning=splits_reasoning, images=loaded.images)
        self.engine = Engine(
            loaded.model,
            decode=self.text.decode,
            is_byte=self.text.is_byte,
            slots=slots,
            max_model_len=loaded.max_model_len,
            threads=threads,
            prefix_bytes=prefix_bytes,
            record=CudaGraphs() if cuda_graphs else None,
            cache_tokens=loaded.cache_tokens_beside(slots),
            images=loaded.images,
        )
        self.api_key = api_key
        self._routes = Routes(
            self.engine,
            loaded,
            self.text,
            model_name=name,
            seed=seed,
            api_key=api_key,
            max_body_bytes=max_body_bytes,
            max_images=max_images,
        )

    async def start(self, listener: socket.socket) -> web.AppRunner:
        """Start the engine and answer on a bound socket; the caller stops the engine, then cleans the runner up.

        Raises:
            OSError: the socket cannot listen; nothing runs then.
        """
        is_open = self.api_key is None and is_loopback_address(listener.getsockname()[0])
        names = is_loopback_host if is_open else None
        runner = app_runner(self._routes.app(), names, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        self.engine.start()
        try:
            await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        except OSError:
            await self.stop(runner)
            raise
        return runner

    async def stop(self, runner: web.AppRunner) -> None:
        """End what `start` has started."""
        # The engine first: its end answers the requests that wait, which the runner would otherwise wait for.
        await asyncio.to_thread(self.engine.stop)
        await runner.cleanup()


def serve(arguments: argparse.Namespace, model: Path, name: str, api_key: str | None, listener: socket.socket) -> int:
    """Load the model and serve it until a signal comes; return the exit code.

    Args:
        arguments: the command line, as `cli.parser` reads it.

    Raises:
        StartError: the model or the address cannot be used.
    """
    if arguments.cuda_graphs and (arguments.device == "cpu" or not torch.cuda.is_available()):
        raise StartError("--cuda-graphs needs a model on a GPU, and this one would be on the CPU; leave the flag out")
    # The engine gives up the interpreter at every tensor operation and waits this long, at worst, to get it
    # back from the thread that talks HTTP; Python's 5 ms would be as much as a whole step of a small model.
    sys.setswitchinterval(_SWITCH_S)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    loaded = load_model(
        model,
        device=arguments.device,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        cache_bytes=None if arguments.kv_cache_mib is None else arguments.kv_cache_mib * 2**20,
        with_images=arguments.max_images > 0,
    )
    service = Service(
        loaded,
        name=name,
        slots=arguments.rollout_chunk_size,
        threads=arguments.threads,
        prefix_bytes=arguments.prefix_cache_mib * 2**20,
        tool_format=arguments.tool_call_parser,
        splits_reasoning=arguments.reasoning_parser == "think",
        seed=secrets.randbits(64) if arguments.seed is None else arguments.seed % 2**64,
        cuda_graphs=arguments.cuda_graphs,
        api_key=api_key,
        max_body_bytes=arguments.max_body_mib * 2**20,
        max_images=arguments.max_images,
    )
    return asyncio.run(_serve(service, arguments, listener))


async def _serve(service: Service, arguments: argparse.Namespace, listener: socket.socket) -> int:
    ended = end_by_signals()
    try:
        runner = await service.start(listener)
    except OSError as error:
        raise cannot_listen(arguments.host, arguments.port, error) from error
    try:
        _announce(service, listener)
        if arguments.port_file is not None:
            write_port_file(arguments.port_file, listener)
        return await ended
    finally:
        await service.stop(runner)


def _announce(service: Service, listener: socket.socket) -> None:
    """Print the one line that a parent process reads, and a warning where it is due."""
    url, loaded = url_of(listener), service.loaded
    if not is_loopback_address(listener.getsockname()[0]) and service.api_key is None:
        print(
            f"vf-serve: {url} is not only for this machine: anyone who reaches it can generate text, pause it and "
            "replace its weights without a password; use --host 127.0.0.1 unless the network is trusted, or "
            "--api-key-var.",
            file=sys.stderr,
            flush=True,
        )
    tokens = min(service.slots * loaded.max_model_len, loaded.cache_tokens_beside(service.slots))
    cache_mib = (tokens * loaded.cache_bytes_per_token + service.slots * loaded.state_bytes) / 2**20
    print(
        f"vf-serve: {service.name}, {loaded.num_parameters:,} parameters, {loaded.device.type}, "
        f"{str(loaded.dtype).removeprefix('torch.')}, context {loaded.max_model_len} tokens, "
        f"{service.slots} slots, KV cache at most {cache_mib:,.1f} MiB, kept prefixes at most "
        f"{service.prefix_bytes / 2**20:,.0f} MiB; listening on {url}",
        flush=True,
    )
