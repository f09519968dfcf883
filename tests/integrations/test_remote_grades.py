"""Requests to a dataserver: its grades are never a number that is none, and they end in time."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from remote_world import RecordingServer

from verifiers.errors import ConfigError, InfraError
from verifiers.inference.endpoint import encoded
from verifiers.integrations.dataserver import (
    Dataserver,
    Grade,
    RemoteEnv,
    RemoteGrader,
    RequestLimits,
    completion_for_wire,
)
from verifiers.integrations.dataserver_trl import remote_reward


def items(*sample_ids: str, text: str = "x") -> list[dict[str, Any]]:
    return [
        {"sample_id": sample_id, "completion": text, "completion_tokens": 1, "completion_index": index}
        for index, sample_id in enumerate(sample_ids)
    ]


def grader(url: str, limits: RequestLimits, **options: Any) -> RemoteGrader:
    return RemoteGrader(Dataserver(url, max_attempts=1), limits, **options)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), "abc", "1.0", [1.0], 10**400])
def test_a_reward_that_is_no_finite_number_is_a_failed_grade(recorder: RecordingServer, value: Any) -> None:
    recorder.grade = lambda items: [
        {"completion_index": 0, "reward": value, "metrics": {"m": 1}},
        {"completion_index": 1, "reward": 0.25, "metrics": {"good": 1, "bad": value}},
    ]
    found = grader(recorder.url, RequestLimits(8)).grades(items("easy:0", "easy:0"), {})
    assert (found[0].reward, found[0].metrics) == (None, {})
    assert "no finite reward" in str(found[0].error)
    assert found[1] == Grade(0.25, {"good": 1.0}, None)
    assert remote_reward(recorder.url)(completions=["a", "b"], sample_id=["easy:0"] * 2) == [None, 0.25]


def test_an_answer_that_is_none_is_no_grade_at_all(recorder: RecordingServer) -> None:
    for answer in ([1, 2], [{"reward": 1.0}], None, [{"completion_index": [], "reward": 1.0}]):
        recorder.grade = lambda items, answer=answer: answer
        with pytest.raises(InfraError, match="cannot be read"):
            grader(recorder.url, RequestLimits(8)).grades(items("easy:0"), {})


def test_requests_hold_what_the_server_takes_and_groups_stay_whole(
    recorder: RecordingServer, caplog: pytest.LogCaptureFixture
) -> None:
    def sent(limits: RequestLimits, *sample_ids: str) -> list[list[int]]:
        recorder.requests.clear()
        found = grader(recorder.url, limits).grades(items(*sample_ids), {"seed": 3})
        assert [grade.reward for grade in found] == [1.0] * len(sample_ids)
        bodies = recorder.calls("/v2/grade")
        assert all(len(encoded(body)) <= limits.max_body_bytes and body["seed"] == 3 for body in bodies)
        return [[item["completion_index"] for item in body["items"]] for body in bodies]

    one = len(encoded(items("a:0")[0]))
    assert sent(RequestLimits(4), "a:0", "a:0", "a:1", "a:1", "a:2") == [[0, 1], [2, 3, 4]]
    assert sent(RequestLimits(4, max_body_bytes=100 + 3 * one), "a:0", "a:0", "a:1", "a:1") == [[0, 1], [2, 3]]
    assert caplog.messages == []
    assert sent(RequestLimits(2), "a:0", "a:1", "a:1", "a:1") == [[0], [1], [2, 3]]
    assert "the 3 completions of sample a:1" in caplog.text
    assert sent(RequestLimits(9, max_body_bytes=100 + 2 * one), "a:0", "a:0", "a:0") == [[0], [1, 2]]


def test_a_completion_that_no_request_holds_is_a_failed_grade_and_parts_no_others(recorder: RecordingServer) -> None:
    four = items("a:0", "a:0", "a:0", "a:0")
    four[1]["completion"] = "x" * 2000
    found = grader(recorder.url, RequestLimits(8, max_body_bytes=1000)).grades(four, {})
    assert [grade.reward for grade in found] == [1.0, None, 1.0, 1.0]
    assert "over the dataserver's max_body_mib" in str(found[1].error)
    # a grader may compare them
    (body,) = recorder.calls("/v2/grade")
    assert [item["completion_index"] for item in body["items"]] == [0, 2, 3]


@pytest.mark.parametrize(("timeout_s", "grade_timeout_s", "waited_s"), [(90.0, 300.0, 310.0), (90.0, 0.0, 90.0)])
def test_a_grade_is_waited_for_as_long_as_the_server_takes_and_no_less_than_others(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float, grade_timeout_s: float, waited_s: float
) -> None:
    waits: list[Any] = []

    async def request(self: Dataserver, path: str, body: Any, timeout_s: float) -> Any:
        waits.append(timeout_s)
        return {"results": [{**item, "reward": 1.0} for item in body["items"]]}

    monkeypatch.setattr(Dataserver, "request_async", request)
    asked = RemoteGrader(
        Dataserver("http://127.0.0.1:1", timeout_s=timeout_s), RequestLimits(8, 1000, grade_timeout_s)
    )
    assert asyncio.run(asked.grades_async(items("a:0"), {}))[0].reward == 1.0
    assert waits == [waited_s]


def test_what_goes_over_the_wire_is_always_json_that_can_be_read() -> None:
    assert encoded({"completion": completion_for_wire("é\ud800")}) == '{"completion":"é\ufffd"}'.encode()
    message = {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [object()]}
    assert completion_for_wire([message, {"role": "tool", "tool_call_id": "1", "content": "out"}]) == [
        {"role": "assistant", "content": ""},
        {"role": "tool", "tool_call_id": "1", "content": "out"},
    ]


def test_a_remote_env_takes_its_servers_limits(recorder: RecordingServer) -> None:
    recorder.meta = {"max_body_bytes": 1000, "grade_timeout_s": 7.5}
    env = RemoteEnv(recorder.url)
    assert env.rubric.grader.limits == RequestLimits(1024, 1000, 7.5)


# -- requests -----------------------------------------------------------------------------------------------------


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
        with pytest.raises(InfraError, match=r"no answer from http.*/v2/meta within 0.2 s"):
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
            with pytest.raises(ConfigError, match=rf"sends on to '{elsewhere.url}/v2/meta'; give the base URL"):
                asyncio.run(in_a_loop()) if is_running else server.meta()
        assert elsewhere.requests == []


def test_a_body_that_is_too_large_is_refused_with_the_setting_that_mends_it() -> None:
    with RecordingServer() as recorder:
        recorder.faults["/v2/grade"] = [413]
        with pytest.raises(ConfigError, match=r"answered 413: as scripted; raise max_body_mib or max_batch"):
            Dataserver(recorder.url).request("/grade", {"items": []})


def test_a_server_that_hangs_up_and_then_hangs_is_given_up_at_the_deadline() -> None:
    hung, ended = list[socket.socket](), threading.Event()

    def answer(connection: socket.socket) -> None:
        if hung:
            ended.wait(20)
        hung.append(connection)

    with scripted(answer) as url:
        started = time.monotonic()
        with pytest.raises(InfraError, match="could not be reached"):
            Dataserver(url, timeout_s=0.3, max_attempts=1).request("/grade", {"items": []})
        waited_s = time.monotonic() - started
        ended.set()
    assert waited_s < 5


def test_an_address_is_one_of_http() -> None:
    with pytest.raises(ConfigError, match="not an HTTP address"):
        Dataserver("127.0.0.1:9000")
