"""Commands where a standard stream is closed, full or ASCII, and where the working directory is gone."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verifiers.cli.main import run_command, writing_results

COMMAND = f"{sys.executable} -m verifiers.cli.evaluate one_env.py -m fake -n 2 -r 1 --output-dir out"


def run_in(directory: Path, command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (directory / "one_env.py").write_text(
        "import verifiers as vf\n"
        "def load_environment():\n"
        "    rows = [{'question': '?', 'answer': '4'}] * 2\n"
        "    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([lambda completion: 1.0]))\n"
    )
    env = {**os.environ, **environ}
    return subprocess.run(["sh", "-c", command], cwd=directory, capture_output=True, text=True, timeout=60, env=env)


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"], ids=["stdin", "stdout", "stderr"])
def test_an_evaluation_stores_its_rows_where_a_standard_stream_is_closed(closed: str, tmp_path: Path) -> None:
    done = run_in(tmp_path, f"{COMMAND} {closed}")
    assert done.returncode == 0, done
    (results,) = tmp_path.glob("out/*/*/results.jsonl")
    assert [json.loads(line)["reward"] for line in results.read_text().splitlines()] == [1.0, 1.0]


def test_a_standard_output_without_room_is_named(tmp_path: Path) -> None:
    done = run_in(tmp_path, f"{COMMAND} > /dev/full")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1,
        "vf-eval: standard output: No space left on device",
    )


@pytest.mark.slow
def test_a_standard_error_without_room_changes_no_exit_code(tmp_path: Path) -> None:
    assert run_in(tmp_path, f"{COMMAND} 2>/dev/full").returncode == 0
    assert run_in(tmp_path, f"{COMMAND} --temperature -1 2>/dev/full").returncode == 2


def test_an_ascii_output_takes_every_character(tmp_path: Path) -> None:
    done = run_in(tmp_path, COMMAND, PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert done.returncode == 0, done
    assert "\\xb1 stderr" in done.stdout


def test_a_working_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    done = run_in(tmp_path, f"mkdir gone && cd gone && rmdir ../gone && {COMMAND}")
    told = "vf-eval: the working directory was deleted; change to one that is there.\n"
    assert (done.returncode, done.stderr) == (2, told)


def test_a_process_that_could_not_be_started_is_not_taken_for_a_full_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_fork() -> int:
        with writing_results(tmp_path):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    assert run_command("vf-eval", no_fork) == 1
    assert "vf-eval: no further process or thread can be started; raise the limit" in capsys.readouterr().err


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG], ids=["disk", "ulimit -f"])
def test_a_file_that_takes_no_more_is_one_sentence(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def full() -> int:
        raise OSError(code, os.strerror(code))

    assert run_command("vf-report", full) == 1
    assert os.strerror(code) in capsys.readouterr().err
