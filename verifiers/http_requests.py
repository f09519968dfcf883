"""Checks of requests that all servers share: strangers' web pages, keys, and packed bodies.

A web page can have its visitor's browser send requests to servers on the visitor's machine. The browser names the
page in `Origin` and `Sec-Fetch-Site`. A page whose own host name is made to mean a loopback address (DNS rebinding)
is known by the `Host` header.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import zlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from verifiers.server_process import is_loopback_address

if TYPE_CHECKING:
    from aiohttp import web

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_HOST = re.compile(r"(?:\[([\da-f:.]+)\]|([\w.-]+))(?::\d+)?")
_WINDOW_BITS = {"identity": 0, "gzip": 31, "x-gzip": 31, "deflate": 15}
"""The zlib window of each supported Content-Encoding."""

logger = logging.getLogger("verifiers.http")


def app_runner(app: web.Application, is_own_host: Callable[[str], bool] | None, **options: Any) -> web.AppRunner:
    """Return a runner of an application that answers no web page of another origin; handlers call `read_body`.

    Refusals are aiohttp's exceptions, raised inside of the application's middlewares. `is_own_host` says if a Host
    header names this server; None takes all, where a key is asked for or other machines reach the server.
    """
    from aiohttp import web

    @web.middleware
    async def refuse_strangers(request: web.Request, handler: Handler) -> web.StreamResponse:
        host, origin = (request.headers.get(name, "").lower() for name in ("Host", "Origin"))
        if is_own_host is not None and not is_own_host(host):
            raise web.HTTPForbidden(
                reason="the Host header names another server; use localhost, or start it with a key"
            )
        is_foreign = "Origin" in request.headers and origin.partition("://")[2] != host
        if is_foreign or request.headers.get("Sec-Fetch-Site") == "cross-site":
            raise web.HTTPForbidden(reason="this server answers no web page of another origin")
        if _encoding(request) not in _WINDOW_BITS:
            raise web.HTTPUnsupportedMediaType(reason=f"the Content-Encoding is not in {', '.join(_WINDOW_BITS)}")
        return await handler(request)

    app.middlewares.append(refuse_strangers)
    # unpacked by `read_body`: aiohttp answers encodings that it does not know before any middleware
    return web.AppRunner(app, access_log=None, auto_decompress=False, logger=logger, **options)


def is_loopback_host(host: str) -> bool:
    """Return whether a Host header names this machine by a loopback address or as localhost, at any port."""
    found = _HOST.fullmatch(host)
    name = (found[1] or found[2]) if found else ""
    return name == "localhost" or is_loopback_address(name)


def bearer_token(request: web.Request) -> str:
    """Return the token of the header `Authorization: Bearer TOKEN`, "" without one."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def has_key(request: web.Request, key: str) -> bool:
    """Return whether a request brings a key as its bearer token, in a time that tells nothing about the key."""
    # aiohttp keeps bytes that are not UTF-8 as halves of surrogate pairs
    given, wanted = (text.encode(errors="surrogateescape") for text in (bearer_token(request), key))
    return hmac.compare_digest(given, wanted)


async def read_body(request: web.Request) -> bytes:
    """Return a request's body, unpacked.

    Raises:
        web.HTTPException: 400 where it breaks off or is not what its Content-Encoding says, 413 where it has more
            than the application's `client_max_size`, packed or unpacked.
    """
    from aiohttp import web

    encoding, limit = _encoding(request), request.client_max_size
    try:
        body = await request.read()
        if _WINDOW_BITS[encoding]:
            unpacking = zlib.decompressobj(_WINDOW_BITS[encoding])
            body = await asyncio.to_thread(unpacking.decompress, body, limit + 1)
            if len(body) > limit:
                raise web.HTTPRequestEntityTooLarge(limit, len(body))
            if not unpacking.eof or unpacking.unused_data:
                raise zlib.error
    except web.HTTPRequestEntityTooLarge:
        text = f"the body is longer than {limit / 2**20:g} MiB"
        raise web.HTTPRequestEntityTooLarge(limit, limit + 1, reason=text) from None
    except (web.RequestPayloadError, zlib.error):
        raise web.HTTPBadRequest(reason=f"the body cannot be read: it breaks off or is not {encoding}") from None
    return body


def _encoding(request: web.Request) -> str:
    return request.headers.get("Content-Encoding", "identity").strip().lower()


def _without_bytes(record: logging.LogRecord) -> bool:
    """Take out what aiohttp could not parse, which may be a key."""
    from aiohttp.http_exceptions import HttpProcessingError

    if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
        record.exc_info = record.exc_text = None
    return True


logger.addFilter(_without_bytes)
