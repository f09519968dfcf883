"""A training run as a process of which one rank breaks at some place: what the tests of failing ranks start.

    python run_faulty_rank.py '{"model": DIR, "url": URL, "output_dir": DIR, "rank": 1, "place": "backward"}'

The rank that breaks writes the time into broke; a rank whose training raised writes what into failure-RANK.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import tiny_world
import torch
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import TrainerCallback


class Breaking(tiny_world.ObservedTrainer):
    """Breaks at one place in its second optimizer step."""

    place = ""
    mark = Path()

    def reach(self, place: str) -> None:
        if place == self.place.partition(":")[0] and self.state.global_step >= 1:
            self.place, how = "", self.place.partition(":")[2]
            self.mark.write_text(str(time.time()))
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "alone":
                # nobody ever sends: this rank waits in C++ code, and the others for it in their next collective
                torch.distributed.recv(torch.zeros(2), src=0)
            if how == "in flight":
                # the other rank never joins, and the interpreter would wait for it at its exit
                torch.distributed.all_reduce(torch.zeros(2), async_op=True)
            raise ValueError(f"no more of this at {place}")

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs = super()._prepare_inputs(generation_batch)
        self.reach("slice")
        return inputs

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        self.reach("loss")
        loss = super()._compute_loss(model, inputs)
        if self.place == "backward" and self.state.global_step >= 1:
            loss.register_hook(lambda grad: self.reach("backward"))
        return loss

    def _push_weights(self, version: int) -> None:
        self.reach("push")
        super()._push_weights(version)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.reach("saving")
        super()._save_checkpoint(model, trial)


class Calls(TrainerCallback):
    """Breaks in a callback."""

    def __init__(self, trainer: Breaking) -> None:
        self._trainer = trainer

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.reach("callback")


@record
def main() -> None:
    given = json.loads(sys.argv[1])
    rank = int(os.environ["RANK"])
    output_dir = Path(given["output_dir"])
    output_dir.mkdir(parents=True, exist_ok=True)
    args = tiny_world.config(output_dir, given["url"], **given.get("settings", {}))
    trainer = Breaking(given["model"], tiny_world.single_turn(), args)
    trainer.mark = output_dir / "broke"
    if rank == given["rank"]:
        trainer.place = given["place"]
    trainer.add_callback(Calls(trainer))
    try:
        trainer.train()
    except BaseException as error:
        failure = {"type": type(error).__name__, "text": str(error)}
        (output_dir / f"failure-{rank}.json").write_text(json.dumps(failure))
        raise


if __name__ == "__main__":
    main()
