"""Version 2 draws rows by what the request says and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from verifiers_dataserver.config import load_configuration

from verifiers.data.row_source import StagedRows


@pytest.fixture
def configuration(tmp_path: Path) -> dict[str, Any]:
    for name, count in (("easy", 12), ("hard", 40)):
        lines = [f'{{"prompt": "{name} {i}", "answer": "{i}"}}' for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    weighted = [{"id": "easy", "weight": 1}, {"id": "hard", "weight": 3}]
    return {
        "datasets": {name: {"jsonl": f"{name}.jsonl", "graders": ["exact"]} for name in ("easy", "hard")},
        "curriculum": {
            "seed": 11,
            "stages": [
                {"name": "warm", "until_step": 2, "datasets": ["easy"]},
                {"name": "main", "until_step": 4, "datasets": weighted},
            ],
        },
    }


async def ids(server: Any, block: int, count: int = 4, step: int | None = None, **fields: Any) -> list[str]:
    body = {
        "optimizer_step": block if step is None else step,
        "generation_step": block,
        "batch_size": count,
        **fields,
    }
    status, answer = await server.post("/v2/sample", body)
    assert status == 200, answer
    return [sample["sample_id"] for sample in answer["samples"]]


async def test_a_retry_a_restart_and_another_order_get_the_same_rows(serve: Any, configuration: Any) -> None:
    first, second = await serve(configuration), await serve(configuration)
    ahead = [await ids(first, block) for block in range(6)]
    await first.post("/sample", {"iteration": 3, "batch_size": 2})
    assert [await ids(first, block) for block in reversed(range(6))] == ahead[::-1]
    assert [await ids(second, block) for block in (5, 0, 3)] == [ahead[5], ahead[0], ahead[3]]


async def test_every_rank_gets_the_same_rows_and_another_seed_others(serve: Any, configuration: Any) -> None:
    server = await serve(configuration)
    rows = [await ids(server, 2, rank=rank) for rank in range(4)]
    assert rows == [rows[0]] * 4
    assert await ids(server, 2, seed=11) == rows[0]
    assert await ids(server, 2, seed=12) != rows[0]


async def test_the_stage_follows_the_optimizer_step_and_not_the_block(serve: Any, configuration: Any) -> None:
    """Two passes over each block: blocks 0 and 1 begin at the steps 0 and 2."""
    server = await serve(configuration)
    assert {name.split(":")[0] for name in await ids(server, 0, step=0, updates_per_block=2)} == {"easy"}
    found = Counter(name.split(":")[0] for name in await ids(server, 1, step=2, updates_per_block=2))
    assert found == {"easy": 1, "hard": 3}


async def test_a_part_of_a_block_is_what_the_plan_of_a_trainer_draws(
    serve: Any, configuration: Any, configure: Any
) -> None:
    server = await serve(configuration)
    curriculum = load_configuration(configure(configuration)).curriculum
    staged = StagedRows(curriculum, {"easy": range(12), "hard": range(12, 52)})
    drawn = curriculum.draw(staged.sizes, 1, 1, 6)
    body = {"offset": 2, "prompts_per_block": 6, "first_blocks": curriculum.first_blocks(1)}
    assert await ids(server, 1, 2, step=1, **body) == [f"{name}:{row}" for name, row in drawn[2:4]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"first_blocks": [1, 2]}, "first_blocks is [1, 2]"),
        ({"first_blocks": [0]}, "'main'"),
        ({"offset": 2, "prompts_per_block": 4}, "one block of 4"),
        ({"batch_size": 13}, "block 0 takes 13"),
        ({"batch_size": 1025}, "max_batch of 1024"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": "4"}, "batch_size"),
        ({"optimizer_step": -1}, "optimizer_step"),
    ],
)
async def test_a_request_that_contradicts_itself_is_refused_with_a_sentence(
    serve: Any, configuration: Any, fields: Any, words: str
) -> None:
    server = await serve(configuration)
    body = {"optimizer_step": 0, "generation_step": 0, "batch_size": 4, **fields}
    status, answer = await server.post("/v2/sample", body)
    assert status in (400, 413)
    assert words in answer["error"]["message"]


async def test_rows_of_a_dataset_come_in_order_page_by_page(serve: Any, configuration: Any) -> None:
    server = await serve(configuration)
    found = []
    for offset in (0, 5, 10, 15):
        _, answer = await server.post("/v2/rows", {"dataset": "easy", "offset": offset, "limit": 5})
        assert answer["total"] == 12
        found += [sample["sample_id"] for sample in answer["samples"]]
    assert found == [f"easy:{i}" for i in range(12)]
    assert (await server.post("/v2/rows", {"dataset": "none"}))[0] == 400
