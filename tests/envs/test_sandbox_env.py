"""SandboxEnv: a sandbox for each rollout that never outlives it, and bash in it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

import verifiers as vf
from verifiers.envs.tool_env import result_text
from verifiers.inference.endpoint import ClientBackend
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.sandbox.spec import RunResult
from verifiers.testing import FakeClient
from verifiers.types import Outcome, RolloutKey

ROWS = [{"question": "q", "answer": "a"}]
ASK = [{"role": "user", "content": "q"}]


def bash(*commands: str) -> dict[str, Any]:
    return {"tool_calls": [{"name": "bash", "arguments": {"command": command}} for command in commands]}


def replies(completion: Any) -> list[str]:
    return [message["content"] for message in completion if message["role"] == "tool"]


async def run_one(env: vf.SandboxEnv, *answers: Any, timeout_s: float = 600.0) -> Rollout:
    backend = ClientBackend(FakeClient(answers[0] if callable(answers[0]) else list(answers)))
    runner = Run(env, backend, "m", rollout_timeout_s=timeout_s)
    return (await runner.play([RolloutRequest(RolloutKey(0, 0, 0), ASK)]))[0]


class FakeSandbox:
    """Counts what is asked of it; may be told to break or to hang."""

    isolation = "process"

    def __init__(self, opened: list[FakeSandbox]) -> None:
        opened.append(self)
        self.commands: list[Any] = []
        self.closed = 0
        self.began = asyncio.Event()

    async def run(self, command: Any, *, stdin: Any = None, timeout_s: float | None = None) -> RunResult:
        self.commands.append((command, timeout_s))
        assert not self.closed
        if command == "die":
            raise vf.SandboxError("the sandbox died")
        if command == "hang":
            self.began.set()
            await asyncio.get_running_loop().create_future()
        return RunResult(f"ran {command}\n", "", 0, False, 0)

    async def start(self, command: Any) -> Any:
        self.commands.append(tuple(command))

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed += 1


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FakeSandbox]:
    sandboxes: list[FakeSandbox] = []

    async def open_sandbox(spec: vf.SandboxSpec) -> FakeSandbox:
        await asyncio.sleep(0)
        return FakeSandbox(sandboxes)

    monkeypatch.setattr("verifiers.sandbox.open_sandbox", open_sandbox)
    return sandboxes


# -- with real sandboxes ------------------------------------------------------------------------------------------


async def test_commands_run_in_the_rollouts_own_sandbox_and_their_output_is_told() -> None:
    env = vf.SandboxEnv(eval_dataset=ROWS, timeout_per_command_s=10)
    first = bash("echo one > file; cat file; echo oops >&2; exit 3", "pwd", "")
    rollout = await run_one(env, first, bash("cat file"), "done")
    assert (rollout.outcome, rollout.failure) == (Outcome.COMPLETED, None)
    mixed, _, empty, kept = replies(rollout.completion)
    assert mixed == "one\nstderr:\noops\n[exit code 3]"
    assert (empty, kept) == ("[no output]", "one")
    other = await run_one(env, bash("cat file"), "done")
    assert "No such file" in replies(other.completion)[0]
    assert env._slots == {}


async def test_a_command_that_runs_too_long_is_told_and_the_sandbox_lives_on() -> None:
    env = vf.SandboxEnv(eval_dataset=ROWS, timeout_per_command_s=0.5)

    def answer(body: dict[str, Any]) -> Any:
        said = len(replies(body["messages"]))
        # the second command has all the time it needs
        env.timeout_per_command_s = 60.0 if said else 0.5
        return [bash("echo begun; sleep 60"), bash("echo alive"), "done"][said]

    rollout = await run_one(env, answer)
    late, after = replies(rollout.completion)
    assert late.endswith("[the command ran longer than 0.5 s and was killed]")
    assert after == "alive"


async def test_post_rollout_reads_what_the_policy_left_in_the_sandbox() -> None:
    class Graded(vf.SandboxEnv):
        async def prepare_sandbox(self, sandbox: Any) -> None:
            await sandbox.write("task.txt", "41")

        async def post_rollout(self, state: vf.State) -> None:
            state["result"] = (await (await self.sandbox(state)).read("result.txt")).decode()
            state["again"] = await self.bash("cat task.txt", sandbox_id=state["sandbox_id"])

    rollout = await run_one(Graded(eval_dataset=ROWS), bash("echo $(($(cat task.txt) + 1)) > result.txt"), "done")
    assert (rollout.failure, rollout.state["result"], rollout.state["again"]) == (None, "42\n", "41")


# -- with sandboxes that are told what to do ----------------------------------------------------------------------


async def test_each_rollout_has_one_sandbox_opened_when_needed_and_closed_at_its_end(opened: Any) -> None:
    env = vf.SandboxEnv(eval_dataset=ROWS, timeout_per_command_s=7)
    await run_one(env, "no command")
    assert opened == []
    await run_one(env, bash("a", "b"), bash("c"), "done")
    (only,) = opened
    assert only.commands == [("a", 7), ("b", 7), ("c", 7)]
    assert only.closed == 1
    await asyncio.gather(*(run_one(env, bash("a"), "done") for _ in range(3)))
    assert [sandbox.closed for sandbox in opened] == [1, 1, 1, 1]


async def test_a_sandbox_that_dies_is_an_environment_error_and_it_is_closed(opened: Any) -> None:
    rollout = await run_one(vf.SandboxEnv(eval_dataset=ROWS), bash("hang", "die"), "done")
    assert (rollout.outcome, str(rollout.failure)) == (
        Outcome.ENVIRONMENT_ERROR,
        "SandboxError: the sandbox died",
    )
    assert [sandbox.closed for sandbox in opened] == [1]


async def test_a_sandbox_that_cannot_be_opened_or_prepared_is_never_the_policys_fault(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Careless(vf.SandboxEnv):
        async def prepare_sandbox(self, sandbox: Any) -> None:
            raise FileNotFoundError("my own file")

    rollout = await run_one(Careless(eval_dataset=ROWS), bash("ls"), "done")
    assert rollout.outcome is Outcome.ENVIRONMENT_ERROR
    assert "could not be prepared: FileNotFoundError: my own file" in str(rollout.failure)
    assert [sandbox.closed for sandbox in opened] == [1]

    async def refuse(spec: Any) -> Any:
        raise vf.SandboxError("no room")

    monkeypatch.setattr("verifiers.sandbox.open_sandbox", refuse)
    assert (await run_one(Careless(eval_dataset=ROWS), bash("ls"), "done")).outcome is Outcome.ENVIRONMENT_ERROR


async def test_a_cancelled_or_late_rollout_leaves_no_sandbox_and_skips_post_rollout(opened: Any) -> None:
    class Graded(vf.SandboxEnv):
        graded = 0
        hanging = asyncio.Event()

        async def prepare_sandbox(self, sandbox: Any) -> None:
            sandbox.began = self.hanging

        async def post_rollout(self, state: vf.State) -> None:
            self.graded += 1

    env = Graded(eval_dataset=ROWS)
    work = asyncio.create_task(run_one(env, bash("hang"), "done"))
    await env.hanging.wait()
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
    late = await run_one(env, bash("hang"), "done", timeout_s=0.2)
    assert late.outcome is Outcome.TIMED_OUT
    assert [sandbox.closed for sandbox in opened] == [1, 1]
    assert env.graded == 0
    await run_one(env, bash("a"), "done")
    assert env.graded == 1


async def test_states_hold_the_sandboxes_id_and_times_alone(opened: Any) -> None:
    plain = await vf.ToolEnv(eval_dataset=ROWS).rollout({"prompt": ASK}, FakeClient("done"), "m")
    rollout = await run_one(vf.SandboxEnv(eval_dataset=ROWS), bash("a"), "done")
    assert set(rollout.state) - set(plain) == {"sandbox_id", "sandbox_state"}
    assert isinstance(rollout.state["sandbox_id"], str)


async def test_teardown_closes_what_was_left_open(opened: Any) -> None:
    env = vf.SandboxEnv(eval_dataset=ROWS)
    state = vf.State()
    await env.sandbox(state)
    await env.close_sandboxes()
    assert opened[0].closed == 1
    with pytest.raises(vf.ConfigError, match="its rollout has ended"):
        await env.bash("ls", state["sandbox_id"])


async def test_classic_arguments_are_supported_or_refused(opened: Any) -> None:
    env = vf.SandboxEnv(
        eval_dataset=ROWS, sandbox_name="mine", docker_image="python:3.11-slim", cpu_cores=2, memory_gb=4,
        disk_size_gb=1, timeout_minutes=5, timeout_per_command_seconds=9, environment_vars={"A": "b"}, labels=["x"],
        start_command="serve",
    )  # fmt: skip
    assert (env.spec.memory_bytes, env.spec.disk_bytes, env.spec.env) == (4 << 30, 1 << 30, {"A": "b"})
    await run_one(env, bash("a"), "done")
    assert opened[0].commands == [("sh", "-c", "serve"), ("a", 9)]
    for refused in ({"gpu_count": 1}, {"team_id": "t"}, {"advanced_configs": {"a": 1}}):
        with pytest.raises(vf.ConfigError, match=f"{next(iter(refused))}=.* is not possible"):
            vf.SandboxEnv(eval_dataset=ROWS, **refused)  # type: ignore[arg-type]


def test_an_image_needs_a_level_that_has_images(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str] = {}
    monkeypatch.setattr("shutil.which", found.get)
    with pytest.raises(vf.ConfigError, match=r"'ubuntu:24\.04' needs the docker or podman level, but neither"):
        vf.SandboxEnv(eval_dataset=ROWS, docker_image="ubuntu:24.04")
    found["podman"] = "/usr/bin/podman"
    env = vf.SandboxEnv(eval_dataset=ROWS, docker_image="ubuntu:24.04")
    assert (env.spec.isolation, env.spec.image) == ("podman", "ubuntu:24.04")
    with pytest.raises(vf.ConfigError, match="the spec asks for 'process'"):
        vf.SandboxEnv(vf.SandboxSpec(isolation="process"), eval_dataset=ROWS, docker_image="ubuntu:24.04")


# -- text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (RunResult("", "", 0, False, 0), "[no output]"),
        (RunResult("a\n", "", 0, False, 0), "a"),
        (RunResult("", "b\n", 1, False, 0), "stderr:\nb\n[exit code 1]"),
        (RunResult("a\n", "", -9, False, 0), "a\n[exit code -9]"),
        (RunResult("a", "", None, True, 0), "a\n[the command ran longer than 3 s and was killed]"),
        (RunResult("abcdefghijkl", "", 0, False, 12345), "abcd\n[... 3 characters left out ...]\nhijkl\n[12,345 "
         "bytes of output were too many and are lost]"),
    ],
)  # fmt: skip
def test_what_a_command_did_is_said(result: RunResult, text: str) -> None:
    assert result_text(result, 9, 3.0) == text
