"""Prefetching of rollouts on rank 0: when blocks are submitted, and which weights the servers hold meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from verifiers.data.batch_plan import BatchPlan
from verifiers.data.sampler import rollout_seed
from verifiers.envs.datasets import row_fields
from verifiers.errors import GenerationError
from verifiers.monitoring.stage_timer import StageTimer
from verifiers.rollouts.block import BatchRequest
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import Group, RolloutRequest, ScoredBlock
from verifiers.types import RolloutKey

__all__ = ["RolloutPrefetcher"]

logger = logging.getLogger("verifiers.train")


class RolloutPrefetcher:
    """A prefetcher that keeps blocks in flight ahead of the trainer and hands them out in order.

    Args:
        dataset: training rows.
        plan: says which prompts a block has.
        generator: produces blocks; its `num_batches_ahead` bounds what is in flight.
        push: sends the present weights to the server, stamped with the optimizer step given.
        drains: every rollout in flight ends before weights are pushed. Otherwise they continue under the new weights,
            and each token is stamped with its own version.
        max_staleness: optimizer steps that a block's oldest token may be behind at the block's first update; None
            for what `num_batches_ahead` gives.
        replacement_groups: prompts held ready to replace a block's groups without variance.
        timer: the trainer's, which is told of pushing and waiting.

    Attributes:
        server_version: optimizer step whose weights the server holds; None before the first push.
        seconds: time spent on "sync" and "wait" for the newest block.
    """

    def __init__(
        self,
        dataset: Any,
        plan: BatchPlan,
        generator: AsyncBatchGenerator,
        push: Callable[[int], None],
        *,
        drains: bool = False,
        max_staleness: int | None = None,
        replacement_groups: int = 0,
        timer: StageTimer | None = None,
    ) -> None:
        self._dataset = dataset
        self._plan = plan
        self._generator = generator
        self._push = push
        self.drains = drains
        self._max_staleness = max_staleness
        self._replacement_groups = replacement_groups
        self._timer = timer or StageTimer()
        self._submitted: set[int] = set()
        self.server_version: int | None = None
        self.seconds: dict[str, float] = {}

    @property
    def blocks_ahead(self) -> int:
        """Blocks in flight beyond the one that is wanted: none is begun that would be too stale when it is wanted."""
        ahead = self._generator.num_batches_ahead
        if self._max_staleness is not None:
            ahead = min(ahead, self._max_staleness // self._plan.updates_per_block)
        return ahead

    def check(self) -> None:
        """Raise what made generation fail, if anything did."""
        self._generator.check()

    def sync(self, optimizer_step: int) -> None:
        """Bring the server to the weights of `optimizer_step`; does nothing where it has them."""
        if self.server_version == optimizer_step:
            return
        if self.drains:
            self._timed("wait", self._generator.drain)
        self._timed("sync", lambda: self._push(optimizer_step))
        self.server_version = optimizer_step
        self._generator.policy_version = optimizer_step

    def begin(self, block_id: int, optimizer_step: int) -> None:
        """Push the weights that the block is trained from on, and submit what may be in flight while it is trained.

        The push comes before the block is waited for: its stragglers, and blocks after it, run on meanwhile.
        """
        self.seconds = {}
        self.sync(optimizer_step)
        last = min(block_id + self.blocks_ahead, self._plan.blocks - 1)
        for ahead in range(block_id, last + 1):
            if ahead not in self._submitted:
                self._submit(ahead, optimizer_step)

    def take(self, block_id: int, optimizer_step: int) -> ScoredBlock:
        """Return the block, once all of it is scored.

        Raises:
            GenerationError: it holds tokens of weights that no push of this run can explain.
        """
        block: ScoredBlock = self._timed("wait", lambda: self._generator.get_batch(block_id))
        self._submitted.discard(block_id)
        self._check_staleness(block.groups, block_id, optimizer_step)
        return block

    def groups(self, block_id: int, start: int, stop: int, optimizer_step: int) -> list[Group]:
        """Return the groups `start` .. `stop` - 1, once all up to there are scored; the block stays to be taken."""
        groups = self._timed("wait", lambda: self._generator.groups(block_id, stop))[start:]
        self._check_staleness(groups, block_id, optimizer_step)
        return list(groups)

    def oldest_version(self, optimizer_step: int) -> int | None:
        """Return the oldest policy version whose tokens are trained from `optimizer_step` on; None for any."""
        return None if self._max_staleness is None else optimizer_step - self._max_staleness

    def finished_blocks(self) -> list[ScoredBlock]:
        """Return the blocks in flight that a checkpoint keeps.

        Where pushes wait for rollouts in flight, that is all of them: the push that follows would wait as long. Where
        they do not, it is what is finished; the rest is generated again after a resume.
        """
        if self.drains:
            with self._timer.stage("wait"):
                self._generator.drain()
        return self._generator.finished_blocks()

    def restore(self, blocks: Iterable[ScoredBlock]) -> list[int]:
        """Hold blocks of a checkpoint instead of generating them; those too stale for these settings are left out.

        Returns:
            The ids of the blocks held.
        """
        allowed = self.blocks_ahead * self._plan.updates_per_block
        held = []
        for block in blocks:
            first_update = block.block_id * self._plan.updates_per_block
            if first_update - _oldest(block.groups, first_update) <= allowed:
                self._generator.restore(block)
                self._submitted.add(block.block_id)
                held.append(block.block_id)
        return held

    def batch_request(self, block_id: int, optimizer_step: int) -> BatchRequest:
        """Return what the generator is asked for: the block's rollouts, and prompts that may replace its groups.

        Each rollout has the sampling seed that (seed, block, example, generation) gives.
        """
        planned = [example_id for example_id, _ in self._plan.requests(block_id)]
        others = self._plan.replacement_ids(block_id, self._replacement_groups) if self._replacement_groups else []
        replacements = [example_id for example_id in others for _ in range(self._plan.num_generations)]
        return BatchRequest(
            block_id,
            self._requests(block_id, planned),
            policy_version=optimizer_step,
            replacements=self._requests(block_id, replacements),
        )

    def _submit(self, block_id: int, optimizer_step: int) -> None:
        self._generator.submit_batch(self.batch_request(block_id, optimizer_step))
        self._submitted.add(block_id)

    def _requests(self, block_id: int, example_ids: Sequence[int]) -> list[RolloutRequest]:
        requests = []
        for place, example_id in enumerate(example_ids):
            key = RolloutKey(block_id, example_id, place % self._plan.num_generations)
            row = row_fields(self._dataset[example_id])
            requests.append(RolloutRequest(key, *row, seed=rollout_seed(self._plan.seed, key)))
        return requests

    def _timed(self, stage: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        try:
            with self._timer.stage(stage):
                return work()
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started

    def _check_staleness(self, groups: list[Group], block_id: int, optimizer_step: int) -> None:
        allowed = self._generator.num_batches_ahead * self._plan.updates_per_block
        first_update = block_id * self._plan.updates_per_block
        oldest = _oldest(groups, first_update)
        if oldest > optimizer_step or first_update - oldest > allowed:
            raise GenerationError(
                f"block {block_id} holds tokens of policy version {oldest} at optimizer step {optimizer_step}, "
                f"and num_batches_ahead={self._generator.num_batches_ahead} allows a staleness of {allowed}: the "
                "server's weight version and the trainer's disagree."
            )


def _oldest(groups: Iterable[Group], default: int) -> int:
    rows = (row for group in groups for rollout in group.rollouts for row in rollout.rows)
    return min((row.oldest_version for row in rows), default=default)
