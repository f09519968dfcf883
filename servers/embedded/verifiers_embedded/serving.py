"""From settings to a listening server, and back to nothing."""

from __future__ import annotations

import asyncio
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from aiohttp import web

from verifiers.http_requests import app_runner, is_loopback_host
from verifiers.server_process import cannot_listen, end_by_signals, is_loopback_address, url_of, write_port_file
from verifiers_embedded.engine.decoding import cuda_graph
from verifiers_embedded.engine.engine import Engine
from verifiers_embedded.engine.loading import LoadedModel, load_model
from verifiers_embedded.errors import StartError
from verifiers_embedded.routes.app import Routes
from verifiers_embedded.text.prompts import ChatText

_BACKLOG = 2048
_SHUTDOWN_S = 2.0
_SWITCH_S = 0.0005


@dataclass(frozen=True)
class Settings:
    """The settings of the command line. Sizes are in tokens, `slots` in sequences; None stands for the default.

    `backend` is that of torch.compile, None for none; `graphs` records CUDA graphs.
    """

    model: Path
    host: str
    port: int
    port_file: Path | None
    model_name: str | None
    device: str
    dtype: str
    max_model_len: int | None
    slots: int
    tool_format: str
    splits_reasoning: bool
    cache_bytes: int | None
    prefix_bytes: int
    api_key: str | None
    max_body_bytes: int
    threads: int | None
    backend: str | None
    graphs: bool
    seed: int


def serve(settings: Settings, listener: socket.socket) -> int:
    """Load the model and serve it until a signal comes; return the exit code.

    Args:
        settings: the command line.
        listener: a bound socket, as `bind` gives it.

    Raises:
        StartError: the model or the address cannot be used.
    """
    if settings.graphs and (settings.device == "cpu" or not torch.cuda.is_available()):
        raise StartError("--cuda-graphs needs a model on a GPU, and this one would be on the CPU; leave the flag out")
    # The engine gives up the interpreter at every tensor operation and waits this long, at worst, to get it
    # back from the thread that talks HTTP; Python's 5 ms would be as much as a whole step of a small model.
    sys.setswitchinterval(_SWITCH_S)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    loaded = load_model(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        cache_bytes=settings.cache_bytes,
    )
    return asyncio.run(_serve(settings, loaded, listener))


async def _serve(settings: Settings, loaded: LoadedModel, listener: socket.socket) -> int:
    ended = end_by_signals()
    text = ChatText(loaded.tokenizer, settings.tool_format, splits_reasoning=settings.splits_reasoning)
    engine = Engine(
        loaded.model,
        decode=text.decode,
        slots=settings.slots,
        max_model_len=loaded.max_model_len,
        threads=settings.threads,
        prefix_bytes=settings.prefix_bytes,
        backend=settings.backend,
        record=cuda_graph if settings.graphs else None,
        cache_tokens=loaded.cache_tokens,
    )
    name = settings.model_name or settings.model.resolve().name
    routes = Routes(
        engine,
        loaded,
        text,
        model_name=name,
        seed=settings.seed,
        api_key=settings.api_key,
        max_body_bytes=settings.max_body_bytes,
    )
    is_open = settings.api_key is None and is_loopback_address(listener.getsockname()[0])
    names = is_loopback_host if is_open else None
    runner = app_runner(routes.app(), names, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    engine.start()
    try:
        try:
            await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        except OSError as error:
            raise cannot_listen(settings.host, settings.port, error) from error
        announce(settings, loaded, name, listener)
        return await ended
    finally:
        # The engine first: its end answers the requests that wait, which the runner would otherwise wait for.
        await asyncio.to_thread(engine.stop)
        await runner.cleanup()


def announce(settings: Settings, loaded: LoadedModel, name: str, listener: socket.socket) -> None:
    """Print the one line a parent process reads, and write the port file."""
    url = url_of(listener)
    if not is_loopback_address(listener.getsockname()[0]) and settings.api_key is None:
        print(
            f"vf-serve: {url} is not only for this machine: anyone who reaches it can generate text, pause it and "
            "replace its weights without a password; use --host 127.0.0.1 unless the network is trusted, or "
            "--api-key-var.",
            file=sys.stderr,
            flush=True,
        )
    prefix_mib = settings.prefix_bytes / 2**20
    tokens = min(settings.slots * loaded.max_model_len, loaded.cache_tokens)
    cache_mib = tokens * loaded.cache_bytes_per_token / 2**20
    print(
        f"vf-serve: {name}, {loaded.num_parameters:,} parameters, {loaded.device.type}, "
        f"{str(loaded.dtype).removeprefix('torch.')}, context {loaded.max_model_len} tokens, "
        f"{settings.slots} slots, KV cache at most {cache_mib:,.1f} MiB, kept prefixes at most "
        f"{prefix_mib:,.0f} MiB; listening on {url}",
        flush=True,
    )
    if settings.port_file is not None:
        write_port_file(settings.port_file, listener)
