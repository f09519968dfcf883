"""A training run as a process: what the tests that kill processes, or need several ranks, start.

    python run_training.py '{"model": DIR, "url": URL, "output_dir": DIR, "env": "single", "settings": {}}'

Each rank writes final-RANK.pt with its weights and rows; or, where it fails, failure-RANK.json with what it saw.
Rank 0 appends what it trained in each optimizer step to trained.jsonl, so that a killed process has said it too.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import tiny_world
import torch
import torch.distributed
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import TrainerCallback

import verifiers as vf
from verifiers.data.adaptive_curriculum import curriculum_from


class WritesDown(TrainerCallback):
    """A line a step: which process, which step, the rows' token ids."""

    def __init__(self, trainer: tiny_world.ObservedTrainer, path: Path) -> None:
        self._trainer, self._path = trainer, path

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step - 1
        rows = [row[:2] for row in self._trainer.rows() if row[4]["step"] == step]
        with open(self._path, "a") as file:
            file.write(json.dumps({"process": os.getpid(), "step": step, "rows": rows}) + "\n")


class Breaks(TrainerCallback):
    """Breaks one rank at the end of its second optimizer step, once it has written down when."""

    def __init__(self, how: str, mark: Path) -> None:
        self._how, self._mark = how, mark

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step < 2:
            return
        self._mark.write_text(str(time.time()))
        if self._how == "alone":
            # nobody ever sends: this rank waits in C++ code, and the others for it in their next collective
            torch.distributed.recv(torch.zeros(2), src=0)
        # the other rank never joins, and the interpreter would wait for it at its exit
        torch.distributed.all_reduce(torch.zeros(2), async_op=True)
        raise ValueError("no more of this")


class BreaksInTheSecondBlock(tiny_world.Dialogue):
    """Writes down when it broke, so that ranks can say how long they took to hear of it."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self._mark = mark
        self._begun = 0

    async def rollout(self, *args: Any, **kwargs: Any) -> Any:
        self._begun += 1
        if self._begun > 8:
            if not self._mark.exists():
                self._mark.write_text(str(time.time()))
            raise vf.ConfigError("rank 0's environment broke in its second block")
        return await super().rollout(*args, **kwargs)


class OverflowsInTheSecondBlock(vf.SingleTurnEnv):
    """Its ninth rollout gets an advantage by which the loss overflows, on the rank that trains it."""

    _begun = 0

    async def rollout(self, *args: Any, **kwargs: Any) -> Any:
        self._begun += 1
        is_ninth = self._begun == 9
        completion, state = await super().rollout(*args, **kwargs)
        if is_ninth:
            state["advantage"] = 3e38
        return completion, state


def overflowing() -> OverflowsInTheSecondBlock:
    return OverflowsInTheSecondBlock(dataset=tiny_world.rows(), rubric=vf.Rubric(funcs=[tiny_world.vowels]))


def leveled() -> vf.SingleTurnEnv:
    """Three datasets of eight prompts, for levels and pools."""
    rows = [{**row, "task": f"d{place % 3}"} for place, row in enumerate(tiny_world.rows(24))]
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows[:4], rubric=vf.Rubric(funcs=[tiny_world.vowels]))


@record
def run(given: dict[str, Any]) -> None:
    """Train as `given` says."""
    rank = int(os.environ.get("RANK", "0"))
    # ranks of several hosts need not see the same directory
    output_dir = Path(given["output_dir"].replace("{rank}", str(rank)))
    output_dir.mkdir(parents=True, exist_ok=True)
    envs = {
        "single": tiny_world.single_turn,
        "multi": tiny_world.Dialogue,
        "forking": tiny_world.Rewriting,
        "leveled": leveled,
        "overflowing": overflowing,
        "breaking": lambda: BreaksInTheSecondBlock(output_dir / "broke"),
    }
    args = tiny_world.config(output_dir, given["url"], **given["settings"])
    # a policy keeps what it learned, so each process makes its own
    curriculum = curriculum_from(given["curriculum"]) if given.get("curriculum") else None
    trainer = tiny_world.ObservedTrainer(given["model"], envs[given["env"]](), args, curriculum=curriculum)
    if rank == 0:
        trainer.add_callback(WritesDown(trainer, output_dir / "trained.jsonl"))
    if rank == 1 and given.get("breaks"):
        trainer.add_callback(Breaks(given["breaks"], output_dir / "broke"))
    start = tiny_world.weights(trainer)
    try:
        trainer.train(resume_from_checkpoint=given.get("resume"))
    except Exception as error:
        failure = {"type": type(error).__name__, "text": str(error), "time": time.time()}
        (output_dir / f"failure-{rank}.json").write_text(json.dumps(failure))
        raise
    rows = [
        (prompt, ids, mask, logps, batch["step"], float(batch["advantages"][place].sum() / sum(mask)))
        for prompt, ids, mask, logps, batch, place in trainer.rows()
    ]
    final = {"start": start, "weights": tiny_world.weights(trainer), "rows": rows, "log": trainer.state.log_history}
    torch.save(final, output_dir / f"final-{rank}.pt")
    if torch.distributed.is_initialized():
        # a model that outlives its process group can hang while it is freed
        torch.distributed.barrier()
        del trainer
        gc.collect()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
