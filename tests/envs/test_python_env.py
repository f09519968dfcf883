"""PythonEnv: cells in one interpreter for each rollout, in a sandbox; whatever a cell does, the policy is told."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.inference.endpoint import ClientBackend
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.sandbox import open_sandbox
from verifiers.sandbox.python_repl import PythonInterpreter
from verifiers.sandbox.spec import SandboxSpec
from verifiers.testing import FakeClient
from verifiers.types import Outcome, RolloutKey

ROWS = [{"question": "q", "answer": "a"}]
LOST = "The interpreter was restarted: all variables, functions and imports are lost."


def python(*cells: str) -> dict[str, Any]:
    return {"tool_calls": [{"name": "python", "arguments": {"code": code}} for code in cells]}


async def run_one(env: vf.PythonEnv, *answers: Any, timeout_s: float = 600.0) -> Rollout:
    runner = Run(env, ClientBackend(FakeClient(list(answers))), "m", rollout_timeout_s=timeout_s)
    request = RolloutRequest(RolloutKey(0, 0, 0), [{"role": "user", "content": "q"}])
    return (await runner.play([request]))[0]


def replies(rollout: Rollout) -> list[str]:
    assert rollout.failure is None
    return [message["content"] for message in rollout.completion if message["role"] == "tool"]


@pytest.fixture
async def interpreter() -> AsyncIterator[PythonInterpreter]:
    sandbox = await open_sandbox()
    yield PythonInterpreter(sandbox, cell_timeout_s=60.0, max_output_chars=2000)
    await sandbox.close()


Cells = list[tuple[str, str]]


async def check(interpreter: PythonInterpreter, cells: Cells) -> None:
    for code, expected in cells:
        assert await interpreter.run(code) == expected, code


# -- cells --------------------------------------------------------------------------------------------------------


async def test_state_stays_from_cell_to_cell_and_the_last_value_is_shown(interpreter: PythonInterpreter) -> None:
    await check(
        interpreter,
        [
            ("import math\nx = 3", "[no output]"),
            ("def double(n):\n    return 2 * n", "[no output]"),
            ("print('so')\ndouble(x) + math.floor(1.5)", "so\n7"),
            ("_ + 1", "8"),
            ("None", "[no output]"),
            ("", "[no output]"),
            ("from __future__ import annotations\ny: Undefined = 1", "[no output]"),
            (
                "try:\n    y: Undefined = 1\nexcept NameError as error:\n    print(error)",
                "name 'Undefined' is not defined",
            ),
            ("'text'", "'text'"),
            ("if x:\n    x", "[no output]"),
        ],
    )


async def test_a_traceback_begins_in_the_cell(interpreter: PythonInterpreter) -> None:
    text = await interpreter.run("def f():\n    return {}['k']\nf()")
    assert text.splitlines()[:3] == ["Traceback (most recent call last):", '  File "<cell 1>", line 3, in <module>', "    f()"]  # noqa: E501 # fmt: skip
    assert "return {}['k']" in text
    assert text.endswith("KeyError: 'k'")
    assert "driver" not in text
    assert "eval(" not in text
    text = await interpreter.run("1 +")
    assert text.startswith('  File "<cell 2>", line 1')
    assert text.endswith("SyntaxError: invalid syntax")
    assert (await interpreter.run("raise SystemExit(3)")).endswith("SystemExit: 3")
    assert (await interpreter.run("raise KeyboardInterrupt")).endswith("KeyboardInterrupt")
    broken = "class E(Exception):\n    def __str__(self):\n        raise ValueError\nraise E"
    assert (await interpreter.run(broken)).endswith("E: <exception str() failed>")


async def test_long_output_is_cut_in_the_middle_and_says_so(interpreter: PythonInterpreter) -> None:
    text = await interpreter.run("print('a' * 50_000 + 'é' * 50_000)")
    assert text.startswith("a" * 1000 + "\n[... 1")
    assert "bytes left out ...]\n" in text
    assert text.endswith("é" * 900)
    assert len(text) < 2100
    assert await interpreter.run("1") == "1"


async def test_output_that_has_no_room_ends_no_interpreter_and_is_not_told_with_the_next_cells() -> None:
    async with await open_sandbox(SandboxSpec(file_bytes=1 << 20)) as sandbox:
        interpreter = PythonInterpreter(sandbox, cell_timeout_s=60.0, max_output_chars=2000)
        text = await interpreter.run("x = 5\nfor _ in range(50_000): print('a' * 50)")
        assert text.startswith("a" * 50 + "\n")
        assert text.endswith("\nOSError (its traceback is lost: File too large)")
        assert await interpreter.run("x") == "5"


async def test_a_forked_child_does_not_become_a_second_interpreter(interpreter: PythonInterpreter) -> None:
    code = "import os\nchild = os.fork()\nif child:\n    os.waitpid(child, 0)\nchild > 0"
    assert sorted((await interpreter.run(code)).split()) == ["False", "True"]
    code = "child = os.fork()\nif not child:\n    raise SystemExit(7)\nos.WEXITSTATUS(os.waitpid(child, 0)[1])"
    assert await interpreter.run(code) == "1"
    assert await interpreter.run("1 + 1") == "2"


async def test_a_cell_that_runs_too_long_is_stopped_and_the_loss_is_said(interpreter: PythonInterpreter) -> None:
    assert await interpreter.run("x = 1") == "[no output]"
    interpreter._cell_timeout_s = 0.5
    started = time.monotonic()
    ignores = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(60)"
    assert await interpreter.run(ignores) == f"The code ran longer than 0.5 s and was stopped. {LOST}"
    assert time.monotonic() - started < 30
    interpreter._cell_timeout_s = 60.0
    assert (await interpreter.run("x")).endswith("NameError: name 'x' is not defined")


async def test_a_cell_that_ends_the_interpreter_gets_a_new_one(interpreter: PythonInterpreter) -> None:
    assert await interpreter.run("import os; os._exit(4)") == f"The code ended the interpreter. {LOST}"
    assert LOST in await interpreter.run("import ctypes; ctypes.string_at(0)")
    assert LOST in await interpreter.run("import os; os.closerange(0, 256)")
    assert await interpreter.run("1 + 1") == "2"


async def test_a_cancelled_cell_is_stopped_and_the_next_one_says_what_is_lost(interpreter: PythonInterpreter) -> None:
    assert await interpreter.run("x = 1") == "[no output]"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await interpreter.run("import time; time.sleep(60)")
    assert await interpreter.run("print('on')") == f"{LOST}\non"
    assert await interpreter.run("'x' in globals()") == "False"


async def test_an_interpreter_that_dies_between_cells_is_noticed(interpreter: PythonInterpreter) -> None:
    later = """
import os, threading, time
def end_when_told():
    while not os.path.exists("end"):
        time.sleep(0.01)
    os._exit(0)
threading.Thread(target=end_when_told).start()
"""
    assert await interpreter.run(later) == "[no output]"
    process = interpreter._process
    assert process is not None
    await interpreter._sandbox.write("end", "")
    await process.wait(timeout_s=60)
    assert LOST in await interpreter.run("1")
    assert await interpreter.run("1") == "1"


@pytest.mark.parametrize("line", ["ready forged", "x" * 32 + " forged", "", "\\x00" * 99])
async def test_no_cell_answers_in_the_interpreters_place(interpreter: PythonInterpreter, line: str) -> None:
    everywhere = f"""
import os
for number in range(100):
    try:
        os.write(number, b'{line}\\n')
    except OSError:
        pass
"""
    text = await interpreter.run(everywhere)
    assert LOST in text
    assert await interpreter.run("'mine'") == "'mine'"


# -- the environment ----------------------------------------------------------------------------------------------


async def test_each_rollout_has_its_interpreter_and_calls_of_a_turn_run_in_their_order() -> None:
    env = vf.PythonEnv(eval_dataset=ROWS)
    (tool,) = env.oai_tools or ()
    assert tool["function"]["name"] == "python"
    assert list(tool["function"]["parameters"]["properties"]) == ["code"]
    answers = (python("x = 1", "x += 1", "x *= 10", "x"), python("x + 1"), "done")
    both = await asyncio.gather(run_one(env, *answers), run_one(env, *answers))
    for rollout in both:
        assert replies(rollout) == ["[no output]"] * 3 + ["20", "21"]
    assert env._slots == {}


async def test_a_call_waiting_for_its_turn_is_not_late() -> None:
    env = vf.PythonEnv(eval_dataset=ROWS, timeout_per_command_s=30.0, tool_timeout_s=2.0)
    cell = "import time; time.sleep(0.8); 1"
    assert replies(await run_one(env, python(cell, cell, cell), "done")) == ["1", "1", "1"]


async def test_files_and_post_rollout_share_the_sandbox_with_the_code() -> None:
    class Graded(vf.PythonEnv):
        async def prepare_sandbox(self, sandbox: Any) -> None:
            await sandbox.write("helpers.py", "def triple(n): return 3 * n")

        async def post_rollout(self, state: vf.State) -> None:
            state["x"] = await self.run_python("x", state)

    rollout = await run_one(Graded(eval_dataset=ROWS), python("from helpers import triple; x = triple(4)"), "done")
    assert replies(rollout) == ["[no output]"]
    assert rollout.state["x"] == "12"


async def test_missing_packages_are_warned_of_once_and_nothing_is_installed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = vf.PythonEnv(eval_dataset=ROWS, pip_install_packages="pydantic>=2 no-such-package[extra]==1.0")
    with caplog.at_level(logging.WARNING, "verifiers.envs"):
        for _ in range(2):
            assert replies(await run_one(env, python("import pydantic; 1"), "done")) == ["1"]
    (record,) = [record for record in caplog.records if "pip_install_packages" in record.message]
    assert "no-such-package cannot be imported" in record.message
    assert "pydantic" not in record.message


def test_output_that_no_answer_could_carry_is_refused() -> None:
    with pytest.raises(vf.ConfigError, match="output_bytes=1000"):
        vf.PythonEnv(vf.SandboxSpec(output_bytes=1000), eval_dataset=ROWS)


async def test_a_sandbox_that_is_gone_is_an_environment_error() -> None:
    class Loses(vf.PythonEnv):
        async def update_tool_args(self, tool_name: Any, tool_args: Any, messages: Any, state: Any, **kw: Any) -> Any:
            if state["turn"] == 2:
                await (await self.sandbox(state)).close()
            return await super().update_tool_args(tool_name, tool_args, messages, state, **kw)

    rollout = await run_one(Loses(eval_dataset=ROWS), python("x = 1"), python("x"), "done")
    assert (rollout.outcome, rollout.reward) == (Outcome.ENVIRONMENT_ERROR, None)
    assert rollout.failure is not None
    assert rollout.failure.kind == "SandboxError"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("isolation", ["auto", "process"])
def test_two_hundred_calls_in_parallel_lose_none_and_leave_no_process(isolation: str) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "python_tool.py"
    command = [sys.executable, str(script), "--rounds", "1", "--calls", "200", "--isolation", isolation]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert '"calls_lost": 0, "processes_left": 0' in result.stdout
