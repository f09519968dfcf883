"""Mistakes in the endpoint of an evaluation are one sentence, before or at the first call."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from verifiers.cli.evaluate import main
from verifiers.errors import ProviderError
from verifiers.inference.endpoint import CHAT, Endpoint, HttpBackend
from verifiers.inference.retry import RetryPolicy, retry
from verifiers.testing import FakeOpenAIServer


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "-m is missing: name a model, or 'fake' for the built-in one, which needs no endpoint."),
        (
            ["-m", "gpt-x"],
            "the environment variable 'OPENAI_API_KEY' holds no key for https://api.openai.com/v1; set it",
        ),
        (["-k", "NOSUCHVAR", "-b", "http://127.0.0.1:1/v1"], "the environment variable 'NOSUCHVAR' holds no key for"),
    ],
)
def test_a_model_or_a_key_that_is_missing_is_refused_before_any_call(
    arguments: list[str],
    sentence: str,
    env_name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def refuse(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr("socket.socket.connect", refuse)
    assert main([env_name, *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"vf-eval: {sentence}")
    assert not Path("outputs").exists()


def test_a_base_url_without_v1_is_told_to_add_it(env_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAIServer("4") as server:
        url = server.url.removesuffix("/v1")
        assert main([env_name, "-b", url, "-m", "m", "-n", "1", "-r", "1"]) == 1
    assert f"is the base URL {url}/v1?" in capsys.readouterr().err


async def test_a_host_name_without_an_address_is_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[object] = []

    async def unknown(*_: object, **__: object) -> None:
        tries.append(None)
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
    backend = HttpBackend(Endpoint("http://no-such-host.invalid/v1"))
    with pytest.raises(ProviderError, match=r"no-such-host\.invalid.*\(after 2 attempts\)"):
        await retry(
            lambda: backend.call(CHAT, {"model": "m", "messages": []}), RetryPolicy(max_attempts=9, base_s=0.01)
        )
    assert len(tries) == 2
    await backend.close()
