"""The common parts of all routes: reading a body, and answering every failure with an error object."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from verifiers.http_requests import has_key, read_body

log = logging.getLogger("verifiers_dataserver")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
R = TypeVar("R", bound=BaseModel)

OPEN_PATHS = frozenset({"/health"})
"""Paths that need no token: they tell nothing of the datasets."""


class RequestError(ValueError):
    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the JSON answer: {"error": {"message", "code"}}."""
        return {"error": {"message": str(self), "code": self.code}}


async def read_request(request: web.Request, kind: type[R]) -> R:
    """Return the body; RequestError where it cannot be read, is too long, is not JSON, or not of this kind."""
    try:
        return kind.model_validate_json(await read_body(request))
    except web.HTTPRequestEntityTooLarge:
        limit_mib = request.client_max_size / 2**20
        raise RequestError(
            f"the body is longer than the {limit_mib:g} MiB of server.max_body_mib; send less at once",
            status=413,
            code="body_too_large",
        ) from None
    except ValidationError as error:
        # of a union's branches the one that got furthest is the one that was meant
        first = max(error.errors(include_url=False), key=lambda found: len(found["loc"]))
        where = ".".join(str(part) for part in first["loc"] if not _is_branch(part))
        if first["type"] == "json_invalid":
            raise RequestError(f"the body is not valid JSON: {first['msg']}") from None
        given = "" if first["type"] == "missing" else f" (given: {first['input']!r:.80})"
        raise RequestError(f"{where or 'the body'}: {first['msg'].lower()}{given}") from None


def token_required(token: str) -> Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]:
    """Return a middleware that lets in only requests with the header ``Authorization: Bearer TOKEN``."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS and not has_key(request, token):
            raise RequestError(
                "the token is missing or wrong; send the server's as 'Authorization: Bearer TOKEN'",
                status=401,
                code="invalid_token",
            )
        return await handler(request)

    return check


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every exception into an error object with the fitting status."""
    try:
        return await handler(request)
    except RequestError as error:
        refusal, headers = error, {}
        if error.status == 401:
            headers = {"WWW-Authenticate": "Bearer"}
    except web.HTTPException as error:
        refusal = RequestError(f"{request.method} {request.path}: {error.reason}", status=error.status, code="http")
        headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
    except Exception as error:
        # Without this the client would get aiohttp's HTML page.
        log.exception("%s %s failed", request.method, request.path)
        refusal = RequestError(f"internal error: {type(error).__name__}", status=500, code="internal")
        headers = {}
    return web.json_response(refusal.body(), status=refusal.status, headers=headers)


def _is_branch(part: int | str) -> bool:
    """Return whether a part of a location names a branch of a union, which is not a place in the body."""
    return isinstance(part, str) and (part in ("str", "Part") or not part.isidentifier())
