"""The rows that a request gets: pure in version 2, and in version 1 as far as its requests allow."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping

from verifiers.concurrency import threads_for
from verifiers.data.curriculum import Curriculum
from verifiers.errors import ConfigError
from verifiers_dataserver.http import RequestError
from verifiers_dataserver.wire import SampleRequest2

_INLINE_PROMPTS = 64
_INLINE_ROWS = 20_000
_REMEMBERED = 4096


class Sampler:
    def __init__(self, curriculum: Curriculum, sizes: Mapping[str, int]) -> None:
        self.curriculum = curriculum
        self.sizes = dict(sizes)
        self._asked: OrderedDict[int, int] = OrderedDict()
        # what a curriculum has shuffled stays with it
        self._seeded = functools.lru_cache(_REMEMBERED)(lambda seed: dataclasses.replace(curriculum, seed=seed))
        self._is_large = max(sizes.values()) > _INLINE_ROWS

    async def by_iteration(self, iteration: int, count: int) -> list[tuple[str, int]]:
        """Draw rows for an iteration, in version 1.

        Its clients ask once a rank and accumulation step, in the same words, and need other rows each time.
        So only the first request for an iteration is a pure function of it.
        """
        times = self._asked.pop(iteration, 0)
        self._asked[iteration] = times + 1
        if len(self._asked) > _REMEMBERED:
            self._asked.popitem(last=False)
        # the second, third, ... requests of all iterations have an order of their own, which covers its rows
        curriculum = self._with_seed(_seed_of(self.curriculum.seed, times)) if times else self.curriculum
        return await self._run(lambda: curriculum.draw(self.sizes, iteration, iteration, count), count)

    async def by_block(self, request: SampleRequest2) -> list[tuple[str, int]]:
        """Draw rows for a request, in version 2: a pure function of the request.

        Raises:
            RequestError: fields that contradict each other or this curriculum.
        """
        curriculum = self._with_seed(request.seed)
        size = request.batch_size if request.prompts_per_block is None else request.prompts_per_block
        first, end = request.offset, request.offset + request.batch_size
        if end > size:
            raise RequestError(
                f"prompts {first} to {end - 1} do not lie in one block of {size}; ask for each block by itself"
            )
        if size > (rows := sum(self.sizes.values())):
            raise RequestError(f"a block of {size} different prompts is asked for; the datasets have {rows} rows")
        first_blocks = request.first_blocks
        if first_blocks is not None:
            self._check_first_blocks(request, first_blocks)

        def draw() -> list[tuple[str, int]]:
            block = curriculum.draw(
                self.sizes,
                request.generation_step,
                request.optimizer_step,
                size,
                updates_per_block=request.updates_per_block,
                first_blocks=first_blocks,
            )
            return block[first:end]

        return await self._run(draw, size)

    def _check_first_blocks(self, request: SampleRequest2, first_blocks: list[int]) -> None:
        curriculum = self.curriculum
        if len(first_blocks) != len(curriculum.until_steps) or first_blocks != sorted(first_blocks):
            raise RequestError(
                f"first_blocks is {first_blocks!r}, but this curriculum has {len(curriculum.stages)} stages: "
                "give one rising number less; read the stages from /v2/meta"
            )
        stage = curriculum.stages[sum(begin <= request.generation_step for begin in first_blocks)]
        in_force = curriculum.stage_at(request.optimizer_step)
        if stage != in_force:
            raise RequestError(
                f"block {request.generation_step} lies in stage {stage.name!r} by first_blocks, but "
                f"optimizer step {request.optimizer_step} in {in_force.name!r}"
            )

    async def _run(self, draw: Callable[[], list[tuple[str, int]]], count: int) -> list[tuple[str, int]]:
        try:
            if count <= _INLINE_PROMPTS and not self._is_large:
                return draw()
            # an epoch of a large dataset takes a while to shuffle
            return await threads_for("draw", 2).run(draw)
        except ConfigError as error:
            raise RequestError(str(error)) from None

    def _with_seed(self, seed: int | None) -> Curriculum:
        return self.curriculum if seed in (None, self.curriculum.seed) else self._seeded(seed)


def _seed_of(seed: int, times: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{times}".encode(), digest_size=8).digest(), "big")
