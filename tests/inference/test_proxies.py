"""Proxies of the environment stand between this machine and others, never between this machine and itself."""

from __future__ import annotations

from typing import Any

import pytest

from verifiers.errors import ConfigError, ProviderError
from verifiers.inference.endpoint import Endpoint, HttpBackend, proxy_for
from verifiers.server_process import is_loopback
from verifiers.testing import FakeOpenAIServer

ASK: dict[str, Any] = {"model": "m", "messages": []}
KEY = "sk-secret-0123456789"


async def one_call(endpoint: Endpoint) -> None:
    backend = HttpBackend(endpoint)
    await backend.call("/chat/completions", ASK)
    await backend.close()


@pytest.mark.parametrize(
    ("urls", "local"),
    [
        (["http://localhost:8000/v1", "http://127.1.2.3/v1", "http://[::1]:80", "http://a.localhost"], True),
        (["https://api.openai.com/v1", "http://10.0.0.1/v1", "http://localhost.example.com", "x"], False),
    ],
    ids=["this machine", "others"],
)
def test_this_machine_is_known_by_all_its_names(urls: list[str], local: bool) -> None:
    assert [url for url in urls if is_loopback(url) != local] == []


def test_proxies_of_the_environment_are_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert proxy_for("https://there/v1") is None
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("HTTP_PROXY", "plain:3128")
    monkeypatch.setenv("NO_PROXY", "inside.example.com,10.0.0.1")
    assert proxy_for("https://there/v1") == "http://proxy:3128"
    assert proxy_for("http://there:8000/v1") == "http://plain:3128"
    for direct in (
        "http://localhost:8000/v1",
        "http://127.0.0.1/v1",
        "http://inside.example.com/v1",
        "http://10.0.0.1",
    ):
        assert proxy_for(direct) is None
    monkeypatch.setenv("HTTPS_PROXY", f"socks5://me:{KEY}@proxy:1080")
    with pytest.raises(ConfigError, match="names a socks5 proxy for there") as caught:
        proxy_for("https://there/v1")
    assert KEY not in str(caught.value)


async def test_a_call_to_another_machine_goes_through_the_proxy_and_one_to_this_machine_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with FakeOpenAIServer("4") as server:
        # to a proxy, the path is the whole address: the fake server takes it for one of its own
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        await one_call(Endpoint(server.url))
        assert server.request_count == 1
        monkeypatch.setenv("http_proxy", server.root_url)
        monkeypatch.setenv("HTTP_PROXY", server.root_url)
        await one_call(Endpoint("http://elsewhere.invalid/v1", KEY))
        assert server.request_count == 2
        assert server.requests[1].headers["host"] == "elsewhere.invalid"
        assert server.requests[1].headers["authorization"] == f"Bearer {KEY}"


async def test_a_proxy_that_refuses_a_connection_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with FakeOpenAIServer("4") as server:
        # it knows no CONNECT
        monkeypatch.setenv("https_proxy", f"http://me:{KEY}@127.0.0.1:{server.port}")
        with pytest.raises(ProviderError, match=rf"404.*http://127\.0\.0\.1:{server.port}") as caught:
            await one_call(Endpoint("https://elsewhere.invalid/v1"))
    assert KEY not in str(caught.value)
