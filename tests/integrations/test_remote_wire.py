"""Requests to a dataserver: bounded in time, never sent on to another host, and refused with a sentence."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from remote_world import RecordingServer

from verifiers.errors import ConfigError, InfraError
from verifiers.integrations.dataserver import Dataserver, encoded


@contextmanager
def scripted(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Serve one request a connection, answered by the function, until the peer is gone."""
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            connection, _ = listener.accept()
            with connection:
                if ended.is_set():
                    return
                connection.recv(65536)
                try:
                    answer(connection)
                except OSError:
                    continue

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        port = listener.getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            ended.set()
            socket.create_connection(("127.0.0.1", port)).close()
            thread.join()


@pytest.mark.parametrize(
    "head",
    [b"HTTP/1.1 200 OK\r\nX-Slow: ", b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"],
    ids=["head", "body"],
)
def test_a_server_that_trickles_is_left_at_the_deadline(head: bytes) -> None:
    def trickle(connection: socket.socket) -> None:
        connection.sendall(head)
        for _ in range(5000):
            connection.sendall(b"H")
            time.sleep(0.02)

    with scripted(trickle) as url:
        server = Dataserver(url, timeout_s=0.2, max_attempts=1)
        begun = time.monotonic()
        with pytest.raises(InfraError, match=r"/v2/meta: no answer within 0.2 s"):
            server.meta()
        assert time.monotonic() - begun < 30


@pytest.mark.parametrize("is_running", [False, True], ids=["no loop", "in a loop"])
def test_a_redirect_is_refused_and_takes_the_token_nowhere(monkeypatch: pytest.MonkeyPatch, is_running: bool) -> None:
    monkeypatch.setenv("TOKEN_OF_A_TEST", "sesame")
    with RecordingServer() as elsewhere:
        location = f"Location: {elsewhere.url}/v2/meta\r\n"

        def redirect(connection: socket.socket) -> None:
            connection.sendall(f"HTTP/1.1 302 Found\r\n{location}Content-Length: 0\r\n\r\n".encode())

        async def in_a_loop() -> None:
            server.meta()

        with scripted(redirect) as url:
            server = Dataserver(url, token_var="TOKEN_OF_A_TEST")
            with pytest.raises(ConfigError, match=rf"a redirect to '{elsewhere.url}/v2/meta'.* give the address"):
                asyncio.run(in_a_loop()) if is_running else server.meta()
        assert elsewhere.requests == []


def test_a_body_that_is_too_large_is_refused_with_the_setting_that_mends_it() -> None:
    with RecordingServer() as recorder:
        recorder.faults["/v2/grade"] = [413]
        with pytest.raises(ConfigError, match=r"status 413: as scripted; raise max_body_mib or max_batch"):
            Dataserver(recorder.url).request("/v2/grade", {"items": []})


def test_another_kind_of_server_is_named_as_one() -> None:
    with RecordingServer() as recorder:
        recorder.meta = {"datasets": 3}
        with pytest.raises(InfraError, match="to /v2/meta is not a dataserver's"):
            Dataserver(recorder.url).meta()
    with pytest.raises(ConfigError, match="not an HTTP address"):
        Dataserver("127.0.0.1:9000")


def test_text_goes_as_it_is_and_not_escaped() -> None:
    assert encoded({"text": "é\ud800"}) == '{"text": "é?"}'.encode()
