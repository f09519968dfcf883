"""A request that cannot be obeyed is refused with a sentence, and the server keeps serving."""

from __future__ import annotations

import functools
from typing import Any


async def test_numbers_beyond_any_float_neither_crash_nor_pass(start: Any) -> None:
    server = await start()
    for name in ("temperature", "top_p", "min_p"):
        status, error = await server.refused(**{name: 10**400})
        assert (status, error["param"]) == (400, name)
    answer = await server.chat(top_k=10**400, seed=10**400, max_tokens=3)
    assert answer["usage"]["completion_tokens"] > 0


async def test_whole_numbers_may_be_written_with_a_point(start: Any) -> None:
    server = await start()
    plain = {"max_tokens": 5, "seed": 3, "n": 2, "top_k": 20, "top_logprobs": 1, "stop_token_ids": [90]}
    pointed = {name: [90.0] if name == "stop_token_ids" else float(value) for name, value in plain.items()}
    assert (await server.chat(**pointed))["choices"] == (await server.chat(**plain))["choices"]
    for prompt in ([69.0, 7], [[69.0], [7]]):
        status, answer = await server.post("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 2.0})
        assert status == 200, answer
    for name, value in (("max_tokens", 5.5), ("seed", 0.1), ("stop_token_ids", [7.5])):
        assert (await server.refused(**{name: value}))[0] == 400


async def test_a_prompt_with_tokens_the_model_lacks_does_not_end_the_engine(start: Any) -> None:
    server = await start()
    server.loaded.tokenizer.add_tokens(["wxyz"])
    status, error = await server.refused(messages=[{"role": "user", "content": "wxyz"}])
    assert (status, "embeddings" in error["message"]) == (400, True)
    assert (await server.get("/health"))[0] == 200


async def test_a_body_that_is_not_json_is_refused(start: Any) -> None:
    server = await start()
    for body in (b"", b"{", b"[1]", b'"text"', b"\xff"):
        async with server.session.post(server.base + "/v1/chat/completions", data=body) as response:
            assert response.status == 400
            assert "JSON" in (await response.json())["error"]["message"]
    async with server.session.post(server.base + "/v1/chat/completions", data=b'{"temperature": NaN}') as response:
        assert response.status == 400
    # as JSON it can be read
    status, error = await server.refused(stop=functools.reduce(lambda inner, _: [inner], range(700), []))
    assert (status, "deep" in error["message"]) == (400, True)


async def test_an_unknown_model_is_not_found(start: Any) -> None:
    server = await start()
    status, error = await server.refused(model="gpt-9")
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "gpt-9" in error["message"]


async def test_a_prompt_as_long_as_the_context_is_refused_in_openais_words(start: Any) -> None:
    server = await start(max_model_len=32)
    for length in (30, 500):
        status, error = await server.refused(messages=[{"role": "user", "content": "x" * length}])
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].startswith("This model's maximum context length is 32 tokens. However, your")
        assert f"messages resulted in {length + 2} tokens" in error["message"]
    assert (await server.chat("x" * 29, ignore_eos=True))["usage"]["completion_tokens"] == 1


async def test_unknown_routes_and_methods_answer_with_an_error_object(start: Any) -> None:
    server = await start()
    assert (await server.get("/v1/nothing"))[1]["error"]["type"] == "invalid_request_error"
    status, body = await server.get("/v1/chat/completions")
    assert (status, "error" in body) == (405, True)
    status, body = await server.post("/v1/embeddings", {})
    assert (status, "error" in body) == (404, True)
