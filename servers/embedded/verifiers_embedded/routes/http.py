"""The common parts of all routes: reading a body, and answering every failure as OpenAI does."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from verifiers.http_requests import has_key, read_body
from verifiers_embedded.errors import (
    ApiError,
    BrokenLogits,
    EngineDied,
    EngineStopped,
    GrammarFailed,
    WeightsError,
)

log = logging.getLogger("verifiers_embedded")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_PATHS = frozenset({"/health", "/metrics"})
"""Paths that need no key: monitors seldom have one, and no text or weights are behind these."""


async def read_json(request: web.Request) -> Any:
    """Return the body; ApiError where it is not JSON, or has half of a surrogate pair, which no tokenizer takes."""
    try:
        text = (await read_body(request)).decode("utf-8-sig")
        body = json.loads(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(body, ensure_ascii=False).encode()
        return body
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the request body is not valid JSON: {error}") from error


def key_required(key: str) -> Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]:
    """Return a middleware that lets in only requests with the header ``Authorization: Bearer KEY``."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS and not has_key(request, key):
            raise ApiError(
                "the API key is missing or wrong; send the one the server was started with as "
                "'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
            )
        return await handler(request)

    return check


def json_only(handler: Handler) -> Handler:
    """Return a handler that takes no form and no text: web pages may send those to any server without asking."""

    async def handle(request: web.Request) -> web.StreamResponse:
        # without a header it is octet-stream, which some clients send with an empty body
        taken = ("application/json",) if request.body_exists else ("application/json", "application/octet-stream")
        if request.content_type not in taken:
            raise ApiError(f"{request.path} needs the header 'Content-Type: application/json'", status=415)
        return await handler(request)

    return handle


def as_api_error(error: Exception) -> ApiError | None:
    """Return the refusal that stands for an exception; None for one that nobody foresaw."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, WeightsError):
        return ApiError(str(error), param="weights_path")
    if isinstance(error, EngineStopped):
        return ApiError(str(error), status=503)
    if isinstance(error, EngineDied | BrokenLogits | GrammarFailed):
        return ApiError(str(error), status=500)
    return None


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every exception into OpenAI's error object with the fitting status."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        refusal = ApiError(f"{request.method} {request.path}: {error.reason}", status=error.status)
        allowed = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        return web.json_response(refusal.body(), status=refusal.status, headers=allowed)
    except Exception as error:
        # Without this the client would get aiohttp's HTML page, which no OpenAI client can read.
        known = as_api_error(error)
        if known is None:
            log.exception("%s %s failed", request.method, request.path)
        refusal = known or ApiError(f"internal error: {type(error).__name__}: {error}", status=500)
    return web.json_response(refusal.body(), status=refusal.status)
