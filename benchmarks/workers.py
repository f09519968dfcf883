"""Rollouts in worker processes and in Ray beside rollouts inline.

    python benchmarks/workers.py [--rollouts 200] [--rounds 3]

`processes_ratio`: rollouts per second of two worker processes over inline, where a reward burns 50 ms of CPU. It
needs two cores that are free. `ray_ratio`: the same of two workers in a Ray cluster of this machine, where Ray is
installed. `overhead_ms`: CPU, of rank 0 and the worker processes together, that a worker adds to a rollout of an
empty environment with one call of a model that answers at once. The start of the workers is in none of them: rates
are measured from the first scored rollout on, and the overhead is the difference between a long and a short run.
`step_ratio`: seconds of a training step on one thread of this process beside one busy worker process, over the step
alone; `step_ratio_inline` beside the same rewards inline, on the event loop's thread.

Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# a module that worker processes can import, too
sys.path.insert(0, str(Path(__file__).parent / "worker_sides"))
import torch
import worker_environments

import verifiers as vf
from verifiers.inference.endpoint import ClientBackend
from verifiers.inference.limiter import Limiter
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.testing import FakeClient
from verifiers.types import RolloutKey
from verifiers.workers.settings import WorkerSettings

ENGINES = ("inline", "processes:2", "ray:2")
GROUP = 8


async def play(
    engine: str,
    make: Callable[[], vf.Environment],
    rollouts: int,
    in_flight: int,
    begun: threading.Event | None = None,
) -> float:
    """Play rollouts in groups; return the rollouts per second after the first four, at whose end `begun` is set."""
    env = make()
    played = WorkerSettings.parse(engine).open([(env, make)], blocked_s=120.0).of(env)
    scored: list[float] = []

    def note(rollout: Rollout) -> None:
        assert rollout.reward == 1.0, rollout
        scored.append(time.perf_counter())

    runner = Run(played, ClientBackend(FakeClient("42")), "instant", {}, limiter=Limiter(in_flight), on_rollout=note)
    row = worker_environments.ROW

    def group(example: int) -> list[RolloutRequest]:
        keys = [RolloutKey(0, example, generation) for generation in range(GROUP)]
        return [RolloutRequest(key, row["prompt"], row["answer"], seed=1) for key in keys]

    # every worker has played before the clock starts
    await runner.run_groups(group(example) for example in range(4))
    before = len(scored)
    if begun is not None:
        begun.set()
    started = time.perf_counter()
    await runner.run_groups(group(example) for example in range(4, 4 + rollouts // GROUP))
    return (len(scored) - before) / (time.perf_counter() - started)


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def cpu_ms_of_a_rollout(engine: str, rollouts: int) -> float:
    """Return the CPU of one more rollout of an empty environment."""
    spent = []
    # what is imported at the first use belongs to neither
    asyncio.run(play(engine, worker_environments.empty, GROUP, 256))
    for count in (GROUP * 4, GROUP * 4 + rollouts):
        before = cpu_s()
        asyncio.run(play(engine, worker_environments.empty, count, 256))
        spent.append(cpu_s() - before)
    return (spent[1] - spent[0]) / rollouts * 1000


class Training:
    """A model whose steps take some tenths of a second on one thread."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._layers = torch.nn.Sequential(torch.nn.Linear(768, 3072), torch.nn.GELU(), torch.nn.Linear(3072, 768))
        self._optimizer = torch.optim.AdamW(self._layers.parameters())
        self._inputs = torch.randn(1024, 768)

    def step_s(self) -> float:
        """Train one step; return its seconds."""
        started = time.perf_counter()
        self._optimizer.zero_grad()
        (self._layers(self._inputs) - self._inputs).square().mean().backward()
        self._optimizer.step()
        return time.perf_counter() - started

    def steps_s_beside(self, engine: str, rollouts: int) -> float:
        """Return the median seconds of a step while an engine plays busy rollouts in a thread of its own."""
        begun = threading.Event()
        with ThreadPoolExecutor(1) as other:
            playing = other.submit(lambda: asyncio.run(play(engine, worker_environments.busy, rollouts, 32, begun)))
            while not begun.wait(1.0):
                # raises what ended it
                if playing.done():
                    playing.result()
            found = []
            while not playing.done():
                found.append(self.step_s())
            playing.result()
        # the last one ended alone
        return statistics.median(found[:-1])


def step_ratios(rounds: int, rollouts: int) -> dict[str, float]:
    """Return seconds of a step beside workers and beside rewards inline, over seconds of a step alone."""
    training = Training()
    ratios: dict[str, list[float]] = {"step_ratio": [], "step_ratio_inline": []}
    for _ in range(rounds):
        for name, engine in zip(ratios, ("processes:1", "inline"), strict=True):
            alone = statistics.median(training.step_s() for _ in range(20))
            ratios[name].append(training.steps_s_beside(engine, rollouts) / alone)
            print(f"a step beside {engine}: {ratios[name][-1]:.3f} of {alone:.3f} s alone", flush=True)
    return {name: round(statistics.median(found), 3) for name, found in ratios.items()}


def join_ray() -> bool:
    """Start a Ray cluster of this machine, which the workers find; False where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        return False
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    # before Ray's processes share the cores
    steps = step_ratios(args.rounds, args.rollouts)
    engines = ENGINES if join_ray() else ENGINES[:2]
    rates: dict[str, list[float]] = {engine: [] for engine in engines}
    costs: dict[str, list[float]] = {engine: [] for engine in ENGINES[:2]}
    for _ in range(args.rounds):
        for engine in engines:
            rates[engine].append(asyncio.run(play(engine, worker_environments.busy, args.rollouts, 32)))
            text = f"{engine}: {rates[engine][-1]:.1f} rollouts/s"
            if engine in costs:
                costs[engine].append(cpu_ms_of_a_rollout(engine, 20 * args.rollouts))
                text += f", {costs[engine][-1]:.3f} ms of CPU a rollout"
            print(text, flush=True)
    rate = {engine: statistics.median(found) for engine, found in rates.items()}
    cost = {engine: statistics.median(found) for engine, found in costs.items()}
    result = {f"{engine.partition(':')[0]}_ratio": round(rate[engine] / rate["inline"], 2) for engine in engines[1:]}
    result["overhead_ms"] = round(cost["processes:2"] - cost["inline"], 3)
    print(json.dumps(result | steps))


if __name__ == "__main__":
    main()
