"""The share of time in which slots are busy while an evaluation runs against a server whose latency varies a lot.

    python benchmarks/slots.py [--in-flight 512] [--rollouts 12000] [--median-s 1.0] [--sigma 1.0]

The server is a process of its own on loopback; it answers each request after a latency drawn from a log-normal
distribution (real seconds). The client is `run_units`, what `vf-eval` runs: rollouts of a SingleTurnEnv under one
limiter, scored, and written to results.jsonl. Two runs: each rollout scored by itself, and groups of eight scored
together by a reward function that takes a second, which must not keep a slot from the next rollout.

Busy is measured at the server, the stricter side: requests in service, integrated over time, divided by slots times
time. It begins with the first request and ends with the last one's arrival, since from there on (the tail) there is
nothing left to begin. So the ramp at the start counts, and so does the client's work between two rollouts.

Ends with one line of JSON: slots_busy (the smaller of the two runs), each run's share, and rollouts per second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, web

import verifiers as vf
from verifiers.evals.evaluation_run import iter_requests, run_units
from verifiers.evals.store import ResultStore
from verifiers.inference.endpoint import Endpoint, HttpBackend
from verifiers.inference.limiter import Limiter
from verifiers.rollouts.run import Run

GROUP = 8
SCORING_S = 1.0


class Service:
    """Requests in service over time."""

    def __init__(self, median_s: float, sigma: float) -> None:
        self._draw = random.Random(0)
        self._median_s, self._sigma = median_s, sigma
        self.reset()

    def reset(self) -> None:
        self.arrived, self.serving, self.most = 0, 0, 0
        self._first = self._changed = self._last_arrival = 0.0
        self._area = self._area_at_last_arrival = 0.0

    def _step(self, change: int) -> float:
        now = time.perf_counter()
        self._area += self.serving * (now - self._changed)
        self._changed = now
        self.serving += change
        return now

    async def answer(self, request: web.Request) -> web.Response:
        if self.arrived == 0:
            self._first = self._changed = time.perf_counter()
        now = self._step(+1)
        self.arrived += 1
        self.most = max(self.most, self.serving)
        self._last_arrival, self._area_at_last_arrival = now, self._area
        await request.read()
        await asyncio.sleep(self._draw.lognormvariate(0.0, self._sigma) * self._median_s)
        self._step(-1)
        message = {"role": "assistant", "content": "42"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 8, "completion_tokens": 2, "total_tokens": 10}
        return web.json_response({"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage})

    async def measured(self, _: web.Request) -> web.Response:
        found = {
            "requests": self.arrived,
            "most_at_once": self.most,
            "seconds": self._last_arrival - self._first,
            "busy_seconds": self._area_at_last_arrival,
        }
        self.reset()
        return web.json_response(found)


def serve(port_file: Path, median_s: float, sigma: float) -> None:
    async def main() -> None:
        service = Service(median_s, sigma)
        app = web.Application()
        app.router.add_post("/v1/chat/completions", service.answer)
        app.router.add_get("/measured", service.measured)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        partial = port_file.with_suffix(".partial")
        partial.write_text(str(runner.addresses[0][1]))
        partial.rename(port_file)
        while os.getppid() != 1:  # noqa: ASYNC110 - until its parent is gone, which sets no event
            await asyncio.sleep(1.0)

    asyncio.run(main())


def environment(prompts: int, *, grouped: bool) -> vf.Environment:
    async def together(completions: list[Any]) -> list[float]:
        await asyncio.sleep(SCORING_S)
        return [float(completion[-1]["content"] == "42") for completion in completions]

    def alone(completion: Any, answer: str) -> float:
        return float(completion[-1]["content"] == answer)

    rows = [{"question": f"{n}: what is 6 times 7?", "answer": "42"} for n in range(prompts)]
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([together if grouped else alone]))


async def busy(url: str, rollouts: int, in_flight: int, *, grouped: bool) -> dict[str, float]:
    """Run one evaluation; return the share of busy slots and the requests per second that the server counted."""
    env = environment(rollouts // GROUP, grouped=grouped)
    backend = HttpBackend(Endpoint(f"{url}/v1"))
    runner = Run(env, backend, "m", limiter=Limiter(in_flight))
    groups = iter_requests(env.get_eval_dataset(), GROUP, 0)
    units: Any = groups if grouped else ([request] for group in groups for request in group)
    scored = 0

    with tempfile.TemporaryDirectory() as directory, ResultStore(Path(directory), {}) as store:

        def take(rollout: Any) -> None:
            nonlocal scored
            store.append(rollout)
            scored += rollout.reward == 1.0

        await run_units(runner, units, take)
    await backend.close()
    assert scored == rollouts // GROUP * GROUP, scored
    async with ClientSession() as session, session.get(f"{url}/measured") as response:
        found: dict[str, float] = await response.json()
    assert found["requests"] == scored, found
    assert found["most_at_once"] <= in_flight, found
    share = found["busy_seconds"] / (in_flight * found["seconds"])
    print(
        f"{'groups of 8' if grouped else 'one by one'}: {share:.4f} of {in_flight} slots busy over "
        f"{found['seconds']:.1f} s, at most {found['most_at_once']:g} at once",
        file=sys.stderr,
    )
    return {"busy": share, "per_second": found["requests"] / found["seconds"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--in-flight", type=int, default=512)
    parser.add_argument("--rollouts", type=int, default=12_000)
    parser.add_argument("--median-s", type=float, default=1.0)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve, args.median_s, args.sigma)
        return
    with tempfile.TemporaryDirectory() as scratch:
        port_file = Path(scratch) / "port"
        command = [sys.executable, __file__, "--serve", str(port_file)]
        command += ["--median-s", str(args.median_s), "--sigma", str(args.sigma)]
        server = subprocess.Popen(command)
        try:
            while not port_file.exists():
                assert server.poll() is None, "the server ended"
                time.sleep(0.02)
            url = f"http://127.0.0.1:{port_file.read_text()}"
            runs = [
                asyncio.run(busy(url, args.rollouts, args.in_flight, grouped=grouped)) for grouped in (False, True)
            ]
        finally:
            server.terminate()
            server.wait()
    print(
        json.dumps(
            {
                "slots_busy": round(min(run["busy"] for run in runs), 4),
                "one_by_one": round(runs[0]["busy"], 4),
                "groups": round(runs[1]["busy"], 4),
                "rollouts_per_second": round(runs[0]["per_second"], 1),
            }
        )
    )


if __name__ == "__main__":
    main()
