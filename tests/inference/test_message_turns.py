"""Turns that go as messages: where ids cannot say them, where a server offers no token ids, and while it fails to."""

from __future__ import annotations

import asyncio
import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
from token_world import (
    ASK,
    NO_WAIT,
    TURNS,
    Dialogue,
    TokenServer,
    client_of,
    counts,
    digest,
    keeps,
    play,
    strips,
    thinks,
)

from verifiers.errors import ConfigError, ProviderError
from verifiers.inference.endpoint import DERENDER, GENERATE, TOKENIZE, ClientBackend, Endpoint, HttpBackend
from verifiers.inference.retry import RetryableError
from verifiers.inference.token_in import TokenIn, token_in_for
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.testing import FakeClient
from verifiers.types import Outcome, RolloutKey

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


@pytest.mark.parametrize(
    "fields",
    [{"response_format": {"type": "json_object"}}, {"tool_choice": "required"}, {"extra_body": {"guided": 1}}],
)
async def test_a_call_that_has_no_counterpart_in_ids_goes_as_messages(fields: dict[str, Any]) -> None:
    async with TokenServer(digest) as server, client_of(server, "tokens") as client:
        await client.chat.completions.create(model="m", messages=ASK, **fields)
        await client.chat.completions.create(model="m", messages=[{**ASK[0], "content": [{"type": "text"}]}])
    assert list(server.bodies) == ["/v1/chat/completions"]


async def test_what_is_asked_of_judges_is_no_turn_and_goes_as_it_is() -> None:
    async with TokenServer(digest) as server:
        async with client_of(server, "tokens") as client:
            await client.untrained.chat.completions.create(model="m", messages=ASK)
        assert list(server.bodies) == ["/v1/chat/completions"]
        assert client.turns == []


async def test_a_client_object_that_speaks_chat_alone_gets_messages() -> None:
    backend = ClientBackend(FakeClient("yes"))
    token_in = token_in_for("auto", backend, "m", require_tokens=True)
    runner = Run(Dialogue(), backend, "m", require_tokens=True, token_in=token_in)
    (rollout,) = await runner.play([RolloutRequest(RolloutKey(0, 0, 0), prompt=ASK, seed=1)])
    assert (rollout.outcome, rollout.turns) == (Outcome.COMPLETED, TURNS)


def test_an_unknown_way_is_refused_and_evaluation_stays_with_messages() -> None:
    backend = HttpBackend(Endpoint("http://127.0.0.1:1/v1"))
    with pytest.raises(ConfigError, match="'ids'"):
        token_in_for("ids", backend, "m", require_tokens=True)
    assert token_in_for("auto", backend, "m", require_tokens=False) is None
    assert token_in_for("messages", backend, "m", require_tokens=True) is None
    assert token_in_for("tokens", backend, "m", require_tokens=False) is not None


# -- routes that fail ------------------------------------------------------------------------------------------------


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
        if path == TOKENIZE:
            return {"tokens": [ord(letter) for letter in keeps(arguments["messages"], None)]}
        return {"choices": [{"token_ids": [1], "logprobs": {"content": [{}]}}]}

    async def close(self) -> None: ...


@pytest.mark.parametrize("path", [GENERATE, DERENDER])
async def test_a_route_that_keeps_failing_is_asked_again_after_a_minute_and_turns_go_as_messages_till_then(
    path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Failing(path, 500)
    token_in = TokenIn(backend, "m", retry=NO_WAIT)
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
    token_in = TokenIn(backend, "m", mode, retry=NO_WAIT)
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
