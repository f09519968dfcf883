"""The OpenAPI description of this server: what each route reads and answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter

from verifiers_embedded import __version__
from verifiers_embedded.engine.engine import PAUSE_MODES
from verifiers_embedded.routes import answer_bodies as answers
from verifiers_embedded.routes import requests

_ERRORS = {
    400: "The body cannot be read, or asks for what the server does not support",
    401: "The server requires a key, and the request has none",
    404: "There is no such model",
    413: "The body is too long",
    500: "Nothing more can be generated, or the model gave no valid distribution",
    503: "The server is shutting down",
}
_OPEN_PATHS = ("/health", "/metrics")
_REF = "#/components/schemas/{model}"
_NOTE = (
    "Fields that are null count as absent. Beyond what the schemas say, and with status 400 where it is not so: a "
    "prompt leaves room for a token in the context and holds ids of the vocabulary, the chat template accepts the "
    "messages, fields that need one another come together, a constraint can be compiled, and weights fit the model. "
    "A model's name other than the served one is answered with status 404."
)


@dataclass(frozen=True)
class _Route:
    """A route: what it reads, what it answers, what the events of its stream hold, and the statuses of refusals."""

    method: str
    path: str
    answer: Any
    body: Any = None
    chunk: Any = None
    statuses: tuple[int, ...] = ()
    parameters: tuple[dict[str, Any], ...] = ()


_FAILING = (500, 503)
_READING = (400, 404, 413, *_FAILING)
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
_MODE = {"name": "mode", "in": "query", "required": False, "schema": {"enum": list(PAUSE_MODES)}}
_ROUTES = (
    _Route("post", "/v1/chat/completions", answers.ChatCompletion, requests.ChatRequest, answers.ChatChunk, _READING),
    _Route("post", "/v1/completions", answers.Completion, requests.TextRequest, answers.CompletionChunk, _READING),
    _Route(
        "post",
        "/inference/v1/generate",
        answers.TokenGeneration,
        requests.TokenRequest,
        answers.GenerationChunk,
        _READING,
    ),
    _Route(
        "post", "/v1/chat/completions/derender", answers.ChatCompletion, requests.DerenderRequest, statuses=_READING
    ),
    _Route("post", "/tokenize", answers.Tokenized, requests.TokenizeRequest, statuses=_READING),
    _Route("post", "/detokenize", answers.Detokenized, requests.DetokenizeRequest, statuses=_READING),
    _Route("get", "/v1/models", answers.ModelList),
    _Route("get", "/v1/models/{name}", answers.ServedModel, statuses=(404,), parameters=(_NAME,)),
    _Route("post", "/pause", answers.Paused, statuses=(400, *_FAILING), parameters=(_MODE,)),
    _Route("post", "/resume", answers.Resumed, statuses=_FAILING),
    _Route("get", "/is_paused", answers.PauseState),
    _Route("post", "/collective_rpc", answers.Reloaded, requests.ReloadRequest, statuses=_READING),
    _Route("post", "/update_weight_version", answers.VersionSet, requests.VersionRequest, statuses=_READING),
    _Route("get", "/weight_info", answers.WeightInfo),
    _Route("get", "/health", answers.Health, statuses=(503,)),
    _Route("get", "/metrics", str),
    _Route("get", "/openapi.json", dict),
)


def openapi_route(*, keyed: bool) -> web.RouteDef:
    """Make the route of the description, GET /openapi.json."""
    document = describe(keyed=keyed)

    async def show(request: web.Request) -> web.Response:
        return web.json_response(document)

    handler: Callable[[web.Request], Awaitable[web.Response]] = show
    return web.get("/openapi.json", handler)


@cache
def describe(*, keyed: bool) -> dict[str, Any]:
    """Write the whole document, OpenAPI 3.1; once a process, since it takes pydantic a tenth of a second.

    Args:
        keyed: true where the server requires a key.
    """
    described = {kind for route in _ROUTES for kind in (route.answer, route.body, route.chunk) if kind is not None}
    inputs = [(kind, "validation", TypeAdapter(kind)) for kind in [*sorted(described, key=_name), answers.Error]]
    found, definitions = TypeAdapter.json_schemas(inputs, ref_template=_REF)  # type: ignore[arg-type]
    schemas = {kind: schema for (kind, _), schema in found.items()}
    paths: dict[str, Any] = {}
    for route in _ROUTES:
        operation = _operation(route, schemas)
        if route.path in _OPEN_PATHS:
            operation["security"] = []
        elif keyed:
            operation["responses"]["401"] = _refused(401)
        paths.setdefault(route.path, {})[route.method] = operation
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "verifiers-embedded", "version": __version__, "description": _NOTE},
        "paths": paths,
        "components": {"schemas": definitions["$defs"]},
    }
    if keyed:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _name(kind: Any) -> str:
    return str(kind.__name__)


def _operation(route: _Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    media = "text/plain" if route.answer is str else "application/json"
    done: dict[str, Any] = {"description": "Done", "content": {media: {"schema": schemas[route.answer]}}}
    if route.chunk is not None:
        done["description"] = (
            'Done. With "stream": true the body is server-sent events, each of which holds a '
            f'{_name(route.chunk)} or, at a failure, an Error; the last holds "[DONE]"'
        )
        # no schema: one for a body of events is OpenAPI 3.2's
        done["content"]["text/event-stream"] = {"x-event-schema": schemas[route.chunk]}
    responses = {"200": done, **{str(status): _refused(status) for status in route.statuses}}
    operation: dict[str, Any] = {"responses": responses}
    if route.parameters:
        operation["parameters"] = list(route.parameters)
    if route.body is not None:
        content = {"application/json": {"schema": schemas[route.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _refused(status: int) -> dict[str, Any]:
    schema = {"$ref": _REF.format(model="Error")}
    return {"description": _ERRORS[status], "content": {"application/json": {"schema": schema}}}
