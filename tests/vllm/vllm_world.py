"""A policy that vLLM's CPU attention takes, and a server process that can be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny_world
from tiny_models import write_random_qwen3

PYTHON = os.environ["VERIFIERS_VLLM_PYTHON"]


def make_model(directory: Path, *, seed: int) -> Path:
    """Return a random Qwen3 with heads of 32; its distributions are far from flat."""
    sizes = {"head_dim": 32, "max_position_embeddings": 1024, "initializer_range": 0.2}
    return write_random_qwen3(directory, tiny_world.make_tokenizer(), seed=seed, **sizes)


class Server:
    """`vf-vllm` as a process.

    Args:
        args: further arguments.
        log: where its output goes.

    Attributes:
        port: picked at the first start; later starts take it again.
    """

    def __init__(self, model: Path, args: Sequence[str], log: Path, start_s: float) -> None:
        self.model, self.log, self.port = model, log, 0
        self._args, self._start_s = list(args), start_s
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        """Start it and wait until it answers."""
        self.begin()
        return self.until_ready()

    def begin(self) -> None:
        """Start it."""
        self._port_file.unlink(missing_ok=True)
        command = [PYTHON, "-m", "verifiers_vllm", "--model", str(self.model), "--served-model-name", "policy"]
        command += ["--port", str(self.port), "--port-file", str(self._port_file), "--threads", "1"]
        command += ["--max-model-len", "512", "--parent-pid", str(os.getpid()), *self._args]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def until_ready(self) -> Server:
        assert self._process is not None
        deadline = time.monotonic() + self._start_s
        while not self._port_file.exists():
            assert self._process.poll() is None, self.log.read_text()[-600:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.1)
        self.port = int(self._port_file.read_text())
        return self

    @property
    def _port_file(self) -> Path:
        return self.log.with_name("port")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Kill -9 of the command; what it started must end by itself."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> float:
        """SIGTERM; the seconds until it has ended."""
        started = time.monotonic()
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
        return time.monotonic() - started

    def ask(self, path: str, body: Any = None, timeout_s: float = 60.0) -> Any:
        """Return the JSON answer of a route; POST where there is a body."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                content = response.read()
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{path}: {error.read()[:500]!r}\n{self.trouble()}") from None
        return json.loads(content) if content else None

    def trouble(self) -> str:
        """Return what the server's log says of errors."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([line[:300] for line in lines if "ERROR" in line][:40])

    def generated_tokens(self) -> float:
        """Return how many tokens it has sampled since it started."""
        lines = self.metrics().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def sample(self, prompt_ids: Sequence[int], **sampling: Any) -> dict[str, Any]:
        """One choice of /inference/v1/generate."""
        settings = {"max_tokens": 16, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, **sampling}
        answer = self.ask("/inference/v1/generate", {"token_ids": list(prompt_ids), "sampling_params": settings})
        choice: dict[str, Any] = answer["choices"][0]
        return choice


def log_probs(choice: dict[str, Any]) -> list[float]:
    """Return the sampled tokens' log-probs in an answer of /inference/v1/generate."""
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


def members(pid: int) -> list[int]:
    """Return the processes that have `pid` among their ancestors."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
    found, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return sorted(found - {pid})


def is_running(pid: int) -> bool:
    """Return whether a process computes; a zombie does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False
