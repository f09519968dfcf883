"""Which rows a request gets: pure in version 2, and in version 1 as far as its requests allow."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping

from verifiers.data.curriculum import Curriculum
from verifiers.errors import ConfigError
from verifiers.threads import threads_for

from verifiers_dataserver.http import RequestError
from verifiers_dataserver.wire import SampleRequest2

__all__ = ["Sampler"]

_INLINE_PROMPTS = 64
_INLINE_ROWS = 20_000
_REMEMBERED = 4096


class Sampler:
    """Draws rows by the curriculum.

    Args:
        curriculum: the stages.
        sizes: rows of each dataset.
    """

    def __init__(self, curriculum: Curriculum, sizes: Mapping[str, int]) -> None:
        self.curriculum = curriculum
        self.sizes = dict(sizes)
        self._asked: OrderedDict[int, int] = OrderedDict()
        self._seeded: OrderedDict[int, Curriculum] = OrderedDict()
        self._is_large = max(sizes.values()) > _INLINE_ROWS

    async def by_iteration(self, iteration: int, count: int) -> list[tuple[str, int]]:
        """Version 1: rows for an iteration.

        Its clients ask once a rank and accumulation step, in the same words, and want other rows each time.
        So only the first request for an iteration is a pure function of it.
        """
        times = self._asked.pop(iteration, 0)
        self._asked[iteration] = times + 1
        if len(self._asked) > _REMEMBERED:
            self._asked.popitem(last=False)
        # the second, third, ... requests of all iterations have an order of their own, which covers its rows
        curriculum = self._with_seed(_seed_of(self.curriculum.seed, times)) if times else self.curriculum
        return await self._drawn(curriculum, iteration, iteration, count, 1)

    async def by_block(self, request: SampleRequest2) -> list[tuple[str, int]]:
        """Version 2: a pure function of the request.

        Raises:
            RequestError: fields that contradict each other or this curriculum.
        """
        curriculum = self._with_seed(request.seed)
        part = (request.start, request.prompts_per_block, request.borders)
        if all(value is None for value in part):
            updates = request.updates_per_block
            return await self._drawn(
                curriculum, request.generation_step, request.optimizer_step, request.batch_size, updates
            )
        start, size, borders = part
        if start is None or size is None or borders is None:
            raise RequestError("give start, prompts_per_block and borders together, or none of them")
        if len(borders) != len(curriculum.until_steps) or borders != sorted(borders):
            raise RequestError(
                f"borders is {borders!r}, but this curriculum has {len(curriculum.stages)} stages: give one "
                "rising number less; read them from /v2/meta"
            )
        stage = curriculum.stages[sum(border <= start for border in borders)]
        if stage != curriculum.stage_at(request.optimizer_step):
            raise RequestError(
                f"prompt {start} lies in stage {stage.name!r} by the borders, but optimizer step "
                f"{request.optimizer_step} in {curriculum.stage_at(request.optimizer_step).name!r}"
            )
        if start % size + request.batch_size > size:
            raise RequestError(
                f"prompts {start} to {start + request.batch_size - 1} do not lie in one block of {size}; "
                "ask for each block by itself"
            )

        def draw() -> list[tuple[str, int]]:
            return curriculum.rows(self.sizes, borders, start, request.batch_size, size)

        return await self._run(draw, request.batch_size)

    async def _drawn(
        self, curriculum: Curriculum, block_id: int, step: int, count: int, updates: int
    ) -> list[tuple[str, int]]:
        def draw() -> list[tuple[str, int]]:
            return curriculum.draw(self.sizes, block_id, step, count, updates_per_block=updates)

        return await self._run(draw, count)

    async def _run(self, draw: Callable[[], list[tuple[str, int]]], count: int) -> list[tuple[str, int]]:
        try:
            if count <= _INLINE_PROMPTS and not self._is_large:
                return draw()
            # an epoch of a large dataset takes a while to shuffle
            return await threads_for("draw", 2).run(draw)
        except ConfigError as error:
            raise RequestError(str(error)) from None

    def _with_seed(self, seed: int | None) -> Curriculum:
        if seed is None or seed == self.curriculum.seed:
            return self.curriculum
        known = self._seeded.pop(seed, None) or dataclasses.replace(self.curriculum, seed=seed)
        self._seeded[seed] = known
        if len(self._seeded) > _REMEMBERED:
            self._seeded.popitem(last=False)
        return known


def _seed_of(seed: int, times: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{times}".encode(), digest_size=8).digest(), "big")
