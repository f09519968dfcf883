"""SIGTERM ends a run as an error does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from verifiers.train.termination import ended_by_sigterm


@pytest.fixture(autouse=True)
def nobody_handles_sigterm() -> Iterator[None]:
    """As in a process that has just begun; a command that another test ran may have left its own handler."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_raises_while_a_run_is_on_and_does_what_it_did_afterwards() -> None:
    with pytest.raises(SystemExit, match="ended by SIGTERM"), ended_by_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_who_handles_sigterm_already_goes_on_doing_so() -> None:
    got = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        with ended_by_sigterm():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM]


def test_outside_of_the_main_thread_nothing_is_handled() -> None:
    seen = []

    def run() -> None:
        with ended_by_sigterm():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]
