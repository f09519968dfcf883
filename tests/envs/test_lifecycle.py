"""The end of environments: every teardown begins, and none is waited for beyond its time."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

import verifiers as vf
from verifiers.envs.lifecycle import run_teardown, tear_down

ROWS = [{"question": "q", "answer": "a"}]


class Hanging(vf.SingleTurnEnv):
    """Its teardown ends when the test is over."""

    def __init__(self) -> None:
        super().__init__(dataset=ROWS)
        self.over = threading.Event()
        self.begun = threading.Event()

    @vf.teardown
    def hang(self) -> None:
        self.begun.set()
        self.over.wait(60)


class HangingLoop(Hanging):
    @vf.teardown
    async def hang(self) -> None:
        self.begun.set()
        while not self.over.is_set():  # noqa: ASYNC110 - another thread says it
            await asyncio.sleep(0.01)


class Tidy(vf.SingleTurnEnv):
    """Counts its teardowns."""

    ended = 0

    def __init__(self) -> None:
        super().__init__(dataset=ROWS)
        self.has_ended = threading.Event()

    @vf.teardown
    def count(self) -> None:
        self.ended += 1
        self.has_ended.set()


@pytest.fixture(params=[Hanging, HangingLoop], ids=["a thread", "an event loop"])
def hanging(request: pytest.FixtureRequest) -> Iterator[Hanging]:
    env = request.param()
    yield env
    env.over.set()
    for thread in threading.enumerate():
        if thread.name == "verifiers-teardown" and thread is not threading.current_thread():
            thread.join(0.5)


def test_a_teardown_that_hangs_is_left_behind_with_a_warning_and_keeps_no_other_from_running(
    hanging: Hanging, caplog: pytest.LogCaptureFixture
) -> None:
    tidy = Tidy()
    with caplog.at_level(logging.WARNING, "verifiers.envs"):
        tear_down([hanging, tidy, tidy], within_s=0.2)
    # their threads may need longer than the one that hangs is given
    assert hanging.begun.wait(30)
    assert tidy.has_ended.wait(30)
    assert tidy.ended == 1
    assert "@vf.teardown did not end within 0.2 s" in caplog.text


def test_a_teardown_that_was_done_is_not_done_again() -> None:
    tidy = Tidy()
    asyncio.run(run_teardown(tidy))
    tear_down([tidy])
    assert tidy.ended == 1


AT_EXIT = """
import threading
import verifiers as vf
from verifiers.envs import lifecycle

class Env(vf.SingleTurnEnv):
    @vf.teardown
    def end(self):
        print("begun", flush=True)
        threading.Event().wait()

lifecycle.TEARDOWN_WITHIN_S = 1.0
env = Env(dataset=[dict(question="q", answer="a")])
lifecycle.teardown_at_exit(env)
lifecycle.teardown_at_exit(vf.EnvGroup([env]))
"""


@pytest.mark.slow
def test_a_process_ends_whatever_its_environments_wait_for() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=15, check=False)
    assert (done.returncode, done.stdout) == (0, "begun\n"), done.stderr
    assert "did not end within 1 s" in done.stderr
