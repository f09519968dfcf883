"""The floor: the same requests over aiohttp, decoded and compared; nothing is limited, recorded or stored."""

from __future__ import annotations

import asyncio
import json
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


def evaluate(url: str, rollouts: int, in_flight: int, scratch: Path) -> float:
    """Send all requests at once, bounded by a semaphore."""
    return asyncio.run(_evaluate(url, rollouts, in_flight))


if __name__ == "__main__":
    side.measure(evaluate)
