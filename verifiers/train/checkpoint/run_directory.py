"""The output directory of a run, from its first to its last step: lock, block log, checkpoints."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from verifiers.data.batch_plan import BatchPlan
from verifiers.errors import Error
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.train.batching.collate import Dropped
from verifiers.train.checkpoint.block_log import BlockLog, block_record
from verifiers.train.checkpoint.checkpoint import (
    extra_state,
    mark_complete,
    mark_incomplete,
    raises_checkpoint_error,
    rotate_checkpoints,
)
from verifiers.train.checkpoint.pending_blocks import save_pending_blocks
from verifiers.train.checkpoint.resume import (
    ResumePoint,
    choose_resume_point,
    lock_output_dir,
    prepare_output_dir,
)
from verifiers.train.config import GRPOConfig
from verifiers.train.distributed import Ranks

__all__ = ["RunDirectory"]

logger = logging.getLogger("verifiers.train")


class RunDirectory:
    """The output directory of a run, which no other run writes to meanwhile; every rank has one.

    Args:
        args: settings of the run.
        plan: of the run.
        ranks: of the run.
        rows: the training rows.
        model: path or hub name of the policy at step 0; None where there is none.
        state: gives what a checkpoint keeps beside the model, as JSON, by the name of what it belongs to.
        blocks: gives the blocks in flight that are finished.
    """

    def __init__(
        self,
        args: GRPOConfig,
        plan: BatchPlan,
        ranks: Ranks,
        rows: Any,
        model: str | None,
        *,
        state: Callable[[], dict[str, Any]],
        blocks: Callable[[], Iterable[ScoredBlock]],
    ) -> None:
        self._args, self._plan, self._ranks, self._rows, self._model = args, plan, ranks, rows, model
        self._state, self._blocks = state, blocks
        self.path = Path(str(args.output_dir))
        self._lock: Any = None
        self._block_log: BlockLog | None = None
        self._limit: int | None = None

    # -- on rank 0 ------------------------------------------------------------------------------------------------

    def choose(self, asked: str | bool | None) -> ResumePoint:
        """Lock the directory and return where the run starts.

        Args:
            asked: a checkpoint's path, True for the newest complete one here, else step 0.

        Raises:
            CheckpointError: another run holds the lock, or the checkpoint cannot be resumed.
        """
        self._lock = lock_output_dir(self.path)
        return choose_resume_point(str(self.path), asked, self._plan, self._rows, self._model)

    def begin(self, point: ResumePoint, keeps: Collection[Path]) -> dict[str, Any]:
        """Archive what other runs left here and open the block log; return the checkpoint's further state.

        Args:
            point: where the run starts.
            keeps: stored evaluations of this run.

        Raises:
            CheckpointError: files cannot be moved or written.
        """
        prepare_output_dir(point, str(self.path), keeps)
        if self._args.save_only_model and self._args.save_strategy != "no":
            logger.warning("with save_only_model=True no run can resume its checkpoints: they lack the optimizer.")
        self._block_log = BlockLog(self.path, self._plan.first_block_after(point.step))
        return extra_state(point.checkpoint) if point.checkpoint else {}

    def log_block(self, block: ScoredBlock, step: int, dropped: Sequence[Dropped]) -> None:
        """Write down the fate of a block's rollouts.

        Args:
            block: the block.
            step: optimizer steps before it.
            dropped: what of it is not trained.

        Raises:
            CheckpointError: it cannot be written.
        """
        if self._block_log is not None:
            self._block_log.write(block_record(block, step, dropped))

    def close(self) -> None:
        """Release the lock. May be called twice."""
        lock, self._lock, self._block_log = self._lock, None, None
        if lock is not None:
            lock.release()

    # -- on every rank --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def rotation(self) -> Iterator[None]:
        """Leave the deletion of old checkpoints to `saving`: transformers may delete one before the next is complete.

        To be open while a run trains.
        """
        limit = self._limit = self._args.save_total_limit
        self._args.save_total_limit = None
        try:
            yield
        finally:
            self._args.save_total_limit = limit

    @contextlib.contextmanager
    def saving(self, state: Any) -> Iterator[None]:
        """Have the checkpoint that is written inside count once it is whole, then delete older ones.

        The last checkpoint of a run may stand inside a block: no run can resume it, and it does not count.

        Args:
            state: the trainer's.

        Raises:
            CheckpointError: the disk is full or broken.
        """
        step, writes = state.global_step, self._args.should_save
        checkpoint = self.path / f"checkpoint-{step}"
        with raises_checkpoint_error(checkpoint):
            if writes:
                mark_incomplete(checkpoint)
            yield
            self._ranks.wait_for_all()
            if writes and step % self._plan.updates_per_block == 0 and not self._args.save_only_model:
                # a block that failed ends the run when it is needed; the weights are saved all the same
                with contextlib.suppress(Error):
                    save_pending_blocks(checkpoint, self._blocks())
                if self._block_log is not None:
                    self._block_log.sync()
                mark_complete(checkpoint, self._plan, step, self._state(), self._rows, self._model)
        if writes:
            rotate_checkpoints(self.path, self._limit, state.best_model_checkpoint)
