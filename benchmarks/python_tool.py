"""Python tool calls per second through PythonEnv, beside bare `python -c` processes.

    python benchmarks/python_tool.py [--calls 200] [--calls-per-rollout 10] [--rounds 5] [--isolation auto]

All calls of a round are in flight at once. Three ways take turns, several rounds; rates are medians over rounds, so
that a machine whose speed drifts treats all alike:

    python -c               a bare process for each call: no sandbox, no limits, no state
    PythonEnv, new          rollouts with one call each: a sandbox and an interpreter are started and removed for each
    PythonEnv, kept         rollouts with several calls each, which share their rollout's interpreter

A rollout here is the whole thing (the policy is a fake client that answers at once). Every answer is checked, and
processes are counted before and after; orphans are adopted, so that none can hide (Linux).

Ends with one line of JSON: ratio_new and ratio_kept (1.0 would be as fast as bare `python -c`), calls_lost,
processes_left.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil

import verifiers as vf
from verifiers.inference.endpoint import ClientBackend
from verifiers.inference.limiter import Limiter
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.testing import FakeClient
from verifiers.types import RolloutKey

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def adopt_orphans() -> None:
    """Make processes whose parents end children of this one, so that they are counted."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def descendants() -> set[int]:
    """Return the processes under this one that still run."""
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE}


def code_of(call: int) -> str:
    return f"print({call} * 2)"


async def bare(calls: int, _: int, __: str) -> int:
    async def one(call: int) -> bool:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-c", code_of(call), stdout=asyncio.subprocess.PIPE
        )
        answer, _ = await process.communicate()
        return answer.decode().strip() == str(call * 2)

    return sum(await asyncio.gather(*(one(call) for call in range(calls))))


async def rollouts(calls: int, per_rollout: int, isolation: str) -> int:
    """Make the calls in whole rollouts; returns how many of them gave the right answer."""

    def answer(body: dict[str, Any]) -> Any:
        done = sum(message["role"] == "tool" for message in body["messages"])
        if done == per_rollout:
            return "done"
        call = int(body["messages"][0]["content"]) * per_rollout + done
        return {"tool_calls": [{"name": "python", "arguments": {"code": code_of(call)}}]}

    env = vf.PythonEnv(
        vf.SandboxSpec(isolation=isolation),
        eval_dataset=[{"question": "0"}],
        max_turns=per_rollout + 1,  # type: ignore[arg-type]
    )
    runner = Run(env, ClientBackend(FakeClient(answer)), "fake", limiter=Limiter(calls))
    finished = await runner.play(
        [
            RolloutRequest(RolloutKey(0, number, 0), [{"role": "user", "content": str(number)}])
            for number in range(calls // per_rollout)
        ]
    )
    right = 0
    for number, rollout in enumerate(finished):
        said = [message["content"] for message in rollout.completion if message["role"] == "tool"]
        right += sum(text == str((number * per_rollout + call) * 2) for call, text in enumerate(said))
    return right


Way = Callable[[int, int, str], Awaitable[int]]
WAYS: dict[str, tuple[Way, bool]] = {
    "python -c": (bare, False),
    "PythonEnv, new": (rollouts, False),
    "PythonEnv, kept": (rollouts, True),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--calls-per-rollout", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--isolation", default="auto")
    args = parser.parse_args()
    adopt_orphans()
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    lost = 0
    for way, _ in WAYS.values():
        asyncio.run(way(10, 1, args.isolation))  # type: ignore[arg-type]
    before = descendants()
    for _ in range(args.rounds):
        for name, (way, keeps) in WAYS.items():
            started = time.perf_counter()
            right = asyncio.run(way(args.calls, args.calls_per_rollout if keeps else 1, args.isolation))  # type: ignore[arg-type]
            rates[name].append(args.calls / (time.perf_counter() - started))
            lost += args.calls - right
    left = descendants() - before
    medians = {name: statistics.median(runs) for name, runs in rates.items()}
    print(f"{args.calls} calls in flight, {args.calls_per_rollout} a rollout where kept, {args.rounds} rounds")
    for name, runs in rates.items():
        print(f"{name:<18} {medians[name]:>8,.0f} calls/s  ({min(runs):,.0f} .. {max(runs):,.0f})")
    result = {
        "ratio_new": round(medians["PythonEnv, new"] / medians["python -c"], 3),
        "ratio_kept": round(medians["PythonEnv, kept"] / medians["python -c"], 3),
        "calls_lost": lost,
        "processes_left": len(left),
    }
    print(json.dumps(result))
    return 1 if lost or left else 0


if __name__ == "__main__":
    sys.exit(main())
