"""Answers that a server, or something else at its address, may give to the trainer's questions."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from verifiers.errors import WeightSyncError
from verifiers.inference import server_client
from verifiers.inference.server_client import NoAnswerError, RefusedError, ServerClient
from verifiers.testing import FakeOpenAIServer, Fault


@contextmanager
def answering(raw: bytes) -> Iterator[ServerClient]:
    """Something that answers each connection with these bytes, and closes it."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while not done.is_set():
                connection, _ = listening.accept()
                with connection:
                    if not done.is_set() and connection.recv(65536):
                        connection.sendall(raw)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield ServerClient(f"http://127.0.0.1:{listening.getsockname()[1]}")
        finally:
            done.set()
            # wakes who accepts, on every system
            with contextlib.suppress(OSError), socket.create_connection(listening.getsockname(), timeout=5.0):
                pass
            thread.join()


@pytest.mark.parametrize(
    "raw", [b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"a"', b"garbage\r\n\r\n", b""], ids=["cut", "other", ""]
)
async def test_an_answer_that_breaks_off_is_none(raw: bytes) -> None:
    with answering(raw) as client, pytest.raises(NoAnswerError, match=r"/weight_info got no answer: .") as raised:
        await client.weight_version(5.0)
    assert not raised.value.timed_out


@pytest.mark.parametrize("body", ["hi", "[1]", '{"weight_version": ', "[" * 100_000])
async def test_an_answer_of_another_kind_is_refused_with_a_sentence(body: str) -> None:
    with FakeOpenAIServer(
        route_faults={"/weight_info": Fault(200, body=body), "/v1/models": Fault(200, body=body)}
    ) as s:
        with pytest.raises(WeightSyncError, match="names no version"):
            await ServerClient(s.url).weight_version()
        with pytest.raises(WeightSyncError, match="lists no model"):
            await ServerClient(s.url).model_name()


@pytest.mark.parametrize("models", ["[3]", '{"a": 1}', '"abc"', "[{}]", "[null]", "[]"])
async def test_a_list_of_models_of_another_shape_is_refused_with_a_sentence(models: str) -> None:
    answer = Fault(200, body=f'{{"data": {models}}}')
    with FakeOpenAIServer(route_faults={"/v1/models": answer}) as s, pytest.raises(WeightSyncError, match="no model"):
        await ServerClient(s.url).model_name()


@pytest.mark.parametrize(
    ("fault", "up"), [(None, True), (Fault(404), True), (Fault(401), True), (Fault(500), False), (Fault(503), False)]
)
async def test_a_server_without_the_route_is_up_and_one_without_its_engine_is_not(
    fault: Fault | None, up: bool
) -> None:
    with FakeOpenAIServer(route_faults={"/health": fault}) as server:
        assert await ServerClient(server.url).is_up(30.0) == up
    assert not await ServerClient(server.url).is_up(30.0)


@pytest.mark.parametrize("status", [500, 503])
async def test_an_error_of_a_server_whose_engine_is_gone_is_no_answer(status: int) -> None:
    faults = {"/weight_info": Fault(status, times=2), "/health": Fault(503)}
    with FakeOpenAIServer(route_faults=faults) as server:
        with pytest.raises(NoAnswerError, match=f"answered {status}.*/health says that it is not up") as raised:
            await ServerClient(server.url).weight_version()
        assert not raised.value.timed_out
        with pytest.raises(RefusedError, match=f"answered {status}"):
            await ServerClient(server.url).weight_version()


async def test_waiting_for_a_server_ends_when_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    with FakeOpenAIServer(route_faults={"/health": Fault(503, times=2)}) as server:
        await ServerClient(server.url).wait_until_up(30.0)
        (line,) = caplog.messages
    assert line.startswith("waiting up to 30 s for the rollout server: ")
    assert server.url.removesuffix("/v1") in line
    assert "503" in line


async def test_a_server_that_is_too_slow_was_reached_and_one_that_refuses_was_not() -> None:
    with (
        FakeOpenAIServer(route_faults={"/health": Fault.hang()}) as server,
        pytest.raises(NoAnswerError, match="timed out") as late,
    ):
        await ServerClient(server.url).request("GET", "/health", timeout_s=1.0)
    assert late.value.timed_out
    with pytest.raises(NoAnswerError, match="got no answer") as gone:
        await ServerClient("http://127.0.0.1:9").request("GET", "/health", timeout_s=5.0)
    assert not gone.value.timed_out


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_host_that_takes_no_connection_was_not_reached(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    async def dropping(*args: object, **kwargs: object) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(server_client, "_CONNECT_S", 0.05)
    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", dropping)
    with pytest.raises(NoAnswerError, match=r"no connection within 0\.05 s") as gone:
        await ServerClient(f"{scheme}://127.0.0.1:9").request("GET", "/health", timeout_s=60.0)
    assert not gone.value.timed_out


async def test_once_connected_an_answer_has_the_whole_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "_CONNECT_S", 1.0)
    with FakeOpenAIServer(latency_s=1.5) as server:
        answer = await ServerClient(server.url).request("POST", "/v1/completions", {"prompt": "a"}, timeout_s=30.0)
    assert answer["choices"]
