"""The HTTP routes: OpenAI's chat completions, and vLLM's names for pausing and for new weights."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from verifiers_embedded.answers import chat_completion
from verifiers_embedded.engine import PAUSE_MODES, Engine
from verifiers_embedded.errors import ApiError, BrokenLogits, EngineDied, EngineStopped, WeightsError
from verifiers_embedded.generation import GenerationRequest
from verifiers_embedded.loading import LoadedModel
from verifiers_embedded.prompts import ChatText
from verifiers_embedded.sampling import SamplingParameters, UniformStream
from verifiers_embedded.weights import match_weights, read_weights
from verifiers_embedded.wire import ChatRequest, parse_chat_request

log = logging.getLogger(__name__)

_MAX_BODY_BYTES = 64 * 2**20
_INLINE_CHARACTERS = 20_000


class Routes:
    """The handlers and what they share.

    Args:
        engine: a started engine.
        loaded: the model it serves.
        text: the tokenizer, as the engine decodes with it.
        model_name: the name requests give in ``model``.
        seed: of the stream from which requests without a seed get theirs.
    """

    def __init__(
        self, engine: Engine, loaded: LoadedModel, text: ChatText, *, model_name: str, seed: int
    ) -> None:
        self._engine = engine
        self._loaded = loaded
        self._text = text
        self._model_name = model_name
        self._seeds = UniformStream(seed)
        self._created = int(time.time())
        self._reloading = asyncio.Lock()
        self._rendering = asyncio.Lock()

    def app(self) -> web.Application:
        """The application, ready for a runner (with handler_cancellation, so that disconnects free slots)."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[answer_errors])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self.chat_completions),
                web.get("/v1/models", self.models),
                web.get("/health", self.health),
                web.post("/pause", self.pause),
                web.post("/resume", self.resume),
                web.get("/is_paused", self.is_paused),
                web.post("/collective_rpc", self.collective_rpc),
                web.post("/update_weight_version", self.update_weight_version),
                web.get("/weight_info", self.weight_info),
            ]
        )
        return app

    async def chat_completions(self, request: web.Request) -> web.Response:
        """POST /v1/chat/completions"""
        chat = parse_chat_request(await read_json(request))
        if chat.model != self._model_name:
            raise ApiError(
                f"The model {chat.model!r} does not exist; this server holds {self._model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        prompt_ids = await self._render(chat)
        generation = await asyncio.wrap_future(
            self._engine.submit(self._generation_request(chat, prompt_ids))
        )
        return web.json_response(chat_completion(chat, prompt_ids, generation, self._text))

    async def _render(self, chat: ChatRequest) -> list[int]:
        if chat.text_length < _INLINE_CHARACTERS:
            return self._text.render(chat.messages, chat.chat_template_kwargs, chat.tools)
        # Long texts would hold up the event loop; one at a time, as tokenizers are not made for several
        # threads.
        async with self._rendering:
            return await asyncio.to_thread(
                self._text.render, chat.messages, chat.chat_template_kwargs, chat.tools
            )

    def _generation_request(self, chat: ChatRequest, prompt_ids: list[int]) -> GenerationRequest:
        """The engine's request; `max_tokens` is clipped to the room left, and the answer then ends with
        "length".
        """
        limit = self._loaded.max_model_len
        room = limit - len(prompt_ids)
        if room < 1:
            raise ApiError(
                f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
                f"{len(prompt_ids)} tokens, which leaves no room for a completion. Please shorten them.",
                param="messages",
                code="context_length_exceeded",
            )
        if not prompt_ids:
            raise ApiError("the messages resulted in no token at all; give some text", param="messages")
        if max(prompt_ids) >= self._loaded.vocab_size:
            # Left to the model, one such prompt would end the engine for all requests.
            raise ApiError(
                f"the messages hold token {max(prompt_ids)}, but the model has {self._loaded.vocab_size} "
                "embeddings; serve the model with its own tokenizer",
                param="messages",
            )
        seed = int(self._seeds.next() * 2**53) if chat.seed is None else chat.seed
        return GenerationRequest(
            prompt_ids=tuple(prompt_ids),
            max_tokens=room if chat.max_tokens is None else min(room, chat.max_tokens),
            sampling=SamplingParameters(seed, chat.temperature, chat.top_k, chat.top_p, chat.min_p),
            eos_ids=frozenset() if chat.ignore_eos else self._loaded.eos_ids,
            stop=chat.stop,
        )

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models"""
        entry = {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "verifiers-embedded",
            "max_model_len": self._loaded.max_model_len,
        }
        return web.json_response({"object": "list", "data": [entry]})

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: 200 with the queue's lengths, or 503 with the reason why nothing is generated."""
        failure = self._engine.failure
        if failure is not None:
            return web.json_response(ApiError(str(failure), status=503).body(), status=503)
        return web.json_response({"status": "ok", **self._engine.counts})

    async def pause(self, request: web.Request) -> web.Response:
        """POST /pause?mode=wait|keep|abort; answers when no more tokens are sampled."""
        name = request.query.get("mode", "wait")
        mode = next((known for known in PAUSE_MODES if known == name), None)
        if mode is None:
            raise ApiError(f"mode {name!r} is unknown; give one of {', '.join(PAUSE_MODES)}", param="mode")
        await asyncio.wrap_future(self._engine.pause(mode))
        return web.json_response({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        """POST /resume"""
        await asyncio.wrap_future(self._engine.resume())
        return web.json_response({"status": "resumed"})

    async def is_paused(self, request: web.Request) -> web.Response:
        """GET /is_paused"""
        return web.json_response({"is_paused": self._engine.is_paused})

    async def collective_rpc(self, request: web.Request) -> web.Response:
        """POST /collective_rpc with method reload_weights; answers when the new weights are in use."""
        body = await read_json(request)
        if not isinstance(body, dict) or body.get("method") != "reload_weights":
            method = body.get("method") if isinstance(body, dict) else body
            raise ApiError(f"method {method!r} is not supported; only 'reload_weights' is", param="method")
        kwargs = body.get("kwargs") or {}
        if not isinstance(kwargs, dict) or set(kwargs) != {"weights_path"} or body.get("args"):
            raise ApiError("reload_weights takes exactly kwargs {'weights_path': DIR}", param="kwargs")
        if not isinstance(kwargs["weights_path"], str):
            raise ApiError(f"weights_path must be a string, not {kwargs['weights_path']!r}", param="kwargs")
        async with self._reloading:
            started = time.monotonic()
            directory = Path(kwargs["weights_path"])
            tensors = await asyncio.to_thread(read_weights, directory)
            copies = await asyncio.to_thread(match_weights, self._loaded.model, tensors)
            await asyncio.wrap_future(self._engine.reload(copies))
        log.info("loaded %d tensors from %s in %.3f s", len(copies), directory, time.monotonic() - started)
        return web.json_response({"results": [None]})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        """POST /update_weight_version"""
        body = await read_json(request)
        label = body.get("new_version") if isinstance(body, dict) else None
        if not isinstance(label, str) or not label:
            raise ApiError(f"new_version must be a non-empty string, not {label!r}", param="new_version")
        await asyncio.wrap_future(self._engine.name_version(label))
        return web.json_response({"success": True, "new_version": label})

    async def weight_info(self, request: web.Request) -> web.Response:
        """GET /weight_info"""
        return web.json_response(
            {
                "weight_version": self._engine.weight_version,
                "num_parameters": self._loaded.num_parameters,
                "model": self._model_name,
            }
        )


async def read_json(request: web.Request) -> Any:
    """The request's body.

    Raises:
        ApiError: it is not JSON.
    """
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the request body is not valid JSON: {error}") from error


@web.middleware
async def answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Turns every exception into OpenAI's error object with the fitting status."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        refusal = ApiError(f"{request.method} {request.path}: {error.reason}", status=error.status)
    except ApiError as error:
        refusal = error
    except WeightsError as error:
        refusal = ApiError(str(error), param="weights_path")
    except EngineStopped as error:
        refusal = ApiError(str(error), status=503)
    except (EngineDied, BrokenLogits) as error:
        refusal = ApiError(str(error), status=500)
    except Exception as error:
        # Without this the client would get aiohttp's HTML page, which no OpenAI client can read.
        log.exception("%s %s failed", request.method, request.path)
        refusal = ApiError(f"internal error: {type(error).__name__}: {error}", status=500)
    return web.json_response(refusal.body(), status=refusal.status)
