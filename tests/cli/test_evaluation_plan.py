"""The endpoint that a command means, the places of registries, and how long an attempt may take."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from verifiers.cli.evaluate import main
from verifiers.errors import ProviderError
from verifiers.inference.endpoint import CHAT, Endpoint, HttpBackend
from verifiers.inference.endpoint_registry import registries
from verifiers.inference.retry import RetryPolicy, retry
from verifiers.testing import FakeOpenAIServer

SMALL = ["-m", "small", "-n", "1", "-r", "1"]


def write_registry(path: Path, url: str, name: str = "small", model: str = "org/policy") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".py":
        path.write_text(f'ENDPOINTS = {{"{name}": {{"model": "{model}", "url": "{url}", "key": "SMALL_KEY"}}}}\n')
    else:
        path.write_text(f'[endpoints.{name}]\nmodel = "{model}"\nurl = "{url}"\nkey_var = "SMALL_KEY"\n')


@pytest.mark.parametrize("number", range(5))
def test_a_registry_is_found_without_a_flag_and_that_is_said(
    server: FakeOpenAIServer,
    env_name: str,
    results: Any,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each place wins over the ones after it."""
    monkeypatch.setenv("SMALL_KEY", "the-key-of-small")
    for place, path in enumerate(registries()):
        if place >= number:
            write_registry(path, server.url, model=f"org/{place}")
    assert main([env_name, *SMALL]) == 0
    said = capsys.readouterr().err
    assert f"vf-eval: -m small is org/{number} at {server.url}, as {registries()[number]} says\n" == said
    assert server.requests[0].body["model"] == f"org/{number}"
    assert server.requests[0].headers["authorization"] == "Bearer the-key-of-small"
    assert results.metadata["endpoint"] == "small"


def test_a_registry_without_the_name_leaves_it_to_the_next(
    server: FakeOpenAIServer, env_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _, _, classic, _ = registries()
    write_registry(first, "http://127.0.0.1:1/v1", name="other")
    write_registry(classic, server.url)
    assert main([env_name, *SMALL, "--json"]) == 0
    assert f"as {classic} says" in capsys.readouterr().err
    assert server.request_count == 1


def test_an_address_that_is_given_and_the_built_in_fake_need_no_registry(
    server: FakeOpenAIServer, env_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_registry(registries()[0], "http://127.0.0.1:1/v1")
    assert main([env_name, *SMALL, "-b", server.url]) == 0
    assert server.requests[0].body["model"] == "small"
    registries()[0].write_text("no TOML")
    assert main([env_name, "-m", "fake"]) == 0
    assert "endpoints.toml" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "more", "sentence"),
    [
        ("no TOML", [], "the endpoint registry 'endpoints.toml' is not valid TOML"),
        ('[endpoints.small]\nmodel = "m"\nurl = "http://h/v1"\nkey = "sk"', [], "keys do not belong in files"),
        ('[endpoints.small]\nmodel = "m"\nurl = "http://h/v1"', ["--header", "X: y"], "put the headers there"),
    ],
)
def test_a_registry_that_is_found_and_cannot_be_used_is_one_sentence(
    env_name: str, text: str, more: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("endpoints.toml").write_text(text)
    assert main([env_name, *SMALL, *more]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert sentence in said


@pytest.mark.parametrize(
    ("flags", "attempt_s", "rollout_s"),
    [
        ([], 600.0, 1800.0),
        (["--rollout-timeout", "90"], 30.0, 90.0),
        (["--rollout-timeout", "9000"], 600.0, 9000.0),
        (["--attempt-timeout", "45"], 45.0, 1800.0),
    ],
)
def test_an_attempt_gets_a_third_of_a_rollouts_time_unless_told(
    server: FakeOpenAIServer, env_name: str, results: Any, flags: list[str], attempt_s: float, rollout_s: float
) -> None:
    assert main([env_name, "-b", server.url, "-n", "1", "-r", "1", *flags]) == 0
    assert (results.metadata["attempt_timeout_s"], results.metadata["rollout_timeout_s"]) == (attempt_s, rollout_s)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "-m is missing: name a model, or 'fake' for the built-in one, which needs no endpoint."),
        (
            ["-m", "gpt-x"],
            "the environment variable 'OPENAI_API_KEY' holds no key for https://api.openai.com/v1; set it",
        ),
        (["-m", "", "-b", "http://127.0.0.1:1/v1"], "-m is missing: name a model"),
        (["-k", "NOSUCHVAR", "-b", "http://127.0.0.1:1/v1"], "the environment variable 'NOSUCHVAR' holds no key for"),
        (["-m", "gpt-x", "-k", "sk-a-key"], "--api-key-var is not an environment variable's name; put the key into"),
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
