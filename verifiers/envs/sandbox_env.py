"""SandboxEnv: a sandbox for each rollout, and bash in it as a tool."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import re
import shlex
import shutil
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypedDict

from verifiers.envs.lifecycle import cleanup, maybe_await, teardown
from verifiers.envs.tool_env import StatefulToolEnv, result_text
from verifiers.envs.tools import NOT_FOR_THE_MODEL
from verifiers.errors import ConfigError, SandboxError
from verifiers.sandbox.python_repl import PythonInterpreter
from verifiers.sandbox.spec import RunResult, Sandbox, SandboxSpec
from verifiers.types import Messages, Record, State, names_of_classic

_IDLE_COMMAND = "tail -f /dev/null"


class SandboxState(TypedDict):
    """A sandbox as `state["sandbox_state"]` describes it; times are in seconds."""

    ready: bool
    ready_wait_time: float
    command_execution_times: list[float]


class SandboxRequest(Record):
    """A description of a sandbox: the arguments of `SandboxEnv`, with `sandbox_name` as `name`."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None, **_: Any) -> SandboxRequest:
        return SandboxRequest({**self, **(update or {})})


class _AwaitableDict(dict[str, Any]):
    """A dict that may also be awaited, from methods that overrides call in either way."""

    def __await__(self) -> Generator[Any, Any, dict[str, Any]]:
        yield from ()
        return self


@dataclass(slots=True)
class _Slot:
    """A rollout's place for its sandbox, which is opened when it is first needed."""

    spec: SandboxSpec
    classic_state: SandboxState
    start_command: str
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    sandbox: Sandbox | None = None
    interpreter: PythonInterpreter | None = None


class SandboxEnv(StatefulToolEnv):
    """A tool environment in which each rollout has a sandbox of its own, with the tool `bash(command)`.

    The sandbox is opened when it is first needed and closed when the rollout ends, however it ends. A command that
    fails or runs too long is told to the policy; a sandbox that dies ends the rollout as `environment_error`.
    States and stored rows hold the sandbox's id in `state["sandbox_id"]` and, for packages of the classic API, its
    times in `state["sandbox_state"]`.

    Args:
        spec: isolation level and limits of the sandboxes; see `verifiers.sandbox`.
        timeout_per_command_s: seconds that one command may take.
        max_output_chars: how much of a command's output the policy sees; the middle is left out.
        docker_image: an image for the docker and podman levels. Any but a plain Python one chooses one of these.
        start_command: started in the background of each new sandbox.
        memory_gb, disk_size_gb, environment_vars, timeout_per_command_seconds: the classic names of the spec's
            limits and of `timeout_per_command_s`.
        sandbox_name, cpu_cores, timeout_minutes, labels: kept for the classic signature; sandboxes may use every
            core, and live as long as their rollout.
        **kwargs: as `StatefulToolEnv`.

    Raises:
        ConfigError: what no sandbox here can give: GPUs, a hosted service's settings, an image without a container
            runtime.
    """

    def __init__(
        self,
        spec: SandboxSpec | None = None,
        timeout_per_command_s: float | None = None,
        max_output_chars: int = 20_000,
        *,
        sandbox_name: str = "sandbox-env",
        docker_image: str | None = None,
        start_command: str = _IDLE_COMMAND,
        cpu_cores: int = 1,
        memory_gb: float | None = None,
        disk_size_gb: float | None = None,
        gpu_count: int = 0,
        timeout_minutes: float = 60,
        timeout_per_command_seconds: float | None = None,
        environment_vars: Mapping[str, str] | None = None,
        team_id: str | None = None,
        advanced_configs: Any = None,
        labels: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        for name, value in (("gpu_count", gpu_count), ("team_id", team_id), ("advanced_configs", advanced_configs)):
            if value:
                raise ConfigError(f"{name}={value!r} is not possible: sandboxes run on this machine, without a GPU.")
        limits = {"memory_bytes": _bytes(memory_gb), "disk_bytes": _bytes(disk_size_gb), "env": environment_vars}
        given: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
        self.spec = _with_image(dataclasses.replace(spec or SandboxSpec(), **given), docker_image)
        self.timeout_per_command_s = timeout_per_command_s or timeout_per_command_seconds or 30.0
        self.max_output_chars = max_output_chars
        self.start_command = start_command
        self.labels = list(labels or ())
        self._slots: dict[str, _Slot] = {}
        self.sandbox_client = SandboxClient(self)
        self.sandbox_request = SandboxRequest(
            name=sandbox_name,
            docker_image=docker_image,
            start_command=start_command,
            cpu_cores=cpu_cores,
            memory_gb=memory_gb,
            disk_size_gb=disk_size_gb,
            timeout_minutes=timeout_minutes,
            environment_vars=dict(environment_vars or {}),
            labels=self.labels,
        )
        super().__init__(**kwargs)
        self._add_bounded_tool(self.bash, ("sandbox_id", "sandbox_state", "working_dir"))

    async def bash(
        self,
        command: str,
        sandbox_id: str,
        sandbox_state: dict[str, Any] | None = None,
        working_dir: str | None = None,
    ) -> str:
        """Run a command with bash and get its output.

        Args:
            command: the command line; each call is a new shell in the same directory.
            sandbox_id: the rollout's sandbox, supplied by the environment.
            sandbox_state: its times, supplied by the environment.
            working_dir: the directory, supplied by the environment.
        """
        await self._opened(sandbox_id)
        started = time.perf_counter()
        result = await self._run(sandbox_id, command, working_dir, self.timeout_per_command_s)
        if sandbox_state is not None:
            sandbox_state["command_execution_times"].append(time.perf_counter() - started)
        return result_text(result, self.max_output_chars, self.timeout_per_command_s)

    async def _run(
        self, sandbox_id: str, command: str, working_dir: str | None, timeout_s: float | None
    ) -> RunResult:
        sandbox = await self._opened(sandbox_id)
        line = command if working_dir is None else f"cd {shlex.quote(working_dir)} && {{ {command}\n}}"
        return await sandbox.run(line, timeout_s=timeout_s)

    # overrides of either kind, sync and async, call this one
    def update_tool_args(  # type: ignore[override]
        self, tool_name: str, tool_args: dict[str, Any], messages: Messages, state: State, **kwargs: Any
    ) -> _AwaitableDict:
        """Supply `sandbox_id`, `sandbox_state` and `working_dir` to tools that hide them; may be awaited or not."""
        sandbox_id = self._sandbox_id(state)
        supplied = {
            "sandbox_id": sandbox_id,
            "sandbox_state": state["sandbox_state"],
            "working_dir": state.get("working_dir"),
        }
        hidden = self.skipped_args.get(tool_name, ())
        return _AwaitableDict({**tool_args, **{name: supplied[name] for name in supplied if name in hidden}})

    def _add_bounded_tool(self, tool: Callable[..., Any], hidden: Sequence[str] = ("sandbox_id",)) -> None:
        """Add a tool that takes a hidden sandbox_id, and whose calls the sandbox ends in time."""
        self.add_tool(tool, args_to_skip=hidden)
        name = next(reversed(self.tool_map))
        source, prepared = self._prepared[name]
        self._prepared[name] = (source, dataclasses.replace(prepared, has_own_deadline=True))

    async def sandbox(self, state: State) -> Sandbox:
        """Return the rollout's sandbox, opened at the first call.

        Raises:
            SandboxError: it cannot be started.
        """
        return await self._opened(self._sandbox_id(state))

    async def prepare_sandbox(self, sandbox: Sandbox) -> None:
        """Prepare a new sandbox before anything runs in it. Override it to put files there."""

    def get_sandbox_request(self, state: State) -> SandboxRequest:
        """Return what the rollout's sandbox is to be like. Override it where rows need different ones."""
        return self.sandbox_request.model_copy()

    async def post_rollout(self, state: State) -> None:
        """Read from the sandbox what rewards need, and keep that in the state. Override it.

        Called at the end of a rollout, before its sandbox is closed, unless the rollout failed or was cancelled.
        """

    async def setup_state(self, state: State, **kwargs: Any) -> State:
        """Give the rollout the id of its sandbox."""
        self._sandbox_id(state)
        return state

    @cleanup(priority=-100)
    async def destroy_sandbox(self, state: State) -> None:
        """Close the rollout's sandbox, after `post_rollout` and after other clean-ups, which may need it."""
        try:
            # without a reason to stop, the loop was left by an error or a cancellation
            if state.get("stop_condition") and not state.get("error"):
                await maybe_await(self.post_rollout, state)
        finally:
            await self._close(state.get("sandbox_id") or "")

    @teardown(priority=-100)
    async def close_sandboxes(self) -> None:
        """Close what was left open by rollouts that never came to their clean-up."""
        for sandbox_id in list(self._slots):
            await self._close(sandbox_id)

    def _sandbox_id(self, state: State) -> str:
        sandbox_id: str | None = state.get("sandbox_id")
        if not sandbox_id:
            sandbox_id = state["sandbox_id"] = uuid.uuid4().hex
        if sandbox_id not in self._slots:
            spec, start_command = self.spec, self.start_command
            if type(self).get_sandbox_request is not SandboxEnv.get_sandbox_request:
                request = self.get_sandbox_request(state)
                spec, start_command = self._spec_of(request), request["start_command"]
            times = SandboxState(ready=False, ready_wait_time=0.0, command_execution_times=[])
            state["sandbox_state"] = times
            self._slots[sandbox_id] = _Slot(spec, times, start_command)
        return sandbox_id

    def _spec_of(self, request: SandboxRequest) -> SandboxSpec:
        """Return the environment's spec with what the request of one rollout asks for."""
        spec = dataclasses.replace(
            self.spec,
            memory_bytes=_bytes(request.get("memory_gb")) or self.spec.memory_bytes,
            disk_bytes=_bytes(request.get("disk_size_gb")) or self.spec.disk_bytes,
            env={**self.spec.env, **(request.get("environment_vars") or {})},
        )
        image = request.get("docker_image")
        return spec if image == self.sandbox_request.docker_image else _with_image(spec, image)

    async def _opened(self, sandbox_id: str) -> Sandbox:
        from verifiers.sandbox import open_sandbox

        slot = self._slots.get(sandbox_id)
        if slot is None:
            raise ConfigError(f"There is no sandbox {sandbox_id!r}: its rollout has ended.")
        async with slot.opening:
            if slot.sandbox is None:
                started = time.perf_counter()
                sandbox = await open_sandbox(slot.spec)
                # known before it is prepared, so that it is closed though preparing may fail
                slot.sandbox = sandbox
                await self._prepare(sandbox, slot.start_command)
                slot.classic_state["ready_wait_time"] = time.perf_counter() - started
                slot.classic_state["ready"] = True
        return slot.sandbox

    async def _prepare(self, sandbox: Sandbox, start_command: str) -> None:
        try:
            if start_command != _IDLE_COMMAND:
                await sandbox.start(["sh", "-c", start_command])
            await self.prepare_sandbox(sandbox)
        except NOT_FOR_THE_MODEL:
            raise
        except Exception as error:
            # the environment's own mistake, which no tool message should tell the policy of
            raise SandboxError(f"A new sandbox could not be prepared: {type(error).__name__}: {error}") from error

    async def _close(self, sandbox_id: str) -> None:
        slot = self._slots.pop(sandbox_id, None)
        if slot is None or slot.sandbox is None:
            return
        await slot.sandbox.close()


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * (1 << 30))


def _with_image(spec: SandboxSpec, image: str | None) -> SandboxSpec:
    """Return the spec with the image, at a level that has images where that makes a difference."""
    if image is None:
        return spec
    spec = dataclasses.replace(spec, image=image)
    if spec.isolation in ("docker", "podman") or image.startswith("python:"):
        return spec
    runtime = next((name for name in ("docker", "podman") if shutil.which(name)), None)
    if spec.isolation != "auto" or runtime is None:
        why = "neither is installed" if spec.isolation == "auto" else f"the spec asks for {spec.isolation!r}"
        raise ConfigError(f"docker_image={image!r} needs the docker or podman level, but {why}.")
    return dataclasses.replace(spec, isolation=runtime)  # type: ignore[arg-type]


class SandboxClient:
    """The part of the hosted service's client that local sandboxes can serve; `SandboxEnv.sandbox_client`."""

    def __init__(self, env: SandboxEnv) -> None:
        self._env = env

    async def execute_command(
        self,
        sandbox_id: str,
        command: str,
        working_dir: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        **_: Any,
    ) -> RunResult:
        """Run a bash command and return its `stdout`, `stderr` and `exit_code`.

        Args:
            sandbox_id: as `state["sandbox_id"]` has it.
            working_dir: left out, the sandbox's own.
            timeout: seconds; the spec's wall time when left out.

        Raises:
            SandboxError: it took longer, or the sandbox died.
        """
        names = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in (env or {}).items())
        result = await self._env._run(sandbox_id, names + command, working_dir, timeout)
        if result.timed_out:
            raise SandboxError(f"the command {command!r:.200} took longer than timeout={timeout}; give it more.")
        return result

    async def upload_file(self, sandbox_id: str, file_path: str, local_file_path: str, **_: Any) -> None:
        content = await asyncio.to_thread(Path(local_file_path).read_bytes)
        await self.upload_bytes(sandbox_id, file_path, content)

    async def upload_bytes(self, sandbox_id: str, file_path: str, file_bytes: bytes, *_: Any, **__: Any) -> None:
        await (await self._env._opened(sandbox_id)).write(file_path, file_bytes)

    async def download_file(self, sandbox_id: str, file_path: str, local_file_path: str, **_: Any) -> None:
        content = await (await self._env._opened(sandbox_id)).read(file_path)
        await asyncio.to_thread(Path(local_file_path).write_bytes, content)

    async def wait_for_creation(self, sandbox_id: str, **_: Any) -> None:
        """Open the sandbox, if it is not open yet."""
        await self._env._opened(sandbox_id)

    async def delete(self, sandbox_id: str) -> None:
        await self._env._close(sandbox_id)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"sandbox_client.{name} is a call of the hosted sandbox service; sandboxes on this machine have "
            "execute_command, upload_file, upload_bytes, download_file, wait_for_creation and delete."
        )


# in the codec of the interpreter's answers, for characters beyond U+FFFF
_BYTES_PER_CHAR = 10
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class PythonEnv(SandboxEnv):
    """A tool environment with the tool `python(code)`, whose variables, functions and imports stay between calls.

    Code runs as in a notebook: what it prints is captured, the value of a last expression is shown, and a traceback
    begins in the code. Calls of one turn run one after the other, in their order. A call that runs too long is killed
    and gets a new interpreter, and the policy is told that the state is lost.

    Args:
        spec, timeout_per_command_s, max_output_chars: as `SandboxEnv`.
        pip_install_packages: what the code may import, as "numpy sympy" or a list. Nothing is installed, since
            sandboxes have no network: one that is missing is warned of. In a container it is the image that has them.
        max_startup_wait_seconds: seconds that an interpreter may take to start.
        **kwargs: as `SandboxEnv`.

    Raises:
        ConfigError: `max_output_chars` is more than the spec's `output_bytes` can carry; and as `SandboxEnv`.
    """

    def __init__(
        self,
        spec: SandboxSpec | None = None,
        timeout_per_command_s: float | None = None,
        max_output_chars: int = 20_000,
        *,
        pip_install_packages: str | Sequence[str] = (),
        max_startup_wait_seconds: float = 30.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(spec, timeout_per_command_s, max_output_chars, **kwargs)
        # side by side on few cores, each library's own threads only get into each other's way
        self.spec = dataclasses.replace(self.spec, env={**_ONE_THREAD, **self.spec.env})
        if _BYTES_PER_CHAR * max_output_chars + 1000 > self.spec.output_bytes:
            raise ConfigError(
                f"max_output_chars={max_output_chars} may take {_BYTES_PER_CHAR} bytes each, which is more than the "
                f"spec's output_bytes={self.spec.output_bytes}; lower the one or raise the other."
            )
        packages = pip_install_packages
        self.pip_install_packages = packages.split() if isinstance(packages, str) else list(packages)
        self.max_startup_wait_seconds = max_startup_wait_seconds
        self.remove_tool(self.bash)
        self._add_bounded_tool(self.python)
        names = [re.split(r"[\s\[<>=!~;@]", package, maxsplit=1)[0] for package in self.pip_install_packages]
        missing = [name for name in names if not _is_there(name)]
        if missing and self.spec.isolation not in ("docker", "podman"):
            self.logger.warning(
                "pip_install_packages installs nothing, because sandboxes have no network: %s cannot be imported in "
                "them. Install it in the environment that runs verifiers.",
                ", ".join(missing),
            )

    async def python(self, code: str, sandbox_id: str) -> str:
        """Run Python code and get what it prints and the value of its last expression.

        Args:
            code: the code; variables, functions and imports of earlier calls are still there.
            sandbox_id: the rollout's sandbox, supplied by the environment.
        """
        sandbox = await self._opened(sandbox_id)
        slot = self._slots[sandbox_id]
        if slot.interpreter is None:
            slot.interpreter = PythonInterpreter(
                sandbox,
                cell_timeout_s=self.timeout_per_command_s,
                startup_timeout_s=self.max_startup_wait_seconds,
                max_output_chars=self.max_output_chars,
            )
        return await slot.interpreter.run(code)

    async def run_python(self, code: str, state: State) -> str:
        """Run code in the rollout's interpreter, for the environment's own use, such as in `post_rollout`."""
        return await self.python(code, self._sandbox_id(state))


def _is_there(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


__getattr__ = names_of_classic(__name__)
