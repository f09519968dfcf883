"""A push over NCCL to a second process on the same card, by the class that pushes to vLLM's workers.

NCCL usually refuses two ranks of a group on one device; what it says is reported then. Any other failure
fails the check.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from typing import Any

from common import Asked, Report, run_stage

BYTES = 2**26
DEADLINE_S = 60
REFUSAL = "Duplicate GPU detected"
"""NCCL's warning where two ranks of a group are on one device; torch's exception leaves it out."""


def receive(unique_id: bytes) -> None:
    """Run the second rank, as a worker of vLLM does: join, all-reduce one number, take a broadcast."""
    import torch
    from torch.cuda import nccl

    comm = nccl.init_rank(2, unique_id, 1)
    stream = torch.cuda.Stream()
    warm_up, buffer = torch.zeros(1, device="cuda"), torch.zeros(BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    nccl.all_reduce([warm_up], streams=[stream], comms=[comm])
    nccl.broadcast([buffer], root=0, streams=[stream], comms=[comm])
    stream.synchronize()
    print(json.dumps({"sum": int(buffer.sum(dtype=torch.int64))}))


def send() -> None:
    """Run the first rank, the trainer's, and start the second."""
    import torch

    from verifiers.train.weight_sync.nccl import NcclGroup

    group = NcclGroup("cuda:0")
    unique_id = group.unique_id()
    receiver = subprocess.Popen(
        [sys.executable, __file__, "receive", base64.b64encode(unique_id).decode()], stdout=subprocess.PIPE, text=True
    )
    try:
        group.join(unique_id, 2)
        buffer = torch.randint(0, 255, (BYTES,), dtype=torch.uint8, device="cuda")
        group.broadcast(buffer)
        group.wait(time.monotonic() + DEADLINE_S)
        found = answer(receiver.communicate(timeout=DEADLINE_S)[0])["sum"]
        print(json.dumps({"equal": found == int(buffer.sum(dtype=torch.int64))}))
    finally:
        receiver.kill()


def stage(asked: Asked, report: Report) -> None:
    name = "a push over NCCL to a second process on the card"
    if asked.device != "cuda":
        report.result(name, None, why="needs a GPU")
        return
    command = [sys.executable, __file__, "send"]
    asks: dict[str, Any] = {"capture_output": True, "text": True, "env": os.environ | {"NCCL_DEBUG": "WARN"}}
    try:
        done = subprocess.run(command, **asks, timeout=2 * DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        report.check(name, False, why="the two processes never met")
        return
    refusal = next((line for line in (done.stdout + done.stderr).splitlines() if REFUSAL in line), None)
    if done.returncode and refusal:
        report.result(name, None, why=f"NCCL does not allow it here: {refusal}")
    elif done.returncode:
        report.check(name, False, why=done.stderr[-2000:])
    else:
        report.check(name, answer(done.stdout)["equal"])


def answer(printed: str) -> Any:
    """Return the line of JSON among what was printed; NCCL prints its version and its warnings there too."""
    return json.loads(next(line for line in printed.splitlines() if line.startswith("{")))


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(base64.b64decode(sys.argv[2]))
    elif sys.argv[1] == "send":
        send()
    else:
        run_stage(stage)
