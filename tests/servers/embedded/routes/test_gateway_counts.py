"""Tokens of a prompt, counted for an agent by the server that will read it."""

from __future__ import annotations

from typing import Any

import anthropic

from verifiers.gateway.gateway import Gateway
from verifiers.gateway.session import Session
from verifiers.inference.endpoint import Endpoint, HttpBackend
from verifiers.rollouts.recording_client import RolloutClient


async def test_tokens_are_counted_as_the_prompt_is_read_and_add_no_turn(start: Any) -> None:
    server = await start()
    backend, gateway = HttpBackend(Endpoint(f"{server.base}/v1")), Gateway()
    await gateway.start()
    session = Session(RolloutClient(backend, model="m", require_tokens=True), "m")
    arguments: Any = {"model": "m", "system": "add", "messages": [{"role": "user", "content": "one and one"}]}
    async with (
        gateway.serving(session),
        anthropic.AsyncAnthropic(base_url=gateway.url, api_key=session.key) as client,
    ):
        counted = await client.messages.count_tokens(**arguments)
        answered = await client.messages.create(max_tokens=2, **arguments)
        calls = session.client.calls
    await gateway.close()
    await backend.close()
    assert (counted.input_tokens, calls) == (answered.usage.input_tokens, 1)
