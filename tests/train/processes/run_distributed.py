"""Two ranks that share work through rank 0, started under torchrun by test_distributed.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed
from accelerate import PartialState

from verifiers.errors import RankError
from verifiers.train.processes.distributed import on_all_ranks, on_rank_0, scatter_from_rank_0


def main() -> None:
    state = PartialState(cpu=True)
    rank = state.process_index
    joint_work = {"add": lambda number: number + rank}

    assert on_rank_0(state, lambda: ("made by", rank)) == ("made by", 0)

    def parts() -> list[torch.Tensor]:
        added = on_all_ranks(state, "add", joint_work["add"], 5)
        return [torch.arange(added + place) for place in range(state.num_processes)]

    own = scatter_from_rank_0(state, parts, joint_work)
    assert own.tolist() == list(range(5 + rank))

    def fails() -> list[int]:
        raise ValueError("no rows")

    for share in (on_rank_0, scatter_from_rank_0):
        with pytest.raises((ValueError, RankError)) as raised:
            share(state, fails)
        wanted = (ValueError, "no rows") if rank == 0 else (RankError, "rank 0 stopped: ValueError: no rows")
        assert (raised.type, str(raised.value)) == wanted
    print(f"rank {rank} is done")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
