"""Calls through the recording gateway, beside the same calls to the server behind it.

    python benchmarks/gateway.py [--in-flight 64] [--requests 4000] [--rounds 5]

Three processes: a server that answers at once, this one with the gateway, and a client of plain aiohttp, which plays
both sides. The calls are spread over 64 sessions, so that each is a rollout of its own, as in training: token ids and
log-probs are asked for and recorded. One call in ten is sent once more as an SDK's retry; it must add no turn.

Ends with one line of JSON: calls_per_second through the gateway, added_ms_p50 (the median of a call alone, with the
gateway less without), ratio_to_raw (of calls per second), extra_turns (recorded turns beyond the calls that differ).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import aiohttp
from fake_process import server_process

from verifiers.gateway.gateway import Gateway
from verifiers.gateway.session import Session
from verifiers.inference.endpoint import Endpoint, HttpBackend
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.rollouts.run import relaxed_gc

SESSIONS = 64
RETRIED = 10
ANSWER = "The answer is 42."


async def play(url: str, keys: list[str], requests: int, in_flight: int, retries: bool) -> dict[str, float]:
    """Send `requests` calls that all differ; return calls per second and the median seconds of one."""
    slots = asyncio.Semaphore(in_flight)
    seconds: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(number: int) -> None:
            messages = [{"role": "user", "content": f"What is 6 times {number}?"}]
            body = json.dumps({"model": "fake", "messages": messages, "max_tokens": 64}).encode()
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {keys[number % len(keys)]}"}
            async with slots:
                for again in (False, True) if retries and number % RETRIED == 0 else (False,):
                    headers["x-stainless-retry-count"] = str(int(again))
                    began = time.perf_counter()
                    async with session.post(f"{url}/chat/completions", data=body, headers=headers) as response:
                        answer = json.loads(await response.read())
                    seconds.append(time.perf_counter() - began)
                    assert answer["choices"][0]["message"]["content"] == ANSWER, answer

        began = time.perf_counter()
        await asyncio.gather(*(one(number) for number in range(requests)))
        elapsed = time.perf_counter() - began
    return {"rate": len(seconds) / elapsed, "p50": statistics.median(seconds)}


async def from_client(url: str, keys: list[str], requests: int, in_flight: int, *, retries: bool) -> dict[str, float]:
    """Play in a process of its own."""
    given = json.dumps([url, keys, requests, in_flight, retries])
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--client", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    output, _ = await process.communicate(given.encode())
    if process.returncode != 0:
        raise SystemExit("the client failed")
    measured: dict[str, float] = json.loads(output)
    return measured


async def through_gateway(gateway: Gateway, backend: HttpBackend, requests: int, in_flight: int) -> dict[str, Any]:
    sessions = [
        Session(RolloutClient(backend, model="fake", seed=number, require_tokens=True), "fake")
        for number in range(SESSIONS)
    ]
    async with contextlib.AsyncExitStack() as served:
        for session in sessions:
            await served.enter_async_context(gateway.serving(session))
        keys = [session.key for session in sessions]
        with relaxed_gc():
            measured = await from_client(gateway.base_url, keys, requests, in_flight, retries=True)
    turns = sum(len(session.client.turns) for session in sessions)
    return {**measured, "extra_turns": turns - requests}


async def measure(args: argparse.Namespace, url: str) -> dict[str, Any]:
    gateway, backend = Gateway(), HttpBackend(Endpoint(url))
    await gateway.start()
    raw, ours, alone, ours_alone = [], [], [], []
    await through_gateway(gateway, backend, 200, 8)
    for _ in range(args.rounds):
        raw.append(await from_client(url, ["none"], args.requests, args.in_flight, retries=False))
        ours.append(await through_gateway(gateway, backend, args.requests, args.in_flight))
        alone.append(await from_client(url, ["none"], 400, 1, retries=False))
        ours_alone.append(await through_gateway(gateway, backend, 400, 1))
    await gateway.close()
    await backend.close()
    rate = statistics.median(run["rate"] for run in ours)
    raw_rate = statistics.median(run["rate"] for run in raw)
    added_ms = [1000 * (a["p50"] - b["p50"]) for a, b in zip(ours_alone, alone, strict=True)]
    print(f"raw aiohttp {raw_rate:8,.0f} /s   through the gateway {rate:8,.0f} /s   {args.in_flight} in flight")
    return {
        "calls_per_second": round(rate),
        "added_ms_p50": round(statistics.median(added_ms), 2),
        "ratio_to_raw": round(rate / raw_rate, 3),
        "extra_turns": sum(run["extra_turns"] for run in (*ours, *ours_alone)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        print(json.dumps(asyncio.run(play(*json.loads(sys.stdin.read())))))
        return 0
    with server_process(ANSWER, "--instant") as url:
        print(json.dumps(asyncio.run(measure(args, url))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
