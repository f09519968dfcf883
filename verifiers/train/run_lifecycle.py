"""Start and end of a run: servers, generator, prefetcher, directory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verifiers.data.batch_plan import BatchPlan
from verifiers.data.row_source import ObservesBlocks
from verifiers.envs.lifecycle import teardown_at_exit
from verifiers.errors import CheckpointError
from verifiers.inference.endpoint import Backend
from verifiers.inference.wire import refuse_biased_call
from verifiers.interrupt import Termination
from verifiers.monitoring.stage_timer import StageTimer
from verifiers.rollouts.block import GroupPolicy
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import Group, ScoredBlock
from verifiers.train.batching.advantages import has_zero_variance
from verifiers.train.batching.prefetch import RolloutPrefetcher
from verifiers.train.checkpoint.checkpoint import load_pending_blocks, resume_step
from verifiers.train.checkpoint.run_directory import ResumePoint, RunDirectory, visible_checkpoint
from verifiers.train.config import GRPOConfig
from verifiers.train.evaluation.evaluator import Evaluator
from verifiers.train.monitor import RunMonitor
from verifiers.train.processes.distributed import Ranks, ended_if_stuck
from verifiers.train.weight_sync.protocol import WeightSync
from verifiers.train.weight_sync.publisher import WeightPublisher

__all__ = [
    "RolloutSession",
    "RunLifecycle",
    "replacement_groups",
    "restore_curriculum",
    "still_planned",
]


class RolloutSession:
    """The servers, the generator and the prefetcher of a run, from `open` to `close`.

    Args:
        eval_envs: what else is played.
        publisher: keeps the servers on the trained weights.
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
        checks_meanwhile: bool,
    ) -> None:
        self._args, self._env, self._eval_envs, self._rows = args, env, eval_envs, rows
        self._plan, self._sampling_args, self._publisher, self._timer = plan, sampling_args, publisher, timer
        self._checks_meanwhile = checks_meanwhile
        self.generator: AsyncBatchGenerator | None = None
        self.prefetcher: RolloutPrefetcher | None = None

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
        publisher.connect(self._note_version)
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
            check_call=functools.partial(refuse_biased_call, args.temperature),
            vocab_size=publisher.vocab_size,
            group_policy=_group_policy(args),
            drop_stragglers_after_s=args.drop_stragglers_after,
        ).start()
        # writing a checkpoint to a slow disk holds the interpreter too, so not already at grading_timeout
        self.generator.exit_if_blocked(max(args.grading_timeout, args.async_generation_timeout))
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
        # pushes that drain are for runs that can be repeated: nothing then runs beside a check
        drains = self.prefetcher is None or self.prefetcher.drains
        self._publisher.push(version, may_check_meanwhile=self._checks_meanwhile and not drains)

    def publish(self, version: int) -> AsyncBatchGenerator:
        """Bring the servers to the present weights, where they have others, and return the generator.

        Args:
            version: of the present weights.
        """
        self.open().sync(version)
        # after the last step nothing more would check these weights
        self._publisher.finish_check()
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


class RunLifecycle:
    """The start and end of a run: its parts, and curriculum and blocks in flight as its checkpoint has them.

    Args:
        directory: where the run writes.
        session: connects the servers and starts the generator.

    Attributes:
        first_step: the optimizer step at which the run starts.
    """

    def __init__(
        self,
        plan: BatchPlan,
        ranks: Ranks,
        directory: RunDirectory,
        session: RolloutSession,
        evaluator: Evaluator,
        monitor: RunMonitor,
    ) -> None:
        self._plan, self._ranks, self._directory = plan, ranks, directory
        self._session, self._evaluator, self._monitor = session, evaluator, monitor
        self.first_step = 0
        # for a second run of the same trainer
        self._state_at_0 = self.state()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside the model, as JSON, by the name of what it belongs to."""
        source = self._plan.source
        return {"curriculum": source.state()} if isinstance(source, ObservesBlocks) else {}

    def open(self, asked: str | bool | None) -> str | None:
        """Start the run and return the checkpoint's path on this rank, None for step 0; every rank calls it.

        Args:
            asked: a checkpoint's path, True for the newest complete one in the directory, else step 0.

        Raises:
            CheckpointError: the checkpoint cannot be resumed, is not seen by this rank, or another run writes to the
                directory.
        """
        point = self._ranks.on_rank_0(lambda: self._directory.choose(asked))
        checkpoint = visible_checkpoint(point, str(self._directory.path), self._ranks.index)
        self.first_step = resume_step(checkpoint) if checkpoint else 0
        self._ranks.on_rank_0(lambda: self._open_on_rank_0(point))
        return checkpoint

    def _open_on_rank_0(self, point: ResumePoint) -> None:
        # servers come first: nothing is archived for a run that finds none
        prefetcher, generator = self._session.open(), self._session.generator
        assert generator is not None
        further = self._directory.begin(point, self._evaluator.stored.own)
        if self._plan.source is not None:
            restore_curriculum(self._plan, further if point.checkpoint else self._state_at_0)
        if point.checkpoint:
            prefetcher.restore(still_planned(self._plan, load_pending_blocks(point.checkpoint)))
        self._monitor.begin(
            self.first_step if point.checkpoint else None,
            servers=self._session.servers,
            activity=generator.activity,
            drains=prefetcher.drains,
        )

    def close(self) -> None:
        """End the generator's thread, give back what weight pushes used, and release the directory.

        May be called twice.
        """
        self._evaluator.stored.own.clear()
        # whatever one of them raises, the other is closed
        with contextlib.ExitStack() as stack:
            stack.callback(self._directory.close)
            stack.callback(self._session.close)

    def ended_if_stuck(self, termination: Termination) -> contextlib.AbstractContextManager[None]:
        """End rank 0 of several by a signal also inside a collective that does not end; it gives back what it can."""

        def give_back(error: BaseException) -> None:
            try:
                self._session.weight_sync.close()
            finally:
                self._monitor.end(error)

        if self._session.generator is None or self._ranks.count == 1:
            return contextlib.nullcontext()
        return ended_if_stuck(termination, self._session.generator.loop, give_back)


def restore_curriculum(plan: BatchPlan, further: Mapping[str, Any]) -> None:
    """Bring an adaptive curriculum to where a checkpoint stands.

    Args:
        further: state of the checkpoint.

    Raises:
        CheckpointError: the checkpoint has no state of a curriculum.
    """
    if not isinstance(plan.source, ObservesBlocks):
        return
    if "curriculum" not in further:
        raise CheckpointError(
            "the checkpoint holds no state of an adaptive curriculum, so it is of another run; start a new "
            "output_dir."
        )
    plan.source.restore(further["curriculum"])


def still_planned(plan: BatchPlan, blocks: Iterable[ScoredBlock]) -> list[ScoredBlock]:
    """Return the blocks of a checkpoint whose prompts are still planned: later stages may have other datasets now."""
    return [
        block
        for block in blocks
        if block.block_id < plan.blocks
        and set(plan.example_ids(block.block_id)) <= {group.example_id for group in (*block.groups, *block.filtered)}
    ]
