"""What the server bears, whom it lets in, and what it says about itself."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def configuration(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "answer": "a"}\n')
    server = {"max_body_mib": 1, "max_batch": 3}
    return {"datasets": {"d": {"jsonl": "rows.jsonl", "graders": ["exact"]}}, "server": server}


def items(count: int, text: str = "a") -> list[dict[str, Any]]:
    return [{"sample_id": "d:0", "completion": text, "completion_index": index} for index in range(count)]


async def test_bodies_and_batches_over_the_limit_are_refused_with_413(serve: Any, configuration: Any) -> None:
    server = await serve(configuration)
    for path, body in (
        ("/sample", {"iteration": 0, "batch_size": 4}),
        ("/v2/sample", {"optimizer_step": 0, "generation_step": 0, "batch_size": 4}),
        ("/v2/rows", {"dataset": "d", "limit": 4}),
        ("/grade", {"iteration": 0, "items": items(4)}),
        ("/v2/grade", {"items": items(4)}),
    ):
        status, answer = await server.post(path, body)
        assert status == 413, path
        assert set(answer["error"]) == {"message", "code"}
    body = io.BytesIO(json.dumps({"items": items(1, "a" * 2**20)}).encode())
    async with server.session.post(server.url + "/v2/grade", data=body) as response:
        assert response.status == 413
    assert (await server.post("/v2/grade", {"items": items(3)}))[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"items": [{"sample_id": "\\ud800"}]}',
        b"[" * 100_000,
        b"1" * 10**5,
    ],
)
async def test_bodies_that_are_no_request_are_refused_with_400(serve: Any, configuration: Any, body: bytes) -> None:
    server = await serve(configuration)
    for path in ("/sample", "/grade", "/v2/sample", "/v2/rows", "/v2/grade"):
        async with server.session.post(server.url + path, data=body) as response:
            assert response.status == 400
            assert "message" in (await response.json())["error"]


async def test_a_token_is_asked_for_everywhere_but_where_monitors_look(serve: Any, configuration: Any) -> None:
    server = await serve(configuration, token="sesame")
    for path in ("/meta", "/v2/meta", "/openapi.json", "/nowhere"):
        assert (await server.get(path))[0] == 401
        assert (await server.get(path, headers={"Authorization": "Bearer sesam"}))[0] == 401
    assert (await server.post("/v2/grade", {"items": items(1)}))[0] == 401
    assert (await server.get("/health"))[0] == 200
    assert "vf_dataserver_requests" in await server.text("/metrics")
    right = {"Authorization": "Bearer sesame"}
    assert (await server.get("/meta", headers=right))[0] == 200
    assert (await server.post("/v2/grade", {"items": items(1)}, headers=right))[0] == 200


async def test_wrong_paths_and_methods_are_error_objects(serve: Any, configuration: Any) -> None:
    server = await serve(configuration)
    assert (await server.get("/nowhere"))[0] == 404
    async with server.session.delete(server.url + "/sample") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert (await response.json())["error"]["code"] == "http"


async def test_the_description_has_every_route(serve: Any, configuration: Any) -> None:
    server = await serve(configuration)
    _, document = await server.get("/openapi.json")
    assert set(document["paths"]) == {
        "/meta",
        "/sample",
        "/grade",
        "/v2/meta",
        "/v2/sample",
        "/v2/rows",
        "/v2/grade",
        "/health",
        "/metrics",
        "/openapi.json",
    }
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert named <= set(document["components"]["schemas"])


async def test_metrics_count_requests_samples_and_rewards(serve: Any, configuration: Any) -> None:
    server = await serve(configuration)
    await server.post("/sample", {"iteration": 0, "batch_size": 1})
    await server.post("/grade", {"iteration": 0, "items": items(2)})
    await server.post("/grade", {"iteration": 0, "items": [{"sample_id": "d:9", "completion": ""}]})
    text = await server.text("/metrics")
    for line in (
        'vf_dataserver_requests_total{method="POST",route="/grade",status="200"} 1.0',
        'vf_dataserver_requests_total{method="POST",route="/grade",status="400"} 1.0',
        'vf_dataserver_samples_total{dataset="d",stage="all"} 1.0',
        'vf_dataserver_graded_total{dataset="d"} 2.0',
        'vf_dataserver_reward_total{dataset="d"} 2.0',
    ):
        assert line in text
