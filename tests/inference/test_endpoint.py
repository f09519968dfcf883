"""Clients that are handed in are honoured, and whatever goes wrong at an endpoint has one meaning."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import openai
import pytest

from verifiers.errors import ConfigError, ProviderError
from verifiers.inference.endpoint import ClientBackend, Endpoint, HttpBackend
from verifiers.inference.retry import RetryableError
from verifiers.inference.server_pool import backend_for
from verifiers.testing import FakeClient, FakeOpenAIServer, Fault

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "2+2?"}]}
KEY = "sk-secret-0123456789"


@pytest.fixture
async def server() -> AsyncIterator[FakeOpenAIServer]:
    async with FakeOpenAIServer("4") as server:
        yield server


async def one_call(client: Any, **arguments: Any) -> Any:
    backend = backend_for(client)
    try:
        return await backend.call("/chat/completions", {**ASK, **arguments})
    finally:
        await backend.close()


@pytest.mark.parametrize("kind", [openai.AsyncOpenAI, openai.OpenAI])
async def test_base_url_key_headers_and_timeouts_of_the_sdks_clients_are_used(
    kind: Any, server: FakeOpenAIServer
) -> None:
    client = kind(
        base_url=server.url + "/",
        api_key=KEY,
        default_headers={"X-Team": "blue", "X-Dropped": openai.omit},
        organization="org",
        project="proj",
        timeout=12.0,
    )
    backend = backend_for(client)
    assert isinstance(backend, HttpBackend)
    assert (backend.base_url, backend.endpoint.timeout_s) == (server.url, 12.0)
    await one_call(backend)
    headers = server.requests[0].headers
    assert headers["authorization"] == f"Bearer {KEY}"
    assert (headers["x-team"], headers["openai-organization"], headers["openai-project"]) == ("blue", "org", "proj")
    assert "x-dropped" not in headers


def test_a_timeout_object_gives_both_deadlines_and_the_sdks_default_leaves_time_to_connect() -> None:
    given = Endpoint.from_openai(
        openai.AsyncOpenAI(api_key="k", base_url="http://there/v1", timeout=openai.Timeout(7.0, connect=2.0))
    )
    assert (given.timeout_s, given.connect_timeout_s) == (7.0, 2.0)
    default = Endpoint.from_openai(openai.AsyncOpenAI(api_key="k", base_url="http://there/v1"))
    assert (default.timeout_s, default.connect_timeout_s) == (600.0, 10.0)
    assert Endpoint.from_openai(openai.AsyncOpenAI(api_key="k", base_url="http://x", timeout=None)).timeout_s == 600


def test_clients_that_we_cannot_stand_in_for_are_called_as_given() -> None:
    class Traced(openai.AsyncOpenAI):
        pass

    async def token() -> str:
        return "fresh"

    options: dict[str, Any] = {"api_key": "k", "base_url": "http://there/v1"}
    azure = openai.AsyncAzureOpenAI(api_key="k", api_version="1", azure_endpoint="https://there")
    own_http = openai.AsyncOpenAI(**options, http_client=openai.DefaultAsyncHttpxClient())
    fresh_key = openai.AsyncOpenAI(base_url="http://there/v1", api_key=token)
    queried = openai.AsyncOpenAI(**options, default_query={"api-version": "1"})
    for client in (azure, Traced(**options), own_http, fresh_key, queried, FakeClient(), AsyncMock(), MagicMock()):
        backend = backend_for(client)
        assert isinstance(backend, ClientBackend)
        assert backend.client is client


async def test_a_mock_is_called_with_exactly_the_arguments_and_its_answer_is_handed_on() -> None:
    client = AsyncMock()
    answer = await one_call(client, temperature=0.5, extra_body={"top_k": 3})
    client.chat.completions.create.assert_awaited_once_with(**ASK, temperature=0.5, extra_body={"top_k": 3})
    assert answer is client.chat.completions.create.return_value


async def test_a_sync_client_runs_in_a_thread_and_cannot_stall_the_others() -> None:
    class Sync(openai.OpenAI):
        pass

    main = threading.current_thread()
    seen: list[threading.Thread] = []

    def create(**_: Any) -> str:
        seen.append(threading.current_thread())
        return "answer"

    subclass = Sync(api_key="k", base_url="http://there/v1")
    subclass.chat.completions.create = create  # type: ignore[method-assign,assignment]
    wrapper = MagicMock()
    wrapper.chat.completions.create = create
    for client in (subclass, wrapper):
        assert await one_call(client) == "answer"
    assert len(seen) == 2
    assert main not in seen


def test_what_is_no_client_is_refused_with_what_would_be_one() -> None:
    with pytest.raises(ConfigError, match=r"client is 42, which has neither chat\.completions nor completions"):
        backend_for(42)
    for url in ("127.0.0.1:8000", "ftp://there", "http://", ""):
        with pytest.raises(ConfigError, match="is not an HTTP address; give one like"):
            backend_for(url)


@pytest.mark.parametrize(
    ("fault", "retryable", "text"),
    [
        (Fault.malformed(), True, "body that is not JSON"),
        (Fault.disconnect(), True, "could not be reached"),
        (Fault(429, retry_after=7), True, "answered 429: scripted fault 429"),
        (Fault(500), True, "answered 500"),
        *((Fault(status), False, f"answered {status}: scripted") for status in (400, 401, 403, 404, 422)),
    ],
)
async def test_a_failure_means_the_same_over_http_and_of_a_client_called_as_given(
    fault: Fault, retryable: bool, text: str
) -> None:
    async with FakeOpenAIServer(faults=fault) as server:
        with pytest.raises(ProviderError, match=text) as over_http:
            await one_call(Endpoint(server.url))
    with pytest.raises(ProviderError) as of_client:
        await one_call(FakeClient(faults=fault))
    for caught in (over_http, of_client):
        assert isinstance(caught.value, RetryableError) is retryable
        if not retryable:
            assert caught.value.status == fault.status
        if fault.retry_after:
            assert caught.value.retry_after_s == 7.0  # type: ignore[attr-defined]


async def test_a_body_that_is_no_object_is_a_failed_try() -> None:
    async with FakeOpenAIServer(faults=Fault(200, body="[1]")) as server:
        with pytest.raises(RetryableError, match="list instead of an object"):
            await one_call(server.url)


@pytest.mark.parametrize("calls", [[3], [{"id": "c"}], 3])
async def test_an_answer_that_an_sdk_took_as_it_came_is_a_failed_try(calls: Any) -> None:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "tool_calls": calls}}
    async with FakeOpenAIServer(faults=Fault(200, body={"choices": [choice]})) as server:
        client = openai.AsyncOpenAI(base_url=server.url, api_key="k")
        with pytest.raises(RetryableError, match="no completion"):
            await ClientBackend(client).call("/chat/completions", ASK)
        await client.close()


@pytest.mark.parametrize("body", ["[" * 100_000, '{"error": ' + "[" * 100_000, '{"error": {"code": ' + "9" * 5000])
async def test_an_error_that_no_reader_of_json_takes_is_quoted(body: str) -> None:
    async with FakeOpenAIServer(faults=Fault(400, body=body)) as server:
        with pytest.raises(ProviderError, match=r"answered 400: ."):
            await one_call(server.url)


async def test_the_page_of_a_web_server_is_quoted_in_one_line() -> None:
    page = "<html>\r\n<head><title>502 Bad Gateway</title></head>\r\n<body>\r\n</body>\r\n</html>\r\n"
    async with FakeOpenAIServer(faults=Fault(502, body=page)) as server:
        with pytest.raises(ProviderError, match=r"502: <html> <head><title>502 Bad Gateway</title></head> <body>"):
            await one_call(server.url)


async def test_a_foreign_error_passes_unchanged() -> None:
    error = KeyError("theirs")
    client = MagicMock()
    client.chat.completions.create = AsyncMock(side_effect=error)
    with pytest.raises(KeyError) as caught:
        await one_call(client)
    assert caught.value is error
    assert error.__cause__ is None


@pytest.mark.parametrize("timeout", [0.05, openai.Timeout(0.05, connect=1.0)])
async def test_a_server_that_hangs_meets_the_deadline_of_the_call(timeout: Any) -> None:
    async with FakeOpenAIServer(faults=Fault.hang()) as server:
        with pytest.raises(RetryableError, match=r"no answer from .* within 0\.05 s"):
            await one_call(Endpoint(server.url), timeout=timeout)


@pytest.mark.skipif(sys.platform != "linux", reason="how full a listener's queue may get differs")
async def test_a_connection_that_is_never_accepted_is_said_to_be_that() -> None:
    # a listener with a full queue: the kernel answers no further connection
    with socket.socket() as listener, socket.socket() as filler, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for queued in (filler, second):
            queued.setblocking(False)
            queued.connect_ex(listener.getsockname())
        port = listener.getsockname()[1]
        with pytest.raises(RetryableError, match=r"could not be reached"):
            await one_call(Endpoint(f"http://127.0.0.1:{port}/v1", timeout_s=5.0, connect_timeout_s=0.2))


async def test_headers_and_query_of_endpoint_and_call_are_sent_and_a_given_authorization_replaces_ours(
    server: FakeOpenAIServer,
) -> None:
    endpoint = Endpoint(server.url, KEY, {"authorization": "Basic abc", "X-Team": "blue"})
    query = {"api-version": 3, "debug": True, "team": None}
    await one_call(endpoint, extra_headers={"X-Call": "1"}, extra_query=query)
    headers = server.requests[0].headers
    assert (headers["authorization"], headers["x-team"], headers["x-call"]) == ("Basic abc", "blue", "1")
    assert server.requests[0].query == {"api-version": "3", "debug": "true"}
    assert {"extra_headers", "extra_query"}.isdisjoint(server.requests[0].body)


async def test_streaming_and_unwritable_bodies_are_refused_before_anything_is_sent(server: FakeOpenAIServer) -> None:
    with pytest.raises(ConfigError, match="stream=True"):
        await one_call(server.url, stream=True)
    with pytest.raises(ConfigError, match="cannot be written as JSON"):
        await one_call(server.url, extra_body={"x": object()})
    assert server.requests == []


async def test_the_key_is_in_no_repr_and_no_error() -> None:
    quoted = Fault(401, times=1, body={"error": {"message": f"Incorrect API key provided: {KEY}"}})
    async with FakeOpenAIServer(faults=[quoted, Fault(500, body=f"key {KEY} is limited")]) as server:
        endpoint = Endpoint(server.url, KEY, {"X-Key": KEY})
        backend = backend_for(endpoint)
        for _ in range(2):
            with pytest.raises(ProviderError) as caught:
                await backend.call("/chat/completions", ASK)
            assert KEY not in f"{caught.value} {caught.value!r} {caught.value.body}"
        assert KEY not in f"{endpoint} {endpoint!r} {backend!r}"
        await backend.close()


@pytest.mark.parametrize("kind", [openai.AsyncAzureOpenAI, openai.AzureOpenAI])
async def test_the_retries_of_an_sdk_are_switched_off_and_the_client_is_not_changed(kind: Any) -> None:
    asked = 0

    async def busy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(busy, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        client = kind(api_key="k", api_version="1", base_url=f"http://127.0.0.1:{port}/azure", max_retries=5)
        for _ in range(2):
            # and it is still open for the second one
            with pytest.raises(RetryableError, match="InternalServerError"):
                await one_call(client)
        result = client.close()
        if result is not None:
            await result
    assert asked == 2
    assert client.max_retries == 5


async def test_a_client_that_somebody_put_something_into_is_called_and_not_copied() -> None:
    patched = openai.AsyncAzureOpenAI(api_key="k", api_version="1", azure_endpoint="http://there", max_retries=5)
    patched.chat.completions.create = AsyncMock(return_value="answer")  # type: ignore[method-assign]
    assert await one_call(patched) == "answer"
    await patched.close()


def message_of(
    content: str | None, usage: int | None = None, finish_reason: str = "stop", **more: Any
) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content, **more},
        "finish_reason": finish_reason,
    }
    return {"choices": [choice], "usage": None if usage is None else {"completion_tokens": usage}}


@pytest.mark.parametrize(
    "body", [{"choices": []}, {"id": "x"}, {"choices": [{"index": 0}]}, message_of(None), message_of(None, usage=0)]
)
async def test_an_answer_with_nothing_in_it_is_a_failure(body: dict[str, Any]) -> None:
    async with FakeOpenAIServer(faults=Fault(200, body=body)) as server:
        with pytest.raises(RetryableError, match="without a choice") as caught:
            await one_call(server.url)
    assert caught.value.empty
    assert not caught.value.unreachable


@pytest.mark.parametrize(
    ("finish_reason", "failure"),
    [
        ("error", None),
        ("abort", None),
        ("insufficient_system_resource", None),
        (None, {"code": 502, "message": "the provider hung up"}),
        (None, "it hung up"),
    ],
)
async def test_an_answer_that_the_server_broke_off_is_a_failed_try_and_not_the_models(
    finish_reason: Any, failure: Any
) -> None:
    body = message_of("half of", usage=2, finish_reason=finish_reason)
    body["choices"][0]["error"] = failure
    async with FakeOpenAIServer(faults=Fault(200, body=body)) as server:
        with pytest.raises(RetryableError, match=finish_reason or "hung up"):
            await one_call(server.url)


@pytest.mark.parametrize(
    "body",
    [
        message_of(""),
        message_of(None, usage=1),
        message_of(None, finish_reason="length"),
        message_of(None, finish_reason="content_filter"),
        message_of(None, tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "{}"}}]),
        message_of(None, refusal="no"),
        message_of(None, reasoning="hm"),
    ],
)
async def test_an_answer_that_is_only_short_is_the_models(body: dict[str, Any]) -> None:
    async with FakeOpenAIServer(faults=Fault(200, body=body)) as server:
        assert (await one_call(server.url)).choices


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://127.0.0.1:99999/v1", "Port out of range"),
        ("http://127.0.0.1:x/v1", "could not be cast|cannot be read"),
        ("http://127.0.0.1:0/v1", "port 0"),
        ("http://[::1:8000/v1", "Invalid IPv6 URL"),
        ("http://::1:8000/v1", "not an HTTP address"),
        ("http://[::1]8000/v1", "behind the brackets"),
        ("http://fe80:0:1::2:8000/v1", "without brackets|cannot be read"),
        ("http://me:hunter2@127.0.0.1/v1", "user or password"),
        ("http://127.0.0.1/v1?version=2", "query"),
        ("http://127.0.0.1/v1#top", "query"),
        ("http://127.0.0.1/v1\n", "white space"),
        ("ftp://127.0.0.1/v1", "not an HTTP address"),
        ("127.0.0.1:8000/v1", "not an HTTP address"),
        ("http:///v1", "not an HTTP address"),
        *((f"http://{host}/v1", "neither a name nor an address") for host in ("127.1", "1.2.3.4.5", "256.1.1.1")),
        *((f"http://{host}/v1", "neither a name nor") for host in ("a..b", "...", "\\\\h", "ex%zz", "a" * 64)),
    ],
)
def test_a_base_url_that_cannot_work_is_refused_without_its_password(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        Endpoint(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(("key", "headers"), [("sk-a\nb", {}), ("sk-a", {"X-Team": "a\r\nHost: b"})])
def test_a_line_break_in_a_key_or_header_is_refused(key: str, headers: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"(API key|header 'X-Team') for .* has a line break in it"):
        Endpoint("http://127.0.0.1:8000/v1", key, headers)


@pytest.mark.parametrize("name", ["X Team", "", "X:", "Größe"])
def test_a_header_with_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="has a name that no request can hold"):
        Endpoint("http://127.0.0.1:8000/v1", "sk-a", {name: "a"})


def self_signed() -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    certificate = made.sign(key, hashes.SHA256())
    kind = serialization.PrivateFormat.PKCS8
    text = key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())
    return text + certificate.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    ("scheme", "speaks_tls", "told"),
    [
        ("https", True, "cannot be verified .*SSL_CERT_FILE"),
        ("https", False, "does not speak TLS .*is it http://"),
        ("http", True, "speaks TLS; is it https://"),
    ],
)
async def test_a_disagreement_about_tls_is_permanent_and_says_what_to_do(
    scheme: str, speaks_tls: bool, told: str, tmp_path: Path
) -> None:
    certified = tmp_path / "both.pem"
    certified.write_bytes(self_signed())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certified)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.read(100)
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            writer.close()

    given = context if speaks_tls else None
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=given) as server:
        with pytest.raises(ProviderError, match=told) as caught:
            await one_call(f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
    assert not isinstance(caught.value, RetryableError)
