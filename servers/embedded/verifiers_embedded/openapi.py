"""The OpenAPI description of this server: what each route reads and answers, with this model's own limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from verifiers_embedded import __version__
from verifiers_embedded.engine import PAUSE_MODES
from verifiers_embedded.loading import LoadedModel
from verifiers_embedded.schemas import (
    COUNT,
    FLAG,
    TEXT,
    Schema,
    answer_schemas,
    answered,
    listed,
    or_null,
    ref,
    request_schemas,
)

_ERRORS = {
    400: "The body cannot be read, or holds what the server cannot obey",
    401: "The server was started with a key, and the request did not bring it",
    404: "There is no such model",
    413: "The body is too long",
    500: "Nothing more can be generated, or the model gave no valid distribution",
    503: "The server is shutting down",
}

_NOTE = (
    "Fields that are null count as absent. Beyond what the schemas say, and with status 400 where it is not "
    "so: a prompt leaves room for a token in the context, the chat template accepts the messages, a "
    "constraint can be compiled and fits the other fields, and weights fit the model."
)


def openapi_route(model_name: str, loaded: LoadedModel, *, keyed: bool) -> web.RouteDef:
    """GET /openapi.json"""
    document = describe(model_name, loaded.vocab_size, loaded.max_model_len, keyed=keyed)

    async def show(request: web.Request) -> web.Response:
        return web.json_response(document)

    handler: Callable[[web.Request], Awaitable[web.Response]] = show
    return web.get("/openapi.json", handler)


def describe(model_name: str, vocab_size: int, max_model_len: int, *, keyed: bool) -> Schema:
    """The whole document, OpenAPI 3.1.

    Args:
        model_name: the one that requests may name.
        vocab_size: token ids are smaller.
        max_model_len: the context in tokens.
        keyed: whether the server asks for a key.
    """
    token = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    schemas = request_schemas(model_name, token, max_model_len) | answer_schemas()
    document: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "verifiers-embedded", "version": __version__, "description": _NOTE},
        "paths": _paths(keyed),
        "components": {"schemas": schemas},
    }
    if keyed:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _paths(keyed: bool) -> dict[str, Schema]:
    paused = {"status": {"const": "paused"}}
    info = {"weight_version": TEXT, "num_parameters": COUNT, "model": TEXT}
    health = answered({"status": {"const": "ok"}, "running": COUNT, "waiting": COUNT})
    tokenized = {"count": COUNT, "max_model_len": COUNT, "tokens": listed(COUNT)}
    paths = {
        "/v1/chat/completions": _post("ChatRequest", ref("ChatCompletion"), "ChatChunk"),
        "/v1/completions": _post("CompletionRequest", ref("Completion"), "CompletionChunk"),
        "/inference/v1/generate": _post("GenerateRequest", ref("Generation"), "GenerationChunk"),
        "/v1/chat/completions/derender": _post("DerenderRequest", ref("ChatCompletion")),
        "/tokenize": _post("TokenizeRequest", answered({**tokenized, "token_strs": or_null(listed(TEXT))})),
        "/detokenize": _post("DetokenizeRequest", answered({"prompt": TEXT})),
        "/v1/models": _get(answered({"object": {"const": "list"}, "data": listed(ref("Model"))})),
        "/v1/models/{name}": _get(ref("Model"), 404, _parameter("name", "path", TEXT)),
        "/pause": _operation(
            "post",
            answered(paused),
            (400, 500, 503),
            _parameter("mode", "query", {"enum": list(PAUSE_MODES)}),
        ),
        "/resume": _operation("post", answered({"status": {"const": "resumed"}}), (500, 503)),
        "/is_paused": _get(answered({"is_paused": FLAG})),
        "/collective_rpc": _post("ReloadRequest", answered({"results": listed({"type": "null"})})),
        "/update_weight_version": _post(
            "VersionRequest", answered({"success": {"const": True}, "new_version": TEXT})
        ),
        "/weight_info": _get(answered(info)),
        "/health": _get(health, 503),
        "/metrics": _get(TEXT, media="text/plain"),
        "/openapi.json": _get({"type": "object"}),
    }
    for path, item in paths.items():
        for operation in item.values():
            if path in ("/health", "/metrics"):
                operation["security"] = []
            elif keyed:
                operation["responses"]["401"] = _error(401)
    return paths


def _post(request: str, answer: Schema, chunk: str = "") -> Schema:
    """A route with a JSON body. `chunk` names what the events of its stream hold."""
    item = _operation("post", answer, (400, 404, 413, 500, 503))
    operation = item["post"]
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref(request)}}}
    if chunk:
        done = operation["responses"]["200"]
        done["description"] = (
            'Done. With "stream": true the body is server-sent events, each of which holds a '
            f'{chunk} or, at a failure, an Error; the last holds "[DONE]"'
        )
        # no schema: one for a body of events is OpenAPI 3.2's
        done["content"]["text/event-stream"] = {"x-event-schema": ref(chunk)}
    return item


def _get(answer: Schema, *refusals: int | Schema, media: str = "application/json") -> Schema:
    statuses = tuple(item for item in refusals if isinstance(item, int))
    return _operation("get", answer, statuses, *(i for i in refusals if not isinstance(i, int)), media=media)


def _operation(
    method: str,
    answer: Schema,
    refusals: tuple[int, ...],
    *parameters: Schema,
    media: str = "application/json",
) -> Schema:
    responses: Schema = {"200": {"description": "Done", "content": {media: {"schema": answer}}}}
    responses |= {str(status): _error(status) for status in refusals}
    operation: Schema = {"responses": responses}
    if parameters:
        operation["parameters"] = list(parameters)
    return {method: operation}


def _error(status: int) -> Schema:
    return {"description": _ERRORS[status], "content": {"application/json": {"schema": ref("Error")}}}


def _parameter(name: str, place: str, schema: Schema) -> Schema:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}
