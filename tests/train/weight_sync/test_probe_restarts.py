"""A log-prob check that meets a server which was killed since the push is made again once the server is back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from verifiers.errors import WeightProbeError, WeightSyncError
from verifiers.inference.server_client import NoAnswerError
from verifiers.inference.server_pool import ServerPool
from verifiers.train.weight_sync import verification
from verifiers.train.weight_sync.verification import LogprobCheck

FINE: dict[str, Any] = {
    "choices": [{"index": 0, "text": "a", "token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}}],
    "prompt_token_ids": [1],
}
QUESTION = {"model": "m", "prompt": "p", "temperature": 1.0}


class Restarted(ServerPool):
    """One server, which comes back with the pushed weights, or does not."""

    holds, comes_back, waits = False, True, 0

    async def holds_pushed_weights(self, url: str) -> bool:
        return self.holds

    async def wait_until_restored(self, url: str, timeout_s: float) -> bool:
        self.waits += 1
        return self.comes_back


@pytest.fixture
def pool() -> Iterator[Restarted]:
    made = Restarted(["http://127.0.0.1:1/v1"])
    yield made
    made.stop()


def check_with(
    monkeypatch: pytest.MonkeyPatch, pool: ServerPool, *answers: dict[str, Any] | WeightSyncError
) -> list[float]:
    """Return the differences that a check finds in such answers."""
    given = iter(answers)

    async def ask(*args: Any, **options: Any) -> dict[str, Any]:
        answer = next(given)
        if isinstance(answer, WeightSyncError):
            raise answer
        return answer

    monkeypatch.setattr(verification, "ask_server", ask)
    found: list[float] = []
    LogprobCheck(lambda: QUESTION, lambda prompt, ids: [-1.0], on_result=found.append).run(1, pool)
    return found


@pytest.mark.parametrize("first", [NoAnswerError("gone"), WeightProbeError("it samples from version 'default'")])
def test_a_restarted_server_is_checked_again(
    first: WeightSyncError, pool: Restarted, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_with(monkeypatch, pool, first, FINE) == [0.0]
    assert pool.waits == 1


def test_a_server_that_kept_its_old_weights_stops_the_run_at_once(
    pool: Restarted, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.holds = True
    with pytest.raises(WeightProbeError, match="differs"):
        check_with(monkeypatch, pool, WeightProbeError("differs"), FINE)
    assert pool.waits == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_server_that_does_not_come_back_stops_the_run_with_the_cause(
    late: bool, pool: Restarted, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.comes_back = False
    with pytest.raises(NoAnswerError, match="gone"):
        check_with(monkeypatch, pool, NoAnswerError("gone", timed_out=late), FINE)
    assert pool.waits == (0 if late else 1)


def test_a_server_that_goes_down_while_it_is_asked_leaves_the_others_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Shrinking(ServerPool):
        up = 2

        @property
        def servers(self) -> list[Any]:
            return super().servers[: self.up]

    async def ask(server: Any, **options: Any) -> dict[str, Any]:
        if server.url.endswith(":2/v1"):
            raise NoAnswerError("gone")
        return FINE

    monkeypatch.setattr(verification, "ask_server", ask)
    compared: list[float] = []
    pool = Shrinking(["http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"])
    try:
        check = LogprobCheck(lambda: QUESTION, lambda prompt, ids: [-1.0], on_result=compared.append)
        check.begin(1, pool)
        pool.up = 1
        assert check.finish() is None
    finally:
        pool.stop()
    assert compared == [0.0]
