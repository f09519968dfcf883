"""One run writes to a directory at a time, and what ended without a word keeps nobody out."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verifiers.errors import CheckpointError
from verifiers.train.output_lock import LOCK, OutputLock

HOLDS = """
import sys, time
from verifiers.train.output_lock import OutputLock
lock = OutputLock(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""

FORKS = """
import os, sys, time
from verifiers.train.output_lock import OutputLock
lock = OutputLock(sys.argv[1])
if not os.fork():
    lock.release()
    print("forked", flush=True)
    sys.stdin.read()
else:
    time.sleep(60)
"""


def test_a_second_one_is_refused_until_the_first_is_given_back(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    with OutputLock(directory), pytest.raises(CheckpointError, match=r"another run writes to .*out .* output_dir"):
        OutputLock(directory)
    assert list(directory.iterdir()) == []
    again = OutputLock(directory)
    again.release()
    again.release()


def test_a_process_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        try:
            with pytest.raises(CheckpointError):
                OutputLock(tmp_path)
        finally:
            other.kill()
    OutputLock(tmp_path).release()


def test_a_forked_child_neither_gives_back_what_its_parent_holds_nor_keeps_it(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"forked\n"
        try:
            with pytest.raises(CheckpointError):
                OutputLock(tmp_path)
        finally:
            parent.kill()
        while parent.poll() is None:
            time.sleep(0.01)
        # the child is there until its input ends
        OutputLock(tmp_path).release()


@pytest.mark.parametrize("refuses", [fcntl.flock, os.open], ids=["no locks", "no file"])
def test_a_disk_without_locks_refuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: object
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl if refuses is fcntl.flock else os, refuses.__name__, refused)  # type: ignore[attr-defined]
    for _ in range(2):
        OutputLock(tmp_path)
    assert not [name for name in os.listdir(tmp_path) if name != LOCK]
