"""Rollouts as token lists in the classic layout: sampled tokens are the server's, the rest is the tokenizer's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import verifiers as vf
from verifiers.errors import ConfigError, MissingTokenIdsError
from verifiers.inference.endpoint import ClientBackend
from verifiers.inference.wire import WireObject, overlong_response
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.testing import FakeClient, decode_ids, encode_text

ASK = [{"role": "user", "content": "hi"}]


class Tokenizer:
    """Letters are tokens; a message is `<role:content>`, and no more than two methods are there."""

    def apply_chat_template(self, conversation: Any, add_generation_prompt: bool = False, tools: Any = None) -> Any:
        text = f"[{len(tools)} tools]" if tools else ""
        text += "".join(f"<{message['role'][0]}:{message['content']}>" for message in conversation)
        return self.rendered(text + ("<a:" if add_generation_prompt else ""))

    def rendered(self, text: str) -> Any:
        return encode_text(text)

    def encode(self, text: str) -> list[int]:
        return encode_text(text)


class TextTokenizer(Tokenizer):
    def rendered(self, text: str) -> Any:
        return text


class MappingTokenizer(Tokenizer):
    def rendered(self, text: str) -> Any:
        return {"input_ids": encode_text(text), "attention_mask": [1] * len(text)}


def chat_response(ids: list[int], **more: Any) -> Any:
    entries = [{"token": f"token_id:{token_id}", "logprob": -token_id / 1000} for token_id in ids]
    message = {"role": "assistant", "content": decode_ids(ids)}
    return WireObject({"choices": [{"message": message, "logprobs": {"content": entries}, **more}]})


def completion_response(text: str) -> Any:
    tokens = [f"token_id:{ord(letter)}" for letter in text]
    logprobs = {"tokens": tokens, "token_logprobs": [-0.5] * len(text)}
    return WireObject({"choices": [{"text": text, "logprobs": logprobs}]})


@pytest.fixture
def env() -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv(dataset=[{"question": "q"}])


@pytest.fixture
def completion_env() -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv(dataset=[{"prompt": "q"}], message_type="completion")


def test_token_ids_are_read_from_the_choice_or_from_the_logprobs(env: vf.SingleTurnEnv) -> None:
    assert env.parse_chat_completion_tokens(chat_response([5, 6])) == [5, 6]
    assert env.parse_chat_completion_tokens(chat_response([5, 6], token_ids=[7, 8])) == [7, 8]
    assert env.parse_chat_completion_logprobs(chat_response([5, 6])) == [-0.005, -0.006]
    assert env.parse_completion_tokens(completion_response("ab")) == [97, 98]
    assert env.parse_completion_logprobs(completion_response("ab")) == [-0.5, -0.5]


def test_a_prompt_that_did_not_fit_has_no_tokens(env: vf.SingleTurnEnv) -> None:
    for kind in ("chat", "completion"):
        response = overlong_response("m", kind)
        assert env.parse_chat_completion_tokens(response) == env.parse_completion_tokens(response) == []
        assert env.parse_chat_completion_logprobs(response) == env.parse_completion_logprobs(response) == []


@pytest.mark.parametrize(
    "response",
    [
        SimpleNamespace(),
        SimpleNamespace(choices=[]),
        SimpleNamespace(choices=[SimpleNamespace()]),
        SimpleNamespace(choices=[SimpleNamespace(logprobs=None, token_ids=None)]),
        SimpleNamespace(choices=[SimpleNamespace(logprobs=SimpleNamespace(content=None, tokens=None))]),
        WireObject({"choices": [{"logprobs": {"content": [{"token": "7"}], "tokens": ["7"]}}]}),
    ],
    ids=["nothing", "no choice", "bare choice", "none", "empty logprobs", "text that looks like an id"],
)
def test_an_answer_without_token_ids_is_refused_in_a_sentence_not_by_an_attribute_error(
    env: vf.SingleTurnEnv, response: Any
) -> None:
    for parse in (env.parse_chat_completion_tokens, env.parse_completion_tokens):
        with pytest.raises(MissingTokenIdsError, match="neither token_ids nor tokens written as 'token_id:123'"):
            parse(response)


@pytest.mark.parametrize(
    "tokenizer", [Tokenizer(), TextTokenizer(), MappingTokenizer()], ids=lambda t: type(t).__name__
)
@pytest.mark.parametrize("masked", [False, True])
def test_a_chat_is_prompt_sampled_tokens_and_the_environments_words(
    env: vf.SingleTurnEnv, tokenizer: Any, masked: bool
) -> None:
    said = [
        {"role": "assistant", "content": "AB"},
        {"role": "tool", "content": "x"},
        {"role": "user", "content": "y"},
        {"role": "assistant", "content": "C"},
    ]
    state = vf.State(responses=[chat_response([1, 2]), chat_response([3])])
    prompt_ids, prompt_mask, ids, mask, logprobs = env.process_chat_format_vllm(ASK, said, state, tokenizer, masked)
    assert decode_ids(prompt_ids) == "<u:hi><a:"
    assert prompt_mask == [0] * len(prompt_ids)
    between = encode_text("<t:x><u:y>")
    assert ids == [1, 2, *between, 3]
    assert mask == [1, 1, *[0 if masked else 1] * len(between), 1]
    assert logprobs == [-0.001, -0.002, *[0.0] * len(between), -0.003]


def test_the_environments_last_words_and_its_tools_are_rendered_too(env: vf.SingleTurnEnv) -> None:
    said = [{"role": "assistant", "content": "A"}, {"role": "user", "content": "bye"}]
    state = vf.State(responses=[chat_response([1])], info={"oai_tools": [{"function": {"name": "f"}}]})
    prompt_ids, _, ids, _, _ = env.process_chat_format_vllm(ASK, said, state, Tokenizer())
    assert decode_ids(prompt_ids) == "[1 tools]<u:hi><a:"
    assert ids == [1, *encode_text("<u:bye>")]


def test_arguments_of_tool_calls_reach_the_template_as_data(env: vf.SingleTurnEnv) -> None:
    seen: list[Any] = []

    class Looks(Tokenizer):
        def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
            seen.extend(call for message in conversation for call in message.get("tool_calls") or [])
            return super().apply_chat_template(conversation, **options)

    calls = [
        {"id": name, "function": {"name": name, "arguments": text}} for name, text in (("f", '{"a": 1}'), ("g", "{"))
    ]
    said = [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "1"}]
    env.process_chat_format_vllm(ASK, said, vf.State(responses=[chat_response([1])]), Looks())
    assert [call["function"]["arguments"] for call in seen[:2]] == [{"a": 1}, "{"]
    assert calls[0]["function"]["arguments"] == '{"a": 1}'


def test_a_template_that_rewrites_history_is_refused_and_never_realigned(env: vf.SingleTurnEnv) -> None:
    class Rewrites(Tokenizer):
        def rendered(self, text: str) -> Any:
            return encode_text(f"{len(text)}{text}")

    said = [{"role": "assistant", "content": "A"}, {"role": "user", "content": "a longer word"}]
    with pytest.raises(ConfigError, match=r"rewrites history\), so it is not a single row"):
        env.process_chat_format_vllm(ASK, said, vf.State(responses=[chat_response([1])]), Rewrites())


async def test_the_servers_own_prompt_ids_make_rows_exact_whatever_the_template_does() -> None:
    class Twice(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            return [{"role": "user", "content": "more"}], state

    env = Twice(max_turns=2, dataset=[{"question": "q"}])
    handle = RolloutClient(ClientBackend(FakeClient(["one", "two"])), model="m", require_tokens=True)
    completion, state = await env.rollout(handle, "m", ASK)
    no_tokenizer: Any = None
    prompt_ids, _, ids, mask, _ = env.process_chat_format_vllm(ASK, completion, state, no_tokenizer, True)
    assert prompt_ids == handle.turns[0].prompt_ids
    assert [*prompt_ids, *ids] == [*handle.turns[1].prompt_ids, *handle.turns[1].completion_ids]
    sampled = [token_id for token_id, is_sampled in zip(ids, mask, strict=True) if is_sampled]
    assert decode_ids(sampled) == "one\x03two\x03"


@pytest.mark.parametrize("starts", [[0, 3], None])
def test_a_text_is_cut_where_the_policy_speaks(completion_env: vf.SingleTurnEnv, starts: list[int] | None) -> None:
    state = vf.State(responses=[completion_response("ab"), completion_response("c")], responses_start_idx=starts)
    lists = completion_env.process_completion_format_vllm("q", "ab|c.", state, Tokenizer(), True)
    assert decode_ids(lists[0]) == "q"
    assert decode_ids(lists[2]) == "ab|c."
    assert lists[3] == [1, 1, 0, 1, 0]
    assert lists[4] == [-0.5, -0.5, 0.0, -0.5, 0.0]


def process(env: vf.Environment, **options: Any) -> Any:
    states = [vf.State(responses=[chat_response(ids)]) for ids in ([1], [2, 3, 4, 5])]
    said = [[{"role": "assistant", "content": "A"}]] * 2
    return env.process_env_results_vllm([ASK, ASK], said, states, [1.0, 0.5], Tokenizer(), **options)  # type: ignore[list-item,arg-type]


def test_many_rollouts_are_columns_by_name(env: vf.SingleTurnEnv) -> None:
    outputs = process(env)
    assert outputs.completion_ids == outputs["completion_ids"] == [[1], [2, 3, 4, 5]]
    assert outputs.rewards == [1.0, 0.5]
    assert [len(ids) for ids in outputs.prompt_ids] == [9, 9]
    assert outputs.completion_mask == [[1], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("options", "mask", "reward"),
    [
        ({}, [1, 1], 0.5),
        ({"mask_truncated_completions": True}, [0, 0], 0.5),
        ({"zero_truncated_completions": True}, [1, 1], 0.0),
    ],
)
def test_what_is_longer_than_the_limit_is_cut_and_counted_as_asked(
    env: vf.SingleTurnEnv, options: dict[str, Any], mask: list[int], reward: float
) -> None:
    outputs = process(env, max_seq_len=11, **options)
    assert outputs.completion_ids == [[1], [2, 3]]
    assert outputs.completion_mask == [[1], mask]
    assert [len(values) for values in outputs.completion_logprobs] == [1, 2]
    assert outputs.rewards == [1.0, reward]
