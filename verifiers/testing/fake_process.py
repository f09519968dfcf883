"""The server without a model in a process of its own, for benchmarks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["server_process"]


@contextlib.contextmanager
def server_process(answer: str, *flags: str) -> Iterator[str]:
    """Run `verifiers.testing.fake_server` while the block runs, and return its base URL.

    Args:
        flags: further ones of the server's command, such as "--instant".

    Raises:
        RuntimeError: the server did not start.
    """
    with tempfile.TemporaryDirectory() as scratch:
        port_file = Path(scratch) / "port"
        command = [sys.executable, "-m", "verifiers.testing.fake_server", "--answer", answer, *flags]
        process = subprocess.Popen([*command, "--port-file", str(port_file), "--parent-pid", str(os.getpid())])
        try:
            while not port_file.exists():
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended with {process.returncode} before it listened")
                time.sleep(0.02)
            yield f"http://127.0.0.1:{port_file.read_text().strip()}/v1"
        finally:
            process.terminate()
            process.wait()
