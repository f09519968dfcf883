"""The data loop of the trainer: the micro-batches of each micro-step, from the blocks that rank 0 prefetches.

transformers' own data loader yields empty items, so that nothing is read and skipped when a run resumes: which
micro-step of which block is next follows from the optimizer step alone.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from verifiers.data.batch_plan import BatchPlan
from verifiers.keywords import warn_once
from verifiers.monitoring.stage_timer import StageTimer, in_stage
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.train.batching.demonstrations import Demonstrations
from verifiers.train.batching.micro_batches import MicroBatch, MicroSteps, all_micro_batches, packing_metrics
from verifiers.train.batching.rollout_session import RolloutSession
from verifiers.train.batching.training_block import (
    BlockStream,
    Dropped,
    TrainingBlock,
    build_training_block,
    rows_to_score,
)
from verifiers.train.checkpoint.block_log import ranges_by_example
from verifiers.train.config import GRPOConfig
from verifiers.train.loss.logprobs import PolicyLogprobs
from verifiers.train.processes.distributed import Ranks

logger = logging.getLogger("verifiers.train")


class RankSteps(NamedTuple):
    """Micro-steps of one rank, as rank 0 sends them.

    Attributes:
        gradient_scale: of a streamed micro-step that ends an update: the factor for the update's gradient.
    """

    micro_steps: list[list[MicroBatch]]
    metrics: dict[str, float]
    gradient_scale: float | None = None


class DataLoop:
    """Micro-batches for each micro-step of a run; every rank has one, and rank 0 makes them for all.

    Args:
        record: called on rank 0 with each block, what is trained of it, and the optimizer step before; gives metrics.
        log_block: called on rank 0 with a block, the step before and what is dropped, again where that becomes more.
        log: called on every rank with the metrics of a block.

    Attributes:
        gradient_scale: the factor for the gradient of the update that the present micro-step ends, where the block is
            streamed; None where there is none.
    """

    def __init__(
        self,
        plan: BatchPlan,
        args: GRPOConfig,
        ranks: Ranks,
        logprobs: PolicyLogprobs,
        session: RolloutSession,
        timer: StageTimer,
        *,
        demonstrations: Demonstrations | None = None,
        record: Callable[[ScoredBlock, TrainingBlock, int], dict[str, float]],
        log_block: Callable[[ScoredBlock, int, Sequence[Dropped]], None],
        log: Callable[[Mapping[str, float]], None],
    ) -> None:
        self._plan, self._args, self._ranks, self._logprobs, self._session = plan, args, ranks, logprobs, session
        self.timer, self._demonstrations = timer, demonstrations
        self._record, self._log_block, self._log = record, log_block, log
        self.reset()

    def reset(self) -> None:
        self._block_id: int | None = None
        self._optimizer_step = 0
        self._micro_steps: list[list[MicroBatch]] = []
        self._gradient_scales: dict[int, float] = {}
        self._stream: BlockStream | None = None
        self._waiting: ScoredBlock | None = None
        self._not_applied: set[int] = set()
        # of the block in training: what was logged of it, and the places that each update of a pass trains
        self._logged: tuple[ScoredBlock, int, list[Dropped]] | None = None
        self._places: list[set[int]] = []
        self.gradient_scale: float | None = None

    def micro_batches(self, optimizer_step: int, micro_step: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of a micro-step of an update, from 0; every rank must call it."""
        self._optimizer_step = optimizer_step
        block_id, in_block = self._plan.position(optimizer_step, micro_step)
        # a failure of generation is raised on every rank before the next micro-step
        self._ranks.on_rank_0(lambda: self._session.open().check())
        if self._block_id != block_id:
            self._begin_block(block_id, optimizer_step)
        if in_block == len(self._micro_steps):
            self._take(self._ranks.scatter(lambda: self._produce_streamed(in_block)), in_block)
        self.gradient_scale = self._gradient_scales.get(in_block)
        return self._micro_steps[in_block]

    def _begin_block(self, block_id: int, step: int) -> None:
        self._micro_steps, self._gradient_scales, self._logged = [], {}, None
        if self._args.streaming:
            self._ranks.on_rank_0(lambda: self._begin_stream(block_id, step))
        else:
            kl = None
            if self._args.kl_in_reward:
                kl = self._measure_kl(self._ranks.scatter(lambda: self._rows_to_score(block_id, step)))
            self._take(self._ranks.scatter(lambda: self._produce(block_id, step, kl)), 0)
        self._block_id = block_id

    def _take(self, received: RankSteps, first: int) -> None:
        """Hold the micro-steps that rank 0 sent, with the log-probs that they need before they are first trained."""
        self._micro_steps += received.micro_steps
        if received.gradient_scale is not None:
            self._gradient_scales[first] = received.gradient_scale
        self._score(received.micro_steps)
        if received.metrics:
            self._log(received.metrics)

    @in_stage("old_logprobs")
    def _measure_kl(self, micro_batches: Sequence[MicroBatch]) -> dict[int, tuple[float, int]]:
        """Return the KL to the reference (nats, tokens) of each rollout of a block, by its place, over all ranks.

        It is the sum of log mu - log pi_ref over the sampled tokens, with mu the policy that sampled them: the
        penalty of RLHF (Ziegler et al., arXiv:1909.08593; Ouyang et al., arXiv:2203.02155), in the form of one reward
        a rollout (Ahmadian et al., arXiv:2402.14740).
        """
        own: list[tuple[int, float, int]] = []
        for batch in micro_batches:
            ref_RT = self._logprobs.of_reference(batch).to(batch["loss_mask"].device)
            sampled_RT = batch["loss_mask"].bool()
            kl_R = torch.where(sampled_RT, batch["sampler_logps"] - ref_RT, 0.0).double().sum(1)
            own += zip(batch["rollout_index"].tolist(), kl_R.tolist(), sampled_RT.sum(1).tolist(), strict=True)
        sums: dict[int, tuple[float, int]] = {}
        for index, nats, tokens in itertools.chain(*self._ranks.gather(own)):
            if index >= 0:
                before = sums.get(index, (0.0, 0))
                sums[index] = before[0] + nats, before[1] + tokens
        return sums

    # -- on rank 0 ----------------------------------------------------------------------------------------------

    def _rows_to_score(self, block_id: int, step: int) -> list[list[MicroBatch]]:
        """Wait for a whole block and share out its rows, whose KL is needed before there are advantages."""
        self._waiting = self._whole_block(block_id, step)
        packed = rows_to_score(self._waiting, self._plan, self._args)
        return [[batch for batches in steps for batch in batches] for steps in _by_rank(packed)]

    def _whole_block(self, block_id: int, step: int) -> ScoredBlock:
        prefetcher = self._session.open()
        prefetcher.begin(block_id, step)
        return prefetcher.take(block_id, step)

    def _produce(self, block_id: int, step: int, kl: dict[int, tuple[float, int]] | None) -> list[RankSteps]:
        """Make the micro-steps of every rank, of a whole block; `kl` is subtracted from its rewards."""
        block, self._waiting = self._waiting or self._whole_block(block_id, step), None
        rollouts, weight = block.rollouts, self._args.beta
        trained = build_training_block(
            block,
            self._plan,
            self._args,
            oldest_version=self._session.open().oldest_version(step),
            demonstrations=self._demonstrations,
            penalties=None if kl is None else {rollouts[place].key: weight * nats for place, (nats, _) in kl.items()},
        )
        metrics = self._finish_block(block, trained, step)
        if kl and (tokens := sum(count for _, count in kl.values())):
            nats = sum(each for each, _ in kl.values())
            metrics |= {"kl": nats / tokens, "reward/kl_penalty": weight * nats / len(kl)}
        return [RankSteps(micro_steps, metrics) for micro_steps in _by_rank(trained.micro_steps)]

    def _begin_stream(self, block_id: int, step: int) -> None:
        prefetcher = self._session.open()
        prefetcher.begin(block_id, step)
        self._stream = BlockStream(prefetcher, self._plan, self._args, block_id, step)

    def _produce_streamed(self, in_block: int) -> list[RankSteps]:
        """Wait for the next micro-step of the block that is being generated; only the first time it is trained."""
        stream = self._stream
        assert stream is not None
        by_rank, gradient_scale = stream.next()
        metrics: dict[str, float] = {}
        if in_block == self._micro_steps_reached(stream.optimizer_step) - 1:
            metrics = self._finish_block(*stream.finish(), stream.optimizer_step)
        return [RankSteps([micro_batches], metrics, gradient_scale) for micro_batches in by_rank]

    def _finish_block(self, block: ScoredBlock, trained: TrainingBlock, step: int) -> dict[str, float]:
        trained.dropped += self._not_reached(block, trained, step)
        each = self._plan.gradient_accumulation_steps
        starts = range(0, len(trained.micro_steps), each)
        self._places = [_places(trained.micro_steps[start : start + each]) for start in starts]
        self._logged = block, step, trained.dropped
        self._log_again()
        packing, budget = packing_metrics(trained.micro_steps), self._args.max_tokens_per_micro_batch
        if budget is not None and packing["rows/largest_micro_batch_tokens"] > budget:
            warn_once(
                "verifiers.train",
                f"a row is over max_tokens_per_micro_batch={budget} and has a micro-batch of its own; drop such rows "
                "by max_seq_len, or lower max_completion_length.",
            )
        return {**self._record(block, trained, step), **packing}

    def _micro_steps_reached(self, step: int) -> int:
        """Return the micro-steps of a block that are trained before the run ends; all but in its last block."""
        left = (self._plan.max_steps - step) * self._plan.gradient_accumulation_steps
        return min(self._plan.steps_per_generation, left)

    def _not_reached(self, block: ScoredBlock, trained: TrainingBlock, step: int) -> list[Dropped]:
        reached, rollouts = self._micro_steps_reached(step), block.rollouts
        if reached == self._plan.steps_per_generation:
            return []
        if self._args.streaming:
            beyond = set(range(reached * self._plan.completions_per_micro_step, len(rollouts)))
        else:
            beyond = _places(trained.micro_steps[reached:])
        return _dropped(block, beyond, "run_ended")

    def drop_update(self, optimizer_step: int, places: Sequence[int]) -> str:
        """Record the rollouts of an update that is not applied as dropped, unless another pass trains them.

        Returns:
            The block and these rollouts, for a message.
        """
        self._not_applied.add(optimizer_step)
        if self._logged is not None:
            self._log_again()
        stream = self._stream
        block = self._logged[0] if self._logged is not None else stream.block if stream is not None else None
        assert block is not None
        rollouts = block.rollouts
        keys = [rollouts[place].key for place in places]
        ranges = ranges_by_example([(key.example_id, key.generation) for key in keys])
        named = [f"example {example} (generations {spans})" for example, spans in ranges.items()]
        return f"block {block.block_id}: {', '.join(named) or 'all of the update together'}"

    def _log_again(self) -> None:
        """Log the block with the rollouts that no update trains: none that was applied, and none to come."""
        assert self._logged is not None
        block, first, dropped = self._logged
        known, end = {item.key for item in dropped}, min(first + self._plan.updates_per_block, self._plan.max_steps)
        for number, places in enumerate(self._places):
            passes = range(first + number, end, len(self._places))
            if passes and self._not_applied.issuperset(passes):
                dropped += [item for item in _dropped(block, places, "not_finite") if item.key not in known]
        self._log_block(block, first, dropped)

    # -- on every rank ------------------------------------------------------------------------------------------

    @in_stage("old_logprobs")
    def _score(self, micro_steps: list[list[MicroBatch]]) -> None:
        """Add old log-probs, where they are needed, and the reference's."""
        args, plan = self._args, self._plan
        # a whole block's proximal policy is that of its first update, a streamed micro-step's that of its own
        trained_again = plan.num_iterations > 1 if args.streaming else plan.updates_per_block > 1
        copy = self._session.publisher.copy_of(self._optimizer_step) if trained_again else None
        for batch in (batch for micro_batches in micro_steps for batch in micro_batches):
            if not args.vllm_importance_sampling_correction and args.may_be_stale:
                # nothing else tells stale tokens from fresh ones: the clipping then acts on current / sampler
                batch["old_logps"] = batch["sampler_logps"]
            elif trained_again:
                batch["old_logps"] = self._logprobs.old(batch, copy)
            if args.beta != 0.0 and not args.kl_in_reward:
                batch["reference_logps"] = self._logprobs.of_reference(batch)


def _places(micro_steps: MicroSteps) -> set[int]:
    """Return the places in the block of the rollouts that are trained in some micro-steps."""
    batches = all_micro_batches(micro_steps)
    return {index for batch in batches for index in batch["rollout_index"].tolist() if index >= 0}


def _dropped(block: ScoredBlock, places: set[int], reason: str) -> list[Dropped]:
    return [Dropped.whole(rollout, reason) for place, rollout in enumerate(block.rollouts) if place in places]


def _by_rank(micro_steps: MicroSteps) -> list[list[list[MicroBatch]]]:
    return [list(steps) for steps in zip(*micro_steps, strict=True)]


def empty_epoch(plan: BatchPlan, first_step: int) -> DataLoader[Any]:
    """Return a loader of one empty item a micro-step of an epoch, for a run that begins at an optimizer step."""
    # a curriculum may have fewer rows than a block
    updates = max(1, plan.blocks_per_epoch) * plan.updates_per_block
    if first_step >= plan.max_steps:
        # transformers looks at max_steps only after a step, and begins no epoch where all are done
        updates = plan.max_steps
    # a generator of its own: a new epoch must not draw from the one that dropout draws from
    return DataLoader(
        [{}] * (updates * plan.gradient_accumulation_steps),  # type: ignore[arg-type]
        batch_size=1,
        collate_fn=operator.itemgetter(0),
        generator=torch.Generator(),
    )


def reward_of_the_environment(**_: Any) -> list[float | None]:
    """Stand where TRL requires a reward function: rollouts have their rewards."""
    raise AssertionError("TRL's own generation is not used")


class StopsBetweenBlocks(TrainerCallback):
    """A run's end at a block boundary, where the run can be resumed, when another callback stops it inside a block.

    It must come after all other callbacks. A save that is asked for with the stop comes with it.
    """

    def __init__(self, updates_per_block: int) -> None:
        self._updates = updates_per_block
        self._stops = self._saves = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stops = self._saves = False

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hold_back(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            return
        if state.global_step % self._updates:
            self._hold_back(state, control)
        elif self._stops:
            control.should_training_stop = True
            control.should_save = control.should_save or self._saves
            self._stops = self._saves = False

    on_log = on_evaluate = on_save = on_step_end

    def _hold_back(self, state: Any, control: Any) -> None:
        if not control.should_training_stop:
            return
        if not self._stops and state.is_world_process_zero:
            logger.warning(
                "a callback stops the run inside a block: it ends at step %d, when the block has been trained.",
                (state.global_step // self._updates + 1) * self._updates,
            )
        self._saves = self._saves or control.should_save
        self._stops, control.should_training_stop, control.should_save = True, False, False
