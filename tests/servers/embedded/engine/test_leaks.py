"""Ten thousand requests of all kinds leave behind what a few leave behind: the kept prefixes, and those bounded."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from verifiers_embedded.engine.generation import Sequence
from verifiers_embedded.engine.prefixes import Prefix
from verifiers_embedded.routes.events import Watched

REQUESTS = 10_000
WARM_UP = 2_000
IN_FLIGHT = 100
PREFIX_BYTES = 2**20
# oneDNN keeps up to 1,024 plans of products by their shapes: 60 MiB after 10,000 requests, 78 after 40,000
GROWTH_MIB = 90

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "ignore_eos": True}
REFUSED: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {**CHAT, "temperature": -1}),
    ("/v1/chat/completions", {**CHAT, "model": "other"}),
    ("/v1/completions", {"model": "m", "prompt": [10**6]}),
    ("/inference/v1/generate", {"token_ids": []}),
    ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "nowhere"}}),
    ("/nowhere", {}),
]


async def plain(server: Any, rng: random.Random) -> str:
    fields = {"n": rng.randint(1, 2), "stop": "zq", "logprobs": True, "top_logprobs": rng.randint(0, 3)}
    messages = [{"role": "user", "content": "x" * rng.randint(1, 60)}]
    status, answer = await server.post(
        "/v1/chat/completions", {**CHAT, **fields, "messages": messages, "max_tokens": rng.randint(1, 12)}
    )
    assert status == 200, answer
    return "plain"


async def streamed(server: Any, rng: random.Random) -> str:
    body = {"model": "m", "prompt": ["a", "b" * rng.randint(1, 40)], "max_tokens": rng.randint(1, 12), "stream": True}
    async with server.session.post(server.base + "/v1/completions", json=body) as response:
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
    return "streamed"


async def hung_up(server: Any, rng: random.Random) -> str:
    body = {**CHAT, "stream": True, "max_tokens": 200, "n": rng.randint(1, 2)}
    async with server.session.post(server.base + "/v1/chat/completions", json=body) as response:
        assert await response.content.readline()
        response.close()
    return "hung up"


async def refused(server: Any, rng: random.Random) -> str:
    path, body = rng.choice(REFUSED)
    status, answer = await server.post(path, body)
    assert 400 <= status < 500, answer
    return "refused"


async def load(server: Any, requests: int, seed: int) -> Counter[str]:
    """Send requests of all kinds, so many at once; return how many of each."""
    rng, done = random.Random(seed), Counter[str]()
    kinds = rng.choices([plain, streamed, hung_up, refused], weights=[45, 25, 10, 20], k=requests)
    left = iter(kinds)

    async def worker(number: int) -> None:
        own = random.Random(seed * 1000 + number)
        for kind in left:
            done[await kind(server, own)] += 1

    async with asyncio.TaskGroup() as group:
        for number in range(IN_FLIGHT):
            group.create_task(worker(number))
    return done


def open_files() -> int:
    folder = Path("/proc/self/fd") if Path("/proc/self/fd").exists() else Path("/dev/fd")
    return len(os.listdir(folder))


async def left_behind(server: Any) -> dict[str, int]:
    """Return what is held when nothing is asked for."""
    await server.until(lambda: server.engine.counts == {"running": 0, "waiting": 0})
    # without the client's kept connections no task is left but the test's own
    await server.session.close()
    await server.until(lambda: len(asyncio.all_tasks()) == 1)
    server.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    gc.collect()
    objects = Counter(type(item) for item in gc.get_objects())
    return {
        "files": open_files(),
        "sequences": objects[Sequence],
        "watched": objects[Watched],
        # of no store that is in use here; servers of other tests may still have some
        "prefixes": objects[Prefix] - len(server.engine._batch.prefixes),
        "MiB": psutil.Process().memory_info().rss >> 20,
    }


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_ten_thousand_requests_leave_nothing_but_the_bounded_prefixes(start: Any) -> None:
    server = await start(slots=64, prefix_bytes=PREFIX_BYTES)
    await load(server, WARM_UP, seed=0)
    before = await left_behind(server)
    done = await load(server, REQUESTS, seed=1)
    after = await left_behind(server)
    print(before, after, dict(done), server.engine.prefixes)
    assert sum(done.values()) == REQUESTS
    assert min(done.values()) > 500
    for name in ("files", "sequences", "watched", "prefixes"):
        assert after[name] <= before[name], name
    assert after["MiB"] - before["MiB"] <= GROWTH_MIB
    engine, store = server.engine, server.engine._batch.prefixes
    assert server.engine.failure is None
    assert [list(queue) for queue in (engine._waiting, engine._commands, engine._drained)] == [[], [], []]
    assert 0 < store.bytes <= PREFIX_BYTES
    assert sum(map(len, store._by_block.values())) == sum(len(prefix.blocks) for prefix in store._held)
    await server.session.close()
