"""One retry loop: what is repeated, how long it waits, and that it gives up with the cause."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from verifiers.errors import EmptyModelResponseError, ProviderError, WeightSyncError
from verifiers.inference.limiter import Limiter
from verifiers.inference.retry import RetryableError, RetryPolicy, may_pass, retry, retry_after_s
from verifiers.inference.server_client import NoAnswerError, RefusedError

QUICK = RetryPolicy(max_attempts=4, base_s=0.0)


class APIConnectionError(Exception):
    """As the openai package names it."""


class StatusError(Exception):
    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(text)
        self.status_code = status


PASSING = [
    *map(StatusError, (408, 409, 425, 429, 500, 502, 503, 504, 529)),
    RetryableError("late"),
    NoAnswerError("gone"),
    RefusedError("busy", 503),
    ConnectionResetError(),
    TimeoutError(),
    json.JSONDecodeError("cut", "{", 1),
    APIConnectionError(),
]
FINAL = [
    *map(StatusError, (400, 401, 403, 404, 413, 422)),
    StatusError(429, "insufficient_quota"),
    RefusedError("no such route", 404),
    WeightSyncError("for good"),
    ProviderError("tried five times", status=503),
    ValueError(),
]


@pytest.mark.parametrize(("errors", "passing"), [(PASSING, True), (FINAL, False)], ids=["passing", "final"])
def test_what_is_worth_another_try(errors: list[Exception], passing: bool) -> None:
    assert [error for error in errors if may_pass(error) != passing] == []


async def test_a_failure_that_passes_is_invisible_to_the_caller() -> None:
    failures = [RetryableError("busy", status=503), RetryableError("reset")]
    seen: list[Exception] = []

    async def attempt() -> str:
        if failures:
            raise failures.pop(0)
        return "answer"

    assert await retry(attempt, QUICK, seen.append) == "answer"
    assert [str(error) for error in seen] == ["busy", "reset"]


async def test_the_last_failure_is_raised_with_its_status_and_the_number_of_attempts() -> None:
    async def attempt() -> None:
        raise RetryableError("busy", status=503, body="come back later")

    with pytest.raises(ProviderError, match=r"busy \(after 4 attempts\)") as caught:
        await retry(attempt, QUICK)
    assert caught.value.status == 503
    assert caught.value.body == "come back later"


def test_waits_double_up_to_the_cap_and_follow_the_servers_wish() -> None:
    policy = RetryPolicy(base_s=1.0, cap_s=5.0)
    assert [policy.wait_s(attempt, None, 0.5) for attempt in (1, 2, 3, 4, 5)] == [0.5, 1.0, 2.0, 2.5, 2.5]
    assert policy.wait_s(1, 3.0, 0.0) == 3.0


def test_a_minute_that_the_server_asks_for_is_waited_out_and_an_hour_is_not() -> None:
    policy = RetryPolicy(base_s=1.0, cap_s=5.0)
    assert policy.wait_s(1, 60.0, 0.0) == 60.0
    assert policy.wait_s(1, 3600.0, 0.0) == 120.0
    # those refused together come back apart, and none too early
    assert [policy.wait_s(1, 60.0, jitter) for jitter in (0.25, 0.5)] == [61.5, 63.0]
    assert policy.wait_s(1, 0.0, 0.5) == 0.5


def test_retry_after_is_read_as_milliseconds_as_seconds_or_as_a_date() -> None:
    assert retry_after_s({"retry-after-ms": "1500", "retry-after": "9"}) == 1.5
    assert retry_after_s({"retry-after": "2.5"}) == 2.5
    assert retry_after_s({"retry-after": "-2"}) == 0.0
    for nothing in ({}, {"retry-after": "soon"}, {"retry-after": "nan"}, {"retry-after": "inf"}, {"retry-after": ""}):
        assert retry_after_s(nothing) is None
    later = datetime.now(UTC) + timedelta(seconds=30)
    assert retry_after_s({"retry-after": format_datetime(later, usegmt=True)}) == pytest.approx(30, abs=2)
    assert retry_after_s({"retry-after": format_datetime(later - timedelta(hours=1), usegmt=True)}) == 0.0
    assert retry_after_s({"retry-after-ms": "x", "retry-after": "3"}) == 3.0


async def test_a_limiter_learns_of_every_answer_and_of_every_429_and_of_nothing_else() -> None:
    class Watcher(Limiter):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[float | str | None] = []

        def answered(self) -> None:
            self.heard.append("answered")

        def rate_limited(self, retry_after_s: float | None) -> None:
            self.heard.append(retry_after_s)

    failures = [
        RetryableError("slow down", status=429, retry_after_s=0.0),
        RetryableError("busy", status=503, retry_after_s=0.0),
        RetryableError("slow down", status=429),
    ]

    async def attempt() -> str:
        if failures:
            raise failures.pop(0)
        return "answer"

    watcher = Watcher()
    await retry(attempt, QUICK, None, watcher)
    assert watcher.heard == [0.0, None, "answered"]
    failures = [RetryableError("slow down", status=429)] * 4
    watcher.heard.clear()
    with pytest.raises(ProviderError):
        await retry(attempt, QUICK, None, watcher)
    assert watcher.heard == [None] * 4


async def test_an_empty_answer_is_asked_for_again_and_ends_as_one() -> None:
    tries = 0

    async def attempt() -> None:
        nonlocal tries
        tries += 1
        raise RetryableError("nothing in it", empty=True)

    with pytest.raises(EmptyModelResponseError, match=r"nothing in it \(after 4 attempts\)"):
        await retry(attempt, QUICK)
    assert tries == 4


async def test_no_try_begins_after_the_deadline_and_an_error_of_another_kind_stays_what_it_was() -> None:
    tries = 0

    async def attempt() -> None:
        nonlocal tries
        tries += 1
        raise RefusedError("busy", 503)

    with pytest.raises(RefusedError, match=r"busy$"):
        await retry(attempt, QUICK, deadline=time.monotonic() - 1.0)
    assert tries == 1
    with pytest.raises(RefusedError, match=r"busy$"):
        await retry(attempt, QUICK)
    assert tries == 5
