"""The description of the routes is true: of every route there is, and of what is read and refused."""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator
from tool_templates import PRINTS_TEXT, TOOL

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
PROMPT = {"model": "m", "prompt": "hello", "max_tokens": 4}
TOKENS = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}}


def validator(document: dict[str, Any], schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": document["components"]})


def component(document: dict[str, Any], name: str) -> Draft202012Validator:
    return validator(document, {"$ref": f"#/components/schemas/{name}"})


async def described(server: Any) -> dict[str, Any]:
    status, document = await server.get("/openapi.json")
    assert status == 200
    return document


GOOD: list[tuple[str, str, dict[str, Any]]] = [
    ("/v1/chat/completions", "ChatRequest", fields)
    for fields in (
        {"temperature": None, "unheard_of": None, "user": {"any": "thing"}, "response_format": {"type": "text"}},
        {"tools": [TOOL], "tool_choice": "none", "chat_template_kwargs": {"x": 1}},
        {"messages": [{"role": "tool", "content": [{"type": "text", "text": "a"}], "name": None}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]},
        {"stop": ["a"] * 4, "stop_token_ids": [], "top_k": -1, "top_p": 0.1, "seed": -1, "logit_bias": {}},
        {"stream_options": {}, "top_logprobs": 0},
    )
]
BAD: list[tuple[str, str, dict[str, Any]]] = [
    ("/v1/chat/completions", "ChatRequest", fields)
    for fields in (
        {"temperature": 1000.5},
        {"temperature": -0.1},
        {"top_p": 0},
        {"min_p": 1.5},
        {"n": 129},
        {"n": True},
        {"top_k": -2},
        {"top_k": 1.5},
        {"seed": "7"},
        {"model": 3},
        {"logprobs": 1},
        {"return_token_ids": "yes"},
        {"max_completion_tokens": "many"},
        {"top_logprobs": 21, "logprobs": True},
        {"stop": ["a"] * 5},
        {"stop": ""},
        {"stop_token_ids": [2**31]},
        {"stop_token_ids": [-1]},
        {"max_tokens": 0},
        {"stream": "yes"},
        {"unheard_of": 1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {"5": 10}},
        {"min_tokens": 3},
        {"echo": True},
        {"guided_json": {}},
        {"prompt_logprobs": 1},
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"role": "critic", "content": "a"}]},
        {"messages": [{"role": "user", "content": "a", "mood": "good"}]},
        {"tools": [{"type": "function"}]},
        {"chat_template_kwargs": {"tokenize": False}},
        {"tool_choice": "always"},
        {"response_format": {"type": "grammar"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "no schema"}}},
        {"max_tokens": 0, "max_completion_tokens": 4},
    )
]
BAD += [
    ("/v1/completions", "TextRequest", {"prompt": ""}),
    ("/v1/completions", "TextRequest", {"prompt": ["a"] * 129}),
    ("/inference/v1/generate", "TokenRequest", {"sampling_params": {"stream": True}}),
    (
        "/v1/chat/completions/derender",
        "DerenderRequest",
        {"generate_response": {"choices": []}, "chat_request": CHAT},
    ),
    ("/v1/chat/completions/derender", "DerenderRequest", {"generate_response": {"choices": [{"token_ids": [5]}]}}),
    ("/detokenize", "DetokenizeRequest", {"tokens": []}),
    ("/update_weight_version", "VersionRequest", {"new_version": ""}),
    ("/collective_rpc", "ReloadRequest", {"method": "reload_weights", "kwargs": {}}),
]
BASES = {"/v1/chat/completions": CHAT, "/v1/completions": PROMPT, "/inference/v1/generate": TOKENS}


async def test_what_the_schema_allows_is_taken_and_what_it_forbids_is_refused(start: Any) -> None:
    server = await start(template=PRINTS_TEXT)
    document = await described(server)
    for cases, allowed in ((GOOD, True), (BAD, False)):
        for path, name, fields in cases:
            body = {**BASES.get(path, {}), **fields}
            status, answer = await server.post(path, body)
            assert (component(document, name).is_valid(body), status) == (allowed, 200 if allowed else 400), (
                path,
                fields,
                answer,
            )
            if not allowed and name == "ChatRequest":
                assert answer["error"]["type"] == "invalid_request_error"
                assert any(field in answer["error"]["message"] for field in fields)
    # the schema does not say that this needs tools
    status, answer = await server.post("/v1/chat/completions", {**CHAT, "tool_choice": "required"})
    assert (status, answer["error"]["param"]) == (400, "tool_choice")


async def test_with_a_key_the_description_asks_for_it_and_says_so(start: Any) -> None:
    server = await start(api_key="secret")
    status, answer = await server.get("/openapi.json")
    assert status == 401
    server.session.headers["Authorization"] = "Bearer secret"
    document = await described(server)
    component(document, "Error").validate(answer)
    assert document["security"] == [{"key": []}]
    for path, item in document["paths"].items():
        for operation in item.values():
            open_to_all = path in ("/health", "/metrics")
            assert (operation.get("security") == []) == open_to_all
            assert ("401" in operation["responses"]) == (not open_to_all)
