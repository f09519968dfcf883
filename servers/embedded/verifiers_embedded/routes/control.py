"""The routes of the server's owner: pauses, new weights and their version, under vLLM's names."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from pathlib import Path

from aiohttp import web

from verifiers.concurrency import threads_for
from verifiers_embedded.engine.engine import PAUSE_MODES, Engine
from verifiers_embedded.engine.loading import LoadedModel
from verifiers_embedded.engine.weights import match_weights, read_weights
from verifiers_embedded.errors import ApiError
from verifiers_embedded.routes.bodies import parse
from verifiers_embedded.routes.http import json_only, read_json
from verifiers_embedded.routes.requests import ReloadRequest, VersionRequest

log = logging.getLogger("verifiers_embedded")


class ControlRoutes:
    def __init__(self, engine: Engine, loaded: LoadedModel, model_name: str) -> None:
        self._engine = engine
        self._loaded = loaded
        self._model_name = model_name
        self._reloading = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/pause", json_only(self.pause)),
            web.post("/resume", json_only(self.resume)),
            web.get("/is_paused", self.is_paused),
            web.post("/collective_rpc", json_only(self.collective_rpc)),
            web.post("/update_weight_version", json_only(self.update_weight_version)),
            web.get("/weight_info", self.weight_info),
        ]

    async def pause(self, request: web.Request) -> web.Response:
        """POST /pause?mode=wait|keep|abort; answers when no more tokens are sampled."""
        name = request.query.get("mode", "wait")
        mode = next((known for known in PAUSE_MODES if known == name), None)
        if mode is None:
            raise ApiError(f"mode {name!r} is unknown; give one of {', '.join(PAUSE_MODES)}", param="mode")
        await asyncio.wrap_future(self._engine.pause(mode))
        return web.json_response({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        await asyncio.wrap_future(self._engine.resume())
        return web.json_response({"status": "resumed"})

    async def is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self._engine.is_paused})

    async def collective_rpc(self, request: web.Request) -> web.Response:
        """POST /collective_rpc with method reload_weights; answers when the new weights are in use."""
        asked = parse(ReloadRequest, await read_json(request))
        async with self._reloading:
            started = time.monotonic()
            directory = Path(asked.kwargs.weights_path)
            # a daemon thread: one that waits for a mount for ever does not hold up the end of the process
            tensors = await threads_for("reload", 1).run(partial(read_weights, directory))
            copies = await asyncio.to_thread(match_weights, self._loaded.model, tensors)
            await asyncio.wrap_future(self._engine.reload(copies))
        log.info("loaded %d tensors from %s in %.3f s", len(copies), directory, time.monotonic() - started)
        return web.json_response({"results": [None]})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        label = parse(VersionRequest, await read_json(request)).new_version
        await asyncio.wrap_future(self._engine.name_version(label))
        return web.json_response({"success": True, "new_version": label})

    async def weight_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "weight_version": self._engine.weight_version,
                "num_parameters": self._loaded.num_parameters,
                "model": self._model_name,
            }
        )
