"""The load that the dataserver carries: prompts and grades at a fixed rate, while one of its graders hangs.

    python benchmarks/dataserver.py [--rate 500] [--seconds 15] [--rounds 3]

A client process sends, on a schedule that does not wait for answers, `rate` requests a second of /v2/sample (4
prompts each) and as many of /v2/grade (16 completions of 200 characters, exact grader) to a `vf-dataserver` on the
same machine, both at once. Two other completions are all the while being graded by a Python grader that sleeps
without end, and then by one that computes without end on two cores; each is killed and given the next ones every
2 seconds. A time is that from when a request was due to its whole answer, so a client or a server that falls behind
shows in it. Every answer is checked.

Before that each route has the machine to itself at the same rate, and a bare aiohttp server that answers a constant
is driven in the same way: what the machine and the client take by themselves. Ends with one
line of JSON: milliseconds, medians over rounds, and ratios to the bare server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
from fake_process import server_process

ROWS = 1000
GRADERS = "import time\n\ndef sleeping():\n    time.sleep(1e6)\n\ndef busy():\n    while True:\n        pass\n"
HANGING = ("sleeping", "busy")
Check = Callable[[Any], bool]


def write_config(directory: Path) -> Path:
    """Return a configuration of two stages, and a dataset whose grader hangs."""
    with (directory / "rows.jsonl").open("w") as file:
        for index in range(ROWS):
            file.write(json.dumps({"prompt": f"How much is {index} plus {index}?", "answer": str(2 * index)}) + "\n")
    (directory / "graders_of_benchmark.py").write_text(GRADERS)
    fine = {"jsonl": "rows.jsonl", "graders": ["exact"]}
    stages = [
        {"name": "warm", "until_step": 100, "datasets": ["easy"]},
        {"name": "main", "datasets": [{"id": "easy", "weight": 1}, {"id": "hard", "weight": 3}]},
    ]
    hanging = {"path": str(directory), "timeout_s": 2.0, "workers": 2}
    config = {
        "datasets": {"easy": fine, "hard": fine, **{name: {**fine, "graders": [name]} for name in HANGING}},
        "graders": {name: {**hanging, "python": f"graders_of_benchmark:{name}"} for name in HANGING},
        "curriculum": {"stages": stages},
    }
    path = directory / "config.yaml"
    path.write_text(json.dumps(config))
    return path


def sample_body(number: int) -> bytes:
    body = {"optimizer_step": number % 400, "generation_step": number % 400, "batch_size": 4}
    return json.dumps(body).encode()


def grade_body(number: int) -> bytes:
    row = number % ROWS
    thought = "<think>" + "x" * 180 + "</think> "
    items = [
        {
            "sample_id": f"hard:{row}",
            "completion": thought + str(2 * row + index % 2),
            "completion_tokens": 60,
            "completion_index": index,
        }
        for index in range(16)
    ]
    return json.dumps({"items": items}).encode()


def is_sample(answer: Any) -> bool:
    return len({sample["sample_id"] for sample in answer["samples"]}) == 4


def is_grade(answer: Any) -> bool:
    rewards = {result["completion_index"]: result["reward"] for result in answer["results"]}
    return rewards == {index: float(index % 2 == 0) for index in range(16)}


async def drive(
    session: aiohttp.ClientSession, url: str, bodies: list[bytes], check: Check, rate: int
) -> tuple[list[float], int]:
    """Send each request when due; return the latencies from then, in seconds, and how many answers were wrong."""
    latencies: list[float] = []
    wrong = 0

    async def one(data: bytes, due: float) -> None:
        nonlocal wrong
        try:
            async with session.post(url, data=data, headers={"Content-Type": "application/json"}) as response:
                content = await response.read()
                fine = response.status == 200
        except aiohttp.ClientError:
            content, fine = b"", False
        latencies.append(time.perf_counter() - due)
        if not (fine and check(json.loads(content))):
            wrong += 1

    begin = time.perf_counter() + 0.05
    async with asyncio.TaskGroup() as tasks:
        for number, data in enumerate(bodies):
            due = begin + number / rate
            wait_s = due - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.create_task(one(data, due))
    return latencies, wrong


async def keep_hanging(session: aiohttp.ClientSession, base: str, dataset: str, ended: asyncio.Event) -> int:
    """Post two completions to a hanging grader until `ended` is set; return how many grades failed, as they must."""
    items = [{"sample_id": f"{dataset}:{index}", "completion": "x", "completion_index": index} for index in range(2)]
    failed = 0
    while not ended.is_set():
        async with session.post(base + "/v2/grade", json={"items": items}) as response:
            answer = await response.json()
        failed += all(result["reward"] is None for result in answer["results"])
    return failed


def quantile(latencies: list[float], share: float) -> float:
    """Return the quantile `share` of latencies, in milliseconds."""
    ordered = sorted(latencies)
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def measure(base: str, bare: str, rate: int, seconds: float) -> dict[str, float]:
    """Measure one round: each by itself, both at once with a hanging grader, and the bare server."""
    found: dict[str, float] = {}
    routes = {"sample": (sample_body, is_sample), "grade": (grade_body, is_grade)}
    timeout = aiohttp.ClientTimeout(total=60)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        # made before the clock runs: the client must not be late with one route for the other's sake
        bodies = {name: [body(number) for number in range(int(rate * seconds))] for name, (body, _) in routes.items()}
        for name, (_, check) in routes.items():
            few = bodies[name][: len(bodies[name]) // 3]
            latencies, wrong = await drive(session, f"{base}/v2/{name}", few, check, rate)
            found[f"{name}_alone_p99_ms"] = quantile(latencies, 0.99)
            found["wrong"] = found.get("wrong", 0) + wrong
            latencies, _ = await drive(session, f"{bare}/{name}", few, lambda answer: True, rate)
            found[f"{name}_bare_p99_ms"] = quantile(latencies, 0.99)
        for how in HANGING:
            ended = asyncio.Event()
            hanging = asyncio.create_task(keep_hanging(session, base, how, ended))
            await asyncio.sleep(0.5)
            results = await asyncio.gather(
                *(
                    drive(session, f"{base}/v2/{name}", bodies[name], check, rate)
                    for name, (_, check) in routes.items()
                )
            )
            ended.set()
            found[f"{how}_answers"] = await hanging
            for name, (latencies, wrong) in zip(routes, results, strict=True):
                for label, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
                    found[f"{name}_{how}_{label}_ms"] = quantile(latencies, share)
                found["wrong"] += wrong
    return found


@contextlib.contextmanager
def dataserver(config: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "verifiers_dataserver", str(config), "--port", "0"]
    quiet: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([*command, "--parent-pid", str(os.getpid())], **quiet) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert "listening on " in line, line
            yield line.rpartition("listening on ")[2].strip()
        finally:
            process.terminate()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rate", type=int, default=500, help="requests a second, of each route")
    arguments.add_argument("--seconds", type=float, default=15.0, help="of each part where both are asked at once")
    arguments.add_argument("--rounds", type=int, default=3)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as scratch, server_process("ok", "--instant") as bare:
        # the user that sandboxed graders run as must be able to read their module
        os.chmod(scratch, 0o755)
        rounds: list[dict[str, float]] = []
        with dataserver(write_config(Path(scratch))) as base:
            for number in range(given.rounds):
                rounds.append(asyncio.run(measure(base, bare, given.rate, given.seconds)))
                shown = {name: round(value, 2) for name, value in rounds[-1].items()}
                print(f"round {number + 1}:", json.dumps(shown), file=sys.stderr)
    medians = {name: round(statistics.median(found[name] for found in rounds), 2) for name in rounds[0]}
    for name in ("sample", "grade"):
        medians[f"{name}_ratio_to_bare"] = round(medians[f"{name}_alone_p99_ms"] / medians[f"{name}_bare_p99_ms"], 2)
    worst = {
        f"worst_{name}_p99_ms": round(max(found[f"{name}_{how}_p99_ms"] for found in rounds for how in HANGING), 2)
        for name in ("sample", "grade")
    }
    print(json.dumps({"rate_each": given.rate, "rounds": given.rounds, **medians, **worst}))


if __name__ == "__main__":
    main()
