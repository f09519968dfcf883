"""A probe that meets a server which was killed since the push is made again once the server is back."""

from __future__ import annotations

import pytest

from verifiers.errors import WeightProbeError, WeightSyncError
from verifiers.train.probing import _outlasting_restarts
from verifiers.train.weight_sync import Fleet
from verifiers.train.weight_sync.probe import ProbeResult
from verifiers.train.weight_sync.server import NoAnswerError

FINE = ProbeResult(0.0, 8)


class Restarted(Fleet):
    """One server, which comes back with the pushed weights, or does not."""

    def __init__(self, *, holds: bool, comes_back: bool = True) -> None:
        super().__init__(["http://127.0.0.1:1/v1"])
        self._holds, self._comes_back = holds, comes_back
        self.waits = 0

    def holds_pushed_weights(self, url: str) -> bool:
        return self._holds

    def wait_until_held(self, url: str, timeout_s: float) -> bool:
        self.waits += 1
        return self._comes_back


def probe_with(fleet: Fleet, *results: ProbeResult | WeightSyncError) -> ProbeResult:
    given = iter(results)

    def probe() -> ProbeResult:
        result = next(given)
        if isinstance(result, WeightSyncError):
            raise result
        return result

    return _outlasting_restarts(probe, fleet, fleet.servers[0])


@pytest.mark.parametrize("first", [NoAnswerError("gone"), WeightProbeError("it samples from version 'default'")])
def test_a_server_that_was_started_again_is_probed_again(first: WeightSyncError) -> None:
    fleet = Restarted(holds=False)
    assert probe_with(fleet, first, FINE) is FINE
    assert fleet.waits == 1


def test_a_server_that_kept_its_old_weights_stops_the_run_at_once() -> None:
    fleet = Restarted(holds=True)
    with pytest.raises(WeightProbeError, match="differs"):
        probe_with(fleet, WeightProbeError("differs"), FINE)
    assert fleet.waits == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_server_that_does_not_come_back_stops_the_run_with_the_cause(late: bool) -> None:
    fleet = Restarted(holds=False, comes_back=False)
    with pytest.raises(NoAnswerError, match="gone"):
        probe_with(fleet, NoAnswerError("gone", timed_out=late), FINE)
    assert fleet.waits == (0 if late else 1)
