"""Two ranks that share work through rank 0, started under torchrun by test_distributed.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed
from accelerate import PartialState

from verifiers.errors import RankError
from verifiers.train.processes.distributed import Ranks


def main() -> None:
    state = PartialState(cpu=True)
    rank = state.process_index
    ranks = Ranks(state)
    ranks.register("add", lambda number: number + rank)
    assert ranks.on_rank_0(lambda: ("made by", rank)) == ("made by", 0)

    def parts() -> list[torch.Tensor]:
        added = ranks.together("add", 5)
        return [torch.arange(added + place) for place in range(state.num_processes)]

    own = ranks.scatter(parts)
    assert own.tolist() == list(range(5 + rank))

    def fails() -> list[int]:
        raise ValueError("no rows")

    for share in (ranks.on_rank_0, ranks.scatter):
        with pytest.raises((ValueError, RankError)) as raised:
            share(fails)
        wanted = (ValueError, "no rows") if rank == 0 else (RankError, "rank 0 stopped: ValueError: no rows")
        assert (raised.type, str(raised.value)) == wanted
    print(f"rank {rank} is done")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
