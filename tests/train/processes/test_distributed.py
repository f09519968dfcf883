"""Work that rank 0 does for all ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from verifiers.train.processes.distributed import on_rank_0, scatter_from_rank_0

ONE_PROCESS = SimpleNamespace(num_processes=1, is_main_process=True)


def test_one_process_does_its_own_work() -> None:
    assert on_rank_0(ONE_PROCESS, lambda: 3) == 3
    assert scatter_from_rank_0(ONE_PROCESS, lambda: ["mine"]) == "mine"
    with pytest.raises(ValueError, match="no rows"):
        scatter_from_rank_0(ONE_PROCESS, _fail)


def _fail() -> list[int]:
    raise ValueError("no rows")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_each_rank_gets_its_own_part_of_what_rank_0_made_and_every_rank_its_failure() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    launcher += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"]
    script = Path(__file__).with_name("run_distributed.py")
    done = subprocess.run([*launcher, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [f"rank {rank} is done" in done.stdout for rank in range(2)] == [True, True]
