"""Limits of the server, its token, and its description of itself."""

from __future__ import annotations

import io
import json
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
        assert "longer than the 1 MiB of server.max_body_mib" in (await response.json())["error"]["message"]
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
        b'{"items": [{"sample_id": "d:0", "completion": [{"content": [{"text": 5}]}], "completion_index": 0}]}',
        b'{"items": [{"sample_id": "d:0", "completion": [{"content": {"text": "a"}}], "completion_index": 0}]}',
        b'{"items": [{"sample_id": "d:0", "completion": [{"role": 1}], "completion_index": 0}]}',
        b'{"items": [{"sample_id": "d:0", "completion": [5], "completion_index": 0}]}',
        b'{"items": [{"sample_id": "d:0", "completion": "a", "completion_index": 0.5}]}',
        b'{"items": [{"sample_id": "d:0", "completion": "a", "completion_index": 1e999}]}',
    ],
)
async def test_bodies_that_are_no_request_are_refused_with_400(serve: Any, configuration: Any, body: bytes) -> None:
    server = await serve(configuration)
    for path in ("/sample", "/grade", "/v2/sample", "/v2/rows", "/v2/grade"):
        async with server.session.post(server.url + path, data=body) as response:
            assert response.status == 400
            assert "message" in (await response.json())["error"]


async def test_a_refusal_names_the_field_that_is_wrong(serve: Any, configuration: Any) -> None:
    server = await serve(configuration)
    messages = [{"role": "assistant", "content": [{"type": "text", "text": 5}]}]
    body = {"items": [*items(1), {**items(2)[1], "completion": messages}]}
    _, answer = await server.post("/v2/grade", body)
    assert answer["error"]["message"].startswith("items.1.completion.0.content.0.text: ")


async def test_messages_of_every_kind_are_taken(serve: Any, configuration: Any) -> None:
    server = await serve(configuration)
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r"},
        {"role": "tool", "content": "b", "tool_call_id": "c"},
        {"role": "assistant", "content": parts},
    ]
    ways = (messages, [{"content": "a"}], ["a"], [{"role": "assistant", "content": ["a"]}])
    for way, rewards in zip(ways, (1.0, 1.0, None, 1.0), strict=True):
        status, answer = await server.post("/v2/grade", {"items": [{**items(1)[0], "completion": way}]})
        assert (answer["results"][0]["reward"] if status == 200 else None) == rewards


async def test_whole_numbers_may_be_written_with_a_point(serve: Any, configuration: Any) -> None:
    server = await serve(configuration)
    status, answer = await server.post("/sample", {"iteration": 0.0, "batch_size": 1.0})
    assert (status, len(answer["samples"])) == (200, 1)
    item = {**items(1)[0], "completion_index": 2.0, "completion_tokens": 3.0}
    _, answer = await server.post("/v2/grade", {"items": [item], "optimizer_step": 1.0, "seed": -2.0, "rank": 1})
    assert answer["results"][0]["completion_index"] == 2


async def test_rows_come_without_a_limit_also_where_a_batch_is_small(serve: Any, configuration: Any) -> None:
    server = await serve(configuration)
    status, answer = await server.post("/v2/rows", {"dataset": "d"})
    assert (status, len(answer["samples"])) == (200, 1)


async def test_clients_are_told_what_the_server_bears(serve: Any, configuration: Any) -> None:
    configuration["server"]["grade_timeout_s"] = 7.5
    server = await serve(configuration)
    _, meta = await server.get("/v2/meta")
    assert (meta["max_batch"], meta["max_body_bytes"], meta["grade_timeout_s"]) == (3, 2**20, 7.5)
    _, document = await server.get("/openapi.json")
    schemas = {name: schema.get("properties") for name, schema in document["components"]["schemas"].items()}
    assert [schemas[kind]["batch_size"]["maximum"] for kind in ("SampleRequest", "SampleRequest2")] == [3, 3]
    assert [schemas[kind]["items"]["maxItems"] for kind in ("GradeRequest", "GradeRequest2")] == [3, 3]
    assert schemas["RowsRequest"]["dataset"]["enum"] == ["d"]
    assert schemas["RowsRequest"]["limit"]["anyOf"][0]["maximum"] == 3


async def test_a_token_is_asked_for_everywhere_but_for_the_servers_health(serve: Any, configuration: Any) -> None:
    server = await serve(configuration, token="sesame")
    # metrics name the datasets and say what rewards their completions get
    for path in ("/meta", "/v2/meta", "/openapi.json", "/metrics", "/nowhere"):
        assert (await server.get(path))[0] == 401
        assert (await server.get(path, headers={"Authorization": "Bearer sesam"}))[0] == 401
    assert (await server.post("/v2/grade", {"items": items(1)}))[0] == 401
    assert (await server.get("/health"))[0] == 200
    right = {"Authorization": "Bearer sesame"}
    async with server.session.get(server.url + "/metrics", headers=right) as response:
        assert "vf_dataserver_requests" in await response.text()
    assert (await server.get("/meta", headers=right))[0] == 200
    assert (await server.post("/v2/grade", {"items": items(1)}, headers=right))[0] == 200


async def test_wrong_paths_and_methods_are_error_objects(serve: Any, configuration: Any) -> None:
    server = await serve(configuration)
    assert (await server.get("/nowhere"))[0] == 404
    async with server.session.delete(server.url + "/sample") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert (await response.json())["error"]["code"] == "http"


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
