"""HarborEnv: task folders in Harbor's format, each played and tested in a container of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import shlex
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

from verifiers.envs.agent_env import GatewayEnv
from verifiers.envs.external_env import ReportedRubric
from verifiers.envs.lifecycle import stop
from verifiers.envs.multiturn_env import begin_turns
from verifiers.envs.program_env import (
    checked_line,
    checked_words,
    filled,
    gateway_variables,
    placeholder_names,
    placeholder_values,
)
from verifiers.envs.tool_env import ToolEnv, result_text
from verifiers.errors import ConfigError, GradingError, SandboxError
from verifiers.gateway.gateway import Gateway, gateway_of_loop
from verifiers.gateway.session import Session
from verifiers.integrations.harbor_task import (
    ORACLE,
    HarborTask,
    Healthcheck,
    TaskStep,
    read_rewards,
    read_tasks,
    resolved,
    trained_and_evaluated,
)
from verifiers.notebook import shortened
from verifiers.sandbox.container import ContainerTool, ImageContainer, call_tool, installed_tool
from verifiers.sandbox.spec import SandboxSpec
from verifiers.types import Messages, RolloutInput, State

logger = logging.getLogger("verifiers.envs")

SYSTEM_PROMPT = (
    "Solve the task in the container by the tool `shell`, which runs commands with bash. When the task is done, "
    "answer without calling the tool."
)
_MB, _MEMORY_MB, _STORAGE_MB, _PROCESSES = 1 << 20, 4096.0, 10240.0, 4096
_LOG_LINES, _LOG_CHARS = 20, 20_000
_ARTIFACT_BYTES, _ARTIFACTS = 64 << 10, 20
_ROOT = "0"
_FOLDERS = (
    "mkdir -p /logs/agent /logs/verifier /logs/artifacts && chmod 777 /logs/agent /logs/verifier /logs/artifacts"
)
# the tests are nobody's but the task's, and no reward is older than they; without its directory no command starts
_CLEAR = """
for place in /logs {workdir}; do
    # a file may also stand in place of a directory above it
    while [ ! -d "$place" ]; do rm -rf "$place"; place=$(dirname "$place"); done
done
rm -rf /tests /logs/verifier && mkdir -p {workdir} /tests /logs/verifier && chmod 777 /logs/verifier
"""
# one command, as each costs as much as a container: the name and the text of the reward, and the end of the output
_OUTPUT = f"tail -c {_LOG_CHARS} /logs/verifier/test-stdout.txt"
_TEST = f"""
/tests/test.sh > /logs/verifier/test-stdout.txt 2>&1
for name in reward.json reward.txt; do
    if [ -e /logs/verifier/$name ]; then echo $name; cat /logs/verifier/$name; break; fi
done
{_OUTPUT} >&2
"""

_trial_of_rollout: ContextVar[_Trial] = ContextVar("trial_of_rollout")


class HarborEnv(ToolEnv):
    """An environment of Harbor's task folders: a container a rollout, and the task's own tests as the reward.

    The agent works in the container; after its end tests/ is copied in and test.sh runs. Its output and the task's
    artifacts, up to 20 of 64 KiB each, are in `info` of the stored row. The rubric may be another one; it finds the
    tests' rewards in `state["test_rewards"]`.

    Args:
        path: a task folder, or a directory of them.
        agent: "shell": the policy calls the tool `shell`; "oracle": the task's solution/solve.sh runs and no policy
            is asked; or a command, as a line for the shell or as words, that runs in the container with the variables
            and the placeholders of `ProgramEnv`, in a line each as one quoted word, and reaches the gateway alone.
            The image needs `python3` for that.
        tasks: names of the task folders to take, or patterns; None for all.
        eval_tasks: names or patterns of those that are evaluated and never trained; empty: all are both.
        network: "none": containers have no network, whatever the tasks say; "task": `network_mode` decides, where
            "public" is the tool's default network.
        tool: "podman" or "docker"; None: the first that is on PATH.
        readable: files and directories of this machine that are mounted, such as an agent.
        command_timeout_s: seconds that one command of the tool `shell` may take.
        max_output_chars: of a command's output, shown to the policy; the middle is left out.
        max_turns: answers of the policy in one rollout; -1 for no bound.
        train, helpers: as `AgentEnv`, for a command.
        **kwargs: as `ToolEnv`.

    Raises:
        ConfigError: a task that cannot be read, or that needs what cannot be had here; a text in place of a list.
    """

    def __init__(
        self,
        path: str | Path,
        agent: str | Sequence[str] = "shell",
        *,
        tasks: Sequence[str] | None = None,
        eval_tasks: Sequence[str] = (),
        network: Literal["none", "task"] = "none",
        tool: ContainerTool | None = None,
        readable: Sequence[str] = (),
        command_timeout_s: float = 60.0,
        max_output_chars: int = 20_000,
        max_turns: int = 50,
        train: str | Iterable[str] = (),
        helpers: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if network not in ("none", "task"):
            raise ConfigError(f"network is {network!r}; give 'none' or 'task'.")
        for name, given in (("tasks", tasks), ("eval_tasks", eval_tasks), ("readable", readable)):
            if isinstance(given, str):
                raise ConfigError(f"{name} is the text {given!r}; give a list: [{given!r}].")
        found = read_tasks(path, tasks)
        self.harbor_tasks = {task.name: task for task in found}
        self.agent = agent
        self.network = network
        self.readable = tuple(readable)
        self.command_timeout_s = command_timeout_s
        self.max_output_chars = max_output_chars
        self.tool = tool or installed_tool()
        self._check_network(found)
        self._images: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Task[str]] = {}
        self._turns: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}
        self._program: _TaskProgram | None = None
        if agent not in ("shell", ORACLE):
            self._program = _TaskProgram(
                agent, max_turns=max_turns, train=train, helpers=helpers, dataset=[{"question": ""}]
            )
        if agent == "shell":
            kwargs.setdefault("system_prompt", SYSTEM_PROMPT)
        rows = [
            {
                "question": task.steps[0].instruction,
                "task": task.name,
                "info": {"harbor_task": task.name, "digest": task.digest, "steps": len(task.steps)},
            }
            for task in found
        ]
        trained, evaluated = trained_and_evaluated(list(self.harbor_tasks), eval_tasks)
        kwargs.setdefault("rubric", ReportedRubric(test_reward, _other_rewards))
        super().__init__(
            [self.shell] if agent == "shell" else [],
            max_turns=max_turns,
            tool_timeout_s=None,
            # a function, as an evaluation of a benchmark is none of its training rows
            **{
                "dataset": lambda: [row for row in rows if row["task"] in trained],
                "eval_dataset": [row for row in rows if row["task"] in evaluated],
                **kwargs,
            },
        )

    def _check_network(self, tasks: Sequence[HarborTask]) -> None:
        modes = {task.name: task.environment.network_mode for task in tasks}
        if self.network == "task" and "allowlist" in modes.values():
            named = next(name for name, mode in modes.items() if mode == "allowlist")
            raise ConfigError(
                f"the task {named!r} needs a network with a list of hosts (network_mode = 'allowlist'); leave it out "
                "by tasks=, or give network='none'."
            )
        wanting = [name for name, mode in modes.items() if mode != "no-network"]
        if self.network == "none" and wanting:
            logger.info(
                "%d of %d tasks ask for a network and get none, %r first; network='task' gives it to them.",
                *(len(wanting), len(tasks), wanting[0]),
            )

    # -- playing --------------------------------------------------------------------------------------------------

    async def play(self, state: State) -> None:
        """Play one task in a container, and test what the agent left there."""
        async with self._trial(state["info"]["harbor_task"]) as trial:
            token = _trial_of_rollout.set(trial)
            try:
                if self._program is not None:
                    await self._program.play(state)
                elif self.agent == ORACLE:
                    await _play_oracle(state, trial)
                else:
                    await super().play(state)
                if not state.get("error"):
                    await trial.end()
                    state["info"].update(await trial.findings(self.max_output_chars))
            finally:
                _trial_of_rollout.reset(token)
        state["test_rewards"], state["test_problem"] = trial.rewards(), trial.problem

    @contextlib.asynccontextmanager
    async def _trial(self, name: str) -> AsyncIterator[_Trial]:
        task = self.harbor_tasks[name]
        environment = task.environment
        image = await self._image(task)
        socket = [] if self._program is None else [await (await gateway_of_loop()).unix_socket()]
        spec = SandboxSpec(
            self.tool,
            memory_bytes=int((environment.memory_mb or _MEMORY_MB) * _MB),
            file_bytes=int((environment.storage_mb or _STORAGE_MB) * _MB),
            processes=_PROCESSES,
            env=resolved(environment.env),
            readable=(*self.readable, *socket),
            image=image,
        )
        has_network = self.network == "task" and environment.network_mode == "public"
        async with await ImageContainer.open(spec, self.tool, has_network, environment.cpus, _FOLDERS) as container:
            trial = _Trial(task, container)
            await trial.begin()
            yield trial

    async def _image(self, task: HarborTask) -> str:
        """Return the task's image, which is built once; rollouts of other tasks do not wait for it."""
        if task.environment.docker_image is not None:
            return task.environment.docker_image
        loop = asyncio.get_running_loop()
        tag = f"localhost/verifiers-harbor:{task.image_digest[:32]}"
        building = self._images.get((loop, tag))
        if building is None:
            turns = self._turns.setdefault(loop, asyncio.Semaphore(os.cpu_count() or 1))
            building = self._images[loop, tag] = loop.create_task(_build(self.tool, tag, task, turns))
            # those that wait may have been cancelled
            building.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(building)

    async def shell(self, command: str) -> str:
        """Run a command with bash in the task's container and get its output.

        Args:
            command: the command line; each call is a new shell in the same directory.
        """
        trial = _trial_of_rollout.get()
        timeout_s = min(self.command_timeout_s, trial.remaining_s)
        return result_text(await trial.container.run(command, timeout_s=timeout_s), self.max_output_chars, timeout_s)

    @stop
    async def agent_timeout_reached(self, state: State) -> bool:
        """Return whether the time of the task's [agent] is over."""
        state["timed_out"] = _trial_of_rollout.get().remaining_s <= 0
        return bool(state["timed_out"])

    async def no_tools_called(self, state: State) -> bool:
        """Return whether the policy takes the last step for done."""
        return await super().no_tools_called(state) and _trial_of_rollout.get().is_last

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """Answer tool calls; a step that is done is answered with the instruction of the next one."""
        newest = messages[-1]
        if not isinstance(newest, dict) or newest.get("tool_calls"):
            return await super().env_response(messages, state, **kwargs)
        trial = _trial_of_rollout.get()
        if await trial.advance():
            return [{"role": "user", "content": trial.step.instruction}]
        state["final_env_response"] = []
        return []


class _TaskProgram(GatewayEnv):
    """A command in a task's container that calls the policy by the gateway."""

    def __init__(self, command: str | Sequence[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._quoted: Callable[[str], str] = str
        if isinstance(command, str):
            command, self._quoted = ["sh", "-c", checked_line("agent", command)], shlex.quote
        self.command = checked_words("agent", command)
        placeholder_names(*self.command)

    async def _run_agent(self, row: RolloutInput, session: Session, gateway: Gateway) -> dict[str, Any]:
        trial = _trial_of_rollout.get()
        url = f"http://127.0.0.1:{await trial.container.relay(await gateway.unix_socket())}"
        variables = gateway_variables(url, session, trial.container.spec.env)
        state: dict[str, Any] = {}

        async def run() -> None:
            while True:
                asked: Any = {**row, "prompt": trial.step.instruction}
                values = placeholder_values(asked, session.model, url)
                words = [filled(word, values, row, self._quoted) for word in self.command]
                ran = await trial.container.run(words, timeout_s=trial.remaining_s, env=variables)
                state.update(stdout=ran.stdout, stderr=ran.stderr, exit_code=ran.exit_code, timed_out=ran.timed_out)
                if not await trial.advance():
                    return

        await self._within_budget(session, run())
        if said := state.get("stdout", "").strip():
            state["completion"] = [{"role": "assistant", "content": said}]
        return state


async def _play_oracle(state: State, trial: _Trial) -> None:
    begin_turns(state, None)
    started = time.perf_counter()
    said = [await trial.solve()]
    while await trial.advance():
        said.append(await trial.solve())
    state["completion"] = [{"role": "assistant", "content": shortened("".join(said).strip(), _LOG_CHARS)}]
    state["is_completed"] = True
    elapsed_ms = (time.perf_counter() - started) * 1000
    state["timing"].update(generation_ms=elapsed_ms, scoring_ms=0.0, total_ms=elapsed_ms)


async def test_reward(state: State) -> float:
    """Return the reward that the task's tests wrote: "reward", or else the mean of their numbers."""
    if state["test_problem"]:
        raise GradingError(state["test_problem"])
    rewards: dict[str, float] = state["test_rewards"]
    return rewards["reward"] if "reward" in rewards else sum(rewards.values()) / len(rewards)


def _other_rewards(state: State) -> dict[str, float]:
    return {name: value for name, value in state["test_rewards"].items() if name != "reward"}


# -- one rollout's container ----------------------------------------------------------------------------------------


class _Trial:
    """A task in a container: its steps in order, and what their tests gave.

    Attributes:
        problem: why the tests of the newest step gave no reward; "" where they did.
    """

    def __init__(self, task: HarborTask, container: ImageContainer) -> None:
        self.task = task
        self.container = container
        self.problem = ""
        self._place = 0
        self._is_tested = False
        self._rewards: list[dict[str, float]] = []
        self._outputs: list[str] = []
        self._ends = math.inf

    @property
    def step(self) -> TaskStep:
        return self.task.steps[self._place]

    @property
    def is_last(self) -> bool:
        return self._place == len(self.task.steps) - 1

    @property
    def remaining_s(self) -> float:
        """Seconds that the agent has left for the step."""
        return max(0.0, self._ends - time.monotonic())

    async def begin(self) -> None:
        """Prepare the container for the first step. Raises SandboxError where it does not become healthy."""
        self.container.workdir = self.task.environment.workdir or self.container.workdir
        await self._be_healthy(self.task.environment.healthcheck)
        await self._prepare()

    async def _prepare(self) -> None:
        self.container.user = user = self.step.agent_user or self.container.image_user
        # one that is not there would fail all that the agent does, and the tests would mark that down
        if user != _ROOT and (ran := await self.container.run(":")).exit_code != 0:
            raise SandboxError(f"{self.task.name!r} has no user {user!r} for its agent{_last_lines(ran.stderr)}")
        if (self.step.folder / "workdir").is_dir():
            here = (await self.container.run("pwd")).stdout.strip()
            await self.container.copy_in(self.step.folder / "workdir", here)
            if (self.step.folder / "workdir/setup.sh").is_file():
                await self._checked("bash ./setup.sh", self.step.agent_timeout_s)
        await self._be_healthy(self.step.healthcheck)
        self._is_tested = False
        self._ends = time.monotonic() + self.step.agent_timeout_s

    async def advance(self) -> bool:
        """Test the step and begin the next one; False where there is none, or the rewards are too low or missing."""
        if self.is_last:
            return False
        await self._test()
        rewards = {} if self.problem else self._rewards[-1]
        if self.problem or any(rewards.get(key, -math.inf) < least for key, least in self.step.min_reward.items()):
            return False
        await self._clear()
        self._place += 1
        await self._prepare()
        return True

    async def end(self) -> None:
        if not self._is_tested:
            await self._test()

    async def solve(self) -> str:
        """Run the step's solution; return what it printed. Raises SandboxError where there is none."""
        if not (self.step.solution / "solve.sh").is_file():
            raise SandboxError(f"the task {self.task.name!r} has no solution/solve.sh, which the oracle runs.")
        await self.container.copy_in(self.step.solution, "/solution")
        variables = {"DEBIAN_FRONTEND": "noninteractive", **resolved(self.task.table.solution.env)}
        if not os.access(self.step.solution / "solve.sh", os.X_OK):
            await self._as_root("chmod +x /solution/solve.sh")
        ran = await self.container.run("/solution/solve.sh", timeout_s=self.remaining_s, env=variables)
        return ran.stdout + ran.stderr

    async def _test(self) -> None:
        step, container = self.step, self.container
        self._is_tested = True
        await self._clear()
        for folder in step.tests:
            await container.copy_in(folder, "/tests")
        if not os.access(step.test, os.X_OK):
            await self._as_root("chmod +x /tests/test.sh")
        container.user = step.verifier_user or container.image_user
        ran = await container.run(_TEST, timeout_s=step.verifier_timeout_s, env=resolved(step.verifier_env))
        container.user = _ROOT
        self._outputs.append((await container.run(_OUTPUT)).stdout if ran.timed_out else ran.stderr)
        name, _, text = ran.stdout.partition("\n")
        rewards: dict[str, float] = {}
        if ran.timed_out:
            self.problem = f"test.sh did not end within verifier.timeout_sec={step.verifier_timeout_s:g}"
        elif not name:
            self.problem = f"test.sh left neither reward.txt nor reward.json{_last_lines(ran.stderr)}"
        else:
            self.problem, rewards = read_rewards(name, text)
        if rewards:
            self._rewards.append(rewards)

    def rewards(self) -> dict[str, float]:
        """Return the rewards of the steps in one, by the task's multi_step_reward_strategy."""
        if not self._rewards:
            return {}
        if len(self.task.steps) == 1 or self.task.table.multi_step_reward_strategy == "final":
            return self._rewards[-1]
        names = dict.fromkeys(name for rewards in self._rewards for name in rewards)
        return {name: sum(each.get(name, 0.0) for each in self._rewards) / len(self._rewards) for name in names}

    async def findings(self, max_chars: int) -> dict[str, Any]:
        """Return what a report shows of the end: the tests' output and the text of the task's artifacts."""
        self.container.user = _ROOT
        command = ["find", *self.task.artifacts, "-type", "f", "-size", f"-{_ARTIFACT_BYTES}c"]
        found = await self.container.run(command)
        artifacts = {}
        for name in sorted(found.stdout.splitlines())[:_ARTIFACTS]:
            with contextlib.suppress(OSError):
                artifacts[name] = (await self.container.read(name)).decode(errors="replace")
        return {"test_output": shortened("\n".join(self._outputs), max_chars), "artifacts": artifacts}

    async def _clear(self) -> None:
        workdir, self.container.workdir = self.container.workdir, "/"
        try:
            await self._as_root(_CLEAR.format(workdir=shlex.quote(workdir)))
        finally:
            self.container.workdir = workdir

    async def _as_root(self, command: str) -> None:
        before, self.container.user = self.container.user, _ROOT
        try:
            await self._checked(command, self.container.spec.wall_time_s)
        finally:
            self.container.user = before

    async def _checked(self, command: str, timeout_s: float) -> None:
        ran = await self.container.run(command, timeout_s=timeout_s)
        if ran.exit_code != 0:
            how = "did not end in time" if ran.timed_out else f"ended with exit code {ran.exit_code}"
            raise SandboxError(f"{command!r} {how} in the container of {self.task.name!r}{_last_lines(ran.stderr)}")

    async def _be_healthy(self, check: Healthcheck | None) -> None:
        if check is None:
            return
        starts, failures = time.monotonic(), 0
        while (await self.container.run(check.command, timeout_s=check.timeout_sec)).exit_code != 0:
            if time.monotonic() < starts + check.start_period_sec:
                await asyncio.sleep(check.start_interval_sec)
                continue
            failures += 1
            if failures >= check.retries:
                raise SandboxError(f"the healthcheck of {self.task.name!r} failed: {check.command!r:.200}")
            await asyncio.sleep(check.interval_sec)


# -- images ---------------------------------------------------------------------------------------------------------


async def _build(tool: ContainerTool, tag: str, task: HarborTask, turns: asyncio.Semaphore) -> str:
    """Build a task's image unless it is there. Raises SandboxError with the last lines of the log."""
    if (await call_tool(tool, "image", "inspect", "--format={{.Id}}", tag))[0] == 0:
        return tag
    limit_s = task.environment.build_timeout_sec
    async with turns:
        # the task's own commands are not the policy's, and may fetch packages
        arguments = ("build", "--network=host", f"--tag={tag}", str(task.path / "environment"))
        code, log = await call_tool(tool, *arguments, timeout_s=limit_s)
    if code != 0:
        how = f"did not end within build_timeout_sec={limit_s:g}" if code is None else "failed"
        raise SandboxError(f"the build of the image of {task.name!r} {how}{_last_lines(log)}")
    logger.info("built the image of %r.", task.name)
    return tag


def _last_lines(log: str) -> str:
    lines = log.strip().splitlines()[-_LOG_LINES:]
    return ":\n" + "\n".join(lines)[-_LOG_CHARS:] if lines else ""
