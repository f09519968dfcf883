"""What a server, or whatever answers in its place, may say to the trainer's questions."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from verifiers.errors import WeightSyncError
from verifiers.testing import FakeOpenAIServer, Fault
from verifiers.train.weight_sync import NoAnswerError, ServerControl
from verifiers.train.weight_sync.server import RefusedError


@contextmanager
def answering(raw: bytes) -> Iterator[ServerControl]:
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
            yield ServerControl(f"http://127.0.0.1:{listening.getsockname()[1]}")
        finally:
            done.set()
            # wakes who accepts, on every system
            with contextlib.suppress(OSError), socket.create_connection(listening.getsockname(), timeout=5.0):
                pass
            thread.join()


@pytest.mark.parametrize(
    "raw", [b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"a"', b"garbage\r\n\r\n", b""], ids=["cut", "other", ""]
)
def test_an_answer_that_breaks_off_is_none(raw: bytes) -> None:
    with answering(raw) as control, pytest.raises(NoAnswerError, match=r"/weight_info got no answer: .") as raised:
        control.weight_version(5.0)
    assert not raised.value.timed_out


def test_an_error_whose_text_breaks_off_is_that_error() -> None:
    with (
        answering(b"HTTP/1.1 503 no\r\nContent-Length: 100\r\n\r\nabc") as control,
        pytest.raises(RefusedError, match=r"was answered 503: .*broke off") as raised,
    ):
        control.request("GET", "/health", timeout_s=5.0)
    assert raised.value.status == 503


@pytest.mark.parametrize("body", ["hi", "[1]", '{"weight_version": '])
def test_an_answer_of_another_kind_is_refused_with_a_sentence(body: str) -> None:
    with FakeOpenAIServer(
        route_faults={"/weight_info": Fault(200, body=body), "/v1/models": Fault(200, body=body)}
    ) as s:
        with pytest.raises(WeightSyncError, match="names no version"):
            ServerControl(s.url).weight_version()
        with pytest.raises(WeightSyncError, match="lists no model"):
            ServerControl(s.url).model_name()


def test_a_host_that_takes_no_connection_was_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that took it and is too slow was."""

    def dropping(address: object, timeout: float, *args: object, **kwargs: object) -> socket.socket:
        assert timeout == 5.0
        raise TimeoutError("timed out")

    with FakeOpenAIServer(route_faults={"/health": Fault.hang()}) as server:
        with pytest.raises(NoAnswerError, match="timed out") as late:
            ServerControl(server.url).request("GET", "/health", timeout_s=0.1)
        assert late.value.timed_out
    monkeypatch.setattr(socket, "create_connection", dropping)
    for scheme in ("http", "https"):
        with pytest.raises(NoAnswerError, match="no connection within 5 s") as gone:
            ServerControl(f"{scheme}://127.0.0.1:9").request("GET", "/health", timeout_s=60.0)
        assert not gone.value.timed_out


def test_once_connected_an_answer_has_the_whole_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    from verifiers.train.weight_sync import server as module

    monkeypatch.setattr(module, "_CONNECT_S", 0.05)
    with FakeOpenAIServer(latency_s=0.3) as server:
        answer = ServerControl(server.url).request("POST", "/v1/completions", {"prompt": "a"}, timeout_s=5.0)
    assert answer["choices"]
