"""Tiers that the tests run in, and a look at what is left behind."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from verifiers.sandbox.native import NativeSandbox
from verifiers.sandbox.opening import default_tier, open_sandbox
from verifiers.sandbox.spec import SandboxSpec
from verifiers.sandbox.workers import WorkerPool


def need(tier: str) -> None:
    if tier == "namespaces" and default_tier() != "namespaces":
        pytest.skip("the kernel does not allow user namespaces here")


@pytest.fixture(params=["process", "namespaces"])
def tier(request: pytest.FixtureRequest) -> str:
    need(request.param)
    return str(request.param)


@pytest.fixture
def contained() -> str:
    """The tier that contains everything."""
    need("namespaces")
    return "namespaces"


@pytest.fixture
async def box(tier: str) -> AsyncIterator[NativeSandbox]:
    async with await open_sandbox(SandboxSpec(tier=tier, wall_time_s=10)) as sandbox:  # type: ignore[arg-type]
        assert isinstance(sandbox, NativeSandbox)
        yield sandbox


@pytest.fixture
def marker() -> str:
    """An argument that no other process of this machine has; `sleep` takes it for a number of seconds."""
    return f"7{uuid.uuid4().int % 10**15}"


def processes_with(word: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if word.encode() in arguments:
                found.append(int(entry.name))
    return found


@pytest.fixture
def wait_until_gone() -> Callable[[str], None]:
    """Fails unless every process with the marker is gone within seconds."""
    if not os.path.isdir("/proc/self"):
        pytest.skip("needs /proc")

    def wait(word: str) -> None:
        end = time.monotonic() + 8
        while left := processes_with(word):
            assert time.monotonic() < end, f"still alive: {left}"
            time.sleep(0.01)

    return wait


@pytest.fixture
def count_of() -> Callable[[str], int]:
    return lambda word: len(processes_with(word))


@pytest.fixture
async def sealed(contained: str) -> AsyncIterator[NativeSandbox]:
    """A sandbox of the tier that contains everything."""
    async with await open_sandbox(SandboxSpec(tier="namespaces", wall_time_s=10)) as sandbox:
        assert isinstance(sandbox, NativeSandbox)
        yield sandbox


@pytest.fixture
def functions(tmp_path: Path) -> str:
    """A directory with functions to call, as of a package that is not installed."""
    # readable by the other user that root's sandboxes run as
    tmp_path.chmod(0o755)
    shutil.copy(Path(__file__).with_name("pool_functions.py"), tmp_path)
    return str(tmp_path)


@pytest.fixture
def pool(tier: str, functions: str) -> Iterator[WorkerPool]:
    with WorkerPool(workers=1, tier=tier, timeout_s=5, paths=[functions]) as pool:  # type: ignore[arg-type]
        yield pool
