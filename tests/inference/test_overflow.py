"""A prompt that outgrew the context ends a rollout as truncated, in whatever words the server reports it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from verifiers.errors import OverlongPromptError, ProviderError
from verifiers.inference.endpoint import Endpoint, HttpBackend
from verifiers.inference.retry import RetryableError, is_context_overflow
from verifiers.inference.wire import read_completion
from verifiers.testing import FakeOpenAIServer, Fault

OVERFLOWS = {
    "openai": "This model's maximum context length is 8192 tokens. However, your messages resulted in 9031 tokens.",
    "openai with an answer": "This model's maximum context length is 4096 tokens. However, you requested 4222 tokens "
    "(1222 in the messages, 3000 in the completion). Please reduce the length of the messages or completion.",
    "openai completions": "This model's maximum context length is 4097 tokens, however you requested 4162 tokens "
    "(1090 in your prompt; 3072 for the completion). Please reduce your prompt; or completion length.",
    "openai responses": "Your input exceeds the context window of this model. Please adjust your input.",
    "azure": "Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in 509178 tokens. "
    "Please reduce the length of the messages.",
    "vllm 0.6": "The decoder prompt (length 12324) is longer than the maximum model length of 8192. "
    "Make sure that `max_model_len` is no smaller than the number of text tokens.",
    "vllm 0.9": "'max_tokens' or 'max_completion_tokens' is too large: 1024. This model's maximum context length is "
    "2048 tokens and your request has 1500 input tokens (1024 > 2048 - 1500).",
    "vllm 0.11": "This model's maximum context length is 16384 tokens. However, you requested 4096 output tokens and "
    "your prompt contains at least 12289 input tokens, for a total of at least 16385 tokens. Please reduce the "
    "length of the input prompt or the number of requested output tokens. (parameter=input_tokens, value=12289)",
    "vllm with all room asked for": "You passed 98305 input tokens and requested 32768 output tokens. However, the "
    "model's context length is only 131072 tokens, resulting in a maximum input length of 98304 tokens.",
    "anthropic": "prompt is too long: 202128 tokens > 200000 maximum",
    "anthropic with an answer": "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000, "
    "decrease input length or `max_tokens` and try again",
    "llama.cpp": "request (8708 tokens) exceeds the available context size (8192 tokens), try increasing it",
    "llama.cpp, older": "the request exceeds the available context size. try increasing the context size or enable "
    "context shift",
    "sglang": "Requested token count exceeds the model's maximum context length of 202752 tokens. You requested a "
    "total of 202941 tokens: 170941 tokens from the input messages and 32000 tokens for the completion.",
    "sglang, older": "Input length (160062 tokens) exceeds the maximum allowed length (59862 tokens).",
    "together": "The input (516368 tokens) is longer than the model's context length (262144 tokens).",
    "fireworks": "The prompt is too long: 140120, model maximum context length: 131071",
    "tgi": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048. Given: 3474 `inputs` tokens "
    "and 60 `max_new_tokens`",
    "tgi, inputs alone": "Input validation error: `inputs` must have less than 1024 tokens. Given: 1168",
    "openrouter": "This endpoint's maximum context length is 32768 tokens. However, you requested about 42832 tokens "
    "(42832 of text input). Please reduce the length of either one.",
    "groq": "Please reduce the length of the messages or completion.",
    "xai": "This model's maximum prompt length is 131072 but the request contains 537812 tokens.",
    "gemini": "The input token count (1196265) exceeds the maximum number of tokens allowed (1048575).",
    "mistral": "Prompt contains 40000 tokens, too large for model with 32768 maximum context length",
    "bedrock": "Input is too long for requested model.",
}

OTHERS = {
    "an answer longer than the model gives": "max_tokens is too large: 100000. This model supports at most 16384 "
    "completion tokens, whereas you provided 100000.",
    "the same, anthropic": "max_tokens: 100000 > 64000, which is the maximum allowed number of output tokens for x",
    "an answer that fills the context, vllm": "'max_tokens' or 'max_completion_tokens' is too large: 40000. This "
    "model's maximum context length is 32768 tokens and your request has 100 input tokens (40000 > 32768 - 100).",
    "an answer that fills the context, vllm 0.11": "This model's maximum context length is 4096 tokens. However, you "
    "requested 4096 output tokens and your prompt contains at least 1 input tokens, for a total of at least 4097.",
    "an answer that fills the context, openai": "This model's maximum context length is 4097 tokens. However, you "
    "requested 5012 tokens (12 in the messages, 5000 in the completion).",
    "an answer that fills the context, sglang": "Requested token count exceeds the model's maximum context length of "
    "4096 tokens. You requested a total of 9009 tokens: 9 tokens from the input messages and 9000 tokens for the "
    "completion.",
    "an answer that fills the context, tgi": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= "
    "2048. Given: 20 `inputs` tokens and 4000 `max_new_tokens`",
    "a rate limit by tokens": "Request too large for model `x` on tokens per minute (TPM): Limit 6000, Requested "
    "8234, please reduce your message size and try again.",
    "a bad field": "Unrecognized request argument supplied: context_length",
    "a bad temperature": "temperature must be at most 2",
}


@pytest.mark.parametrize("text", OVERFLOWS.values(), ids=OVERFLOWS.keys())
async def test_a_prompt_that_outgrew_the_context_is_known_in_every_servers_words(text: str) -> None:
    body = {"error": {"message": text, "type": "BadRequestError", "code": 400}}
    async with FakeOpenAIServer(faults=Fault(400, body=body)) as server:
        backend = HttpBackend(Endpoint(server.url))
        with pytest.raises(OverlongPromptError):
            await backend.call("/chat/completions", {"model": "m", "messages": []})
        await backend.close()
    # as the SDK's exceptions quote it, and as vLLM puts it without an "error" around it
    assert is_context_overflow(400, f"Error code: 400 - {body}")
    assert is_context_overflow(400, json.dumps({"object": "error", "message": text, "code": 400}))


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS.keys())
async def test_a_mistake_in_the_settings_is_no_overflow(text: str) -> None:
    async with FakeOpenAIServer(faults=Fault(400, body={"error": {"message": text}})) as server:
        backend = HttpBackend(Endpoint(server.url))
        with pytest.raises(ProviderError, match="answered 400"):
            await backend.call("/chat/completions", {"model": "m", "messages": []})
        await backend.close()


@pytest.mark.parametrize("error", [{"code": "context_length_exceeded"}, {"type": "exceed_context_size_error"}])
@pytest.mark.parametrize("status", [400, 413, 500])
def test_a_code_or_type_alone_is_enough_with_any_status(status: int, error: dict[str, Any]) -> None:
    assert is_context_overflow(status, json.dumps({"error": {"message": "no", **error}}))


@pytest.mark.parametrize("status", [None, 200, 401, 404, 429, 500])
def test_other_statuses_are_what_they_say_they_are(status: int | None) -> None:
    assert not is_context_overflow(status, "prompt is too long: 9 tokens > 8 maximum")


def test_a_refusal_that_quotes_the_conversation_is_judged_by_its_own_words() -> None:
    quoted = {"type": "missing", "msg": "Field required", "input": {"content": "my prompt is too long for you"}}
    assert not is_context_overflow(422, json.dumps({"detail": [quoted]}))
    assert is_context_overflow(422, json.dumps({"detail": [{"msg": "prompt is too long: 9 tokens > 8 maximum"}]}))
    assert not is_context_overflow(
        400, json.dumps({"error": {"message": "no such model", "prompt": "prompt is too long"}})
    )


@pytest.mark.parametrize(
    ("code", "message", "error"),
    [
        (
            400,
            "This endpoint's maximum context length is 8192 tokens. However, you requested 9000.",
            OverlongPromptError,
        ),
        (403, "no credits", ProviderError),
        (502, "upstream is away", RetryableError),
    ],
)
def test_a_failure_inside_of_a_200_means_what_its_code_says(code: int, message: str, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        read_completion({"error": {"message": message, "code": code}}, "http://there/v1", "message")
    assert message in str(caught.value)
    assert isinstance(caught.value, RetryableError) == (code == 502)
