"""The handle that each rollout gets: every call of the policy passes it, and is recorded token by token."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from verifiers.envs.multiturn_env import SingleTurnEnv
from verifiers.errors import (
    ConfigError,
    OverlongPromptError,
    ProviderError,
)
from verifiers.inference.endpoint import ClientBackend, Endpoint, HttpBackend
from verifiers.inference.retry import RetryPolicy
from verifiers.rollouts.recording_client import RolloutClient, refuse_non_text, rows_from_turns, turn_seed
from verifiers.rollouts.rollout import Turn
from verifiers.testing import FakeClient, FakeOpenAIServer, Fault, decode_ids

ASK = [{"role": "user", "content": "2+2?"}]
QUICK = RetryPolicy(max_attempts=3, base_s=0.0)


@pytest.fixture
async def server() -> AsyncIterator[FakeOpenAIServer]:
    async with FakeOpenAIServer(lambda body: f"answer {len(body.get('messages', ''))}") as server:
        yield server


@pytest.fixture
async def backend(server: FakeOpenAIServer) -> AsyncIterator[HttpBackend]:
    backend = HttpBackend(Endpoint(server.url))
    yield backend
    await backend.close()


async def ask(client: RolloutClient, messages: list[dict[str, Any]] = ASK, model: str = "policy", **more: Any) -> Any:
    return await client.chat.completions.create(model=model, messages=messages, **more)


async def test_turns_are_recorded_with_the_servers_token_ids_and_join_into_one_row(backend: HttpBackend) -> None:
    client = RolloutClient(backend, model="policy", require_tokens=True)
    first = await ask(client)
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    await ask(client, [*ASK, answer, {"role": "user", "content": "again"}])
    assert [decode_ids(turn.completion_ids) for turn in client.turns] == ["answer 1\x03", "answer 3\x03"]
    assert all(len(turn.logprobs) == len(turn.completion_ids) for turn in client.turns)
    assert (client.calls, client.finish_reason) == (2, "stop")
    assert client.usage.completion_tokens == 18
    assert client.usage.prompt_tokens == sum(len(turn.prompt_ids) for turn in client.turns)
    rows, forks = rows_from_turns(client.turns)
    assert (len(rows), forks) == (1, 0)


async def test_turns_stand_in_the_order_in_which_their_calls_began_whichever_is_answered_first(
    server: FakeOpenAIServer,
) -> None:
    is_second_answered = asyncio.Event()

    class FirstIsLast(HttpBackend):
        async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
            answer = await super().call(path, arguments)
            if len(arguments["messages"]) == 1:
                await is_second_answered.wait()
            return answer

    backend = FirstIsLast(Endpoint(server.url))
    client = RolloutClient(backend, model="policy", require_tokens=True)
    first = asyncio.create_task(ask(client))
    await asyncio.sleep(0)
    await ask(client, ASK * 2, max_tokens=3)
    is_second_answered.set()
    await first
    assert [decode_ids(turn.completion_ids) for turn in client.turns] == ["answer 1\x03", "ans"]
    assert client.finish_reason == "length"
    await backend.close()


async def test_completions_are_recorded_as_chats_are(backend: HttpBackend) -> None:
    client = RolloutClient(backend, model="policy", require_tokens=True)
    await client.completions.create(model="policy", prompt="2+2=")
    assert decode_ids(client.turns[0].prompt_ids) == "2+2="
    assert decode_ids(client.turns[0].completion_ids) == "answer 0\x03"


async def test_each_turn_has_its_own_seed_which_only_the_rollouts_seed_decides(
    server: FakeOpenAIServer, backend: HttpBackend
) -> None:
    for rollout_seed in (7, 7, 8):
        client = RolloutClient(backend, model="policy", seed=rollout_seed)
        await ask(client)
        await ask(client, seed=1)
        await ask(client, extra_body={"seed": 1, "top_k": 5})
    seeds = [request.body["seed"] for request in server.requests]
    assert seeds[:3] == [turn_seed(7, 0), turn_seed(7, 1), turn_seed(7, 2)]
    assert seeds[:3] == seeds[3:6]
    assert len(set(seeds)) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert server.requests[2].body["top_k"] == 5


async def test_without_a_rollout_seed_the_callers_seed_stays(server: FakeOpenAIServer, backend: HttpBackend) -> None:
    client = RolloutClient(backend, model="policy")
    await ask(client, seed=5)
    await ask(client)
    assert [request.body.get("seed") for request in server.requests] == [5, None]


async def test_retries_of_a_call_repeat_its_seed_and_are_counted(server: FakeOpenAIServer) -> None:
    faults = [Fault(503, times=2), None, Fault.disconnect()]
    async with FakeOpenAIServer("fine", faults=faults) as flaky:
        backend = HttpBackend(Endpoint(flaky.url))
        client = RolloutClient(backend, model="policy", seed=3, retry=QUICK)
        await ask(client)
        await ask(client)
        assert client.retries == 3
        assert (client.calls, client.last_error) == (2, None)
        seeds = [request.body["seed"] for request in flaky.requests]
        assert seeds == [turn_seed(3, 0)] * 3 + [turn_seed(3, 1)] * 2
        await backend.close()


async def test_a_user_supplied_extra_body_survives_beside_what_training_asks_for(
    server: FakeOpenAIServer, backend: HttpBackend
) -> None:
    client = RolloutClient(backend, model="policy", require_tokens=True)
    given = {"top_k": 5, "logprobs": False}
    await ask(client, extra_body=given, temperature=0.7)
    body = server.requests[0].body
    assert (body["top_k"], body["temperature"]) == (5, 0.7)
    assert (body["logprobs"], body["return_token_ids"]) == (True, True)
    assert given == {"top_k": 5, "logprobs": False}
    await client.completions.create(model="policy", prompt="x", logprobs=4)
    assert server.requests[1].body["logprobs"] == 4


async def test_a_call_without_a_temperature_asks_for_the_one_that_it_is_scored_at(
    server: FakeOpenAIServer, backend: HttpBackend
) -> None:
    await ask(RolloutClient(backend, model="policy", require_tokens=True))
    await ask(RolloutClient(backend, model="policy"))
    # a server's own default may come from the model's generation_config.json
    assert [request.body.get("temperature") for request in server.requests] == [1.0, None]


@pytest.mark.parametrize("arguments", [{"n": 4}, {"extra_body": {"n": 4}}])
async def test_several_answers_in_one_call_are_refused_in_training(
    backend: HttpBackend, arguments: dict[str, Any]
) -> None:
    client = RolloutClient(backend, model="policy", require_tokens=True)
    with pytest.raises(ConfigError, match="n=4 answers in one call"):
        await ask(client, **arguments)


@pytest.mark.parametrize("arguments", [{"n": 4}, {"extra_body": {"n": 4}}])
def test_several_answers_to_each_call_of_a_run_are_refused_before_its_first(arguments: dict[str, Any]) -> None:
    env = SingleTurnEnv(eval_dataset=[{"question": "?", "answer": "4"}])
    with FakeOpenAIServer("4") as server:
        with pytest.raises(ConfigError, match="n=4 answers to each call, of which one would be used"):
            env.evaluate_sync(server.url, "fake", sampling_args=arguments)
        assert not server.requests


async def test_a_server_without_token_ids_is_told_what_is_missing() -> None:
    async with FakeOpenAIServer("4", token_ids=False) as server:
        backend = HttpBackend(Endpoint(server.url))
        client = RolloutClient(backend, model="policy", require_tokens=True, retry=QUICK)
        with pytest.raises(ProviderError, match="answered without prompt_token_ids and token_ids, which"):
            await ask(client)
        await backend.close()


async def test_ids_and_logprobs_of_different_lengths_are_refused() -> None:
    choice = {
        "message": {"content": "x"},
        "token_ids": [1, 2],
        "prompt_token_ids": [3],
        "logprobs": {"content": [{"logprob": -1.0}]},
    }
    fault = Fault(200, body={"choices": [choice]}, times=3)
    client = RolloutClient(ClientBackend(FakeClient(faults=fault)), model="policy", require_tokens=True, retry=QUICK)
    with pytest.raises(ProviderError, match="2 token ids but 1 log-probs"):
        await ask(client)


def cut_answer(ids: list[int], by_logprobs: bool, kept: list[Any]) -> dict[str, Any]:
    """Return the answer of a server that draws from some tokens: by the field, or by vLLM's likeliest tokens."""
    content: list[dict[str, Any]] = [{"token": f"token_id:{one}", "logprob": -1.0} for one in ids]
    choice = {
        "message": {"content": "x"},
        "token_ids": ids,
        "logprobs": {"content": content},
        "finish_reason": "stop",
    }
    if not by_logprobs:
        return {"choices": [choice | {"sampling_mask": kept}], "prompt_token_ids": [3]}
    for entry, left in zip(content, kept, strict=True):
        tops = [(one, -math.log(len(left))) for one in left] + [(99, -9999.0)]
        entry["top_logprobs"] = [{"token": f"token_id:{one}", "logprob": logprob} for one, logprob in tops]
    return {"choices": [choice], "prompt_token_ids": [3]}


@pytest.mark.parametrize("by_logprobs", [False, True], ids=["sampling_mask", "vLLM"])
async def test_the_tokens_that_each_was_drawn_from_are_asked_for_and_kept_with_it(by_logprobs: bool) -> None:
    fake = FakeClient(faults=Fault(200, body=cut_answer([1, 2], by_logprobs, [[1, 5], [2]]), times=1))
    source: Any = "logprobs" if by_logprobs else "sampling_mask"
    client = RolloutClient(ClientBackend(fake), model="policy", require_tokens=True, mask_source=source)
    await ask(client, top_p=0.9, extra_body={"top_k": 3})
    sent = fake.requests[0].body
    asked = (
        {"top_logprobs": 11, "return_tokens_as_token_ids": True} if by_logprobs else {"return_sampling_mask": True}
    )
    assert {name: sent.get(name) for name in asked} == asked
    (row,), _ = rows_from_turns(client.turns)
    assert (list(row.kept_counts), list(row.kept_ids)) == ([2, 1], [1, 5, 2])


async def test_between_turns_that_leave_tokens_out_nothing_is_cut() -> None:
    turns = [Turn([3], [1, 2], [-1.0] * 2, [0, 0], kept_counts=[2, 0], kept_ids=[1, 5])]
    turns += [
        Turn([3, 1, 2, 7, 7], [4], [-1.0], [0]),
        Turn([3, 1, 2, 7, 7, 4], [6], [-1.0], [0], kept_counts=[1], kept_ids=[6]),
    ]
    (row,), _ = rows_from_turns(turns)
    assert (list(row.kept_counts), list(row.kept_ids)) == ([2, 0, 0, 0, 0, 1], [1, 5, 6])
    (plain,), _ = rows_from_turns(turns[1:2])
    assert not plain.kept_counts


@pytest.mark.parametrize(
    "kept",
    [None, [[1]], [[1], [5]], [[1], [2, -1]], [[1], [2, 10**9]], [[1], ["2"]], [[1], [2.0]], [[1], 2], "ab", {}],
)
async def test_an_answer_without_the_tokens_it_was_drawn_from_is_a_failed_try(kept: Any) -> None:
    fault = Fault(200, body=cut_answer([1, 2], False, kept), times=3)
    options: dict[str, Any] = {
        "require_tokens": True,
        "retry": QUICK,
        "vocab_size": 50,
        "mask_source": "sampling_mask",
    }
    client = RolloutClient(ClientBackend(FakeClient(faults=fault)), model="policy", **options)
    with pytest.raises(ProviderError, match=r"sampling_mask|as the tokens that [12] was drawn from"):
        await ask(client, top_p=0.9)


@pytest.mark.parametrize(
    "entry", [{"top_logprobs": []}, {"token_id": 1, "top_logprobs": [{"token_id": 1, "logprob": -1.0}]}]
)
async def test_likeliest_tokens_that_are_not_all_that_were_left_are_no_mask(entry: dict[str, Any]) -> None:
    answer = cut_answer([1], False, [[1]])
    choice = answer["choices"][0]
    choice["logprobs"]["content"][0] |= entry
    del choice["sampling_mask"]
    for source, message in (("sampling_mask", "without the tokens"), ("logprobs", "probability of 0")):
        options: dict[str, Any] = {"require_tokens": True, "retry": QUICK, "mask_source": source}
        fake = FakeClient(faults=Fault(200, body=answer, times=3))
        with pytest.raises(ProviderError, match=message):
            await ask(RolloutClient(ClientBackend(fake), model="policy", **options), extra_body={"top_k": 3})


async def test_vllm_is_not_asked_for_what_it_cannot_tell(backend: HttpBackend) -> None:
    client = RolloutClient(backend, model="policy", require_tokens=True, mask_source="logprobs")
    with pytest.raises(
        ConfigError, match=r"'top_p' of 0\.9, and vLLM tells which tokens that leaves only within a top_k"
    ):
        await ask(client, top_p=0.9)


async def test_calls_of_another_model_and_of_the_untrained_handle_are_not_recorded(
    server: FakeOpenAIServer, backend: HttpBackend
) -> None:
    client = RolloutClient(backend, model="policy", seed=1, require_tokens=True)
    await ask(client, model="judge")
    await ask(client.untrained, model="policy")
    assert (client.turns, client.calls, client.usage.completion_tokens) == ([], 0, 0)
    assert all("seed" not in request.body for request in server.requests)
    await ask(client)
    assert server.requests[2].body["seed"] == turn_seed(1, 0)


async def test_the_last_error_is_the_policys_and_is_kept_until_a_call_succeeds() -> None:
    client = RolloutClient(ClientBackend(FakeClient("4", faults=Fault(401, times=2))), model="policy")
    with pytest.raises(ProviderError):
        await ask(client.untrained, model="judge")
    assert client.last_error is None
    with pytest.raises(ProviderError) as caught:
        await ask(client)
    assert client.last_error is caught.value
    await ask(client)
    assert client.last_error is None


async def test_every_token_is_stamped_with_the_version_that_the_server_reports_for_it() -> None:
    choice = {
        "message": {"content": "abcd"},
        "token_ids": [1, 2, 3, 4],
        "prompt_token_ids": [9],
        "logprobs": {"content": [{"logprob": -1.0}] * 4},
        "weight_versions": [
            {"version": "4", "start": 0, "end": 1},
            {"version": "default", "start": 1, "end": 2},
            {"version": "5", "start": 2, "end": 9},
        ],
    }
    fault = Fault(200, body={"choices": [choice]})
    client = RolloutClient(
        ClientBackend(FakeClient(faults=fault)), model="policy", require_tokens=True, policy_version=lambda: 3
    )
    await ask(client)
    assert client.turns[0].versions == [4, 3, 5, 5]


async def test_the_handle_looks_like_the_client_it_stands_for(backend: HttpBackend) -> None:
    client = RolloutClient(backend, model="policy")
    assert (client.base_url, client.api_key) == (backend.base_url, "EMPTY")
    assert client.with_options(timeout=3) is client
    await client.close()
    await ask(client)


# -- turns as rows ------------------------------------------------------------------------------------------------


def turn(prompt: list[int], answer: list[int], *, version: int = 0) -> Turn:
    return Turn(prompt, answer, [-0.5] * len(answer), [version] * len(answer))


def test_a_turn_that_extends_the_row_is_appended_and_the_environments_tokens_carry_no_loss() -> None:
    rows, forks = rows_from_turns([turn([1, 2], [3, 4], version=7), turn([1, 2, 3, 4, 9, 9], [5], version=8)])
    assert forks == 0
    assert len(rows) == 1
    row = rows[0]
    assert row.prompt_ids == [1, 2]
    assert row.completion_ids == [3, 4, 9, 9, 5]
    assert row.loss_mask == [1, 1, 0, 0, 1]
    assert row.logprobs == [-0.5, -0.5, 0.0, 0.0, -0.5]
    assert row.versions == [7, 7, -1, -1, 8]
    assert row.sampled_tokens == 3
    assert row.oldest_version == 7


@pytest.mark.parametrize(
    ("turns", "rows"),
    [
        ([turn([1, 2], [3, 4]), turn([1, 2, 8], [5])], [([1, 2], [3, 4]), ([1, 2, 8], [5])]),
        ([turn([1, 2], [3, 4]), turn([1, 2, 3, 40, 9], [5])], [([1, 2], [3, 4]), ([1, 2, 3, 40, 9], [5])]),
        (
            [turn([1], [2]), turn([7], [8]), turn([1, 2, 3], [4]), turn([7, 8, 9], [10])],
            [([1], [2, 3, 4]), ([7], [8, 9, 10])],
        ),
    ],
    ids=["rewritten history", "another last token", "two conversations"],
)
def test_a_turn_that_extends_no_row_starts_one_and_is_counted_as_a_fork(turns: list[Turn], rows: Any) -> None:
    found, forks = rows_from_turns(turns)
    assert [(row.prompt_ids, row.completion_ids) for row in found] == rows
    assert forks == 1


def test_a_turn_without_sampled_tokens_leaves_no_row() -> None:
    assert rows_from_turns([turn([1, 2], [])]) == ([], 0)


async def test_a_training_answer_gives_its_tokens_where_they_are_read_and_as_the_server_sent_them_where_asked() -> (
    None
):
    client = RolloutClient(ClientBackend(FakeClient("four")), model="m", require_tokens=True)
    messages = [{"role": "user", "content": "2+2?"}]
    plain = await client.chat.completions.create(model="m", messages=messages)
    asked = await client.chat.completions.create(model="m", messages=messages, logprobs=True)
    assert plain.choices[0].token_ids == list(client.turns[0].completion_ids) == asked.choices[0].token_ids
    assert plain.prompt_token_ids == list(client.turns[0].prompt_ids)
    assert [entry.token for entry in asked.choices[0].logprobs.content][:4] == list("four")


async def test_a_prompt_that_does_not_fit_the_context_is_noted_and_is_no_failure() -> None:
    fault = Fault(400, body={"error": {"message": "prompt is too long: 201 tokens > 200 maximum"}})
    client = RolloutClient(ClientBackend(FakeClient(faults=fault)), model="policy", retry=QUICK)
    with pytest.raises(OverlongPromptError):
        await ask(client)
    assert (client.overlong, client.last_error, client.retries) == (True, None, 0)


@pytest.mark.parametrize("kind", ["input_audio", "video_url", "file"])
def test_what_is_neither_text_nor_image_is_refused_by_name_in_training(kind: str) -> None:
    content = [{"type": "text", "text": "what is it?"}, {"type": kind, kind: {}}]
    with pytest.raises(ConfigError, match=f"row 3 has a content part of type '{kind}'"):
        refuse_non_text([{"role": "user", "content": content}], "row 3", max_images=2)
