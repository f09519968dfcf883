"""Runs to look at, and a real browser to look with: Chromium through its DevTools protocol, without a library."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import os
import random
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SENTENCE = "the train leaves at noon and arrives after three hours so we add them up and check the sum again"
WORDS = SENTENCE.split()


def make_row(example: int, generation: int, **fields: Any) -> dict[str, Any]:
    """Return a plausible row of results.jsonl; the same for the same numbers."""
    rng = random.Random(example * 1009 + generation)
    right = rng.random() < 1 / (1 + math.exp((example % 20 - 10) / 3))
    asked = random.Random(example)
    length = rng.randint(20, 300) + (100 if not right else 0)
    thought = " ".join(rng.choice(WORDS) for _ in range(length // 3))
    said = " ".join(rng.choice(WORDS) for _ in range(length // 4))
    return {
        "example_id": example,
        "generation": generation,
        "prompt": [
            {"role": "system", "content": "Answer with a number."},
            {"role": "user", "content": f"Task {example}: " + " ".join(asked.choice(WORDS) for _ in range(30))},
        ],
        "completion": [{"role": "assistant", "content": f"<think>{thought}</think>\n{said} = {example * 3}"}],
        "answer": str(example * 3),
        "task": "sums",
        "info": {},
        "outcome": "truncated" if length > 380 else "completed",
        "reward": 1.0 if right else 0.2 * rng.randint(0, 3),
        "error": None,
        "generation_ms": length * 21.5,
        "scoring_ms": 0.5,
        "prompt_tokens": 60,
        "completion_tokens": length,
        "right": float(right),
        "brief": round(1 - length / 500, 4),
        **fields,
    }


def failed_row(example: int, generation: int) -> dict[str, Any]:
    return make_row(
        example, generation, outcome="provider_error", reward=None, completion=[], completion_tokens=0,
        error="ProviderError: the server answered 503 after 6 attempts",
    )  # fmt: skip


def tool_row(example: int, generation: int, **fields: Any) -> dict[str, Any]:
    """Return a rollout with two calls in a turn, answered in the other order, and an answer that nobody asked for."""
    call = lambda id_, text: {"id": id_, "type": "function", "function": {"name": "add", "arguments": text}}  # noqa: E731
    completion = [
        {
            "role": "assistant",
            "content": "Let me add.",
            "reasoning_content": "Two sums are needed.",
            "tool_calls": [call("c1", '{"a": 1, "b": 2}'), call("c2", '{"a": 3, "b": 4}')],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "seven-result"},
        {"role": "tool", "tool_call_id": "c1", "content": "three-result"},
        {"role": "tool", "tool_call_id": "nobody", "content": "stray"},
        {"role": "assistant", "content": "3 and 7."},
    ]
    return make_row(example, generation, completion=completion, **fields)


def write_run(directory: Path, rows: Iterable[dict[str, Any]], **metadata: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "results.jsonl").open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    known = {
        "env": "sums",
        "model": "small-model",
        "started": "2026-01-02T03:04:05+0000",
        "num_examples": 40,
        "rollouts_per_example": 8,
        "sampling_args": {"temperature": 1.0},
        "summary": {"seconds": 123.4},
    }
    (directory / "metadata.json").write_text(json.dumps({**known, **metadata}), encoding="utf-8")
    return directory


def sums_rows(prompts: int = 40, generations: int = 8) -> list[dict[str, Any]]:
    rows = [make_row(example, generation) for example in range(prompts) for generation in range(generations)]
    rows[5] = failed_row(0, 5)
    rows[9] = tool_row(1, 1, reward=1.0)
    return rows


@pytest.fixture
def sums_run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "sums--small-model" / "aaaa1111", sums_rows())


class Page:
    """One tab of a browser."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(15):
            while True:
                message = json.loads((await self._socket.receive()).data)
                self._note(message)
                if message.get("id") == number:
                    assert "error" not in message, message
                    result: dict[str, Any] = message["result"]
                    return result

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"].get("exception", parameters)))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url="about:blank")
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && document.querySelector('main')?.firstChild")

    async def run(self, expression: str) -> Any:
        """Return the value of a script's expression; a promise is waited for."""
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, condition: str) -> None:
        async with asyncio.timeout(10):
            # the page has no way to call: it is asked until it says yes
            while not await self.run(f"Boolean({condition})"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def key(self, key: str) -> None:
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        code = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowDown": 40, "End": 35}.get(key, ord(key[0].upper()))
        # a key with text sends its character with the same event
        kind = "keyDown" if text else "rawKeyDown"
        extra = {"text": text} if text else {}
        await self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **extra)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def size(self, width: int, height: int, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self, path: Path) -> Path:
        shot = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))
        return path


def find_chromium() -> str | None:
    return next((path for name in CHROMIUM_NAMES if (path := shutil.which(name))), None)


@contextlib.asynccontextmanager
async def opened_browser(profile: Path) -> AsyncIterator[Page]:
    import aiohttp

    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium on the PATH: install the package `chromium` (Debian, Homebrew) or Google Chrome")
    process = await asyncio.create_subprocess_exec(
        program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--no-default-browser-check", "--remote-debugging-port=0", f"--user-data-dir={profile}",
        "--window-size=1280,800", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        port_file = profile / "DevToolsActivePort"
        async with asyncio.timeout(15):
            while not (port_file.exists() and port_file.read_text().count("\n")):
                assert process.returncode is None, f"{program} ended with {process.returncode}"
                await asyncio.sleep(0.02)
        port = int(port_file.read_text().split()[0])
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                targets = await answer.json()
            address = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await page.call(f"{domain}.enable")
                yield page
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Page]:
    """Return a fresh headless Chromium with an empty profile."""
    async with opened_browser(tmp_path / "profile") as page:
        yield page


@pytest.fixture
def rows() -> Callable[..., dict[str, Any]]:
    return make_row
