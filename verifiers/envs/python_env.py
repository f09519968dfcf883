"""PythonEnv: a Python interpreter for each rollout, in a sandbox, that keeps its state between calls."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from verifiers.envs.python_interpreter import PythonInterpreter, python_command
from verifiers.envs.sandbox_env import SandboxEnv
from verifiers.errors import ConfigError
from verifiers.sandbox.spec import Sandbox, SandboxSpec
from verifiers.types import State

__all__ = ["PythonEnv"]

# in the codec of the interpreter's answers, for characters beyond U+FFFF
_BYTES_PER_CHAR = 10
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_MISSING = """
import sys
from importlib.metadata import PackageNotFoundError, version
for name in sys.argv[1:]:
    try:
        version(name)
    except PackageNotFoundError:
        print(name)
"""


class PythonEnv(SandboxEnv):
    """A tool environment with the tool `python(code)`, whose variables, functions and imports stay between calls.

    Code runs as in a notebook: what it prints is captured, the value of a last expression is shown, and a traceback
    begins in the code. Calls of one turn run one after the other, in their order. A call that runs too long is killed
    and gets a new interpreter, and the policy is told that the state is lost.

    Args:
        spec, timeout_per_command_s, max_output_chars: as `SandboxEnv`.
        pip_install_packages: what the code may import, as "numpy sympy" or a list. Nothing is installed, since
            sandboxes have no network: one that is missing is warned of, once.
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
        self._packages_checked = False
        self._interpreters: dict[str, PythonInterpreter] = {}
        self.remove_tool(self.bash)
        self._add_bounded_tool(self.python)

    async def python(self, code: str, sandbox_id: str) -> str:
        """Run Python code and get what it prints and the value of its last expression.

        Args:
            code: the code; variables, functions and imports of earlier calls are still there.
        """
        sandbox = await self._opened(sandbox_id)
        interpreter = self._interpreters.get(sandbox_id)
        if interpreter is None:
            interpreter = self._interpreters[sandbox_id] = PythonInterpreter(
                sandbox,
                cell_timeout_s=self.timeout_per_command_s,
                startup_timeout_s=self.max_startup_wait_seconds,
                max_output_chars=self.max_output_chars,
            )
        return await interpreter.run(code)

    async def run_python(self, code: str, state: State) -> str:
        """Run code in the rollout's interpreter, for the environment's own use, such as in `post_rollout`."""
        return await self.python(code, self._sandbox_id(state))

    async def _prepare(self, sandbox: Sandbox) -> None:
        await super()._prepare(sandbox)
        if self.pip_install_packages and not self._packages_checked:
            self._packages_checked = True
            names = [re.split(r"[\s\[<>=!~;@]", package, maxsplit=1)[0] for package in self.pip_install_packages]
            result = await sandbox.run([python_command(sandbox.tier), "-I", "-c", _MISSING, *names])
            if missing := result.stdout.split():
                self.logger.warning(
                    "pip_install_packages installs nothing, because sandboxes (tier %r) are to do without a network: "
                    "%s cannot be imported in them. Install it in %s.",
                    sandbox.tier,
                    ", ".join(missing),
                    "the image" if sandbox.tier in ("docker", "podman") else "the environment that runs verifiers",
                )

    async def _close(self, sandbox_id: str) -> None:
        self._interpreters.pop(sandbox_id, None)
        await super()._close(sandbox_id)
