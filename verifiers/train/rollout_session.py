"""The rollout session of a run, on rank 0: servers connected, generator running, blocks in flight."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from verifiers.data.batch_plan import BatchPlan
from verifiers.envs.lifecycle import teardown_at_exit
from verifiers.inference.endpoint import Backend
from verifiers.monitoring.stage_timer import StageTimer
from verifiers.rollouts.block import GroupPolicy
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import Group, ScoredBlock
from verifiers.train.batching.advantages import has_zero_variance
from verifiers.train.batching.prefetch import RolloutPrefetcher
from verifiers.train.config import GRPOConfig
from verifiers.train.sampling_args import refuse_biased_call
from verifiers.train.weight_sync.protocol import WeightSync
from verifiers.train.weight_sync.publisher import WeightPublisher

__all__ = ["RolloutSession", "replacement_groups"]


class RolloutSession:
    """The servers, the generator and the prefetcher of a run, from `open` to `close`.

    Args:
        args: settings of the run.
        env: what is trained on.
        eval_envs: what else is played.
        rows: the training rows.
        plan: of the run.
        sampling_args: of training rollouts.
        publisher: keeps the servers on the trained weights.
        timer: the trainer's time by stage.
        before_push: called before each push.
        checks_meanwhile: a push may be checked while the trainer computes.

    Attributes:
        generator: rolls out and scores blocks; None while closed.
        prefetcher: keeps blocks in flight; None while closed.
    """

    def __init__(
        self,
        args: GRPOConfig,
        env: Any,
        eval_envs: Sequence[Any],
        rows: Any,
        plan: BatchPlan,
        sampling_args: dict[str, Any],
        publisher: WeightPublisher,
        timer: StageTimer,
        *,
        before_push: Callable[[], None],
        checks_meanwhile: bool,
    ) -> None:
        self._args, self._env, self._eval_envs, self._rows = args, env, eval_envs, rows
        self._plan, self._sampling_args, self._publisher, self._timer = plan, sampling_args, publisher, timer
        self._before_push, self._checks_meanwhile = before_push, checks_meanwhile
        self.generator: AsyncBatchGenerator | None = None
        self.prefetcher: RolloutPrefetcher | None = None
        publisher.on_version = self._note_version

    @property
    def weight_sync(self) -> WeightSync:
        """The way that weights reach the rollout servers."""
        return self._publisher.sync

    @property
    def servers(self) -> Backend:
        """The rollout servers."""
        return self._publisher.servers

    def open(self) -> RolloutPrefetcher:
        """Wait for the rollout servers and start the generator, where that was not done."""
        if self.prefetcher is not None:
            return self.prefetcher
        # not in close: an evaluation may follow the training
        for env in (self._env, *self._eval_envs):
            teardown_at_exit(env)
        args, publisher = self._args, self._publisher
        publisher.connect()
        args.server_model = publisher.policy_name()
        self.generator = AsyncBatchGenerator(
            self._env,
            publisher.servers,
            args.server_model,
            self._sampling_args,
            num_batches_ahead=args.num_batches_ahead,
            max_concurrent=args.max_concurrent,
            requests_per_second=args.requests_per_second,
            generation_timeout_s=args.async_generation_timeout,
            rollout_timeout_s=args.rollout_timeout,
            grading_timeout_s=args.grading_timeout,
            generation=args.generation,
            check_call=functools.partial(refuse_biased_call, args),
            group_policy=_group_policy(args),
            drop_stragglers_after_s=args.drop_stragglers_after,
        ).start()
        self.prefetcher = RolloutPrefetcher(
            self._rows,
            self._plan,
            self.generator,
            self.push,
            drains=publisher.drains(),
            max_staleness=args.max_staleness,
            replacement_groups=replacement_groups(args, self._plan.prompts_per_block),
            timer=self._timer,
        )
        return self.prefetcher

    def finished_blocks(self) -> list[ScoredBlock]:
        """Return the blocks in flight that are whole; none while closed."""
        return self.prefetcher.finished_blocks() if self.prefetcher is not None else []

    def close(self) -> None:
        """End the generator's thread and give back what weight pushes used. May be called twice."""
        generator, self.generator, self.prefetcher = self.generator, None, None
        # whatever one of them raises, the rest is given back
        with contextlib.ExitStack() as stack:
            stack.callback(self._publisher.close)
            if generator is not None:
                stack.callback(generator.close)

    def push(self, version: int) -> None:
        """Push the present weights, stamped with a version."""
        self._before_push()
        # pushes that drain are for runs that can be repeated: nothing then runs beside a check
        drains = self.prefetcher is None or self.prefetcher.drains
        self._publisher.push(version, may_check_meanwhile=self._checks_meanwhile and not drains)

    def publish(self, version: int, *, settle: bool) -> AsyncBatchGenerator:
        """Bring the servers to the present weights, where they have others, and return the generator.

        Args:
            version: of the present weights.
            settle: judge a check that is on its way.
        """
        self.open().sync(version)
        if settle:
            self._publisher.settle()
        assert self.generator is not None
        return self.generator

    def _note_version(self, version: int) -> None:
        """Stamp requests that continue after a push with the weights they continue under."""
        if self.generator is not None:
            self.generator.policy_version = version


def replacement_groups(args: GRPOConfig, prompts_per_block: int) -> int:
    """Return how many prompts may replace the zero-variance groups of a block."""
    if not args.dynamic_sampling:
        return 0
    most = args.dynamic_sampling_max_groups
    return 2 * prompts_per_block if most is None else most


def _group_policy(args: GRPOConfig) -> GroupPolicy:
    def is_zero_variance(group: Group) -> bool:
        return has_zero_variance(group, zero_truncated_completions=args.zero_truncated_completions)

    return GroupPolicy(
        retries=args.rollout_retries, is_zero_variance=is_zero_variance if args.dynamic_sampling else None
    )
