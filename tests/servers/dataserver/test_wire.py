"""The wire format: version 1 as kolibrify's clients read it, version 2, and never an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SECRET = "the-answer-that-nobody-may-see"


@pytest.fixture
def two_stages(tmp_path: Path) -> dict[str, Any]:
    rows = [{"prompt": f"q{i}", "answer": f"{i}", "metadata": {"topic": "t", "hint": f"{i}"}} for i in range(8)]
    (tmp_path / "easy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"prompt": f"h{i}", "answer": f"{i}", "system_prompt": "Think."} for i in range(8)]
    (tmp_path / "hard.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "datasets": {
            "easy": {"jsonl": "easy.jsonl", "metadata": ["topic"], "graders": ["exact"]},
            "hard": {"jsonl": "hard.jsonl", "graders": ["exact"]},
        },
        "curriculum": {
            "stages": [
                {"name": "warm", "until_step": 2, "datasets": ["easy"]},
                {"name": "main", "until_step": 4, "datasets": ["hard"]},
            ]
        },
    }


async def test_meta_names_the_stages_and_the_iterations_of_version_1(serve: Any, two_stages: Any) -> None:
    server = await serve(two_stages)
    stages = [{"name": "warm", "until_step": 2}, {"name": "main", "until_step": 4}]
    assert await server.get("/meta") == (200, {"total_iterations": 4, "stages": stages})


async def test_a_sample_has_the_fields_of_version_1_and_no_others(serve: Any, two_stages: Any) -> None:
    server = await serve(two_stages)
    status, answer = await server.post("/sample", {"iteration": 0, "batch_size": 3})
    assert status == 200
    assert len(answer["samples"]) == 3
    for sample in answer["samples"]:
        assert set(sample) == {"sample_id", "dataset_id", "system_prompt", "prompt", "metadata"}
        number = sample["sample_id"].removeprefix("easy:")
        assert (sample["dataset_id"], sample["prompt"], sample["system_prompt"]) == ("easy", f"q{number}", None)
        assert sample["metadata"] == {"topic": "t"}
    _, answer = await server.post("/sample", {"iteration": 2, "batch_size": 1})
    assert answer["samples"][0]["system_prompt"] == "Think."


async def test_the_stage_is_the_files_at_each_iteration_and_the_last_one_stays(serve: Any, two_stages: Any) -> None:
    server = await serve(two_stages)
    found = []
    for iteration in (0, 1, 2, 3, 4, 10**9):
        _, answer = await server.post("/sample", {"iteration": iteration, "batch_size": 2})
        found.append({sample["dataset_id"] for sample in answer["samples"]})
    assert found == [{"easy"}, {"easy"}, {"hard"}, {"hard"}, {"hard"}, {"hard"}]


async def test_rewards_come_back_under_their_completion_index(serve: Any, two_stages: Any) -> None:
    server = await serve(two_stages)
    items = [
        {"sample_id": "easy:3", "completion": "3", "completion_tokens": 1, "completion_index": 7},
        {"sample_id": "hard:4", "completion": "4", "completion_tokens": None, "completion_index": 2},
        {"sample_id": "easy:3", "completion": "5", "completion_index": 0},
    ]
    status, answer = await server.post("/grade", {"iteration": 1, "items": items})
    assert status == 200
    assert all(set(result) == {"sample_id", "reward", "completion_index"} for result in answer["results"])
    rewards = {result["completion_index"]: result["reward"] for result in answer["results"]}
    assert rewards == {7: 1.0, 2: 1.0, 0: 0.0}


@pytest.mark.parametrize("route", ["/grade", "/v2/grade"])
async def test_an_unknown_sample_id_is_refused_with_400(serve: Any, two_stages: Any, route: str) -> None:
    server = await serve(two_stages)
    for sample_id in ("easy:8", "easy:-1", "easy:03", "easy:x", "easy", "", "none:0", "easy:²", ":0"):
        items = [
            {"sample_id": "easy:0", "completion": "0", "completion_index": 0},
            {"sample_id": sample_id, "completion": "0", "completion_index": 1},
        ]
        status, answer = await server.post(route, {"iteration": 0, "items": items})
        assert (status, answer["error"]["code"]) == (400, "unknown_sample_id"), sample_id


async def test_a_client_of_version_1_that_asks_again_gets_further_rows(serve: Any, two_stages: Any) -> None:
    """Its ranks and accumulation steps all ask in the same words."""
    server = await serve(two_stages)
    found = []
    for _ in range(6):
        _, answer = await server.post("/sample", {"iteration": 0, "batch_size": 4})
        found.append(tuple(sample["sample_id"] for sample in answer["samples"]))
    assert len(set(found)) > 3


async def test_a_conversation_is_served_by_version_2_and_refused_by_version_1(serve: Any, tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2"},
    ]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": messages, "answer": "4"}))
    server = await serve({"datasets": {"chat": {"jsonl": "chat.jsonl", "graders": ["exact"]}}})
    status, answer = await server.post("/sample", {"iteration": 0, "batch_size": 1})
    assert (status, answer["error"]["code"]) == (400, "needs_version_2")
    _, answer = await server.post("/v2/sample", {"optimizer_step": 0, "generation_step": 0, "batch_size": 1})
    assert answer["samples"][0]["messages"] == messages


async def test_no_route_ever_says_an_answer(serve: Any, python: Any, tmp_path: Path) -> None:
    row = {
        "prompt": "q",
        "answer": SECRET,
        "system_prompt": "s",
        "metadata": {"topic": "t", "solution": SECRET},
        "info": {"solution": SECRET},
        "solution": SECRET,
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    graders = {"quoting": python("quote")}
    plain = {"jsonl": "rows.jsonl", "metadata": ["topic"]}
    datasets = {
        "exact": {**plain, "graders": ["exact", "math"]},
        "quoting": {**plain, "graders": ["quoting"]},
        "categories": {**plain, "graders": [{"use": "category", "categories": ["other"]}]},
        "schema": {**plain, "graders": ["json_schema"]},
    }
    server = await serve({"datasets": datasets, "graders": graders})
    heard = [await server.text(path) for path in ("/meta", "/v2/meta", "/health", "/openapi.json")]
    block = {"optimizer_step": 0, "generation_step": 0, "batch_size": 4}
    for path, body in [("/sample", {"iteration": 0, "batch_size": 4}), ("/v2/sample", block)]:
        heard.append(json.dumps(await server.post(path, body)))
    for name in datasets:
        heard.append(json.dumps(await server.post("/v2/rows", {"dataset": name})))
        for text in ("wrong", "{}", SECRET[:-1]):
            items = [{"sample_id": f"{name}:0", "completion": text, "completion_index": 0}]
            heard.append(json.dumps(await server.post("/grade", {"iteration": 0, "items": items})))
            heard.append(json.dumps(await server.post("/v2/grade", {"items": items})))
    heard.append(await server.text("/metrics"))
    assert all(SECRET not in text for text in heard)
    assert sum('"topic": "t"' in text for text in heard) >= 5


async def test_a_grade_says_in_the_log_which_step_block_seed_and_rank_it_was_asked_for(
    serve: Any, two_stages: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "verifiers_dataserver")
    server = await serve(two_stages)
    items = [{"sample_id": "easy:3", "completion": "3", "completion_index": 0}]
    said = {"optimizer_step": 6, "generation_step": 3, "seed": -9, "rank": 2}
    assert (await server.post("/v2/grade", {"items": items, **said}))[0] == 200
    assert "rank 2: 1 completions of block 3 at step 6, seed -9" in caplog.text
