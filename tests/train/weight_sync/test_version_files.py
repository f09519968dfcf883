"""Directories of pushed weights: one process holds each, and what nobody holds is removed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from verifiers.errors import WeightSyncError
from verifiers.train.weight_sync.shared_directory import VersionFiles

KILLED = """
import os, signal, sys, tempfile
tempfile.tempdir = sys.argv[1]
from verifiers.train.weight_sync import shared_directory as files
files.SHARED_MEMORY = files.Path("/nowhere")
print(files.VersionFiles().directory(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the default parent of the directories."""
    monkeypatch.setattr("verifiers.train.weight_sync.shared_directory.SHARED_MEMORY", Path("/nowhere"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed_by_the_next_one(parent: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(parent)], capture_output=True, text=True, check=False)
    left = Path(killed.stdout.strip())
    assert left.is_dir()
    (left / "version-3").mkdir()
    files = VersionFiles()
    assert files.directory().is_dir()
    assert list(parent.iterdir()) == [files.directory()]
    files.close()
    assert list(parent.iterdir()) == []


def test_what_a_living_process_holds_stays_and_so_does_what_is_not_ours(parent: Path) -> None:
    held = VersionFiles()
    (held.directory() / "version-1").mkdir()
    others = [
        parent / name
        for name in ("verifiers-weights-of-mine", "somebody-elses", f".verifiers-weights-{os.getpid()}-a")
    ]
    for other in others:
        other.mkdir()
    second = VersionFiles()
    second.directory()
    assert (held.directory() / "version-1").is_dir()
    assert all(other.is_dir() for other in others)
    held.close()
    second.close()


def test_in_a_directory_that_was_asked_for_nothing_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "verifiers-weights-1-abc"
    left.mkdir()
    files = VersionFiles(str(tmp_path))
    files.directory()
    assert left.is_dir()
    files.close()


def test_weights_that_cannot_be_written_are_a_push_that_failed_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    files = VersionFiles(str(tmp_path))
    with pytest.raises(WeightSyncError, match=r"the weights of step 3 could not be written .*No space left"):
        files.write({"w": torch.ones(2)}, 3, name="model.safetensors")
    assert list(files.directory().iterdir()) == []
    files.close()


def test_a_directory_that_is_given_relative_is_found_from_every_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = VersionFiles("pushed")
    written = files.write({"a": torch.zeros(1)}, 0, name="model.safetensors")
    assert written.is_absolute()
    assert tmp_path in written.parents
    files.close()


def test_a_directory_that_is_none_or_is_gone_is_refused_by_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightSyncError, match="set weight_sync_dir"):
        VersionFiles(str(tmp_path / "file")).write({"a": torch.zeros(1)}, 0, name="model.safetensors")
    files = VersionFiles(str(tmp_path))
    files.directory().rmdir()
    with pytest.raises(WeightSyncError, match="set weight_sync_dir"):
        files.write({"a": torch.zeros(1)}, 1, name="model.safetensors")
    files.close()
