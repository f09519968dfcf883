"""vf-eval again: the same command continues its run, another one begins a new run, and Ctrl-C loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from verifiers.cli.evaluate import main
from verifiers.cli.regrade import main as regrade
from verifiers.evals.store import read_run
from verifiers.testing import FakeOpenAIServer, Fault


def test_the_same_command_continues_and_does_only_what_is_missing(
    env_name: str, capsys: pytest.CaptureFixture[str], results: Any
) -> None:
    with FakeOpenAIServer("4", faults=[None, Fault(400), None, Fault(400)]) as server:
        command = [env_name, "-b", server.url, "-n", "2", "-r", "3", "-c", "1"]
        assert main(command) == 0
        assert "4 completed, 2 provider_error" in capsys.readouterr().out
        directory = results.directory
        assert json.loads((directory / "metadata.json").read_text())["status"] == "finished"
        assert server.request_count == 6
        before = (directory / "results.jsonl").read_bytes()
        assert main(command) == 0
        shown = capsys.readouterr()
    assert f"vf-eval: resuming {directory}: 4 of 6 rollouts are there" in shown.err
    assert server.request_count == 8
    assert (directory / "results.jsonl").read_bytes().startswith(before)
    assert len(read_run(directory).rows) == 6
    assert len(read_run(directory).metadata["sessions"]) == 2
    assert results.directory == directory


def test_a_complete_run_is_shown_again_and_run_again_only_when_told(
    server: FakeOpenAIServer, env_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [env_name, "-b", server.url, "-n", "2", "-r", "1"]
    assert main(command) == 0
    first = capsys.readouterr()
    assert main(command) == 0
    second = capsys.readouterr()
    assert (server.request_count, second.out) == (2, first.out)
    assert second.err == "vf-eval: already complete; --fresh runs it again\n"
    assert main([*command, "--fresh"]) == 0
    assert server.request_count == 4
    assert len(list(Path("outputs/evals").glob("*/*"))) == 2


def test_a_complete_run_of_another_user_is_shown_and_not_written_to(
    server: FakeOpenAIServer,
    env_name: str,
    capsys: pytest.CaptureFixture[str],
    results: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = [env_name, "-b", server.url, "-n", "2", "-r", "1"]
    assert main(command) == 0
    first, directory = capsys.readouterr().out, results.directory
    before = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert main(command) == 0
    assert capsys.readouterr().out == first
    assert {path: path.stat().st_mtime_ns for path in directory.iterdir()} == before


def test_more_prompts_and_more_rollouts_of_each_keep_what_was_done(server: FakeOpenAIServer, env_name: str) -> None:
    for prompts, each in ((2, 1), (3, 1), (3, 2)):
        assert main([env_name, "-b", server.url, "-n", str(prompts), "-r", str(each)]) == 0
        assert server.request_count == prompts * each
    (directory,) = Path("outputs/evals").glob("*/*")
    assert {(row["example_id"], row["generation"]) for row in read_run(directory).rows} == {
        (example, generation) for example in range(3) for generation in range(2)
    }


def test_more_prompts_do_not_continue_a_run_that_was_graded_again(server: FakeOpenAIServer, env_name: str) -> None:
    command = [env_name, "-b", server.url, "-r", "1"]
    assert main([*command, "-n", "2"]) == 0
    (run,) = Path("outputs/evals").glob("*/*")
    assert regrade([str(run)]) == 0
    assert main([*command, "-n", "3"]) == 0
    assert len(read_run(run).rows) == 3
    assert len(read_run(f"{run}-regraded-1").rows) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("twice", [False, True], ids=["Ctrl-C", "Ctrl-C twice"])
def test_an_interrupt_saves_what_is_finished(
    env_name: str, twice: bool, results: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = threading.Event()

    async def answer(body: dict[str, Any]) -> str:
        if server.request_count > 4:
            await asyncio.to_thread(gate.wait, 120)
        return "4"

    with FakeOpenAIServer(answer) as server, contextlib.ExitStack() as at_the_end:
        at_the_end.callback(gate.set)
        command = [sys.executable, "-m", "verifiers.cli.evaluate", env_name, "-b", server.url, "-n", "-1", "-c", "2"]
        env = {**os.environ, "PYTHONPATH": "modules"}
        process = subprocess.Popen([*command, "-r", "5"], stdout=-1, stderr=-1, text=True, env=env)
        server.wait_until(lambda s: s.request_count == 6 and s.in_flight == 2, 150.0)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert "finishing the work in flight, for at most 30 s" in process.stderr.readline()
        if twice:
            # the fourth answer may still be scored
            deadline = time.monotonic() + 30
            while len(results.rows) < 4 and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
        else:
            gate.set()
        out, err = process.communicate(timeout=150)
        gate.set()
        done = len(results.rows)
        assert process.returncode == 130
        assert done == (4 if twice else 6)
        assert f"vf-eval: interrupted at {done} of 30 rollouts; the same command continues" in err
        assert f"{done} completed" in out
        asked = server.request_count
        assert main([*command[3:], "-r", "5", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["outcomes"] == {"completed": 30}
        assert server.request_count == asked + 30 - done
