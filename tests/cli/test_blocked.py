"""Commands end, with the function's name, where a reward function lets nothing else run; signals end them sooner."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import verifiers as vf
from verifiers.cli.evaluate import main
from verifiers.interrupt import drained_by_signals
from verifiers.loop_thread import LoopThread, running_function

SOURCE = """
import asyncio
import json
import re
import threading
import time
from pathlib import Path

import verifiers as vf


def stored():
    return sum(path.read_text().count("\\n") for path in Path("outputs/evals").glob("*/*/results.jsonl"))


def must_block(info):
    if info["row"] != 2 or Path("mended").exists():
        return False
    while stored() < 2:
        time.sleep(0.01)
    Path("blocks").touch()
    return True


def tries_too_many_ways(completion, info):
    if must_block(info):
        re.match("(a+)+$", "a" * 64 + "b")
    return 1.0


async def sleeps(completion, info):
    while info["row"] == 2 and not Path("mended").exists() and stored() < 2:
        await asyncio.sleep(0.01)
    if must_block(info):
        json.loads("1", parse_int=lambda _: time.sleep(3600))
    return 1.0


async def waits(completion, info):
    if info["row"] == 2 and not Path("mended").exists():
        while stored() < 2:
            await asyncio.sleep(0.01)
        Path("threads").write_text("\\n".join(thread.name for thread in threading.enumerate()))
        Path("blocks").touch()
        await asyncio.sleep(3600)
    return 1.0


async def goes_on(completion, info):
    if info["row"] == 2:
        while stored() < 2:
            await asyncio.sleep(0.01)
        Path("blocks").touch()
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass
    return 1.0


def load_environment(how):
    rows = [{"question": f"question {row}", "answer": "4", "info": {"row": row}} for row in range(3)]
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows, rubric=vf.Rubric([globals()[how]]))
"""

HOLDS = """
import re

import verifiers as vf


def tries_too_many_ways(completion, answer):
    return float(bool(re.fullmatch(r"(\\w+ ?)*" + answer, completion[-1]["content"][:80] + "!")))


def load_environment():
    return vf.SingleTurnEnv(dataset=[{"question": "2 + 2?", "answer": "4"}], rubric=vf.Rubric([tries_too_many_ways]))
"""


class Blocked:
    """A vf-eval of three rollouts of which the third blocks."""

    def __init__(self, how: str, limit_s: float) -> None:
        Path("blocking_env.py").write_text(SOURCE)
        self._flags = ["blocking_env.py", "-a", json.dumps({"how": how}), "-m", "fake", "-n", "3", "-r", "1"]
        command = [sys.executable, "-m", "verifiers.cli.evaluate", *self._flags, "--grading-timeout", str(limit_s)]
        self.process = subprocess.Popen(command, stdout=-1, stderr=-1, text=True)
        until = time.monotonic() + 60
        while not Path("blocks").exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Return exit code and what was printed to stderr."""
        _, said = self.process.communicate(timeout=90)
        return self.process.returncode, said

    def resume(self) -> None:
        """Run the command again, with nothing that blocks and the default deadline."""
        Path("mended").touch()
        assert main(self._flags) == 0


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["tries_too_many_ways", "sleeps"])
def test_a_function_that_lets_nothing_else_run_ends_an_evaluation(
    results: Any, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Blocked(how, 3.0)
    code, said = run.end()
    assert code == 1, said
    assert f"in {how}" in said
    assert {row["example_id"] for row in results.rows} == {0, 1}
    run.resume()
    assert "2 of 3 rollouts are there" in capsys.readouterr().err
    assert [row["outcome"] for row in results.rows] == ["completed"] * 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_function_that_lets_nothing_else_run_ends_a_check() -> None:
    Path("held_env.py").write_text(HOLDS)
    code = "from verifiers.cli.check import main; main()"
    command = [sys.executable, "-c", code, "held_env.py", "--rollout-timeout", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, "in tries_too_many_ways" in done.stderr) == (1, True), done


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_signal_ends_an_evaluation_whose_event_loop_is_blocked(results: Any) -> None:
    run = Blocked("sleeps", 3600.0)
    run.signal(signal.SIGINT)
    code, said = run.end()
    assert code == 1, said
    assert "in sleeps" in said
    assert {row["example_id"] for row in results.rows} == {0, 1}


@pytest.mark.slow
def test_a_function_that_goes_on_when_it_is_cancelled_does_not_outlast_a_signal(results: Any) -> None:
    run = Blocked("goes_on", 3600.0)
    run.signal(signal.SIGTERM)
    code, said = run.end()
    assert (code, "Timeout" in said) == (1, True)
    assert {row["example_id"] for row in results.rows} == {0, 1}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["SIGTERM", "SIGHUP"])
def test_an_evaluation_starts_nothing_that_only_watches_and_ends_at_once_by_a_signal(
    results: Any, number: signal.Signals, code: int
) -> None:
    run = Blocked("waits", 3600.0)
    assert psutil.Process(run.process.pid).children() == []
    # those that reward functions and libraries use are no watchers
    used = ("MainThread", "asyncio_", "verifiers-reward function", "ThreadPoolExecutor", "tqdm_monitor")
    assert [name for name in Path("threads").read_text().splitlines() if not name.startswith(used)] == []
    began = time.monotonic()
    run.signal(number)
    assert run.end()[0] == code
    assert time.monotonic() - began < 10
    assert results.metadata["status"] == "stopped"
    assert {row["example_id"] for row in results.rows} == {0, 1}


@pytest.mark.slow
def test_what_blocks_the_loop_of_a_thread_is_named_and_a_loop_that_runs_is_not_blocked() -> None:
    thread = LoopThread(close_last=lambda: asyncio.sleep(0), failed=lambda error: None)
    thread.start()
    over = threading.Event()
    try:
        time.sleep(2.5)
        assert thread.blocked_by(2.0) is None
        thread.loop.call_soon_threadsafe(_of_a_user, lambda: over.wait(20))
        until = time.monotonic() + 20
        while not (function := thread.blocked_by(2.0)) and time.monotonic() < until:
            time.sleep(0.1)
        assert str(function).startswith("_of_a_user (")
    finally:
        over.set()
        thread.close()


class Work:
    """Work that `drained_by_signals` ends; it notes the request."""

    drain_s, requested, exit_code = 1.0, False, 0

    def drain(self) -> None:
        self.requested = True

    abort = drain


def test_a_signal_to_a_forked_child_ends_the_child_alone() -> None:
    work = Work()

    def fork_one_that_ends_itself() -> int:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
            os._exit(3)
        return child

    async def fork() -> int:
        async with drained_by_signals("vf-eval", work, 60.0):
            child = fork_one_that_ends_itself()
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            # what reached the loop has been handled by then
            await asyncio.sleep(0.1)
            return status

    assert os.WTERMSIG(asyncio.run(fork())) == signal.SIGTERM
    assert not work.requested


DRAINED = """
import asyncio, sys
from verifiers.interrupt import drained_by_signals

async def main():
    async with drained_by_signals("", None, 4.0):
        print(1, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""
CHECKED = """
import asyncio, sys
import verifiers as vf
from verifiers.cli.check import main

async def waits(completion, answer):
    print(1, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    return float(completion[-1]["content"] == answer)

def load_environment():
    rows = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(10, 30)]
    return vf.SingleTurnEnv(dataset=rows[:10], eval_dataset=rows[10:], rubric=vf.Rubric([waits]))

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [DRAINED, CHECKED], ids=["vf-eval", "vf-check"])
def test_ctrl_z_stops_the_clock(code: str) -> None:
    Path("stopped_env.py").write_text(code)
    command = [sys.executable, "stopped_env.py", "stopped_env.py", "--rollout-timeout", "4"]
    # in a group of its own, which a terminal would stop
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, process_group=0) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTSTP)
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        time.sleep(4.5)
        process.send_signal(signal.SIGCONT)
        _, said = process.communicate(timeout=60)
        assert (process.returncode, said) == (0, b"")


def _of_a_user(work: Callable[[], Any]) -> None:
    work()


@pytest.mark.parametrize("file", [__file__, f"{Path(vf.__file__).parent}_of_mine/rewards.py"])
def test_the_function_of_the_user_is_named_and_not_the_library_that_it_calls(file: str) -> None:
    waits, over = threading.Event(), threading.Event()
    idents: list[int] = []

    def reward(completion: Any) -> float:
        json.loads("1", parse_int=lambda _: (idents.append(threading.get_ident()), waits.set(), over.wait(20)))
        return 1.0

    reward.__code__ = reward.__code__.replace(co_filename=file)
    rubric = vf.Rubric([reward])
    state = vf.State(prompt="", completion="", answer="")
    scoring = threading.Thread(target=lambda: asyncio.run(rubric.score_group([state])), daemon=True)
    scoring.start()
    assert waits.wait(20)
    try:
        assert running_function(idents[0]).startswith(f"reward ({file}, line ")
    finally:
        over.set()
        scoring.join(20)
