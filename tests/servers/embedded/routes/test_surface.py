"""The rest of OpenAI's surface: several choices, alternatives, completions, token ids, keys and limits."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from verifiers_embedded.engine import scoring

from verifiers.inference.server_pool import ServerLoad


async def test_several_choices_differ_and_the_first_is_that_of_a_single_one(start: Any) -> None:
    server = await start()
    one = await server.chat(seed=4, ignore_eos=True)
    three = await server.chat(seed=4, ignore_eos=True, n=3)
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert three["choices"][0]["token_ids"] == one["choices"][0]["token_ids"]
    assert len({tuple(choice["token_ids"]) for choice in three["choices"]}) == 3
    again = await server.chat(seed=4, ignore_eos=True, n=3)
    assert [c["token_ids"] for c in again["choices"]] == [c["token_ids"] for c in three["choices"]]
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 3 * 24


@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_alternatives_are_the_models_likeliest_tokens(
    start: Any, model_dir: Any, reference: Any, temperature: float
) -> None:
    server = await start()
    answer, _ = await asyncio.gather(
        server.chat(top_logprobs=3, seed=1, temperature=temperature, ignore_eos=True), server.chat(seed=2)
    )
    prompt, ids, _ = server.sampled(answer)
    logits = reference.logits(model_dir, prompt + ids)[len(prompt) - 1 : -1]
    best = torch.log_softmax(logits / (temperature or 1.0), -1).topk(3)
    for entry, values, places in zip(answer["choices"][0]["logprobs"]["content"], *best, strict=True):
        assert [item["logprob"] for item in entry["top_logprobs"]] == pytest.approx(values.tolist(), abs=1e-4)
        expected = [server.text.token(place)[0] for place in places.tolist()]
        assert [item["token"] for item in entry["top_logprobs"]] == expected


CUTS = {"top_p": {"top_p": 0.7}, "top_k": {"top_k": 5}, "min_p": {"min_p": 0.2}}
CUTS["all, at a temperature"] = {"top_p": 0.7, "top_k": 5, "min_p": 0.05, "temperature": 1.7}


# each cut on one route, and all of them together on the others
@pytest.mark.parametrize(
    ("path", "cut"),
    [
        *(("/inference/v1/generate", cut) for cut in CUTS),
        *((path, "all, at a temperature") for path in ("/v1/chat/completions", "/v1/completions")),
    ],
)
async def test_the_tokens_that_each_was_drawn_from_come_with_it(
    start: Any, model_dir: Any, reference: Any, path: str, cut: str
) -> None:
    server = await start()
    prompt = server.loaded.tokenizer.encode("hello", add_special_tokens=True)
    asked = {"temperature": 1.0, "return_sampling_mask": True, "max_tokens": 12, "seed": 3, **CUTS[cut]}
    body = {"model": "m", **asked, "return_token_ids": True}
    if path.endswith("generate"):
        body = {"model": "m", "token_ids": prompt, "sampling_params": {**asked, "logprobs": 0}}
    elif "chat" in path:
        body |= {"messages": [{"role": "user", "content": "hello"}], "logprobs": True}
    else:
        body |= {"prompt": prompt, "logprobs": 0}
    _, answer = await server.post(path, body)
    choice = answer["choices"][0]
    prompt = answer.get("prompt_token_ids") or prompt
    shown = choice["logprobs"]
    found = shown.get("token_logprobs") or [entry["logprob"] for entry in shown["content"]]
    logits = reference.logits(model_dir, prompt + choice["token_ids"])[len(prompt) - 1 : -1]
    logps = (logits.double() / asked["temperature"]).log_softmax(-1)
    for row, token, kept, value in zip(logps, choice["token_ids"], choice["sampling_mask"], found, strict=True):
        order = row.sort(descending=True)
        is_kept = order.values >= order.values[0] + math.log(asked.get("min_p") or 1e-300)
        is_kept[asked.get("top_k", len(row)) :] = False
        left = torch.where(is_kept, order.values.exp(), 0.0)
        left = left / left.sum()
        is_kept &= left.cumsum(0) - left < asked.get("top_p", 1.0)
        assert kept == sorted(order.indices[is_kept].tolist())
        assert value == pytest.approx(float(row[token] - row[kept].logsumexp(0)), abs=1e-4)


async def test_a_mask_does_not_come_in_pieces_nor_unasked(start: Any) -> None:
    server = await start()
    body = {"model": "m", "prompt": "hello", "top_k": 2, "max_tokens": 2}
    _, answer = await server.post("/v1/completions", body)
    assert "sampling_mask" not in answer["choices"][0]
    asked = {"return_sampling_mask": True, "stream": True}
    for path, one in (
        ("/v1/completions", {**body, **asked}),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "a"}], **asked}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": asked | {"stream": None}, "stream": True}),
    ):
        status, refused = await server.post(path, one)
        assert (status, refused["error"]["param"]) == (400, "return_sampling_mask")


async def test_completions_take_text_and_ids_alike(start: Any, model_dir: Any, reference: Any) -> None:
    server = await start()
    ids = server.loaded.tokenizer.encode("hello", add_special_tokens=True)
    common = {"model": "m", "seed": 3, "max_tokens": 8, "logprobs": 2, "return_token_ids": True}
    answers = [
        (await server.post("/v1/completions", {**common, "prompt": prompt}))[1] for prompt in ("hello", ids, [ids])
    ]
    first = answers[0]["choices"][0]
    assert answers[0]["object"] == "text_completion"
    assert first["prompt_token_ids"] == ids
    for answer in answers[1:]:
        assert answer["choices"][0]["token_ids"] == first["token_ids"]
    log_probs = reference.log_probs(model_dir, ids, first["token_ids"])
    assert first["logprobs"]["token_logprobs"] == pytest.approx(log_probs, abs=1e-4)
    assert "".join(first["logprobs"]["tokens"]).startswith(first["text"])
    tops = first["logprobs"]["top_logprobs"]
    # the sampled token is among its alternatives, or one more
    assert all(1 <= len(top) <= 3 for top in tops)
    assert all(name in top for name, top in zip(first["logprobs"]["tokens"], tops, strict=True))


async def test_prompts_are_scored_by_the_models_own_distribution(
    start: Any, model_dir: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "_MOST_TOKENS", 16)
    server = await start()
    draw = torch.Generator().manual_seed(0)
    long, short = (torch.randint(5, 60, (length,), generator=draw).tolist() for length in (70, 2))
    body = {"model": "m", "prompt": [long, short], "max_tokens": 1, "prompt_logprobs": 2}
    (status, answer), _ = await asyncio.gather(server.post("/v1/completions", body), server.chat(ignore_eos=True))
    assert status == 200
    for ids, choice in zip((long, short), answer["choices"], strict=True):
        first, *found = choice["prompt_logprobs"]
        assert first is None
        assert [one[str(token)]["logprob"] for token, one in zip(ids[1:], found, strict=True)] == pytest.approx(
            reference.log_probs(model_dir, ids[:1], ids[1:]), abs=1e-4
        )
        best = torch.log_softmax(reference.logits(model_dir, ids)[:-1], -1).topk(2)
        for one, values, places in zip(found, best.values.tolist(), best.indices.tolist(), strict=True):
            assert [one[str(place)]["logprob"] for place in places] == pytest.approx(values, abs=1e-4)
    status, refused = await server.post("/v1/completions", {**body, "stream": True})
    assert (status, refused["error"]["param"]) == (400, "prompt_logprobs")


async def test_an_echo_has_the_log_probs_of_its_prompt(start: Any, model_dir: Any, reference: Any) -> None:
    server = await start()
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 60, (length,), generator=draw).tolist() for length in (30, 1, 12, 29, 3)]
    body = {"model": "m", "prompt": prompts, "echo": True, "logprobs": 1, "seed": 1}
    for most, ends in ((0, 0), (2, 2)):
        answer = await server.post("/v1/completions", {**body, "max_tokens": most, "ignore_eos": True})
        assert answer[0] == 200
        assert answer[1]["usage"]["completion_tokens"] == ends * len(prompts)
        for ids, choice in zip(prompts, answer[1]["choices"], strict=True):
            told = choice["logprobs"]
            assert (told["token_logprobs"][0], told["text_offset"][0]) == (None, 0)
            assert choice["text"] == "".join(told["tokens"])
            found = told["token_logprobs"][1 : len(ids)]
            assert found == pytest.approx(reference.log_probs(model_dir, ids[:1], ids[1:]), abs=1e-4)
            assert len(told["tokens"]) == len(ids) + ends
            first, *others = told["top_logprobs"] or [None]
            assert first is None
            tops = [max(top.values()) for top in others[: len(ids) - 1]]
            best = torch.log_softmax(reference.logits(model_dir, ids)[:-1], -1).amax(-1)
            assert tops == pytest.approx(best.tolist(), abs=1e-4)


async def test_several_prompts_with_several_choices_keep_openais_order(start: Any) -> None:
    server = await start()
    body = {"model": "m", "prompt": ["a", "b"], "n": 2, "seed": 1, "echo": True, "max_tokens": 3, "ignore_eos": True}
    status, answer = await server.post("/v1/completions", body)
    assert status == 200
    assert [choice["text"][0] for choice in answer["choices"]] == ["a", "a", "b", "b"]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14}


async def test_completions_default_to_16_tokens_as_openais_do(start: Any) -> None:
    server = await start()
    _, answer = await server.post("/v1/completions", {"model": "m", "prompt": "a", "ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": True}, "logprobs"),
    ],
)
async def test_a_completion_that_cannot_be_made_is_refused(start: Any, fields: dict[str, Any], param: str) -> None:
    server = await start()
    status, answer = await server.post("/v1/completions", {"model": "m", "prompt": "a", **fields})
    assert (status, answer["error"]["param"]) == (400, param)


async def test_token_ids_go_in_and_out_and_say_their_weights(start: Any, model_dir: Any, reference: Any) -> None:
    server = await start()
    await server.post("/update_weight_version", {"new_version": "7"})
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 9, "seed": 2, "logprobs": 1, "top_k": -1}}
    status, answer = await server.post("/inference/v1/generate", body)
    assert status == 200
    choice = answer["choices"][0]
    log_probs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert log_probs == pytest.approx(reference.log_probs(model_dir, [5, 6, 7], choice["token_ids"]), abs=1e-4)
    assert choice["weight_versions"] == [{"version": "7", "start": 0, "end": len(choice["token_ids"])}]
    for refused in ({"token_ids": []}, {"token_ids": "abc"}, {"token_ids": [1], "sampling_params": {"typo": 1}}):
        assert (await server.post("/inference/v1/generate", refused))[0] == 400


async def test_a_stop_token_ends_a_completion_and_stays_in_the_ids(start: Any) -> None:
    server = await start()
    free = (await server.chat(seed=3, ignore_eos=True))["choices"][0]["token_ids"]
    stopped = (await server.chat(seed=3, ignore_eos=True, stop_token_ids=[free[4]]))["choices"][0]
    assert stopped["token_ids"] == free[: free.index(free[4]) + 1]
    assert stopped["finish_reason"] == "stop"


async def test_text_and_conversations_are_tokenized_and_back(start: Any) -> None:
    server = await start()
    _, chat = await server.post(
        "/tokenize", {"model": "m", "messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}
    )
    assert "".join(chat["token_strs"]) == "<user>hi<bot>"
    assert (chat["count"], chat["max_model_len"]) == (4, 256)
    assert chat["tokens"] == (await server.chat("hi"))["prompt_token_ids"]
    _, plain = await server.post("/tokenize", {"prompt": "hi"})
    assert plain["tokens"] == server.loaded.tokenizer.encode("hi")
    assert (await server.post("/detokenize", {"tokens": chat["tokens"]}))[1] == {"prompt": "<user>hi<bot>"}
    for body in ({}, {"prompt": "a", "messages": []}, {"prompt": 3}):
        assert (await server.post("/tokenize", body))[0] == 400
    assert (await server.post("/detokenize", {"tokens": [-1]}))[0] == 400


async def test_metrics_count_what_was_done(start: Any) -> None:
    server = await start()
    answer = await server.chat(n=2, ignore_eos=True)
    await server.refused(temperature=-1)
    async with server.session.get(server.base + "/metrics") as response:
        assert response.content_type == "text/plain"
        text = await response.text()
    assert f"vf_generation_tokens_total {float(answer['usage']['completion_tokens'])}" in text
    assert 'vf_completions_total{finish_reason="length"} 2.0' in text
    assert 'vf_requests_total{method="POST",route="/v1/chat/completions",status="400"} 1.0' in text
    assert "vf_sequences_running 0.0" in text


async def test_a_server_whose_slots_are_taken_says_that_it_is_full(start: Any) -> None:
    server, load = await start(slots=2), ServerLoad()
    asked = [asyncio.create_task(server.chat(ignore_eos=True, max_tokens=60)) for _ in range(6)]
    while load.full < 1 or load.cache_use < 1:
        async with server.session.get(server.base + "/metrics") as response:
            assert load.take(await response.text())
    assert load.running == 2 * load.cache_use
    await asyncio.gather(*asked)
