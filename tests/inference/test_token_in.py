"""Turns by token ids: what is sent is what is held, whatever the chat template does with earlier turns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from token_world import (
    END,
    THINK,
    TURNS,
    Dialogue,
    Template,
    TokenServer,
    calls,
    client_of,
    digest,
    extends_each_time,
    keeps,
    play,
    strips,
    thinks,
    tools,
)

from verifiers.types import Outcome

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


async def test_a_single_turn_costs_one_request_unless_ids_are_asked_for() -> None:
    async with TokenServer(thinks) as server:
        await play(server, "auto", Dialogue(1), count=5)
        assert {path: len(bodies) for path, bodies in server.bodies.items()} == {"/v1/chat/completions": 5}


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
        talks: list[list[dict[str, Any]]] = [[{"role": "user", "content": who}] for who in ("one", "two")]
        async with client_of(server, "auto") as client:
            for turn, talk in itertools.product(range(4), talks):
                response = await client.chat.completions.create(model="m", messages=talk)
                said = response.choices[0].message
                assert said.reasoning_content
                talk += [{"role": "assistant", "content": said.content}, {"role": "user", "content": f"{turn}"}]
    assert extends_each_time(server.turns[::2])
    assert extends_each_time(server.turns[1::2])
    assert len(server.sent("/v1/chat/completions")) == 2


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


@pytest.mark.parametrize("generation", ["messages", "tokens"])
async def test_without_a_servers_stamp_an_answer_across_a_push_is_stamped_with_the_older_version(
    generation: str,
) -> None:
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
    assert row.oldest_version == 3


def _fail_at(server: TokenServer, number: int, statuses: list[int]) -> Any:
    """Fails from the given answer of the policy on, the probe's included, once for each status."""
    asked = 0

    async def count() -> None:
        nonlocal asked
        asked += 1
        if asked == number:
            server.failures = list(statuses)

    return count
