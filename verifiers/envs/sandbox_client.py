"""The classic names of a rollout's sandbox: its state, what it is to be like, and the client of the hosted service.

The client has the calls that mean the same here: run a command, and move files. Everything else of the service's
client is an error that says so.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypedDict

from verifiers.errors import SandboxError
from verifiers.sandbox.spec import RunResult, Sandbox
from verifiers.types import Record

__all__ = [
    "AwaitableDict",
    "SandboxClient",
    "SandboxRequest",
    "SandboxState",
    "new_sandbox_state",
]


class SandboxState(TypedDict):
    """A sandbox as `state["sandbox_state"]` describes it; times are in seconds."""

    ready: bool
    ready_wait_time: float
    command_execution_times: list[float]


def new_sandbox_state() -> SandboxState:
    """Return the description of a sandbox that is not open yet."""
    return SandboxState(ready=False, ready_wait_time=0.0, command_execution_times=[])


class SandboxRequest(Record):
    """A description of a sandbox: the arguments of `SandboxEnv`, with `sandbox_name` as `name`."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None, **_: Any) -> SandboxRequest:
        """Return a copy with the fields in `update`."""
        return SandboxRequest({**self, **(update or {})})


@dataclass(frozen=True, slots=True)
class _TimedResult:
    """A command's result and how long it took."""

    result: RunResult
    duration_s: float


class SandboxClient:
    """The part of the hosted service's client that local sandboxes can serve; `SandboxEnv.sandbox_client`.

    Args:
        opened: gives the sandbox of an id.
        close: closes it.
    """

    def __init__(self, opened: Callable[[str], Awaitable[Sandbox]], close: Callable[[str], Awaitable[None]]) -> None:
        self._opened = opened
        self._close = close

    async def run(
        self, sandbox_id: str, command: str, working_dir: str | None, timeout_s: float | None
    ) -> _TimedResult:
        """Run a command, in a directory of the sandbox."""
        sandbox = await self._opened(sandbox_id)
        line = command if working_dir is None else f"cd {shlex.quote(working_dir)} && {{ {command}\n}}"
        started = time.perf_counter()
        return _TimedResult(await sandbox.run(line, timeout_s=timeout_s), time.perf_counter() - started)

    async def execute_command(
        self,
        sandbox_id: str,
        command: str,
        working_dir: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        **_: Any,
    ) -> RunResult:
        """Run a command and return its `stdout`, `stderr` and `exit_code`.

        Args:
            sandbox_id: as `state["sandbox_id"]` has it.
            command: for bash.
            working_dir: the directory; the sandbox's own when left out.
            env: further variables.
            timeout: seconds; the spec's wall time when left out.

        Raises:
            SandboxError: it took longer, or the sandbox died.
        """
        names = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in (env or {}).items())
        result = (await self.run(sandbox_id, names + command, working_dir, timeout)).result
        if result.timed_out:
            raise SandboxError(f"the command {command!r:.200} took longer than timeout={timeout}; give it more.")
        return result

    async def upload_file(self, sandbox_id: str, file_path: str, local_file_path: str, **_: Any) -> None:
        """Copy a file of this machine into the sandbox."""
        content = await asyncio.to_thread(Path(local_file_path).read_bytes)
        await self.upload_bytes(sandbox_id, file_path, content)

    async def upload_bytes(self, sandbox_id: str, file_path: str, file_bytes: bytes, *_: Any, **__: Any) -> None:
        """Write a file of the sandbox."""
        await (await self._opened(sandbox_id)).write(file_path, file_bytes)

    async def download_file(self, sandbox_id: str, file_path: str, local_file_path: str, **_: Any) -> None:
        """Copy a file of the sandbox to this machine."""
        content = await (await self._opened(sandbox_id)).read(file_path)
        await asyncio.to_thread(Path(local_file_path).write_bytes, content)

    async def wait_for_creation(self, sandbox_id: str, **_: Any) -> None:
        """Open the sandbox, if it is not open yet."""
        await self._opened(sandbox_id)

    async def delete(self, sandbox_id: str) -> None:
        """Close the sandbox."""
        await self._close(sandbox_id)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"sandbox_client.{name} is a call of the hosted sandbox service; sandboxes on this machine have "
            "execute_command, upload_file, upload_bytes, download_file, wait_for_creation and delete."
        )


class AwaitableDict(dict[str, Any]):
    """A dict that may also be awaited, from methods that overrides call in either way."""

    def __await__(self) -> Generator[Any, Any, dict[str, Any]]:
        yield from ()
        return self
