"""Containers per second: sandboxes and whole rollouts of a Harbor task, beside what podman alone starts and stops.

    make podman && python benchmarks/containers.py [--containers 32] [--at-once 16] [--rounds 3]

Four ways take turns, several rounds; rates are medians over rounds:

    podman alone            `podman run --rm`, at once, until its process ends
    sandboxes               `open_sandbox` and its end, at once
    rollouts, at once       a Harbor task by its oracle: container, solution, tests, reward, end
    rollouts, one by one    the same, the next one after the last

Ends with one line of JSON: ratio_to_podman (sandboxes over podman alone; 1.0 would be as fast), ratio_at_once
(rollouts at once over one by one), rollouts_per_s, rewards_lost, containers_left. Says "not run" where podman is not
prepared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from verifiers.inference.endpoint import ClientBackend
from verifiers.inference.limiter import Limiter
from verifiers.integrations.harbor import HarborEnv
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.sandbox import open_sandbox
from verifiers.sandbox.spec import SandboxSpec
from verifiers.testing import FakeClient
from verifiers.types import RolloutKey

PLACE = Path(os.environ.get("VERIFIERS_PODMAN") or Path.home() / ".cache/verifiers-podman")
IMAGE = "python:3.11-slim"
FILES = {
    "task.toml": '[environment]\nnetwork_mode = "no-network"\n',
    "instruction.md": "Write 42 into /answer.",
    "environment/Dockerfile": f"FROM {IMAGE}\n",
    "tests/test.sh": '#!/bin/sh\n[ "$(cat /answer)" = 42 ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n',
    "solution/solve.sh": "#!/bin/sh\necho 42 > /answer\n",
}

Way = Callable[[int, int], Awaitable[int]]


async def at_once(one: Callable[[], Awaitable[bool]], count: int, limit: int) -> int:
    turns = asyncio.Semaphore(limit)

    async def in_turn() -> bool:
        async with turns:
            return await one()

    return sum(await asyncio.gather(*(in_turn() for _ in range(count))))


async def podman_alone(count: int, limit: int) -> int:
    async def one() -> bool:
        command = [
            "podman",
            "run",
            "--rm",
            "--init",
            "--network=none",
            "--memory=1g",
            "--pids-limit=64",
            IMAGE,
            "true",
        ]
        process = await asyncio.create_subprocess_exec(*command)
        return await process.wait() == 0

    return await at_once(one, count, limit)


async def sandboxes(count: int, limit: int) -> int:
    async def one() -> bool:
        async with await open_sandbox(SandboxSpec("podman")):
            return True

    return await at_once(one, count, limit)


def rollouts_of(env: HarborEnv) -> Way:
    async def rollouts(count: int, limit: int) -> int:
        row = env.get_eval_dataset()[0]
        info = json.loads(row["info"]) if isinstance(row["info"], str) else row["info"]
        runner = Run(env, ClientBackend(FakeClient("unasked")), "fake", limiter=Limiter(limit))
        requests = [RolloutRequest(RolloutKey(0, n, 0), row["prompt"], info=info) for n in range(count)]
        groups = await runner.run_groups([request] for request in requests)
        return sum(rollout.reward == 1.0 for group in groups for rollout in group.rollouts)

    return rollouts


def containers() -> list[str]:
    command = ["podman", "ps", "--all", "--quiet", "--filter=label=verifiers.sandbox"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--containers", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not (PLACE / "registries.conf").exists() or (PLACE / "not-available").exists():
        print("containers: not run: podman is not prepared (make podman)")
        return 0
    os.environ["CONTAINERS_CONF"] = str(PLACE / "containers.conf")
    os.environ["CONTAINERS_REGISTRIES_CONF"] = str(PLACE / "registries.conf")
    with tempfile.TemporaryDirectory() as directory:
        for name, text in FILES.items():
            path = Path(directory, "answer", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        env = HarborEnv(directory, agent="oracle", tool="podman")
        return measure(args, rollouts_of(env))


def measure(args: argparse.Namespace, rollouts: Way) -> int:
    few = max(2, args.containers // 4)
    ways: dict[str, tuple[Way, int, int]] = {
        "podman alone": (podman_alone, args.containers, args.at_once),
        "sandboxes": (sandboxes, args.containers, args.at_once),
        "rollouts, at once": (rollouts, args.containers, args.at_once),
        "rollouts, one by one": (rollouts, few, 1),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    lost = 0
    for way, _, _ in ways.values():
        # images are built and loaded before the clock runs
        asyncio.run(way(1, 1))
    for _ in range(args.rounds):
        for name, (way, count, limit) in ways.items():
            started = time.perf_counter()
            right = asyncio.run(way(count, limit))
            rates[name].append(count / (time.perf_counter() - started))
            lost += count - right
    left = containers()
    medians = {name: statistics.median(runs) for name, runs in rates.items()}
    print(f"{args.containers} containers, {args.at_once} at once, {args.rounds} rounds")
    for name, runs in rates.items():
        print(f"{name:<22} {medians[name]:>6.2f} a second  ({min(runs):.2f} .. {max(runs):.2f})")
    result = {
        "ratio_to_podman": round(medians["sandboxes"] / medians["podman alone"], 3),
        "ratio_at_once": round(medians["rollouts, at once"] / medians["rollouts, one by one"], 3),
        "rollouts_per_s": round(medians["rollouts, at once"], 2),
        "rewards_lost": lost,
        "containers_left": len(left),
    }
    print(json.dumps(result))
    return 1 if lost or left else 0


if __name__ == "__main__":
    sys.exit(main())
