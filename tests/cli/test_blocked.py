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
from types import SimpleNamespace
from typing import Any

import openai
import pytest

import verifiers as vf
from verifiers import loop_thread, signals
from verifiers.cli import interrupts
from verifiers.cli.interrupts import handle_interrupts
from verifiers.cli.main import BlockedLoopError
from verifiers.loop_thread import LoopPulse, LoopWatchdog, running_function
from verifiers.testing import FakeOpenAIServer

SOURCE = """
import asyncio
import json
import re
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


def load_environment(how):
    rows = [{"question": f"question {row}", "answer": "4", "info": {"row": row}} for row in range(3)]
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows, rubric=vf.Rubric([globals()[how]]))
"""


KILLED = (-signal.SIGQUIT, -signal.SIGKILL)
"""Exit codes of a process that is killed; a shell's background job ignores the first signal."""


class Blocked:
    """A vf-eval of three rollouts of which the third blocks."""

    def __init__(self, how: str, limit_s: float) -> None:
        Path("blocking_env.py").write_text(SOURCE)
        flags = ["blocking_env.py", "-a", json.dumps({"how": how}), "-m", "fake", "-n", "3", "-r", "1"]
        self._command = [sys.executable, "-m", "verifiers.cli.evaluate", *flags]
        limit = ["--grading-timeout", str(limit_s)]
        self._process = subprocess.Popen([*self._command, *limit], stdout=-1, stderr=-1, text=True)
        until = time.monotonic() + 60
        while not Path("blocks").exists():
            assert self._process.poll() is None, self._process.communicate()
            assert time.monotonic() < until
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Return exit code and what was printed to stderr."""
        _, said = self._process.communicate(timeout=90)
        return self._process.returncode, said

    def resume(self) -> str:
        """Run the command again, with nothing that blocks and the default deadline; return what was printed."""
        Path("mended").touch()
        again = subprocess.run(self._command, capture_output=True, text=True, timeout=90)
        assert again.returncode == 0, again.stderr
        return again.stderr


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_regular_expression_that_holds_the_interpreter_ends_an_evaluation(results: Any) -> None:
    run = Blocked("tries_too_many_ways", 3.0)
    code, said = run.end()
    assert code == 1, said
    assert "a function of one of these threads has kept all others from running for 3 s" in said
    assert "in tries_too_many_ways" in said
    assert {row["example_id"] for row in results.rows} == {0, 1}
    assert "2 of 3 rollouts are there" in run.resume()
    assert [row["outcome"] for row in results.rows] == ["completed"] * 3


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_ends_an_evaluation_whose_interpreter_is_held(results: Any, number: signal.Signals) -> None:
    run = Blocked("tries_too_many_ways", 3600.0)
    run.signal(number)
    code, said = run.end()
    assert code in KILLED, said
    assert "vf-eval: a signal arrived, and a function of one of these threads keeps Python from handling it" in said
    assert "in tries_too_many_ways" in said
    assert {row["example_id"] for row in results.rows} == {0, 1}
    assert "2 of 3 rollouts are there" in run.resume()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_coroutine_that_sleeps_ends_an_evaluation(results: Any) -> None:
    run = Blocked("sleeps", 3.0)
    code, said = run.end()
    assert code == 1, said
    (sentence,) = [line for line in said.splitlines() if "has blocked the event loop for 3" in line]
    assert sentence.startswith("vf-eval: sleeps (")
    assert "Traceback" not in said
    assert {row["example_id"] for row in results.rows} == {0, 1}
    assert results.metadata["status"] == "stopped"
    assert "2 of 3 rollouts are there" in run.resume()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_ends_an_evaluation_whose_event_loop_is_blocked(results: Any, number: signal.Signals) -> None:
    run = Blocked("sleeps", 3600.0)
    run.signal(number)
    code, said = run.end()
    assert code == 130, said
    assert "vf-eval: sleeps (" in said
    assert results.metadata["status"] == "stopped"


def test_a_loop_that_runs_is_not_blocked_and_one_that_stands_still_is() -> None:
    found: list[str] = []
    noticed = threading.Event()

    def blocked(function: str) -> None:
        found.append(function)
        noticed.set()

    async def busy() -> None:
        dog = LoopWatchdog(asyncio.get_running_loop(), 2.0, blocked)
        dog.start()
        try:
            await asyncio.to_thread(time.sleep, 2.5)
            assert found == []
            _of_a_user(lambda: noticed.wait(20))
        finally:
            dog.stop()

    asyncio.run(busy())
    assert noticed.is_set()


def test_time_for_which_the_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, answers = [0.0], []
    monkeypatch.setattr(loop_thread, "time", SimpleNamespace(monotonic=lambda: now[0]))
    pulse = LoopPulse(SimpleNamespace(call_soon_threadsafe=answers.append))  # type: ignore[arg-type]
    for elapsed_s in (1.0, 3600.0, 1.0):
        now[0] += elapsed_s
        pulse.ask(1.0)
    assert pulse.silent_s == 1.0 + 2.0 + 1.0
    answers.pop()()
    now[0] += 1.0
    assert pulse.silent_s == 0.0
    pulse.ask(1.0)
    assert (pulse.silent_s, len(answers)) == (0.0, 1)


class Work:
    """Work that `handle_interrupts` ends; it notes the request."""

    drain_s, requested = 1.0, False

    def drain(self) -> None:
        self.requested = True

    def abort(self) -> None: ...


@pytest.fixture
def _patient_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """End these tests' own process later than the deadline of their event loop: the machine may stand still."""
    limit = signals.exit_if_interpreter_is_held
    monkeypatch.setattr(interrupts, "exit_if_interpreter_is_held", lambda _, sentence: limit(60.0, sentence))


@pytest.mark.usefixtures("_patient_exit")
def test_an_async_agent_that_blocks_the_loop_which_answers_it_is_named_with_its_mend() -> None:
    blocks = False

    async def run(row: Any, *, base_url: str, api_key: str, model: str) -> str:
        if not blocks:
            async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as other:
                return (await other.completions.create(model=model, prompt="waits for others")).choices[0].text
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            return client.completions.create(model=model, prompt="waits for itself").choices[0].text

    async def play(url: str) -> None:
        nonlocal blocks
        env = vf.AgentEnv(run, dataset=[{"question": "?", "answer": ""}])
        row: Any = {"prompt": "?", "answer": "", "task": "default", "info": {}, "example_id": 0}
        # the imports of the first rollout block the loop, too
        await env.rollout(row, url, "fake")
        blocks = True
        with handle_interrupts("vf-eval", Work(), 3.0):
            await env.rollout(row, url, "fake")

    with (
        FakeOpenAIServer() as server,
        pytest.raises(BlockedLoopError, match=r"^run \(.*a plain def where it is .*the run of an AgentEnv"),
    ):
        asyncio.run(play(server.url))


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
        with handle_interrupts("vf-eval", work, 60.0):
            child = fork_one_that_ends_itself()
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            # what reached the loop has been handled by then
            await asyncio.sleep(0.1)
            return status

    assert os.WTERMSIG(asyncio.run(fork())) == signal.SIGTERM
    assert not work.requested


def test_ctrl_z_stops_the_clock_of_a_held_interpreter() -> None:
    code = (
        "import select; from verifiers.signals import exit_if_interpreter_is_held as limit\n"
        "with limit(4.0, 'held'):\n"
        "    print(1, flush=True)\n"
        # a signal that comes just before a blocking read would be handled after it
        "    while not select.select([0], [], [], 0.1)[0]: pass"
    )
    # in a group of its own, which a terminal would stop
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, stderr=-1, process_group=0) as process:
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
