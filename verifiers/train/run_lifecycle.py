"""The parts that a run opens, at step 0 or from a checkpoint, and closes however it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from verifiers.data.batch_plan import BatchPlan
from verifiers.data.row_source import ObservesBlocks
from verifiers.errors import CheckpointError
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.train.checkpoint.checkpoint import resume_step
from verifiers.train.checkpoint.pending_blocks import load_pending_blocks
from verifiers.train.checkpoint.run_directory import ResumePoint, RunDirectory, visible_checkpoint
from verifiers.train.distributed import Ranks
from verifiers.train.evaluation.evaluator import Evaluator
from verifiers.train.evaluation.schedule import EvaluationSchedule
from verifiers.train.monitor import RunMonitor
from verifiers.train.rollout_session import RolloutSession

__all__ = ["RunLifecycle", "restore_curriculum", "still_planned"]


class RunLifecycle:
    """Opens what a run needs, brings curriculum and blocks in flight to where its checkpoint stands, and closes all.

    Args:
        plan: of the run.
        ranks: of the run.
        directory: where the run writes.
        session: connects the servers and starts the generator.
        evaluator: of the run.
        schedule: of its evaluations.
        monitor: of the run.

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
        schedule: EvaluationSchedule,
        monitor: RunMonitor,
    ) -> None:
        self._plan, self._ranks, self._directory = plan, ranks, directory
        self._session, self._evaluator, self._schedule, self._monitor = session, evaluator, schedule, monitor
        self.first_step = 0
        # for a second run of the same trainer
        self._state_at_0 = self.state()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside the model, as JSON, by the name of what it belongs to."""
        source = self._plan.source
        curriculum = {"curriculum": source.state()} if isinstance(source, ObservesBlocks) else {}
        return {**curriculum, **self._evaluator.state()}

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
        self._schedule.owed = self._ranks.on_rank_0(lambda: self._open_on_rank_0(point))
        return checkpoint

    def _open_on_rank_0(self, point: ResumePoint) -> int | None:
        # servers come first: nothing is archived for a run that finds none
        prefetcher, generator = self._session.open(), self._session.generator
        assert generator is not None
        further = self._directory.begin(point, self._evaluator.stored.own)
        if self._plan.source is not None:
            restore_curriculum(self._plan, further if point.checkpoint else self._state_at_0)
        if point.checkpoint:
            prefetcher.restore(still_planned(self._plan, load_pending_blocks(point.checkpoint)))
        owed = self._evaluator.owed(further)
        self._monitor.begin(
            self.first_step if point.checkpoint else None,
            servers=self._session.servers,
            activity=generator.activity,
            drains=prefetcher.drains,
            owes_evaluation=owed is not None,
        )
        return owed

    def close(self) -> None:
        """End the generator's thread, give back what weight pushes used, and release the directory.

        May be called twice.
        """
        self._evaluator.give_up()
        self._schedule.owed = None
        # whatever one of them raises, the other is closed
        with contextlib.ExitStack() as stack:
            stack.callback(self._directory.close)
            stack.callback(self._session.close)

    def abandon(self, error: BaseException) -> None:
        """Give back what other processes would miss, where a run ends without time for `close`.

        Args:
            error: what ends the run.
        """
        try:
            self._session.weight_sync.close()
        finally:
            self._monitor.end(error)


def restore_curriculum(plan: BatchPlan, further: Mapping[str, Any]) -> None:
    """Bring an adaptive curriculum to where a checkpoint stands.

    Args:
        plan: of the run.
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
