"""A push over NCCL to a second process on the same card, by the class that pushes to vLLM's workers.

NCCL usually refuses two ranks of a group on one device; what it says is reported then.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from typing import Any

from common import Asked, Report, run_stage

BYTES = 2**26
DEADLINE_S = 60


def receive(unique_id: bytes) -> None:
    """Be the second rank, as a worker of vLLM is: join, all-reduce one number, take a broadcast."""
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
    """Be the trainer."""
    import torch

    from verifiers.train.weight_sync.nccl import TorchNcclGroup

    group = TorchNcclGroup("cuda:0")
    unique_id = group.unique_id()
    receiver = subprocess.Popen(
        [sys.executable, __file__, "receive", base64.b64encode(unique_id).decode()], stdout=subprocess.PIPE, text=True
    )
    try:
        group.join(unique_id, 2)
        buffer = torch.randint(0, 255, (BYTES,), dtype=torch.uint8, device="cuda")
        group.broadcast(buffer)
        group.wait(time.monotonic() + DEADLINE_S)
        found = json.loads(receiver.communicate(timeout=DEADLINE_S)[0])["sum"]
        print(json.dumps({"equal": found == int(buffer.sum(dtype=torch.int64))}))
    finally:
        receiver.kill()


def stage(asked: Asked, report: Report) -> None:
    name = "a push over NCCL to a second process on the card"
    if asked.device != "cuda":
        report.figure(name, None, why="needs a GPU")
        return
    command = [sys.executable, __file__, "send"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        report.figure(name, None, why="the two processes never met")
        return
    if done.returncode:
        report.figure(name, None, why=f"torch does not allow it here: {last_line(done.stderr)}")
        return
    report.check(name, bool(json.loads(done.stdout.splitlines()[-1])["equal"]))


def last_line(text: str) -> Any:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(base64.b64decode(sys.argv[2]))
    elif sys.argv[1] == "send":
        send()
    else:
        run_stage(stage)
