"""The run of each cell of the fault matrix: a trainer with a gate at each stage, and a server that can be broken.

Imported by the parent that forks them (`forks.py`); each function runs in a process of its own. Test and process talk
through files in the cell's directory:

    reached    the trainer is in the stage (with the time)
    injected   the fault is there: all that waited at the gate continue
    ended-0.json what the process saw when `train` was over
    mode       what the server does wrong: "500 generation" or "500 weights", and how often
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import tiny_world
import tqdm
from aiohttp import web
from verifiers_embedded.routes.app import Routes

import verifiers as vf
from verifiers.cli.main import run_command
from verifiers.inference.server_pool import WeightUpdate
from verifiers.train.batching.rollout_session import RolloutSession

# a thread of tqdm's own, which outlives its bars
tqdm.tqdm.monitor_interval = 0

GATE_S = 10.0
STEPS = 6
PATIENCE_S = 0.003
SLOW_END = "two Ctrl-C, and eight rollouts that take 0.2 s each to end"


class Gate:
    """Says when the trainer is in the stage of this cell, and holds it there until the fault is injected.

    Attributes:
        watched_block: whose rollouts are in flight then.
        trainer_waits: for the block in which the stage is.
    """

    def __init__(self, directory: Path, fault: str, stage: str) -> None:
        self.directory, self.fault, self.stage = directory, fault, stage
        # a checkpoint stands before each: after two steps, and in the midst of the one after four
        self.block = 3 if stage == "saving" else 2
        self.watched_block = self.block + (stage in ("training", "saving"))
        self.trainer_waits = False
        self._lock = threading.Lock()
        self._reached = self._injected = stage == ""

    def is_at(self, stage: str, block: int) -> bool:
        return self.stage == stage and self.block == block

    def reach(self) -> None:
        with self._lock:
            if not self._reached:
                (self.directory / "reached").write_text(repr(time.monotonic()))
                self._reached = True

    def inject(self) -> None:
        """By the run itself, where the fault is one of its own code."""
        with self._lock:
            if not self._injected:
                write_whole(self.directory / "injected", repr(time.monotonic()))
                self._injected = True

    @property
    def reached(self) -> bool:
        return self._reached

    @property
    def injected(self) -> bool:
        self._injected = self._injected or (self.directory / "injected").exists()
        return self._injected

    def hold(self) -> None:
        """On the trainer's own thread."""
        self.reach()
        until = time.monotonic() + GATE_S
        while not self.injected and time.monotonic() < until:
            time.sleep(PATIENCE_S)

    async def until(self, condition: Callable[[], bool]) -> None:
        until = asyncio.get_running_loop().time() + GATE_S
        while not condition() and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110 - a file says it
            await asyncio.sleep(PATIENCE_S)


def tries_too_many_ways() -> None:
    """Hold the interpreter's lock for ages."""
    re.match("(a+)+$", "a" * 64 + "b")


def write_whole(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)


class Faulty(vf.SingleTurnEnv):
    """Its rollouts of one block wait for the stage, and break there where the fault is theirs."""

    def __init__(self, gate: Gate) -> None:
        async def reward(completion: Any, state: Any, **kwargs: Any) -> float:
            await self._score(state["info"]["place"])
            return tiny_world.vowels(completion)

        rows = [{**row, "info": {"place": place}} for place, row in enumerate(tiny_world.rows())]
        super().__init__(dataset=rows, rubric=vf.Rubric(funcs=[reward]))
        self.gate = gate
        self.blocks: dict[int, int] = {}
        self.firsts: set[int] = set()
        self._begun: dict[int, int] = {}

    def learn(self, plan: Any) -> None:
        """Note the block that each prompt is drawn for, the first time; the dataset is as long as the run."""
        for block in range(plan.blocks):
            for index, example in enumerate(plan.example_ids(block)):
                self.blocks[example] = block
                if index == 0:
                    self.firsts.add(example)

    async def rollout(self, client: Any, model: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        place = kwargs["info"]["place"]
        number = self._begun.get(place, 0)
        self._begun[place] = number + 1
        await self._meet_the_fault(place, number)
        return await super().rollout(client, model, prompt, *args, **kwargs)

    async def _meet_the_fault(self, place: int, number: int) -> None:
        gate = self.gate
        if gate.stage == "" or self.blocks[place] != gate.watched_block:
            return
        if gate.stage == "scoring" and place in self.firsts:
            # the group that is being scored
            return
        if gate.fault == SLOW_END:
            try:
                await gate.until(lambda: gate.injected)
            finally:
                # one that awaits would be cancelled again
                time.sleep(0.2)  # noqa: ASYNC251 - the mistake
        await gate.until(lambda: gate.reached)
        if gate.fault == "reward raises":
            return
        if number == 0 and gate.fault == "rollout raises":
            gate.inject()
            raise KeyError("the environment's own mistake")
        if number == 0 and gate.fault == "environment hangs":
            gate.inject()
            await asyncio.Event().wait()
        if number == 0 and gate.fault == "environment blocks":
            gate.inject()
            time.sleep(3600)  # noqa: ASYNC251 - the mistake
        if number == 0 and gate.fault == "interpreter held":
            gate.inject()
            tries_too_many_ways()
        if number < 2:
            # the other two are on their way to the server while the fault is injected
            await gate.until(lambda: gate.injected)

    async def _score(self, place: int) -> None:
        gate = self.gate
        if gate.stage == "" or self.blocks[place] != gate.watched_block:
            return
        first = place in self.firsts
        if gate.stage == "scoring" and first:
            # it may be scored before the trainer wants it
            await gate.until(lambda: gate.trainer_waits)
            gate.reach()
        else:
            await gate.until(lambda: gate.reached)
        if gate.fault == "reward raises" and first:
            gate.inject()
            raise ZeroDivisionError("the reward function's mistake")
        await gate.until(lambda: gate.injected)


class GatedTrainer(tiny_world.GRPOTrainer):
    """Stops at the gate of its cell."""

    gate: Gate

    def _open_session(self) -> Any:
        opened, prefetcher, gate = self.session.prefetcher is not None, RolloutSession.open(self.session), self.gate
        if opened:
            return prefetcher
        take, push = prefetcher.take, self.weight_sync.pool.push  # type: ignore[union-attr]

        def watched_take(block_id: int, optimizer_step: int) -> Any:
            gate.trainer_waits = gate.trainer_waits or block_id == gate.block
            if gate.is_at("generating", block_id):
                gate.reach()
            return take(block_id, optimizer_step)

        async def watched_push(update: WeightUpdate) -> None:
            async def load(server: Any, timeout_s: float) -> None:
                if gate.is_at("syncing", update.version) and not gate.injected:
                    gate.reach()
                    await gate.until(lambda: gate.injected)
                    if gate.fault == "sync fails":
                        _cut_files(self.weight_sync)
                await update.load(server, timeout_s=timeout_s)

            await push(WeightUpdate(update.version, load))

        prefetcher.take = watched_take  # type: ignore[method-assign]
        self.weight_sync.pool.push = watched_push  # type: ignore[union-attr,method-assign]
        return prefetcher

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.session.open = self._open_session  # type: ignore[method-assign]
        begin = self.data_loop._begin_block

        def begin_block(block_id: int, step: int) -> None:
            # the other rank runs this while rank 0 pushes
            self._raise_on_rank_1("syncing", block_id)
            begin(block_id, step)

        self.data_loop._begin_block = begin_block  # type: ignore[method-assign]
        return super().train(*args, **kwargs)

    def _raise_on_rank_1(self, stage: str, block: int) -> None:
        gate = self.gate
        if gate.fault != "rank 1 raises" or self.accelerator.is_main_process or not gate.is_at(stage, block):
            return
        until = time.monotonic() + GATE_S
        while not (gate.directory / "reached").exists() and time.monotonic() < until:
            time.sleep(PATIENCE_S)
        gate.inject()
        raise LookupError("the second rank's own mistake")

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self._raise_on_rank_1("training", self.state.global_step)
        if self.gate.is_at("training", self.state.global_step):
            self.gate.hold()
        return super()._compute_loss(model, inputs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.gate.is_at("saving", self.state.global_step - 1):
            self.gate.reach()
            if self.gate.fault == "disk full at checkpoint" and self.accelerator.is_main_process:
                # writes fail with "File too large"
                resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
                self.gate.inject()
            self.gate.hold()
        super()._save_optimizer_and_scheduler(output_dir)


def _cut_files(sync: Any) -> None:
    """Return what half a copy over a network leaves."""
    for path in sync._files.directory().rglob("*.safetensors"):
        os.truncate(path, 100)


def train(given: dict[str, Any]) -> int:
    """One run, as a command: return its exit code."""
    directory = Path(given["directory"])
    logging.basicConfig(level=logging.WARNING)
    gate = Gate(directory, given["fault"], given["stage"])
    return run_command("train", lambda: _run(given, gate))


def _sockets_left(before: int) -> int:
    """Count the connections beyond those before, once threads that may be left have their answers."""
    # some of several ranks' are torch's until the process ends
    deadline = time.monotonic() + ("RANK" not in os.environ)
    while (left := len(psutil.Process().net_connections()) - before) > 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _run(given: dict[str, Any], gate: Gate) -> int:
    directory = Path(given["directory"])
    rank = os.environ.get("RANK", "0")
    write_whole(directory / f"pid-{rank}", str(os.getpid()))
    sockets = len(psutil.Process().net_connections())
    env = Faulty(gate)
    trainer = _trainer(given, env, gate)
    env.learn(trainer.plan)
    if gate.fault == "generator thread killed" and trainer.accelerator.is_main_process:
        threading.Thread(target=_kill_generator, args=(gate, trainer), name="killer", daemon=True).start()
    try:
        trainer.train(resume_from_checkpoint=True)
    finally:
        blocks = [trainer.plan.requests(block) for block in range(trainer.plan.blocks)]
        left = {
            "step": trainer.state.global_step,
            "threads": sorted(t.name for t in threading.enumerate() if t is not threading.main_thread()),
            "sockets": _sockets_left(sockets),
            "planned": blocks,
        }
        write_whole(directory / f"ended-{rank}.json", json.dumps(left))
    return 0


def _trainer(given: dict[str, Any], env: Faulty, gate: Gate) -> GatedTrainer:
    args = tiny_world.config(
        Path(given["output_dir"]),
        given["url"],
        max_steps=STEPS,
        num_batches_ahead=1,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=1,
        **given["settings"],
    )
    trainer = GatedTrainer(given["model"], env, args)
    trainer.gate = gate
    return trainer


def _kill_generator(gate: Gate, trainer: GatedTrainer) -> None:
    """End the generator's thread from outside of every task, where no code of the environment can catch it."""
    while not gate.reached:
        time.sleep(PATIENCE_S)

    def end() -> None:
        raise SystemExit if gate.stage == "scoring" else KeyboardInterrupt

    (thread,) = (thread for thread in threading.enumerate() if thread.name == "verifiers-servers")
    assert trainer.session.generator is not None
    trainer.session.generator._thread.loop.call_soon_threadsafe(end)
    thread.join(GATE_S)
    gate.inject()


# -- the server -------------------------------------------------------------------------------------------------


def serve(given: dict[str, Any]) -> int:
    """Return the server, until it is killed."""
    asyncio.run(_serve(Path(given["model"]), given["port"], Path(given["directory"])))
    return 0


async def _serve(model: Path, port: int, directory: Path) -> None:
    """Serve the embedded server on a given port; some of its answers are what a file says."""
    service = tiny_world.EmbeddedServer(model).service
    app = Routes(service.engine, service.loaded, service.text, model_name=service.name, seed=0).app()
    app.middlewares.append(_faults(directory / "mode"))
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    service.engine.start()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    (directory / "listening").touch()
    await asyncio.Event().wait()


def _faults(mode: Path) -> Any:
    def fails(what: str) -> bool:
        try:
            kind, left = mode.read_text().split()
        except FileNotFoundError:
            return False
        if kind != what or not int(left):
            return False
        write_whole(mode, f"{kind} {int(left) - 1}")
        return True

    @web.middleware
    async def answer(request: web.Request, handler: Any) -> web.StreamResponse:
        what = "generation" if request.path.startswith("/v1/chat") else "weights"
        if request.path in ("/v1/chat/completions", "/collective_rpc") and fails(what):
            return web.json_response({"error": {"message": "out of order"}}, status=500)
        response: web.StreamResponse = await handler(request)
        return response

    return answer
