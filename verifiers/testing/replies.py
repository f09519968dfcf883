"""Pieces of the fake server's HTTP: reading requests, and answering with errors and faults."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from verifiers.testing.answers import RecordedRequest
from verifiers.testing.faults import Fault

__all__ = ["error_reply", "fault_reply", "read_object", "recorded"]


def error_reply(status: int, message: str) -> web.Response:
    """An error in OpenAI's format."""
    return web.json_response({"error": {"message": message, "type": "fake_server", "code": status}}, status=status)


async def fault_reply(fault: Fault, request: web.Request, stopping: asyncio.Event) -> web.StreamResponse:
    """What the caller of `request` gets for `fault`; a hang lasts until `stopping` is set."""
    if fault.kind == "hang":
        await stopping.wait()
    if fault.kind in ("hang", "disconnect") and request.transport is not None:
        request.transport.abort()
    return web.Response(status=fault.status, text=fault.text, headers=fault.headers, content_type="application/json")


async def read_object(request: web.Request) -> dict[str, Any]:
    """The JSON object in the request's body; an empty body counts as {}. Anything else is answered with 400."""
    raw = await request.read()
    try:
        body = json.loads(raw) if raw else {}
    except ValueError:
        body = None
    if not isinstance(body, dict):
        text = json.dumps({"error": {"message": "the request body is not a JSON object", "code": 400}})
        raise web.HTTPBadRequest(text=text, content_type="application/json")
    return body


def recorded(number: int, request: web.Request, body: dict[str, Any]) -> RecordedRequest:
    """The request as tests read it."""
    headers = {name.lower(): value for name, value in request.headers.items()}
    return RecordedRequest(number, request.path, body, headers, dict(request.query))
