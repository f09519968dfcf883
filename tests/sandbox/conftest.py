"""Isolation levels that the tests run in, and a look at what is left behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from verifiers.sandbox import open_sandbox
from verifiers.sandbox.agent_sandbox import AgentSandbox
from verifiers.sandbox.spec import IsolationLevel, Sandbox, SandboxSpec
from verifiers.sandbox.worker_pool import WorkerPool


@functools.cache
def bubblewrap_works() -> bool:
    async def attempt() -> bool:
        async with await open_sandbox() as sandbox:
            return sandbox.isolation == "bubblewrap"

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        # fixtures ask inside and outside of event loops
        return thread.submit(asyncio.run, attempt()).result()


def need(isolation: IsolationLevel) -> None:
    if isolation == "bubblewrap" and not bubblewrap_works():
        pytest.skip("bubblewrap does not work here")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test at the levels that it or its module names, and else at those of this machine's own processes."""
    own = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "isolation" in metafunc.fixturenames and not any("isolation" in names for names in own):
        levels = getattr(metafunc.module, "LEVELS", ("process", "bubblewrap"))
        metafunc.parametrize("isolation", levels, indirect=True)


@pytest.fixture
def isolation(request: pytest.FixtureRequest) -> IsolationLevel:
    level: IsolationLevel = request.param
    if level == "podman":
        request.getfixturevalue("podman")
    need(level)
    return level


@pytest.fixture
def contained() -> str:
    """Return the isolation level that contains everything."""
    need("bubblewrap")
    return "bubblewrap"


@pytest.fixture
async def box(isolation: IsolationLevel) -> AsyncIterator[Sandbox]:
    async with await open_sandbox(SandboxSpec(isolation, wall_time_s=60)) as sandbox:
        yield sandbox


@pytest.fixture
def marker() -> str:
    """Return an argument that no other process of this machine has; `sleep` takes it for a number of seconds."""
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
        end = time.monotonic() + 60
        while left := processes_with(word):
            assert time.monotonic() < end, f"still alive: {left}"
            time.sleep(0.01)

    return wait


@pytest.fixture
def count_of() -> Callable[[str], int]:
    return lambda word: len(processes_with(word))


@pytest.fixture
async def sealed(contained: str) -> AsyncIterator[AgentSandbox]:
    """Yield a sandbox of the level that contains everything."""
    async with await open_sandbox(SandboxSpec(isolation="bubblewrap", wall_time_s=60)) as sandbox:
        assert isinstance(sandbox, AgentSandbox)
        yield sandbox


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a directory with functions to call, as of a package that is not installed."""
    directory = tmp_path_factory.mktemp("functions")
    # readable by the other user that root's sandboxes run as
    directory.chmod(0o755)
    shutil.copy(Path(__file__).with_name("pool_functions.py"), directory)
    return str(directory)


@pytest.fixture(scope="module", params=["process", "bubblewrap"])
def pool(request: pytest.FixtureRequest, functions: str) -> Iterator[WorkerPool]:
    """Yield one worker of each level, which the tests of a file share: what they do to it must not matter."""
    need(request.param)
    with WorkerPool(workers=1, isolation=request.param, timeout_s=60, paths=[functions]) as pool:
        yield pool
