"""The output directory of a run: where the run starts in it, what earlier runs left there, and its checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers.data.batch_plan import BatchPlan
from verifiers.data.row_source import ObservesBlocks
from verifiers.errors import CheckpointError, Error
from verifiers.monitoring.run_log import METRICS, RUN, SAMPLES, read_run, replace_file
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.train.batching.training_block import Dropped
from verifiers.train.checkpoint.block_log import BLOCK_LOG, BlockLog, block_record
from verifiers.train.checkpoint.checkpoint import (
    KEPT,
    MARKER,
    TENSORS,
    check_resumable,
    curriculum_state,
    describe_run,
    extra_state,
    load_pending_blocks,
    mark_complete,
    mark_incomplete,
    resume_step,
    run_difference,
    save_pending_blocks,
)
from verifiers.train.config import GRPOConfig, setting_name
from verifiers.train.evaluation.storage import EVALUATIONS, remove_later_evaluations
from verifiers.train.processes.distributed import Ranks

logger = logging.getLogger("verifiers.train")

LOCK = ".lock"
"""The lock file in an output directory; the lock ends with its process, the file stays."""

_VISIBLE_WITHIN_S = 2.0

# the tables that TRL writes with log_completions, into a directory that it makes with the trainer
_COMPLETIONS = "completions"


def lock_output_dir(output_dir: str | Path) -> Any:
    """Lock a directory until the returned lock's `release` is called, or this process ends; refuse a second run.

    Where the file system has no locks, or the lock file cannot be made, nothing is locked.
    """
    import filelock

    lock = filelock.FileLock(Path(output_dir) / LOCK, thread_local=False)
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise CheckpointError(
            f"another run writes to {output_dir} ({LOCK} there is locked); wait for its end, or give another "
            "output_dir."
        ) from None
    except (OSError, NotImplementedError) as error:
        logger.debug("%s cannot be locked: %s", output_dir, error)
    return lock


def visible_checkpoint(checkpoint: str | None, rank: int, found_in: Path | None = None) -> str | None:
    """Return the checkpoint's path on this rank; refuse to go on where this rank does not see it.

    One that rank 0 looked for, and was not given by its path, is `found_in` this rank's output_dir.
    """
    if checkpoint is None:
        return None
    path = Path(checkpoint) if found_in is None else found_in / Path(checkpoint).name
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    # a file system over the network may be behind for a moment
    while rank and not (path / MARKER).is_file():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"rank 0 resumes from {checkpoint}, and rank {rank} does not see {path}: output_dir must be on "
                "a file system that all hosts mount, under the same path."
            )
        time.sleep(0.1)
    return str(path)


# -- an earlier run in the directory ---------------------------------------------------------------------------------


def prepare_output_dir(
    checkpoint: str | None, output_dir: str, keeps: Collection[Path] = (), *, resumes: bool
) -> Path | None:
    """Move aside what the directory holds of other runs than the one that starts, and log it; on rank 0.

    A run that resumes one of its own checkpoints leaves the later ones, which others will have the numbers of; else
    the whole directory, with its lock, gets another name, which is returned. A run `resumes` where a checkpoint was
    asked for, whether or not there is one.
    """
    root = Path(output_dir)
    if checkpoint and Path(checkpoint).resolve().parent == root.resolve():
        step = resume_step(checkpoint)
        # the newest first: what a kill in the middle leaves is never a lineage with a gap
        for path in reversed(checkpoints_in(root)):
            if (path / MARKER).is_file() and int(path.name.removeprefix("checkpoint-")) > step:
                logger.warning("%s is after step %d, and is now %s", path, step, _move_aside(path))
        remove_later_evaluations(output_dir, step)
        return None
    aside = _move_aside(root.resolve()) if _holds_a_run(root, keeps) else None
    if aside is not None:
        root.resolve().mkdir()
        if (aside / _COMPLETIONS).is_dir():
            # TRL made it with the trainer, and writes to it
            (root / _COMPLETIONS).mkdir()
        for path in keeps:
            path.parent.mkdir(exist_ok=True)
            (aside / path.relative_to(root)).rename(path)
        text = "%s held an earlier run, which is now in %s"
        if resumes and checkpoint is None:
            text = "no complete checkpoint in %s yet: the run starts at step 0, and the files there are now in %s"
        logger.warning(text, output_dir, aside)
    return aside


def _holds_a_run(root: Path, keeps: Collection[Path]) -> bool:
    folders = {*checkpoints_in(root), *(root / EVALUATIONS).glob("step-*"), *(root / _COMPLETIONS).glob("*")}
    records = [root / name for name in (BLOCK_LOG, METRICS, SAMPLES)]
    return bool(folders.difference(keeps)) or any(path.exists() and path.stat().st_size for path in records)


def _move_aside(path: Path) -> Path:
    """Give a directory a free name beside it, and return that."""
    if Path.cwd().is_relative_to(path.resolve()):
        raise CheckpointError(
            f"{path}, of an earlier run, cannot be moved, as the working directory is in it; give another output_dir."
        )
    numbers = (path.with_name(f"{path.name}-earlier-{number}") for number in itertools.count(1))
    aside = next(other for other in numbers if not other.exists())
    try:
        return path.rename(aside)
    except OSError as error:
        raise CheckpointError(
            f"{path}, of an earlier run, cannot be moved ({error}); give another output_dir."
        ) from error


# -- the checkpoints in the directory --------------------------------------------------------------------------------


def checkpoints_in(output_dir: str | Path) -> list[Path]:
    found = [(path.name.removeprefix("checkpoint-"), path) for path in Path(output_dir).glob("checkpoint-*")]
    return [path for _, path in sorted((int(step), path) for step, path in found if step.isdigit())]


def newest_complete(output_dir: str | Path) -> Path | None:
    """Return the complete checkpoint with the highest step, or None."""
    complete = [path for path in checkpoints_in(output_dir) if (path / MARKER).is_file()]
    return complete[-1] if complete else None


def rotate_checkpoints(output_dir: str | Path, limit: int | None, best: str | Path | None = None) -> None:
    """Delete the oldest checkpoints over `limit`; the newest, the newest complete one and the best always stay.

    To be called when the newest is marked complete: a process that is killed before has the one before it. A limit of
    None or 0 keeps all.
    """
    checkpoints = checkpoints_in(output_dir)
    kept = {os.path.abspath(path) for path in (*checkpoints[-1:], newest_complete(output_dir), best) if path}
    over = max(0, len(checkpoints) - max(limit, len(kept))) if limit and limit > 0 else 0
    for path in [path for path in checkpoints if os.path.abspath(path) not in kept][:over]:
        # transformers' own rotation leaves the marker on what a kill in the middle does not delete
        with contextlib.suppress(OSError):
            mark_incomplete(path)
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def raises_checkpoint_error(directory: Path, output_dir: Path | None = None) -> Iterator[None]:
    """Raise CheckpointError for what libraries raise of a full or broken disk while a model is written.

    It has the first failure as its cause, and names the space left and the newest complete checkpoint of
    `output_dir`, which is the directory above when left out.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, Error) or not _is_of_writing(error):
            raise
        output_dir = output_dir or directory.parent
        newest = newest_complete(output_dir)
        kept = f"the newest complete one is {newest.name}" if newest is not None else "there is no complete one yet"
        with contextlib.suppress(OSError):
            kept = f"{shutil.disk_usage(output_dir).free / 1e6:,.0f} MB are free there, and {kept}"
        raise CheckpointError(
            f"{directory} could not be written ({type(error).__name__}: {error}); {kept}. Make room, perhaps with a "
            "smaller save_total_limit, and give the same command again."
        ) from error


def _is_of_writing(error: Exception) -> bool:
    if isinstance(error, BlockingIOError):
        return False  # no process could be started
    # what a hub answers, or that it does not, is an OSError too
    if isinstance(error, (ConnectionError, TimeoutError)) or {"request", "response"} & set(dir(error)):
        return False
    # torch's archives, and what safetensors and tokenizers write in Rust, are written by code that knows no OSError
    signs = ("SafetensorError", "inline_container", "(os error ")
    return isinstance(error, OSError) or any(sign in f"{type(error).__name__} {error}" for sign in signs)


# -- a run that has nothing left to do -------------------------------------------------------------------------------


def finished_steps(output_dir: str | Path, plan: BatchPlan, rows: Any = None, model: str | None = None) -> int | None:
    """Return the steps of the run in a directory, where it has nothing left to do; else None.

    Such a run ended well, saved its model, was to have as many steps, and was of the same plan, rows and model. A run
    that a callback ended early is finished, too. A directory whose checkpoint is of another plan is refused.
    """
    if not Path(output_dir).is_dir():
        return None
    lock_output_dir(output_dir).release()
    newest = newest_complete(output_dir)
    if newest is not None:
        check_resumable(newest, plan, rows, model)
    run = read_run(output_dir)
    saved, ended = run.get("saved"), run.get("ended")
    if run.get("status") != "finished" or not isinstance(saved, dict) or not isinstance(ended, (int, float)):
        return None
    if saved.get("at", 0.0) < ended or saved.get("max_steps", 0) < plan.max_steps:
        return None
    step = int(saved["step"])
    return step if run_difference(saved.get("of", {}), describe_run(plan, step, rows, model)) is None else None


def note_saved(
    output_dir: str | Path, step: int, plan: BatchPlan, rows: Any = None, model: str | None = None
) -> None:
    """Write down that the model of a finished run is saved; where that fails, the next run only saves it again."""
    path = Path(output_dir) / RUN
    of = describe_run(plan, step, rows, model)
    saved = {"at": time.time(), "step": step, "max_steps": plan.max_steps, "of": of}
    run = {**read_run(output_dir), "saved": saved}
    with contextlib.suppress(OSError):
        replace_file(path, json.dumps(run, indent=1) + "\n")


# -- what a checkpoint has beside the weights ------------------------------------------------------------------------


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


# -- the directory while a run is in progress ------------------------------------------------------------------------


_TEMPERATURE = "temperature"


class RunDirectory:
    """The output directory of a run, which no other run writes to meanwhile; every rank has one.

    Args:
        checksums: gives those of the policy's tensors, on rank 0; every rank calls it.
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
        checksums: Callable[[], dict[str, str]],
        blocks: Callable[[], Iterable[ScoredBlock]],
    ) -> None:
        self._args, self._plan, self._ranks, self._rows, self._model = args, plan, ranks, rows, model
        self._checksums, self._blocks = checksums, blocks
        self.path = Path(str(args.output_dir))
        self._lock: Any = None
        self._block_log: BlockLog | None = None
        self._limit: int | None = None
        # for a second run of the same trainer
        self._state_at_0 = curriculum_state(plan)

    def choose(self, asked: str | bool | None) -> str | None:
        """Lock the directory and return this rank's path of the checkpoint that the run starts from; None for step 0.

        Every rank calls it.

        Args:
            asked: a checkpoint's path, True for the newest complete one here, else step 0.

        Raises:
            CheckpointError: another run holds the lock, or the checkpoint cannot be resumed or is not seen by this
                rank.
        """
        chosen = self._ranks.on_rank_0(lambda: self._choose_on_rank_0(asked))
        return visible_checkpoint(chosen, self._ranks.index, self.path if asked is True else None)

    # -- on rank 0 ------------------------------------------------------------------------------------------------

    def _choose_on_rank_0(self, asked: str | bool | None) -> str | None:
        self._lock = lock_output_dir(self.path)
        checkpoint = newest_complete(self.path) if asked is True else asked or None
        if checkpoint is None:
            return None
        check_resumable(checkpoint, self._plan, self._rows, self._model)
        return str(checkpoint)

    def begin(self, checkpoint: str | None, keeps: Collection[Path], *, resumes: bool) -> list[ScoredBlock]:
        """Move aside what other runs left here, open the block log, and bring the curriculum to the run's start.

        Returns the blocks in flight that the checkpoint keeps.
        """
        if prepare_output_dir(checkpoint, str(self.path), keeps, resumes=resumes) is not None:
            # the lock has moved too
            self._lock.release()
            self._lock = lock_output_dir(self.path)
        if self._args.save_only_model and self._args.save_strategy != "no":
            logger.warning("with save_only_model=True no run can resume its checkpoints: they lack the optimizer.")
        step = resume_step(checkpoint) if checkpoint else 0
        self._block_log = BlockLog(self.path, self._plan.first_block_after(step))
        further = extra_state(checkpoint) if checkpoint else self._state_at_0
        restore_curriculum(self._plan, further)
        if checkpoint is None:
            return []
        before, now = further.get(_TEMPERATURE, self._args.temperature), self._args.temperature
        if before != now:
            text = "blocks that were sampled at temperature %g are generated again at %g"
            logger.warning(text, before, now)
            return []
        return still_planned(self._plan, load_pending_blocks(checkpoint))

    def log_block(self, block: ScoredBlock, step: int, dropped: Sequence[Dropped]) -> None:
        """Write down the fate of the rollouts of a block that begins after `step` optimizer steps."""
        if self._block_log is not None:
            self._block_log.write(block_record(block, step, dropped))

    def close(self) -> None:
        """Release the lock. May be called twice."""
        lock, self._lock, self._block_log = self._lock, None, None
        if lock is not None:
            lock.release()

    # -- on every rank --------------------------------------------------------------------------------------------

    def checkpoint(self, step: int) -> Path:
        return self.path / f"checkpoint-{step}"

    @contextlib.contextmanager
    def rotation(self) -> Iterator[None]:
        """Leave the deletion of old checkpoints to `saving`: transformers may do it before the next is complete."""
        limit = self._limit = self._args.save_total_limit
        self._args.save_total_limit = None
        try:
            yield
        finally:
            self._args.save_total_limit = limit

    @contextlib.contextmanager
    def saving(self, state: Any) -> Iterator[None]:
        """Mark the checkpoint that is written inside as complete once it is whole, then delete older ones.

        The last checkpoint of a run may stand inside a block: no run can resume it, and it does not count.
        """
        step, writes = state.global_step, self._args.should_save
        checkpoint = self.checkpoint(step)
        with raises_checkpoint_error(checkpoint):
            if writes:
                mark_incomplete(checkpoint)
            yield
            self._ranks.wait_for_all()
            marks = step % self._plan.updates_per_block == 0 and not self._args.save_only_model
            tensors = self._checksums() if marks else {}
            if writes and marks:
                # a block that failed ends the run when it is needed; the weights are saved all the same
                with contextlib.suppress(Error):
                    save_pending_blocks(checkpoint, self._blocks())
                if self._block_log is not None:
                    self._block_log.sync()
                extra = {**curriculum_state(self._plan), TENSORS: tensors, _TEMPERATURE: self._args.temperature}
                extra |= {name: setting_name(getattr(self._args, name)) for name in KEPT}
                mark_complete(checkpoint, self._plan, step, extra, self._rows, self._model)
        if writes:
            rotate_checkpoints(self.path, self._limit, state.best_model_checkpoint)
