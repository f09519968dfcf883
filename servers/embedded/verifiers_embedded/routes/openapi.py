"""Routes, and their OpenAPI description: what each reads, and with which statuses it refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from verifiers_embedded import __version__
from verifiers_embedded.engine.engine import PAUSE_MODES
from verifiers_embedded.routes.http import OPEN_PATHS, Handler

_STATUSES = {
    400: "The body cannot be read, or asks for what the server does not support",
    401: "The server requires a key, and the request has none",
    404: "There is no such model",
    413: "The body is too long",
    500: "Nothing more can be generated, or the model gave no valid distribution",
    503: "The server is shutting down",
}
_TEXT, _TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}
_ERROR_FIELDS = {"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL}
_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": _ERROR_FIELDS, "required": list(_ERROR_FIELDS)}},
    "required": ["error"],
}
_REF = "#/components/schemas/{model}"
_NOTE = (
    "Answers are those of OpenAI's API, with vLLM's token ids, and `weight_versions` beside each choice. "
    "Fields that are null count as absent. Beyond what the schemas say, and with status 400 where it is not so: a "
    "prompt leaves room for a token in the context and holds ids of the vocabulary, the chat template accepts the "
    "messages, fields that need one another come together, a constraint can be compiled, and weights fit the model. "
    "A model's name other than the served one is answered with status 404."
)


@dataclass(frozen=True)
class Route:
    """A route: its method in lower case, its path as aiohttp writes it, and what the description says of it."""

    method: str
    path: str
    handler: Handler
    body: type[BaseModel] | None = None
    statuses: tuple[int, ...] = ()
    parameters: tuple[dict[str, Any], ...] = ()
    streams: bool = False


FAILING = (500, 503)
READING = (400, 404, 413, *FAILING)
NAME = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
MODE = {"name": "mode", "in": "query", "required": False, "schema": {"enum": list(PAUSE_MODES)}}


def describe(routes: Sequence[Route], *, keyed: bool) -> dict[str, Any]:
    """Write the whole document, OpenAPI 3.1; `keyed` where the server requires a key. Takes a tenth of a second."""
    bodies = [route.body for route in routes if route.body is not None]
    _, found = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    paths: dict[str, Any] = {}
    for route in routes:
        operation = _operation(route)
        if route.path in OPEN_PATHS:
            operation["security"] = []
        elif keyed:
            operation["responses"]["401"] = _refused(401)
        # patterns of parameters are aiohttp's own
        paths.setdefault(re.sub(r":[^}]+", "", route.path), {})[route.method] = operation
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "verifiers-embedded", "version": __version__, "description": _NOTE},
        "paths": paths,
        "components": {"schemas": {**found["$defs"], "Error": _ERROR}},
    }
    if keyed:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _operation(route: Route) -> dict[str, Any]:
    media = "text/plain" if route.path == "/metrics" else "application/json"
    done: dict[str, Any] = {"description": "Done", "content": {media: {}}}
    if route.streams:
        done["description"] = (
            'Done. With "stream": true the body is server-sent events, as OpenAI\'s; that of a failure holds an '
            'Error, the last one "[DONE]"'
        )
        done["content"]["text/event-stream"] = {}
    operation: dict[str, Any] = {
        "responses": {"200": done, **{str(status): _refused(status) for status in route.statuses}}
    }
    if route.parameters:
        operation["parameters"] = list(route.parameters)
    if route.body is not None:
        schema = {"$ref": _REF.format(model=route.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _refused(status: int) -> dict[str, Any]:
    schema = {"$ref": _REF.format(model="Error")}
    return {"description": _STATUSES[status], "content": {"application/json": {"schema": schema}}}
