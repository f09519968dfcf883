"""Routes, and the OpenAPI description of their requests, from the same classes that read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from verifiers_dataserver import __version__
from verifiers_dataserver.http import OPEN_PATHS, Handler

_ERRORS = {
    400: "The body cannot be read, or asks for what is not there",
    401: "The server requires a token, and the request has none",
    413: "The body is too long, or asks for too much at once",
    503: "Version 1: some completions could not be graded, and `results` holds those that could. Version 2: "
    "the server is ending; send the request again",
}
_TEXT = {"type": "string"}
_ERROR_FIELDS = {"message": _TEXT, "code": _TEXT}
_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": _ERROR_FIELDS, "required": list(_ERROR_FIELDS)}},
    "required": ["error"],
}


class Route(NamedTuple):
    """A route: its method in lower case, what it reads, and statuses beyond those of every body."""

    method: str
    path: str
    handler: Handler
    body: type[BaseModel] | None = None
    statuses: tuple[int, ...] = ()


def describe(routes: Sequence[Route], *, keyed: bool, max_batch: int, datasets: Sequence[str]) -> dict[str, Any]:
    """Return the whole document, OpenAPI 3.1, with the limits and datasets of this server's configuration."""
    kinds = [route.body for route in routes if route.body is not None]
    _, found = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    schemas = {**found["$defs"], "Error": _ERROR}
    _limit(schemas, max_batch, datasets)
    paths = {route.path: {route.method: _operation(route)} for route in routes}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "verifiers-dataserver",
            "version": __version__,
            "description": "Prompts of a curriculum, and grades. Sample ids are those that /sample gave, and "
            "a batch holds no more rows of a dataset than there are; else the answer has status 400.",
        },
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if keyed:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    for path, item in paths.items():
        for operation in item.values():
            if path in OPEN_PATHS:
                operation["security"] = []
            elif keyed:
                operation["responses"]["401"] = _error(401)
    return document


def _limit(schemas: dict[str, Any], max_batch: int, datasets: Sequence[str]) -> None:
    for kind in ("SampleRequest", "SampleRequest2"):
        schemas[kind]["properties"]["batch_size"]["maximum"] = max_batch
    for kind in ("GradeRequest", "GradeRequest2"):
        schemas[kind]["properties"]["items"]["maxItems"] = max_batch
    rows = schemas["RowsRequest"]["properties"]
    rows["dataset"]["enum"] = list(datasets)
    next(schema for schema in rows["limit"]["anyOf"] if schema["type"] == "integer")["maximum"] = max_batch


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _operation(route: Route) -> dict[str, Any]:
    media = "text/plain" if route.path == "/metrics" else "application/json"
    done = {"description": "Done", "content": {media: {}}}
    if route.body is None:
        return {"responses": {"200": done}}
    body = {"required": True, "content": {"application/json": {"schema": _ref(route.body.__name__)}}}
    refusals = {str(status): _error(status) for status in (400, 413, *route.statuses)}
    return {"requestBody": body, "responses": {"200": done, **refusals}}


def _error(status: int) -> dict[str, Any]:
    return {"description": _ERRORS[status], "content": {"application/json": {"schema": _ref("Error")}}}
