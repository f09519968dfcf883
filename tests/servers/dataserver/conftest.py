"""A dataserver in this process, over real sockets on 127.0.0.1, from a configuration that the test writes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from verifiers_dataserver.config import load_configuration
from verifiers_dataserver.serving import load, running

from verifiers.server_process import bind

GRADERS = """
import os, time

def half(completion): return 0.5
def given(text): return float(text)
def hang(): time.sleep(1e6)
def spin():
    while True: pass
def die(): os._exit(3)
def quote(answer): raise ValueError(answer)
def nothing(): return None
def slow_if(text):
    if text == "slow": time.sleep(1e6)
    return 1.0
def options(parsed, answer, info, bonus=0.0): return float(parsed == answer) + bonus + info.get("extra", 0)
def niceness(): return float(os.nice(0))
async def later(text): return float(len(text))
"""


class Client:
    """HTTP client of a server of a test."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, **options) as response:
            return response.status, await response.json()

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.session.get(self.url + path, **options) as response:
            return response.status, await response.json()

    async def text(self, path: str) -> str:
        async with self.session.get(self.url + path) as response:
            return await response.text()

    async def grade(self, *items: tuple[str, str]) -> list[dict[str, Any]]:
        """Version 2's results for (sample id, completion) pairs, in order."""
        status, answer = await self.post("/v2/grade", {"items": graded(*items)})
        assert status == 200, answer
        return sorted(answer["results"], key=lambda result: result["completion_index"])


def graded(*items: tuple[str, str]) -> list[dict[str, Any]]:
    return [
        {"sample_id": sample, "completion": text, "completion_index": index, "completion_tokens": len(text)}
        for index, (sample, text) in enumerate(items)
    ]


Serve = Callable[..., Awaitable[Client]]


@pytest.fixture
def configure(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Return a function that writes a configuration, as YAML, of which JSON is a part."""

    def write(configuration: dict[str, Any]) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(json.dumps(configuration))
        return path

    return write


@pytest_asyncio.fixture
async def serve(configure: Callable[[dict[str, Any]], Path]) -> AsyncIterator[Serve]:
    """Start servers of a configuration, and end them with the test."""
    async with AsyncExitStack() as stack:

        async def begin(configuration: dict[str, Any], token: str | None = None) -> Client:
            loaded = load(load_configuration(configure(configuration)))
            listener = bind("127.0.0.1", 0)
            stack.callback(listener.close)
            url = await stack.enter_async_context(running(loaded, listener, token))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            return Client(url, session)

        yield begin


@pytest.fixture(scope="session")
def grader_directory() -> Iterator[Path]:
    """Write the module of graders, where the user that sandboxes run as may read it, unlike pytest's own folders."""
    with tempfile.TemporaryDirectory(prefix="graders-") as directory:
        os.chmod(directory, 0o755)
        (Path(directory) / "graders_of_a_user.py").write_text(GRADERS)
        yield Path(directory)


@pytest.fixture
def python(grader_directory: Path) -> Callable[..., dict[str, Any]]:
    """Return a function for the table of a grader out of the module of graders."""

    def table(name: str, **fields: Any) -> dict[str, Any]:
        path = str(grader_directory)
        return {"python": f"graders_of_a_user:{name}", "path": path, "timeout_s": 30.0, **fields}

    return table
