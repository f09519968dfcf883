"""Contents of a completion: ids, log-probs, text, and the order in which requests get their slots."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch
from step_gate import StepGate


async def test_greedy_takes_the_likeliest_token_and_reports_its_log_prob_at_temperature_1(
    start: Any, model_dir: Any, reference: Any
) -> None:
    server = await start()
    prompt, ids, log_probs = server.sampled(await server.chat(temperature=0, ignore_eos=True))
    logits = reference.logits(model_dir, prompt + ids)[len(prompt) - 1 : -1]
    assert ids == logits.argmax(-1).tolist()
    assert log_probs == pytest.approx(torch.log_softmax(logits, -1).amax(-1).tolist(), abs=1e-4)


async def test_requests_without_a_seed_differ_and_follow_the_servers_seed(start: Any) -> None:
    runs = []
    for _ in range(2):
        server = await start(seed=11)
        runs.append([server.sampled(await server.chat(ignore_eos=True))[1] for _ in range(3)])
    assert runs[0] == runs[1]
    assert len({tuple(ids) for ids in runs[0]}) == 3


async def test_requests_beyond_the_slots_wait_and_are_answered_by_identity(
    start: Any, model_dir: Any, reference: Any
) -> None:
    server = await start(slots=4)
    answers = await asyncio.gather(
        *(
            server.chat(f"{place}", seed=place, max_tokens=3 + place % 9, temperature=1.0 - 0.3 * (place % 2))
            for place in range(40)
        )
    )
    for place, answer in enumerate(answers):
        prompt, ids, log_probs = server.sampled(answer)
        assert server.loaded.tokenizer.decode(prompt) == f"<user>{place}<bot>"
        expected = reference.log_probs(model_dir, prompt, ids, 1.0 - 0.3 * (place % 2))
        assert log_probs == pytest.approx(expected, abs=1e-4)
    assert server.engine._batch.allocated[0] <= 4


async def test_the_eos_token_is_in_the_ids_but_not_in_the_text(start: Any) -> None:
    server = await start()
    answers = await asyncio.gather(*(server.chat(seed=seed, max_tokens=100) for seed in range(24)))
    ended = [answer for answer in answers if answer["choices"][0]["finish_reason"] == "stop"]
    assert ended
    for answer in ended:
        _, ids, _ = server.sampled(answer)
        assert ids[-1] == server.loaded.tokenizer.eos_token_id
        assert server.loaded.tokenizer.eos_token_id not in ids[:-1]
        text = answer["choices"][0]["message"]["content"]
        assert text == server.loaded.tokenizer.decode(ids, skip_special_tokens=True)
        assert "<eos>" not in text


async def test_a_stop_string_across_token_borders_cuts_the_text_and_keeps_its_tokens(start: Any) -> None:
    server = await start()
    free = (await server.chat(seed=3, max_tokens=40, ignore_eos=True))["choices"][0]
    text = free["message"]["content"]
    stop = text[10:13]
    place = text.index(stop)
    answer = await server.chat(seed=3, max_tokens=40, ignore_eos=True, stop=[stop, "never, ever"])
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == text[:place]
    decoded = server.loaded.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    assert decoded == text[: place + len(stop)]
    assert choice["token_ids"] == free["token_ids"][: len(choice["token_ids"])]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


async def test_a_completion_without_max_tokens_ends_with_the_context(start: Any) -> None:
    server = await start(max_model_len=40)
    for fields in ({"max_tokens": None}, {"max_tokens": 10_000}):
        answer = await server.chat("hi", ignore_eos=True, **fields)
        assert answer["usage"]["total_tokens"] == 40
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_max_completion_tokens_is_obeyed_and_a_list_of_parts_is_joined(start: Any) -> None:
    server = await start()
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    answer = await server.chat(parts, max_tokens=None, max_completion_tokens=3, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 3
    assert server.loaded.tokenizer.decode(answer["prompt_token_ids"]) == "<user>ab\ncd<bot>"


async def test_a_client_that_goes_away_in_mid_generation_stops_costing_steps(start: Any) -> None:
    server = await start()
    gate = StepGate(server.engine, until=lambda: server.engine._batch.sequences[0].future.cancelled())
    task = asyncio.create_task(server.chat(max_tokens=240, ignore_eos=True))
    await server.until(lambda: gate.held == 1)
    (sequence,) = server.engine._batch.sequences
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await server.until(lambda: server.engine.counts["running"] == 0 and server.engine._batch.allocated == (0, 0))
    # the step that was held, and no other
    assert len(sequence.log_probs) == 6


async def test_an_engine_that_dies_answers_everyone_and_health_says_why(start: Any) -> None:
    server = await start(slots=2)
    await server.post("/pause?mode=keep")
    tasks = [asyncio.create_task(server.refused()) for _ in range(5)]
    await server.until(lambda: server.engine.counts["waiting"] == 5)

    def explode(*_: Any, **__: Any) -> None:
        raise RuntimeError("the moon fell down")

    server.engine._batch.step = explode
    await server.post("/resume")
    for status, error in await asyncio.gather(*tasks):
        assert status == 500
        assert "the moon fell down" in error["message"]
    status, body = await server.get("/health")
    assert (status, "the moon fell down" in json.dumps(body)) == (503, True)
    assert (await server.refused())[0] == 500
    assert (await server.post("/pause?mode=keep"))[0] == 500


async def test_health_and_models_describe_the_server(start: Any) -> None:
    server = await start(max_model_len=99)
    assert await server.get("/health") == (200, {"status": "ok", "running": 0, "waiting": 0})
    status, models = await server.get("/v1/models")
    assert status == 200
    assert models["object"] == "list"
    assert models["data"][0]["id"] == "m"
    assert models["data"][0]["max_model_len"] == 99
    assert (await server.get("/v1/models/m"))[1] == models["data"][0]
    assert (await server.get("/v1/models/org/other"))[0] == 404
