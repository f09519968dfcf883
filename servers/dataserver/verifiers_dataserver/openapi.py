"""The OpenAPI description of the server, from the same classes that read its requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from verifiers_dataserver import __version__
from verifiers_dataserver.http import OPEN_PATHS
from verifiers_dataserver.wire import GradeRequest, GradeRequest2, RowsRequest, SampleRequest, SampleRequest2

_ERRORS = {
    400: "The body cannot be read, or asks for what is not there",
    401: "The server requires a token, and the request has none",
    413: "The body is too long, or asks for too much at once",
    503: "Version 1: some completions could not be graded, and `results` holds those that could. Version 2: "
    "the server is ending; send the request again",
}
_TEXT: dict[str, Any] = {"type": "string"}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_NUMBER: dict[str, Any] = {"type": "number"}


def describe(*, keyed: bool, max_batch: int, datasets: Sequence[str]) -> dict[str, Any]:
    """Return the whole document, OpenAPI 3.1.

    Args:
        keyed: whether the server requires a token.
        max_batch: most samples or completions in one request.
        datasets: their names.
    """
    kinds: list[type[BaseModel]] = [SampleRequest, GradeRequest, SampleRequest2, RowsRequest, GradeRequest2]
    _, found = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    schemas = {**found["$defs"], **_answers()}
    _limit(schemas, max_batch, datasets)
    paths = {
        "/meta": _get("Meta"),
        "/sample": _post("SampleRequest", "Samples"),
        "/grade": _post("GradeRequest", "Rewards", 503),
        "/v2/meta": _get("Meta2"),
        "/v2/sample": _post("SampleRequest2", "Samples2"),
        "/v2/rows": _post("RowsRequest", "Rows"),
        "/v2/grade": _post("GradeRequest2", "Rewards2", 503),
        "/health": _get("Health"),
        "/metrics": _get("", media="text/plain"),
        "/openapi.json": _get("Document"),
    }
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
    """Put the limits and datasets of this server's configuration into the schemas."""
    for kind in ("SampleRequest", "SampleRequest2"):
        schemas[kind]["properties"]["batch_size"]["maximum"] = max_batch
    for kind in ("GradeRequest", "GradeRequest2"):
        schemas[kind]["properties"]["items"]["maxItems"] = max_batch
    rows = schemas["RowsRequest"]["properties"]
    rows["dataset"]["enum"] = list(datasets)
    next(schema for schema in rows["limit"]["anyOf"] if schema["type"] == "integer")["maximum"] = max_batch


def _answers() -> dict[str, Any]:
    until = _or_null(_COUNT)
    stage = {"name": _TEXT, "until_step": until}
    weighted = _object({"id": _TEXT, "weight": _NUMBER})
    sample = {
        "sample_id": _TEXT,
        "dataset_id": _TEXT,
        "system_prompt": _or_null(_TEXT),
        "metadata": {"type": "object"},
    }
    messages = _or_null(_list({"type": "object"}))
    sample2 = {**sample, "prompt": _or_null(_TEXT), "messages": messages, "task": _TEXT}
    result = {"sample_id": _TEXT, "reward": _NUMBER, "completion_index": _or_null(_COUNT)}
    result2 = {
        "sample_id": _TEXT,
        "completion_index": _COUNT,
        "reward": _or_null(_NUMBER),
        "metrics": {"type": "object", "additionalProperties": _NUMBER},
        "error": _or_null(_TEXT),
    }
    asked = {"optimizer_step": _COUNT, "generation_step": _COUNT, "seed": {"type": "integer"}, "rank": _COUNT}
    meta2 = {
        "version": {"const": 2},
        "total_steps": until,
        "seed": {"type": "integer"},
        "replacement": {"type": "boolean"},
        "stages": _list(_object({**stage, "datasets": _list(weighted)})),
        "datasets": _list(_object({"id": _TEXT, "rows": _COUNT})),
        "max_batch": _COUNT,
        "max_body_bytes": _COUNT,
        "grade_timeout_s": _NUMBER,
    }
    failure = _object({"message": _TEXT, "code": _TEXT})
    return {
        "Meta": _object({"total_iterations": until, "stages": _list(_object(stage))}),
        "Meta2": _object(meta2),
        "Samples": _object({"samples": _list(_object({**sample, "prompt": _TEXT}))}),
        "Samples2": _object({"samples": _list(_object(sample2)), "stage": _TEXT, **asked}),
        "Rows": _object({"samples": _list(_object(sample2)), "total": _COUNT}),
        "Rewards": _object({"results": _list(_object(result))}),
        "Rewards2": _object({"results": _list(_object(result2))}),
        "Health": _object({"status": {"const": "ok"}, "datasets": _COUNT, "version": _TEXT}),
        "Document": {"type": "object"},
        "Error": _object({"error": failure}),
    }


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _post(request: str, answer: str, *more: int) -> dict[str, Any]:
    body = {"required": True, "content": {"application/json": {"schema": _ref(request)}}}
    responses = {str(status): _error(status) for status in (400, 413, *more)}
    return {"post": {"requestBody": body, "responses": {"200": _done(_ref(answer)), **responses}}}


def _get(answer: str, media: str = "application/json") -> dict[str, Any]:
    return {"get": {"responses": {"200": _done(_ref(answer) if answer else _TEXT, media)}}}


def _done(schema: dict[str, Any], media: str = "application/json") -> dict[str, Any]:
    return {"description": "Done", "content": {media: {"schema": schema}}}


def _error(status: int) -> dict[str, Any]:
    return {"description": _ERRORS[status], "content": {"application/json": {"schema": _ref("Error")}}}
