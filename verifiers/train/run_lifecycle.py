"""Start and end of a run: its directory, servers, record, curriculum and blocks in flight."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from verifiers.data.batch_plan import BatchPlan
from verifiers.data.row_source import ObservesBlocks
from verifiers.errors import CheckpointError
from verifiers.interrupt import Termination
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.train.batching.rollout_session import RolloutSession
from verifiers.train.checkpoint.checkpoint import curriculum_state, resume_step
from verifiers.train.checkpoint.run_directory import RunDirectory, visible_checkpoint
from verifiers.train.evaluation.evaluator import Evaluator
from verifiers.train.monitor import RunMonitor
from verifiers.train.processes.distributed import Ranks, ended_if_stuck


class RunLifecycle:
    """The start and end of a run: its parts, and curriculum and blocks in flight as its checkpoint has them."""

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
        self._state_at_0 = curriculum_state(plan)

    def open(self, asked: str | bool | None) -> str | None:
        """Start the run and return the checkpoint's path on this rank, None for step 0; every rank calls it.

        Args:
            asked: a checkpoint's path, True for the newest complete one in the directory, else step 0.

        Raises:
            CheckpointError: the checkpoint cannot be resumed, is not seen by this rank, or another run writes to the
                directory.
        """
        chosen = self._ranks.on_rank_0(lambda: self._directory.choose(asked))
        checkpoint = visible_checkpoint(chosen, self._ranks.index, self._directory.path if asked is True else None)
        self.first_step = resume_step(checkpoint) if checkpoint else 0
        self._ranks.on_rank_0(lambda: self._open_on_rank_0(checkpoint, resumes=bool(asked)))
        return checkpoint

    def _open_on_rank_0(self, checkpoint: str | None, *, resumes: bool) -> None:
        # servers come first: nothing is archived for a run that finds none
        prefetcher, generator = self._session.open(), self._session.generator
        assert generator is not None
        further = self._directory.begin(checkpoint, self._evaluator.stored.own, resumes=resumes)
        restore_curriculum(self._plan, further if checkpoint else self._state_at_0)
        if checkpoint:
            prefetcher.restore(still_planned(self._plan, self._directory.pending_blocks(checkpoint, further)))
        self._monitor.begin(
            self.first_step if checkpoint else None,
            servers=self._session.publisher.servers,
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
                self._session.publisher.sync.close()
            finally:
                self._monitor.end(error)

        if self._session.generator is None or self._ranks.count == 1:
            return contextlib.nullcontext()
        return ended_if_stuck(termination, self._session.generator.loop, give_back)


def restore_curriculum(plan: BatchPlan, further: Mapping[str, Any]) -> None:
    """Bring an adaptive curriculum to where a checkpoint's further state stands."""
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
