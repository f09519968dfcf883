"""Single-turn rollouts per second against an instant server, beside raw aiohttp and the openai client.

    python benchmarks/rollouts.py [--in-flight 256] [--requests 4000] [--rounds 5]

The server is a process of its own on loopback that answers at once with the same body. Three clients send the same
chat request with the same number in flight, alternately, several rounds; rates are medians over rounds, so that a
machine whose speed drifts treats all alike. A rollout here is the whole thing: `Environment.run_rollouts` with
recording handle, limiter, retry loop and deadline, and then its score.

Rollouts run with rarer garbage collections (`relaxed_gc` in verifiers/rollouts/run.py), which helps any client:
the floor is measured with Python's setting, as people write it, and with ours.

Ends with one line of JSON: ratio_to_raw (1.0 would be no overhead at all over aiohttp), ratio_to_raw_same_gc (the
same against raw aiohttp with our collector setting), ratio_to_openai, ratio_traced and cpu_ratio_traced (rate, and
CPU time of this process, with every rollout traced, to those with none: medians of pairs; the server takes the
spans, too), ratio_with_a_lost_server (on four servers of which one is stopped and started again, to the rate on
four).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import openai
from fake_process import server_process

import verifiers as vf
from verifiers import tracing
from verifiers.inference.limiter import Limiter
from verifiers.inference.server_pool import backend_for
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.rollouts.run import Run, relaxed_gc
from verifiers.testing import FakeOpenAIServer
from verifiers.types import RolloutKey

MESSAGES = [{"role": "user", "content": "What is 6 times 7?"}]
ANSWER = "The answer is 42."


async def raw_aiohttp(url: str, requests: int, in_flight: int) -> None:
    """Return the floor: encode, post, read, decode, nothing else."""
    slots = asyncio.Semaphore(in_flight)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one() -> None:
            async with slots:
                body = json.dumps({"model": "fake", "messages": MESSAGES}).encode()
                headers = {"Content-Type": "application/json"}
                async with session.post(f"{url}/chat/completions", data=body, headers=headers) as response:
                    answer = json.loads(await response.read())
                assert answer["choices"][0]["message"]["content"] == ANSWER

        await asyncio.gather(*(one() for _ in range(requests)))


async def raw_aiohttp_same_gc(url: str, requests: int, in_flight: int) -> None:
    with relaxed_gc():
        await raw_aiohttp(url, requests, in_flight)


async def openai_client(url: str, requests: int, in_flight: int) -> None:
    slots = asyncio.Semaphore(in_flight)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def one() -> None:
            async with slots:
                answer = await client.chat.completions.create(model="fake", messages=MESSAGES)
                assert answer.choices[0].message.content == ANSWER

        await asyncio.gather(*(one() for _ in range(requests)))


async def verifiers_rollouts(url: str | list[str], requests: int, in_flight: int) -> None:
    """Run rollouts of a SingleTurnEnv, recorded and scored, one group of eight after the other."""

    def correct(completion: vf.Messages, answer: str) -> float:
        return float(completion[-1]["content"] == answer)

    env = vf.SingleTurnEnv(eval_dataset=[{"prompt": MESSAGES, "answer": ANSWER}], rubric=vf.Rubric(funcs=[correct]))
    backend = backend_for(url)
    runner = Run(env, backend, "fake", {}, limiter=Limiter(in_flight))
    groups = [
        [RolloutRequest(RolloutKey(0, example, g), MESSAGES, ANSWER, seed=example * 8 + g + 1) for g in range(8)]
        for example in range(requests // 8)
    ]
    scored = await runner.run_groups(groups)
    await backend.close()
    assert all(rollout.reward == 1.0 for group in scored for rollout in group.rollouts)


LOADING_S, WARM_UP = 3.0, 400
TRACED = "rollouts, traced"
Client = Callable[[Any, int, int], Awaitable[None]]
CLIENTS: dict[str, Client] = {
    "raw aiohttp": raw_aiohttp,
    "raw, rarer collections": raw_aiohttp_same_gc,
    "verifiers rollouts": verifiers_rollouts,
    "openai.AsyncOpenAI": openai_client,
}


def measure(client: Client, url: Any, requests: int, in_flight: int) -> tuple[float, float]:
    """Return requests per second, and CPU seconds of this process per 1,000 requests."""
    started, cpu = time.perf_counter(), time.process_time()
    asyncio.run(client(url, requests, in_flight))  # type: ignore[arg-type]
    elapsed, used = time.perf_counter() - started, time.process_time() - cpu
    return requests / elapsed, used / requests * 1000


def measure_traced(url: str, requests: int, in_flight: int) -> tuple[float, float]:
    """Return the same of rollouts that are all traced, while they run."""
    settings = argparse.Namespace(trace=url.removesuffix("/v1"), trace_share=1.0, trace_content=False)
    stop = tracing.start(settings, "benchmark")
    # the process that sends spans loads on the cores that are measured
    time.sleep(LOADING_S)
    try:
        # what comes first after a pause is slower
        measure(verifiers_rollouts, url, WARM_UP, in_flight)
        return measure(verifiers_rollouts, url, requests, in_flight)
    finally:
        stop()


def paired(rates: dict[str, list[tuple[float, float]]], column: int) -> float:
    """Return the median ratio of a traced round to the same without traces: of the rate, or of the CPU time."""
    pairs = zip(rates[TRACED], rates["verifiers rollouts"], strict=True)
    return statistics.median(traced[column] / other[column] for traced, other in pairs)


def with_a_lost_server(requests: int, in_flight: int) -> float:
    """Return the rate on four servers of which one is stopped for a quarter of the time, over that on all four."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(FakeOpenAIServer(ANSWER, latency_s=0.05)) for _ in range(4)]
        urls = [server.url for server in servers]
        whole, _ = measure(verifiers_rollouts, urls, requests, in_flight)
        changes = [
            threading.Timer(requests / whole / 4, servers[0].stop),
            threading.Timer(requests / whole / 2, servers[0].start),
        ]
        for change in changes:
            change.start()
        lost, _ = measure(verifiers_rollouts, urls, requests, in_flight)
        for change in changes:
            change.join()
    return lost / whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in (*CLIENTS, TRACED)}
    with server_process(ANSWER, "--instant") as url:
        for client in CLIENTS.values():
            measure(client, url, WARM_UP, args.in_flight)
        for _ in range(args.rounds):
            for name, client in CLIENTS.items():
                requests = args.requests // 4 if client is openai_client else args.requests
                rates[name].append(measure(client, url, requests, args.in_flight))
            rates[TRACED].append(measure_traced(url, args.requests, args.in_flight))
    medians = {name: statistics.median(rate for rate, _ in runs) for name, runs in rates.items()}
    print(f"{args.in_flight} in flight, {args.requests} requests a round, medians of {args.rounds} rounds")
    for name, runs in rates.items():
        cpu = statistics.median(used for _, used in runs)
        low, high = min(r for r, _ in runs), max(r for r, _ in runs)
        print(f"{name:<22} {medians[name]:>8,.0f} /s  ({low:,.0f} .. {high:,.0f})  {cpu:.2f} s CPU per 1,000")
    ours = medians["verifiers rollouts"]
    ratios = {
        "ratio_to_raw": round(ours / medians["raw aiohttp"], 3),
        "ratio_to_raw_same_gc": round(ours / medians["raw, rarer collections"], 3),
        "ratio_to_openai": round(ours / medians["openai.AsyncOpenAI"], 3),
        "ratio_traced": round(paired(rates, 0), 3),
        "cpu_ratio_traced": round(paired(rates, 1), 3),
        "ratio_with_a_lost_server": round(
            statistics.median(with_a_lost_server(args.requests, args.in_flight) for _ in range(args.rounds)), 3
        ),
    }
    print(json.dumps(ratios))
    return 0


if __name__ == "__main__":
    sys.exit(main())
