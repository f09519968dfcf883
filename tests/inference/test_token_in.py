"""Turns by token ids: what is sent is what is held, whatever the chat template does with earlier turns."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from token_world import (
    END,
    THINK,
    Template,
    TokenServer,
    calls,
    counts,
    digest,
    keeps,
    strips,
    thinks,
    tools_in_the_newest_turn,
)

import verifiers as vf
from verifiers.errors import ConfigError, ProviderError
from verifiers.inference.endpoint import DERENDER, GENERATE, TOKENIZE, ClientBackend, Endpoint, HttpBackend
from verifiers.inference.rendering import IncrementalRenderer
from verifiers.inference.retries import RetryableError, RetryPolicy
from verifiers.inference.token_in import TokenIn, token_in_for
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.runner import RolloutRunner
from verifiers.testing import FakeClient
from verifiers.types import Outcome, RolloutKey

TURNS = 6
NO_WAIT = RetryPolicy(base_s=0.0)
ASK = [{"role": "user", "content": "begin"}]


class Dialogue(vf.MultiTurnEnv):
    """The environment's words depend on the policy's; only contents are repeated, as many environments do."""

    def __init__(self, turns: int = TURNS, **kwargs: Any) -> None:
        rows = [{"prompt": ASK, "answer": ""}]
        super().__init__(max_turns=turns, dataset=rows, rubric=vf.Rubric(funcs=[lambda **_: 1.0]), **kwargs)

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        messages[-1].pop("reasoning_content", None)
        return [{"role": "user", "content": f"{state['turn']}: {messages[-1]['content'][:3]}"}], state


def add(n: int) -> str:
    """Add seven.

    Args:
        n: the number to add to
    """
    return str(n + 7)


def tools(turns: int) -> vf.ToolEnv:
    rows = [{"prompt": ASK, "answer": ""}]
    return vf.ToolEnv(tools=[add], max_turns=turns, dataset=rows, rubric=vf.Rubric(funcs=[lambda **_: 1.0]))


async def play(
    server: TokenServer,
    generation: str,
    env: Any = None,
    *,
    count: int = 1,
    token_in: TokenIn | None = None,
    **options: Any,
) -> list[Rollout]:
    """Rollouts of one prompt, each with a seed of its own."""
    backend = HttpBackend(Endpoint(server.url))
    sampling = {"temperature": 1.0, **options.pop("sampling", {})}
    token_in = token_in or token_in_for(generation, backend, "m", require_tokens=True, retry=NO_WAIT)
    runner = RolloutRunner(
        env or Dialogue(), backend, "m", sampling, retry=NO_WAIT, require_tokens=True, token_in=token_in, **options
    )
    try:
        requests = [RolloutRequest(RolloutKey(0, 0, n), prompt=ASK, seed=n + 1) for n in range(count)]
        return [await runner.run_one(request) for request in requests]
    finally:
        await backend.close()


def extends_each_time(turns: Sequence[tuple[list[int], list[int]]]) -> bool:
    """Return True where each prompt begins with the prompt and the answer before it, id for id."""
    return all(
        after[0][: len(prompt) + len(answer)] == prompt + answer
        for (prompt, answer), after in itertools.pairwise(turns)
    )


# -- forks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generation", ["auto", "tokens"])
async def test_a_template_that_strips_reasoning_forks_with_messages_and_not_with_ids(generation: str) -> None:
    async with TokenServer(thinks, strips) as server:
        (rollout,) = await play(server, "messages")
        assert rollout.outcome is Outcome.COMPLETED, rollout.failure
        assert (rollout.forks, len(rollout.rows)) == (TURNS - 1, TURNS)
        server.turns.clear()
        (rollout,) = await play(server, generation)
        assert rollout.outcome is Outcome.COMPLETED, rollout.failure
        assert (rollout.forks, len(rollout.rows), rollout.turns) == (0, 1, TURNS)
        assert len(server.turns) == TURNS
        assert extends_each_time(server.turns)
        # trained is what was sampled, thoughts included
        (row,) = rollout.rows
        sampled = [token for _, answer in server.turns for token in answer]
        assert [t for t, mask in zip(row.completion_ids, row.loss_mask, strict=True) if mask] == sampled
        assert row.prompt_ids + row.completion_ids == server.turns[-1][0] + server.turns[-1][1]
        assert sampled.count(THINK) == TURNS


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("template", [keeps, strips])
async def test_what_is_sent_is_what_the_template_would_send_where_it_keeps_everything(
    template: Template, temperature: float
) -> None:
    # without thoughts, neither template rewrites anything
    async with TokenServer(digest, template) as server:
        env, sampling = Dialogue(), {"temperature": temperature}
        by_messages = await play(server, "messages", env, count=3, sampling=sampling)
        by_ids = await play(server, "tokens", env, count=3, sampling=sampling)
        mixed = await play(server, "auto", env, count=3, sampling=sampling)
    for one, two, three in zip(by_messages, by_ids, mixed, strict=True):
        assert one.rows == two.rows == three.rows
        assert one.completion == two.completion == three.completion
        assert one.forks == 0
    assert by_ids[0].rows != by_ids[1].rows
    assert len(server.turns) == 9 * TURNS


async def test_fifty_turns_with_tools_are_one_row_and_the_environment_sees_the_same_as_with_messages() -> None:
    async with TokenServer(calls) as server:
        (by_messages,) = await play(server, "messages", tools(50))
        before = server.rendered_tokens
        server.turns.clear()
        (rollout,) = await play(server, "auto", tools(50))
        rendered = server.rendered_tokens - before
    assert rollout.outcome is Outcome.COMPLETED, rollout.failure
    assert (rollout.forks, len(rollout.rows), rollout.turns) == (0, 1, 50)
    assert extends_each_time(server.turns)
    assert rollout.rows == by_messages.rows
    assert rollout.completion == by_messages.completion
    assert sum(message["role"] == "tool" for message in rollout.completion) == 49
    reasons = [response.choices[0].finish_reason for response in rollout.state["responses"]]
    assert reasons == ["tool_calls"] * 50
    assert rendered < before / 10


async def test_rendering_is_linear_in_the_turns() -> None:
    rendered = []
    for turns in (10, 20, 40):
        async with TokenServer(thinks, strips) as server:
            (rollout,) = await play(server, "tokens", Dialogue(turns))
            assert rollout.turns == turns
            rendered.append(server.rendered_tokens)
    assert rendered[2] - rendered[1] == pytest.approx(2 * (rendered[1] - rendered[0]), rel=0.1)


async def test_turns_may_be_rendered_elsewhere_than_on_the_server() -> None:
    async def render(messages: Any, tools: Any, options: Any) -> list[int]:
        return [ord(letter) for letter in strips(messages, tools)]

    async with TokenServer(thinks, strips, absent=["/tokenize"]) as server:
        backend = HttpBackend(Endpoint(server.url))
        token_in = TokenIn(backend, "m", "tokens", renderer=IncrementalRenderer(render), retry=NO_WAIT)
        (rollout,) = await play(server, "tokens", token_in=token_in)
        await backend.close()
    assert (rollout.forks, len(rollout.rows), rollout.turns) == (0, 1, TURNS)


async def test_a_single_turn_costs_one_request_unless_ids_are_asked_for() -> None:
    async with TokenServer(thinks) as server:
        await play(server, "auto", Dialogue(1), count=5)
        assert {path: len(bodies) for path, bodies in server.bodies.items()} == {"/v1/chat/completions": 5}


# -- ends of turns ------------------------------------------------------------------------------------------------


async def test_a_turn_that_was_cut_off_gets_the_end_that_it_lacks() -> None:
    async with TokenServer(digest) as server:
        (rollout,) = await play(server, "auto", sampling={"max_tokens": 3})
    (row,) = rollout.rows
    assert rollout.forks == 0
    assert rollout.outcome is Outcome.TRUNCATED
    ends = [place for place, token in enumerate(row.completion_ids) if token == END]
    # each answer's end is the template's and carries no loss; then the environment's own turn ends
    assert len(ends) == 2 * (TURNS - 1)
    assert not any(row.loss_mask[place] for place in ends)
    assert row.sampled_tokens == 3 * TURNS


async def test_a_stop_string_ends_the_message_before_it_and_stays_among_the_ids() -> None:
    def says(prompt: Sequence[int], seed: int) -> str:
        return f"{digest(prompt, seed)}. And more"

    async with TokenServer(says) as server:
        (rollout,) = await play(server, "auto", sampling={"stop": [". And"]})
    assert rollout.forks == 0
    said = [message["content"] for message in rollout.completion if message["role"] == "assistant"]
    assert len(said) == TURNS
    assert all(len(content) == 8 for content in said)
    assert extends_each_time(server.turns)
    assert all("".join(map(chr, answer)).endswith(". And") for _, answer in server.turns)


async def test_a_prompt_that_outgrows_the_context_ends_the_rollout_as_truncated() -> None:
    async with TokenServer(digest, max_model_len=150) as server:
        (rollout,) = await play(server, "auto", Dialogue(50))
    assert rollout.outcome is Outcome.TRUNCATED
    assert rollout.failure is None
    assert 1 < rollout.turns < 50
    assert len(rollout.rows) == 1


# -- what goes as messages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", ["/tokenize", "/inference/v1/generate", "/v1/chat/completions/derender"])
async def test_a_server_without_a_route_gets_messages_and_the_reason_is_said_once(
    absent: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "verifiers.rollouts")
    async with TokenServer(thinks, strips, absent=[absent]) as server:
        rollouts = await play(server, "auto", count=3)
        assert [rollout.forks for rollout in rollouts] == [TURNS - 1] * 3
        with pytest.raises(ConfigError, match=absent):
            await play(server, "tokens")
    assert len([record for record in caplog.records if absent in record.message]) == 1


async def test_a_template_that_cannot_be_split_gets_messages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "verifiers.rollouts")
    async with TokenServer(thinks, counts) as server:
        (rollout,) = await play(server, "auto")
        assert rollout.outcome is Outcome.COMPLETED
        assert len(server.sent("/v1/chat/completions")) == TURNS
        with pytest.raises(ConfigError, match="behind an answer depends"):
            await play(server, "tokens")
    assert "behind an answer depends" in caplog.text


async def test_a_template_that_shows_the_tools_again_gets_messages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "verifiers.rollouts")
    async with TokenServer(calls, tools_in_the_newest_turn) as server:
        (rollout,) = await play(server, "auto", tools(4))
        assert rollout.outcome is Outcome.COMPLETED
        assert len(server.sent("/v1/chat/completions")) == 4
        # without tools the same template can be split
        (rollout,) = await play(server, "auto")
        assert rollout.forks == 0
    assert "shows the tools again" in caplog.text


async def test_what_the_environment_rewrites_is_sent_as_it_says_and_starts_a_row() -> None:
    class Rewrites(Dialogue):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            if state["turn"] == 3:
                # changed in place, in a message that was sent before
                messages[0]["content"] = "something else"
            return await super().env_response(messages, state, **kwargs)

    async with TokenServer(digest) as server:
        (rollout,) = await play(server, "auto", Rewrites())
    assert (rollout.forks, len(rollout.rows)) == (1, 2)
    assert "something else" in "".join(map(chr, server.turns[3][0]))
    assert extends_each_time(server.turns[:3])
    assert extends_each_time(server.turns[3:])


async def test_two_conversations_in_one_rollout_are_each_held() -> None:
    async with TokenServer(thinks, strips) as server:
        backend = HttpBackend(Endpoint(server.url))
        client = RolloutClient(
            backend, model="m", seed=1, require_tokens=True, token_in=TokenIn(backend, "m", retry=NO_WAIT)
        )
        talks: list[list[dict[str, Any]]] = [[{"role": "user", "content": who}] for who in ("one", "two")]
        for turn in range(4):
            for talk in talks:
                response = await client.chat.completions.create(model="m", messages=talk)
                said = response.choices[0].message
                assert said.reasoning_content
                talk += [{"role": "assistant", "content": said.content}, {"role": "user", "content": f"{turn}"}]
        await backend.close()
    assert extends_each_time(server.turns[::2])
    assert extends_each_time(server.turns[1::2])
    assert len(server.sent("/v1/chat/completions")) == 2


@pytest.mark.parametrize(
    "fields",
    [{"response_format": {"type": "json_object"}}, {"tool_choice": "required"}, {"extra_body": {"guided": 1}}],
)
async def test_a_call_that_has_no_counterpart_in_ids_goes_as_messages(fields: dict[str, Any]) -> None:
    async with TokenServer(digest) as server:
        backend = HttpBackend(Endpoint(server.url))
        client = RolloutClient(
            backend, model="m", seed=1, require_tokens=True, token_in=TokenIn(backend, "m", "tokens", retry=NO_WAIT)
        )
        await client.chat.completions.create(model="m", messages=ASK, **fields)
        assert list(server.bodies) == ["/v1/chat/completions"]
        await client.chat.completions.create(model="m", messages=[{**ASK[0], "content": [{"type": "text"}]}])
        await backend.close()
    assert list(server.bodies) == ["/v1/chat/completions"]


async def test_what_is_asked_of_judges_is_no_turn_and_goes_as_it_is() -> None:
    async with TokenServer(digest) as server:
        backend = HttpBackend(Endpoint(server.url))
        client = RolloutClient(
            backend, model="m", require_tokens=True, token_in=TokenIn(backend, "m", "tokens", retry=NO_WAIT)
        )
        await client.untrained.chat.completions.create(model="m", messages=ASK)
        await backend.close()
        assert list(server.bodies) == ["/v1/chat/completions"]
        assert client.turns == []


async def test_a_client_object_that_speaks_chat_alone_gets_messages() -> None:
    backend = ClientBackend(FakeClient("yes"))
    token_in = token_in_for("auto", backend, "m", require_tokens=True)
    runner = RolloutRunner(Dialogue(), backend, "m", require_tokens=True, token_in=token_in)
    rollout = await runner.run_one(RolloutRequest(RolloutKey(0, 0, 0), prompt=ASK, seed=1))
    assert (rollout.outcome, rollout.turns) == (Outcome.COMPLETED, TURNS)


def test_an_unknown_way_is_refused_and_evaluation_stays_with_messages() -> None:
    backend = HttpBackend(Endpoint("http://127.0.0.1:1/v1"))
    with pytest.raises(ConfigError, match="'ids'"):
        token_in_for("ids", backend, "m", require_tokens=True)
    assert token_in_for("auto", backend, "m", require_tokens=False) is None
    assert token_in_for("messages", backend, "m", require_tokens=True) is None
    assert token_in_for("tokens", backend, "m", require_tokens=False) is not None


# -- faults and versions ---------------------------------------------------------------------------------------------


async def test_a_try_is_repeated_with_the_same_ids_and_the_same_seed() -> None:
    async with TokenServer(thinks, strips) as server:
        server.before_answer = _fail_at(server, 4, [503, 500])
        (rollout,) = await play(server, "auto")
    assert rollout.attempts == 3
    assert rollout.forks == 0
    bodies = [body for body in server.sent("/inference/v1/generate") if "seed" in body["sampling_params"]]
    tries = [body for body in bodies if body["token_ids"] == server.turns[2][0]]
    assert len(tries) == 3
    assert tries[0] == tries[1] == tries[2]
    # and each turn has a seed of its own
    assert len({body["sampling_params"]["seed"] for body in bodies}) == TURNS - 1


async def test_a_server_that_stops_answering_is_a_provider_error_and_never_a_reward() -> None:
    async with TokenServer(thinks, strips) as server:
        server.before_answer = _fail_at(server, 4, [503] * 99)
        (rollout,) = await play(server, "auto")
    assert rollout.outcome is Outcome.PROVIDER_ERROR
    assert rollout.reward is None


class Failing:
    """A backend with one route that fails with a status, or cannot be reached (None)."""

    base_url, api_key = "http://x/v1", "EMPTY"

    def __init__(self, path: str, status: int | None) -> None:
        self.path, self.status = path, status
        self.tries = 0

    async def call(self, path: str, arguments: Any) -> Any:
        if path == self.path:
            self.tries += 1
            raise RetryableError("it fails", status=self.status)
        return {"choices": [{"token_ids": [1], "logprobs": {"content": [{}]}}]}

    async def close(self) -> None: ...


class Rendered(IncrementalRenderer):
    """Any template."""

    def __init__(self) -> None: ...

    async def check(self) -> None: ...

    async def first(self, *_: Any) -> list[int]:
        return [1]


@pytest.mark.parametrize("path", [GENERATE, DERENDER])
async def test_a_route_that_keeps_failing_is_asked_again_after_a_minute_and_turns_go_as_messages_till_then(
    path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Failing(path, 500)
    token_in = TokenIn(backend, "m", renderer=Rendered(), retry=NO_WAIT)
    assert await asyncio.gather(*(token_in.offered() for _ in range(20))) == [False] * 20
    assert token_in.is_refused
    assert backend.tries == NO_WAIT.max_attempts
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    now = time.monotonic()
    monkeypatch.setattr("verifiers.inference.token_in.time", SimpleNamespace(monotonic=lambda: now + 61.0))
    backend.path = ""
    assert not token_in.is_refused
    assert await token_in.offered()


@pytest.mark.parametrize(("mode", "status"), [("auto", None), ("tokens", None), ("tokens", 500)])
async def test_a_server_that_cannot_be_asked_is_asked_once_for_all_who_wait(mode: Any, status: int | None) -> None:
    backend = Failing(GENERATE, status)
    token_in = TokenIn(backend, "m", mode, renderer=Rendered(), retry=NO_WAIT)
    found = await asyncio.gather(*(token_in.offered() for _ in range(20)), return_exceptions=True)
    assert {type(error) for error in found} == {ProviderError}
    assert backend.tries == NO_WAIT.max_attempts
    backend.path = ""
    assert await token_in.offered()


@pytest.mark.parametrize("broken", [TOKENIZE, GENERATE, DERENDER])
async def test_turns_go_on_as_messages_where_a_route_of_token_ids_begins_to_fail(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    call = HttpBackend.call

    async def failing(self: HttpBackend, path: str, arguments: Any) -> Any:
        if path == broken:
            raise RetryableError("it fails", status=500)
        return await call(self, path, arguments)

    async with TokenServer(thinks, strips) as server:
        backend = HttpBackend(Endpoint(server.url))
        token_in = TokenIn(backend, "m", retry=NO_WAIT)
        assert await token_in.offered()
        monkeypatch.setattr(HttpBackend, "call", failing)
        (rollout,) = await play(server, "auto", token_in=token_in)
        await backend.close()
    assert rollout.outcome is Outcome.COMPLETED
    assert rollout.turns == TURNS
    assert token_in.is_refused


async def test_tokens_are_stamped_with_the_versions_that_the_server_reports() -> None:
    async with TokenServer(digest) as server:
        server.versions = [{"version": "4", "start": 0, "end": 3}, {"version": "5", "start": 3, "end": 9}]
        (rollout,) = await play(server, "tokens", Dialogue(2), policy_version=lambda: 5)
    (row,) = rollout.rows
    assert [version for version in row.versions if version >= 0] == [4, 4, 4, 5, 5, 5, 5, 5, 5] * 2
    assert (row.oldest_version, row.newest_version) == (4, 5)


@pytest.mark.parametrize("generation", ["messages", "tokens"])
async def test_without_a_servers_stamp_an_answer_across_a_push_is_stamped_with_both_versions(generation: str) -> None:
    version, answered = 3, 0
    async with TokenServer(digest) as server:

        async def push() -> None:
            nonlocal version, answered
            if server.turns:
                answered += 1
                version = 4 if answered == 2 else version

        server.before_answer = push
        (rollout,) = await play(server, generation, Dialogue(4), policy_version=lambda: version)
    (row,) = rollout.rows
    stamps = [version for version in row.versions if version >= 0]
    assert stamps == [3] * 27 + [4] * 9
    assert (row.oldest_version, row.newest_version, row.unreported_version) == (3, 4, 4)


async def test_many_rollouts_at_once_ask_the_server_once_what_it_offers() -> None:
    async with TokenServer(thinks, strips) as server:
        backend = HttpBackend(Endpoint(server.url))
        token_in = TokenIn(backend, "m", retry=NO_WAIT)
        await asyncio.gather(*(play(server, "auto", token_in=token_in) for _ in range(20)))
        await backend.close()
    asked = [body for body in server.sent("/inference/v1/generate") if "seed" not in body["sampling_params"]]
    assert len(asked) == 1


def _fail_at(server: TokenServer, number: int, statuses: list[int]) -> Any:
    """Fails from the given answer of the policy on, the probe's included, once for each status."""
    asked = 0

    async def count() -> None:
        nonlocal asked
        asked += 1
        if asked == number:
            server.failures = list(statuses)

    return count
