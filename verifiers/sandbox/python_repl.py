"""Host side of a Python interpreter in a sandbox: cells in, text out, and a new interpreter where one is lost.

What the process executes, and how the two sides talk, is in `verifiers.sandbox.python_driver`.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.resources
import secrets
import sys

from verifiers.errors import SandboxError
from verifiers.sandbox.python_driver import CODEC
from verifiers.sandbox.spec import Sandbox, SandboxProcess

_LOST = "The interpreter was restarted: all variables, functions and imports are lost."
_FORGED = "The code wrote where the interpreter's own answers belong, so it was stopped."


@functools.cache
def _driver() -> str:
    return importlib.resources.files("verifiers.sandbox").joinpath("python_driver.py").read_text(encoding="utf-8")


class PythonInterpreter:
    """A process that runs cells one after the other, started at the first of them.

    Args:
        sandbox: where the process lives; it ends with the sandbox at the latest.
        cell_timeout_s: seconds that one cell may take.
        startup_timeout_s: seconds that the interpreter may take to start.
        max_output_chars: how much of a cell's output is kept; the middle is left out.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        cell_timeout_s: float = 30.0,
        startup_timeout_s: float = 30.0,
        max_output_chars: int = 20_000,
    ) -> None:
        self._sandbox = sandbox
        self._cell_timeout_s = cell_timeout_s
        self._startup_timeout_s = startup_timeout_s
        self._max_output_chars = max_output_chars
        self._turn = asyncio.Lock()
        self._process: SandboxProcess | None = None
        self._lost = False

    async def run(self, code: str) -> str:
        """Run a cell; return what it printed, with the value of its last expression or its traceback.

        A cell that runs too long, or ends the process, gets a new interpreter at once, and the text says that the
        state is lost. So it is when a call is cancelled, but then the next cell's text says so.
        """
        async with self._turn:
            process = self._process or await self._start()
            lost, self._lost = self._lost, False
            nonce = secrets.token_hex(16)
            # until an answer came, nobody knows what the process is at
            self._process = None
            try:
                await process.write(nonce.encode() + b" " + code.encode(CODEC) + b"\n")
                line = await process.read_line(timeout_s=self._cell_timeout_s)
            except TimeoutError:
                why = f"The code ran longer than {self._cell_timeout_s:g} s and was stopped."
            except SandboxError:
                # of this process or of the whole sandbox: the new start will tell
                why = "The interpreter stopped answering."
            except BaseException:
                # cancelled: kill it here, or it would run until the sandbox is closed
                self._lost = True
                await _kill_whatever_comes(process)
                raise
            else:
                output = _output_of(line, nonce)
                if output is not None:
                    self._process = process
                    text = output.rstrip("\n") or "[no output]"
                    return f"{_LOST}\n{text}" if lost else text
                # bytes that are no answer were written in its place
                why = _FORGED if line else "The code ended the interpreter."
            await process.kill()
            self._process = await self._start()
            return f"{why} {_LOST}"

    async def _start(self) -> SandboxProcess:
        python = "python3" if self._sandbox.isolation in ("docker", "podman") else sys.executable
        command = [python, "-I", "-c", _driver(), str(self._max_output_chars)]
        process = await self._sandbox.start(command)
        try:
            line = await process.read_line(timeout_s=self._startup_timeout_s)
        except TimeoutError:
            await process.kill()
            raise SandboxError(
                f"The Python interpreter did not start within {self._startup_timeout_s:g} s in the sandbox."
            ) from None
        except BaseException:
            await _kill_whatever_comes(process)
            raise
        if _output_of(line, "ready") is None:
            await process.kill()
            raise SandboxError(f"No Python interpreter starts in the sandbox: {process.stderr().strip()[-500:]!r}.")
        return process


def _output_of(line: bytes, nonce: str) -> str | None:
    """Return the output in a reply; None where the line is not the reply to this request."""
    found, _, body = line.partition(b" ")
    if not secrets.compare_digest(found, nonce.encode()) or not line.endswith(b"\n"):
        return None
    try:
        return body[:-1].decode(CODEC)
    except UnicodeDecodeError:
        return None


async def _kill_whatever_comes(process: SandboxProcess) -> None:
    killing = asyncio.ensure_future(process.kill())
    try:
        await asyncio.shield(killing)
    except asyncio.CancelledError:
        await killing
        raise
