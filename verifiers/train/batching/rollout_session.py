"""The rollouts of a run on rank 0: its servers and generator, which blocks are in flight, and under which weights."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from verifiers.data.batch_plan import BatchPlan
from verifiers.data.sampler import rollout_seed
from verifiers.envs.datasets import row_fields
from verifiers.envs.lifecycle import teardown_at_exit
from verifiers.errors import GenerationError
from verifiers.images import ImageStore
from verifiers.inference.wire import refuse_biased_call
from verifiers.monitoring.stage_timer import StageTimer
from verifiers.rollouts.block import BatchRequest, GroupPolicy
from verifiers.rollouts.generator import AsyncBatchGenerator, fields_given
from verifiers.rollouts.rollout import Group, RolloutRequest, ScoredBlock
from verifiers.rollouts.teacher import Teacher
from verifiers.train.batching.advantages import has_zero_variance
from verifiers.train.config import GRPOConfig
from verifiers.train.weight_sync.publisher import WeightPublisher
from verifiers.types import RolloutKey


class RolloutSession:
    """The servers, the generator and the prefetcher of a run, from `open` to `close`.

    Args:
        envs: the environment that is trained on, then those that are evaluated on.
        checks_meanwhile: a push may be checked while the trainer computes.
    """

    def __init__(
        self,
        args: GRPOConfig,
        envs: Sequence[Any],
        rows: Any,
        plan: BatchPlan,
        sampling_args: dict[str, Any],
        publisher: WeightPublisher,
        tokenizer: Any,
        timer: StageTimer,
        *,
        checks_meanwhile: bool,
        images: ImageStore | None = None,
    ) -> None:
        self._images = images
        self._args, self._envs, self._rows, self._plan = args, envs, rows, plan
        self._sampling_args, self.publisher, self._timer = sampling_args, publisher, timer
        self._checks_meanwhile, self._tokenizer = checks_meanwhile, tokenizer
        self.generator: AsyncBatchGenerator | None = None
        self.prefetcher: RolloutPrefetcher | None = None
        self._tracing = contextlib.ExitStack()

    def open(self) -> RolloutPrefetcher:
        """Wait for the rollout servers and start the generator, where that was not done."""
        if self.prefetcher is not None:
            return self.prefetcher
        # not in close: an evaluation may follow the training
        for env in self._envs:
            teardown_at_exit(env)
        args, publisher = self._args, self.publisher
        publisher.connect(self._note_version)
        args.server_model = publisher.policy_name()
        is_zero_variance = functools.partial(
            has_zero_variance,
            zero_truncated_completions=args.zero_truncated_completions,
            by_turn=args.turn_discount is not None,
        )
        publisher.require_masks(fields_given(self._envs[0], self._sampling_args))
        teacher = None
        if args.teacher_url:
            teacher = Teacher(
                args.teacher_url,
                args.teacher_model,
                api_key=os.environ.get("TEACHER_API_KEY", "EMPTY"),
                top_k=args.teacher_top_k,
                timeout_s=args.grading_timeout,
                max_concurrent=args.max_concurrent,
            )
        if args.trace is not None:
            from verifiers import tracing

            self._tracing.callback(tracing.start(args, args.run_name or str(args.output_dir)))
        self.generator = AsyncBatchGenerator(
            self._envs[0],
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
            mask_source=publisher.mask_source,
            images=self._images,
            group_policy=GroupPolicy(
                retries=args.rollout_retries, is_zero_variance=is_zero_variance if args.dynamic_sampling else None
            ),
            teacher=teacher,
        ).start()
        if teacher is not None:
            self.generator.run(teacher.check(self._tokenizer), args.server_wait)
        # writing a checkpoint to a slow disk holds the interpreter too, so not already at grading_timeout
        self.generator.exit_if_blocked(max(args.grading_timeout, args.async_generation_timeout))
        self.prefetcher = RolloutPrefetcher(
            self._rows,
            self._plan,
            self.generator,
            self.push,
            drains=publisher.drains(),
            max_staleness=args.max_staleness,
            replacement_groups=args.replacement_groups(self._plan.prompts_per_block),
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
            stack.callback(self._tracing.close)
            stack.callback(self.publisher.close)
            if generator is not None:
                stack.callback(generator.close)

    def push(self, version: int) -> None:
        # pushes that drain are for runs that can be repeated: nothing then runs beside a check
        drains = self.prefetcher is None or self.prefetcher.drains
        self.publisher.push(version, may_check_meanwhile=self._checks_meanwhile and not drains)

    def publish(self, version: int) -> AsyncBatchGenerator:
        """Bring the servers to the present weights, which get this version, and return the generator."""
        self.open().sync(version)
        # after the last step nothing more would check these weights
        self.publisher.finish_check()
        assert self.generator is not None
        return self.generator

    def _note_version(self, version: int) -> None:
        """Stamp requests that continue after a push with the weights they continue under."""
        if self.generator is not None:
            self.generator.policy_version = version


class RolloutPrefetcher:
    """A prefetcher that keeps blocks in flight ahead of the trainer and hands them out in order.

    Args:
        generator: its `num_batches_ahead` bounds what is in flight.
        push: sends the present weights to the server, stamped with the optimizer step given.
        drains: every rollout in flight ends before weights are pushed. Otherwise they continue under the new weights,
            and each token is stamped with its own version.
        max_staleness: optimizer steps that a block's oldest token may be behind at the block's first update; None
            for what `num_batches_ahead` gives.
        replacement_groups: prompts held ready to replace a block's groups without variance.

    Attributes:
        server_version: optimizer step whose weights the server holds; None before the first push.
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
        self._dataset, self._plan, self._generator, self._push = dataset, plan, generator, push
        self.drains, self._max_staleness, self._replacement_groups = drains, max_staleness, replacement_groups
        self._timer = timer or StageTimer()
        self._submitted: set[int] = set()
        self.server_version: int | None = None

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
            with self._timer.stage("wait"):
                self._generator.drain()
        with self._timer.stage("sync"):
            self._push(optimizer_step)
        self.server_version = optimizer_step
        self._generator.policy_version = optimizer_step

    def begin(self, block_id: int, optimizer_step: int) -> None:
        """Push the weights that the block is trained from on, and submit what may be in flight while it is trained.

        The push comes before the block is waited for: its stragglers, and blocks after it, run on meanwhile.
        """
        self.sync(optimizer_step)
        last = min(block_id + self.blocks_ahead, self._plan.blocks - 1)
        for ahead in range(block_id, last + 1):
            if ahead not in self._submitted:
                self._generator.submit_batch(self.batch_request(ahead, optimizer_step))
                self._submitted.add(ahead)

    def take(self, block_id: int, optimizer_step: int) -> ScoredBlock:
        """Return the block, once all of it is scored.

        Raises:
            GenerationError: it holds tokens of weights that no push of this run can explain.
        """
        with self._timer.stage("wait"):
            block = self._generator.get_batch(block_id)
        self._submitted.discard(block_id)
        self._check_staleness(block.groups, block_id, optimizer_step)
        return block

    def groups(self, block_id: int, count: int, optimizer_step: int) -> list[Group]:
        """Return the first groups of a block, once they are scored; the block stays to be taken."""
        with self._timer.stage("wait"):
            groups = self._generator.groups(block_id, count)
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
        """Hold blocks of a checkpoint instead of generating them, but those too stale now; return the ids held."""
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

    def _requests(self, block_id: int, example_ids: Sequence[int]) -> list[RolloutRequest]:
        requests = []
        for place, example_id in enumerate(example_ids):
            key = RolloutKey(block_id, example_id, place % self._plan.num_generations)
            row = row_fields(self._dataset[example_id])
            requests.append(RolloutRequest(key, *row, seed=rollout_seed(self._plan.seed, key)))
        return requests

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
