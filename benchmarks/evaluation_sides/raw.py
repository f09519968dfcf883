"""The floor: the same requests over aiohttp, decoded and compared; nothing is limited, recorded, retried or stored.

A third argument after the three of a side, `same-gc`, gives it this project's collector setting.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import aiohttp
import side


async def _evaluate(url: str, rollouts: int, in_flight: int) -> float:
    slots = asyncio.Semaphore(in_flight)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(index: int) -> float:
            async with slots:
                messages = [{"role": "user", "content": side.question(index)}]
                body = json.dumps({"model": side.MODEL, "messages": messages}).encode()
                headers = {"Content-Type": "application/json"}
                async with session.post(f"{url}/chat/completions", data=body, headers=headers) as response:
                    answer = json.loads(await response.read())
                return float(side.answer(index) in answer["choices"][0]["message"]["content"])

        return sum(await asyncio.gather(*map(one, range(rollouts)))) / rollouts


def evaluate(url: str, rollouts: int, in_flight: int, scratch: Path) -> side.Evaluated:
    """Send all requests at once, bounded by a semaphore."""
    setting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if sys.argv[4:] == ["same-gc"]:
        from verifiers.rollouts.run import relaxed_gc

        setting = relaxed_gc()
    with setting:
        return side.Evaluated(asyncio.run(_evaluate(url, rollouts, in_flight)))


if __name__ == "__main__":
    side.measure(evaluate)
