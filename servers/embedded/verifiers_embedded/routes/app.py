"""The routes: OpenAI's surface, and vLLM's for token ids, pauses and weights."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from verifiers.concurrency import threads_for
from verifiers.images import image_bytes
from verifiers.train.image_processor import Images
from verifiers_embedded.engine.constraints import Grammar, GrammarCompiler
from verifiers_embedded.engine.engine import PAUSE_MODES, Engine
from verifiers_embedded.engine.generation import Generation, GenerationRequest
from verifiers_embedded.engine.loading import LoadedModel
from verifiers_embedded.engine.sampling import SamplingParameters, seed_of_choice
from verifiers_embedded.engine.scoring import PromptScore
from verifiers_embedded.engine.weights import match_weights, read_weights
from verifiers_embedded.errors import ApiError
from verifiers_embedded.routes.answers import chat_completion, derendered, text_completion, token_generation
from verifiers_embedded.routes.bodies import parse
from verifiers_embedded.routes.events import (
    ChatWriter,
    Progress,
    TextWriter,
    TokenWriter,
    Watched,
    Writer,
    encoded,
    events,
)
from verifiers_embedded.routes.http import answer_errors, as_api_error, json_only, key_required, read_json
from verifiers_embedded.routes.metrics import Metrics
from verifiers_embedded.routes.openapi import FAILING, MODE, NAME, READING, Route, describe
from verifiers_embedded.routes.requests import (
    ChatRequest,
    Conversation,
    Decoding,
    Delivery,
    DerenderRequest,
    DetokenizeRequest,
    ReloadRequest,
    SamplingParams,
    TextRequest,
    TokenizeRequest,
    TokenRequest,
    VersionRequest,
)
from verifiers_embedded.text.grammars import Form, form_of_chat, lark_grammar
from verifiers_embedded.text.prompts import ChatText

log = logging.getLogger("verifiers_embedded")

MAX_BODY_BYTES = 64 * 2**20
_INLINE_CHARACTERS = 20_000


class Routes:
    """The handlers and what they share.

    Args:
        model_name: the name requests give in ``model``.
        seed: of the stream from which requests without a seed get theirs.
        api_key: what requests must bring as a bearer token; None asks for none.
        max_body_bytes: longer bodies are refused with status 413.
        max_images: prompts with more are refused.
    """

    def __init__(
        self,
        engine: Engine,
        loaded: LoadedModel,
        text: ChatText,
        *,
        model_name: str,
        seed: int,
        api_key: str | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_images: int = 0,
    ) -> None:
        self._engine = engine
        self._loaded = loaded
        self._text = text
        self._model_name = model_name
        self._seeds = random.Random(seed)
        self._created = int(time.time())
        self._rendering = asyncio.Lock()
        self._reloading = asyncio.Lock()
        self._api_key = api_key
        self._max_body_bytes, self._max_images = max_body_bytes, max_images if loaded.images else 0
        self._metrics = Metrics(engine)
        self._grammars = GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_ids)

    def app(self) -> web.Application:
        """Return the application, ready for a runner (with handler_cancellation, so that disconnects free slots)."""
        middlewares: list[Any] = [self._metrics.count_answers, answer_errors]
        if self._api_key is not None:
            middlewares.append(key_required(self._api_key))
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=middlewares)
        for route in self._table:
            getattr(app.router, f"add_{route.method}")(route.path, route.handler)
        return app

    @property
    def _table(self) -> list[Route]:
        return [
            Route("post", "/v1/chat/completions", self.chat_completions, ChatRequest, READING, streams=True),
            Route("post", "/v1/completions", self.completions, TextRequest, READING, streams=True),
            Route("post", "/inference/v1/generate", self.generate, TokenRequest, READING, streams=True),
            Route("post", "/v1/chat/completions/derender", self.derender, DerenderRequest, READING),
            Route("post", "/tokenize", self.tokenize, TokenizeRequest, READING),
            Route("post", "/detokenize", self.detokenize, DetokenizeRequest, READING),
            Route("get", "/v1/models", self.models),
            Route("get", "/v1/models/{name:.+}", self.model, statuses=(404,), parameters=(NAME,)),
            Route("post", "/pause", json_only(self.pause), statuses=(400, *FAILING), parameters=(MODE,)),
            Route("post", "/resume", json_only(self.resume), statuses=FAILING),
            Route("get", "/is_paused", self.is_paused),
            Route("post", "/collective_rpc", json_only(self.collective_rpc), ReloadRequest, READING),
            Route("post", "/update_weight_version", json_only(self.update_weight_version), VersionRequest, READING),
            Route("get", "/weight_info", self.weight_info),
            Route("get", "/health", self.health, statuses=(503,)),
            Route("get", "/metrics", self._metrics.show),
            Route("get", "/openapi.json", self.openapi),
        ]

    async def openapi(self, request: web.Request) -> web.Response:
        document = await asyncio.to_thread(describe, self._table, keyed=self._api_key is not None)
        return web.json_response(document)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        chat = parse(ChatRequest, await read_json(request))
        self._check_model(chat.model)
        prompt_ids, images = await self._render(chat)
        grammar = await self._chat_grammar(chat, prompt_ids)
        jobs = self._jobs(chat, prompt_ids, grammar=grammar, images=images)
        if chat.stream:
            return await self._stream(request, chat, jobs, ChatWriter(chat, prompt_ids, self._text))
        return web.json_response(chat_completion(chat, prompt_ids, await self._generate(jobs), self._text))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        asked = parse(TextRequest, await read_json(request))
        self._check_model(asked.model)
        prompts = []
        for prompt in asked.prompts:
            if isinstance(prompt, str):
                prompts.append((prompt, await self._encode(prompt, asked.add_special_tokens)))
            else:
                prompts.append((self._text.decode(prompt) if asked.echo else "", prompt))
        schema = asked.schema_text
        grammar = await self._grammar(None if schema is None else Form(schema), asked)
        jobs = [job for _, ids in prompts for job in self._jobs(asked, ids, "prompt", grammar)]
        if asked.stream:
            return await self._stream(request, asked, jobs, TextWriter(asked, prompts, self._text))
        scored: list[PromptScore] | None = None
        if asked.scores_of_prompt is not None:
            asking = [self._engine.score(ids, asked.scores_of_prompt) for _, ids in prompts]
            scored = await asyncio.gather(*map(asyncio.wrap_future, asking))
        if asked.limit:
            generations = await self._generate(jobs)
        else:
            generations = [Generation([], [], "length", []) for _ in jobs]
            self._metrics.count_tokens(jobs, generations)
        return web.json_response(text_completion(asked, prompts, generations, self._text, scored))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /inference/v1/generate: token ids in and out, under vLLM's names."""
        asked = parse(TokenRequest, await read_json(request))
        self._check_model(asked.model or None)
        jobs = self._jobs(asked.sampling_params, asked.token_ids, "token_ids")
        if asked.stream:
            return await self._stream(request, asked, jobs, TokenWriter(asked, self._text))
        return web.json_response(token_generation(asked, await self._generate(jobs), self._text))

    async def derender(self, request: web.Request) -> web.Response:
        """POST /v1/chat/completions/derender: what /inference/v1/generate answered, as a chat completion."""
        asked = parse(DerenderRequest, await read_json(request))
        self._check_model(asked.model)
        return web.json_response(derendered(asked, self._model_name, self._text))

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize: the ids of a prompt, or of messages as the chat template renders them."""
        asked = parse(TokenizeRequest, await read_json(request))
        self._check_model(asked.model)
        if asked.prompt is not None:
            ids = await self._encode(asked.prompt, asked.add_special_tokens)
        else:
            ids, _ = await self._render(asked)
        answer = {"count": len(ids), "max_model_len": self._loaded.max_model_len, "tokens": ids}
        names = [self._text.token(token)[0] for token in ids] if asked.return_token_strs else None
        return web.json_response({**answer, "token_strs": names})

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /detokenize: the text of token ids, special tokens included."""
        asked = parse(DetokenizeRequest, await read_json(request))
        self._check_model(asked.model)
        return web.json_response({"prompt": self._text.decode_all(asked.tokens)})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._entry()]})

    async def model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["name"])
        return web.json_response(self._entry())

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: 200 with the queue's lengths, or 503 with the reason why nothing is generated."""
        failure = self._engine.failure
        if failure is not None:
            return web.json_response(ApiError(str(failure), status=503).body(), status=503)
        return web.json_response({"status": "ok", **self._engine.counts})

    # -- the owner's routes: pauses, new weights and their version, under vLLM's names ---------------------

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

    # -- generating -----------------------------------------------------------------------------------------

    async def _generate(self, jobs: Sequence[GenerationRequest]) -> list[Generation]:
        promises = [asyncio.wrap_future(promise) for promise in self._engine.submit_all((job, None) for job in jobs)]
        try:
            generations = await asyncio.gather(*promises)
        finally:
            # a client that has gone away, or a choice that failed: the others free their slots
            for promise in promises:
                promise.cancel()
        self._metrics.count_tokens(jobs, generations)
        return generations

    async def _stream(
        self, request: web.Request, delivery: Delivery, jobs: Sequence[GenerationRequest], writer: Writer
    ) -> web.StreamResponse:
        progress = Progress()
        watched = [Watched(index, progress) for index in range(len(jobs))]
        for item, promise in zip(
            watched, self._engine.submit_all(zip(jobs, [item.advance for item in watched], strict=True)), strict=True
        ):
            item.follow(promise)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            try:
                await response.prepare(request)
                async for event in events(watched, progress, writer, delivery):
                    await response.write(event)
                self._metrics.count_tokens(jobs, [item.result() for item in watched])
            except ConnectionError:
                # the client has gone away; its slots are freed below
                return response
            except Exception as error:
                # the status is sent already: the failure can only be an event
                refusal = as_api_error(error)
                if refusal is None:
                    raise
                await response.write(encoded(refusal.body()))
            await response.write_eof()
        finally:
            for item in watched:
                item.cancel()
        return response

    def _jobs(
        self,
        decoding: ChatRequest | TextRequest | SamplingParams,
        prompt_ids: list[int],
        param: str = "messages",
        grammar: Grammar | None = None,
        images: Images | None = None,
    ) -> list[GenerationRequest]:
        """Return the engine's requests, one for each choice.

        `max_tokens` is clipped to the room left, and the answer then ends with "length".
        """
        room = self._checked_room(prompt_ids, param, 0 if decoding.limit == 0 else 1)
        seed = self._seeds.getrandbits(53) if decoding.seed_64 is None else decoding.seed_64
        limit = room if decoding.limit is None else min(room, decoding.limit)
        loaded = self._loaded
        eos_ids = loaded.eos_ids
        if decoding.ignore_eos:
            eos_ids = frozenset() if loaded.images is None else frozenset({loaded.images.token_id})
        return [
            GenerationRequest(
                prompt_ids=tuple(prompt_ids),
                max_tokens=limit,
                sampling=SamplingParameters(
                    seed_of_choice(seed, index),
                    decoding.temperature,
                    decoding.most_likely,
                    decoding.top_p,
                    decoding.min_p,
                    decoding.top_logprobs,
                    decoding.return_sampling_mask,
                ),
                eos_ids=eos_ids.union(decoding.stop_token_ids),
                stop=decoding.stop_strings,
                grammar=grammar,
                images=images,
            )
            for index in range(decoding.n)
        ]

    async def _chat_grammar(self, chat: ChatRequest, prompt_ids: list[int]) -> Grammar | None:
        form = form_of_chat(
            chat.schema_text,
            chat.forced,
            chat.shown_tools,
            several=chat.parallel_tool_calls,
            tool_format=self._text.tool_format,
        )
        reasoning = "none"
        if form is not None and self._text.splits_reasoning and not self._text.reads_whole:
            reasoning = "begun" if self._text.begins_reasoning(prompt_ids) else "may"
        return await self._grammar(form, chat, reasoning)

    async def _grammar(self, form: Form | None, decoding: Decoding, reasoning: str = "none") -> Grammar | None:
        if form is None:
            return None
        if decoding.ignore_eos:
            raise ApiError(
                f"field 'ignore_eos' cannot be true where {form.param!r} says how the text ends",
                param="ignore_eos",
            )
        return await self._grammars.compile(lark_grammar(form, reasoning), form.param)

    def _checked_room(self, prompt_ids: list[int], param: str, least: int) -> int:
        limit = self._loaded.max_model_len
        room = limit - len(prompt_ids)
        if room < least:
            raise ApiError(
                f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
                f"{len(prompt_ids)} tokens, which leaves no room for a completion. Please shorten them.",
                param=param,
                code="context_length_exceeded",
            )
        if not prompt_ids:
            raise ApiError(f"the {param} resulted in no token at all; give some text", param=param)
        if max(prompt_ids) >= self._loaded.vocab_size:
            # Left to the model, one such prompt would end the engine for all requests.
            raise ApiError(
                f"the {param} hold token {max(prompt_ids)}, but the model has {self._loaded.vocab_size} "
                "embeddings; serve the model with its own tokenizer",
                param=param,
            )
        return room

    # -- text and tokens ------------------------------------------------------------------------------------

    async def _render(self, chat: Conversation) -> tuple[list[int], Images | None]:
        messages = [message.for_template() for message in chat.messages]
        arguments = (messages, chat.template_arguments, chat.shown_tools)
        images = self._images_of(chat)
        if not images and chat.text_length < _INLINE_CHARACTERS:
            return self._text.render(*arguments), None
        # Long texts would hold up the event loop; one at a time, as tokenizers are not made for several
        # threads.
        async with self._rendering:
            if images:
                return await asyncio.to_thread(self._text.render_images, *arguments, images)
            return await asyncio.to_thread(self._text.render, *arguments), None

    def _images_of(self, chat: Conversation) -> list[bytes]:
        urls = [url for message in chat.messages for url in message.image_urls]
        if len(urls) > self._max_images:
            raise ApiError(
                f"the messages hold {len(urls)} images, and this server takes {self._max_images} in a prompt; start "
                f"it with --max-images {len(urls)}",
                param="messages",
            )
        try:
            return [image_bytes(url) for url in urls]
        except ValueError as error:
            raise ApiError(str(error), param="messages") from error

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < _INLINE_CHARACTERS:
            return self._text.encode(text, add_special_tokens)
        async with self._rendering:
            return await asyncio.to_thread(self._text.encode, text, add_special_tokens)

    def _entry(self) -> dict[str, Any]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "verifiers-embedded",
            "max_model_len": self._loaded.max_model_len,
            "dtype": str(self._loaded.dtype).removeprefix("torch."),
            **({} if self._loaded.images is None else {"image_reader": self._loaded.images.reader}),
        }

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._model_name):
            raise ApiError(
                f"The model {name!r} does not exist; this server holds {self._model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
