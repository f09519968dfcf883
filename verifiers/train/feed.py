"""The feed of blocks on rank 0: what to submit when, and which weights the server holds meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from verifiers.data.plan import BatchPlan, rollout_seed
from verifiers.envs.dataset_format import row_fields
from verifiers.errors import GenerationError
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import RolloutRequest, ScoredBlock
from verifiers.types import RolloutKey

__all__ = ["BlockFeed"]

logger = logging.getLogger("verifiers.train")


class BlockFeed:
    """Keeps `num_batches_ahead` blocks in flight and hands them out in order.

    Args:
        dataset: training rows.
        plan: says which prompts a block has.
        generator: produces blocks.
        push: sends the present weights to the server, stamped with the optimizer step given.

    Attributes:
        server_version: optimizer step whose weights the server holds; None before the first push.
        seconds: time spent in the newest `next` on "sync" and "wait".
    """

    def __init__(
        self, dataset: Any, plan: BatchPlan, generator: AsyncBatchGenerator, push: Callable[[int], None]
    ) -> None:
        self._dataset = dataset
        self._plan = plan
        self._generator = generator
        self._push = push
        self._submitted: set[int] = set()
        self.server_version: int | None = None
        self.seconds: dict[str, float] = {}

    def sync(self, optimizer_step: int) -> None:
        """Bring the server to the weights of `optimizer_step`; does nothing where it has them."""
        if self.server_version != optimizer_step:
            started = time.perf_counter()
            self._push(optimizer_step)
            self.server_version = optimizer_step
            self._generator.policy_version = optimizer_step
            self.seconds["sync"] = self.seconds.get("sync", 0.0) + time.perf_counter() - started

    def next(self, block_id: int, optimizer_step: int) -> ScoredBlock:
        """The block to train from `optimizer_step` on.

        The block is finished before weights are pushed, so with `num_batches_ahead` 1 no rollout spans the push;
        with more, and where an evaluation pushes, rollouts in flight go on under the new weights, and each token is
        stamped with its own version. Then the next blocks are submitted, no further ahead than the plan allows.
        """
        self.seconds = {}
        ready = self._take(block_id) if block_id in self._submitted else None
        self.sync(optimizer_step)
        last = min(block_id + self._generator.num_batches_ahead, self._plan.blocks - 1)
        for ahead in range(block_id, last + 1):
            if ahead not in self._submitted:
                self._generator.submit(ahead, self.requests(ahead), policy_version=optimizer_step)
                self._submitted.add(ahead)
        block = ready if ready is not None else self._take(block_id)
        self._check_staleness(block, optimizer_step)
        return block

    def requests(self, block_id: int) -> list[RolloutRequest]:
        """The rollouts of a block, each with the sampling seed that (seed, block, example, generation) gives."""
        requests = []
        for example_id, generation in self._plan.requests(block_id):
            prompt, answer, task, info = row_fields(self._dataset[example_id])
            key = RolloutKey(block_id, example_id, generation)
            seed = rollout_seed(self._plan.seed, key)
            requests.append(RolloutRequest(key, prompt, answer, task, info, seed))
        return requests

    def _take(self, block_id: int) -> ScoredBlock:
        started = time.perf_counter()
        block = self._generator.get(block_id)
        self.seconds["wait"] = self.seconds.get("wait", 0.0) + time.perf_counter() - started
        return block

    def _check_staleness(self, block: ScoredBlock, optimizer_step: int) -> None:
        allowed = self._generator.num_batches_ahead * self._plan.updates_per_block
        oldest = min((row.oldest_version for rollout in block for row in rollout.rows), default=optimizer_step)
        if not 0 <= optimizer_step - oldest <= allowed:
            raise GenerationError(
                f"block {block.block_id} holds tokens of policy version {oldest} at optimizer step {optimizer_step}, "
                f"and num_batches_ahead={self._generator.num_batches_ahead} allows a staleness of {allowed}: the "
                "server's weight version and the trainer's disagree."
            )
