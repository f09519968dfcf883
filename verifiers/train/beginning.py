"""Where a run begins: at step 0, or at a checkpoint that rank 0 chooses and every rank must see."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifiers.data.plan import BatchPlan
from verifiers.errors import CheckpointError
from verifiers.train.aside import finish_putting_aside, put_aside, put_later_aside
from verifiers.train.checkpoint import (
    MARKER,
    check_resumable,
    describe_run,
    is_same_run,
    newest_complete,
    resume_step,
)
from verifiers.train.output_lock import OutputLock
from verifiers.train.watching.record import RUN, read_run

__all__ = [
    "Beginning",
    "choose_beginning",
    "clear_the_way",
    "finished_steps",
    "note_saved",
    "seen_from_here",
]

logger = logging.getLogger("verifiers.train")

_SEEN_WITHIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a run begins.

    Attributes:
        checkpoint: what it goes on from; None for step 0.
        goes_on: a checkpoint was wanted, whether or not there is one.
        is_found: it was looked for in `output_dir`, not given by its path.
    """

    checkpoint: str | None
    goes_on: bool
    is_found: bool = False

    @property
    def step(self) -> int:
        """The optimizer step."""
        return resume_step(self.checkpoint) if self.checkpoint else 0


def choose_beginning(
    output_dir: str, asked: str | bool | None, plan: BatchPlan, rows: Any = None, model: str | None = None
) -> Beginning:
    """What to begin from; on rank 0, which holds the directory's lock.

    Args:
        asked: a checkpoint's path, True for the newest complete one of `output_dir`, else step 0.
        rows: the training rows, which must be those of the checkpoint.
        model: path or hub name of the policy's start, which must be that of the checkpoint.

    Raises:
        CheckpointError: the checkpoint is incomplete, or of another plan, other rows or another model.
    """
    finish_putting_aside(output_dir)
    found = newest_complete(output_dir) if asked is True else None
    given = str(asked) if asked and asked is not True else None
    checkpoint = str(found) if found is not None else given
    if checkpoint is not None:
        check_resumable(checkpoint, plan, rows, model)
    return Beginning(checkpoint, bool(asked), is_found=found is not None)


def seen_from_here(beginning: Beginning, output_dir: str, rank: int) -> str | None:
    """The checkpoint's path on this rank.

    Raises:
        CheckpointError: this rank does not see what rank 0 does.
    """
    if beginning.checkpoint is None:
        return None
    path = Path(beginning.checkpoint)
    if beginning.is_found:
        path = Path(output_dir) / path.name
    deadline = time.monotonic() + _SEEN_WITHIN_S
    # a file system over the network may be behind for a moment
    while rank and not (path / MARKER).is_file():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"rank 0 goes on from {beginning.checkpoint}, and rank {rank} does not see {path}: output_dir must "
                "be on a file system that all hosts mount, under the same path."
            )
        time.sleep(0.1)
    return str(path)


def clear_the_way(beginning: Beginning, output_dir: str, keeps: Collection[Path] = ()) -> None:
    """Put aside what is not of the lineage that begins, and say so; on rank 0.

    Args:
        keeps: stored evaluations of this run.

    Raises:
        CheckpointError: it cannot be put aside.
    """
    if beginning.checkpoint and Path(beginning.checkpoint).resolve().parent == Path(output_dir).resolve():
        aside = put_later_aside(output_dir, beginning.step)
        if aside is not None:
            logger.warning("the checkpoints in %s after step %d are now in %s", output_dir, beginning.step, aside)
        return
    aside = put_aside(output_dir, keeps)
    if beginning.checkpoint:
        _say_if_best_is_gone(Path(beginning.checkpoint))
    if aside is None:
        return
    if beginning.goes_on and beginning.checkpoint is None:
        text = "no complete checkpoint in %s yet: starts from step 0; what there was is now in %s"
    else:
        text = "%s held an earlier run, which is now in %s"
    logger.warning(text, output_dir, aside)


def _say_if_best_is_gone(checkpoint: Path) -> None:
    try:
        best = json.loads((checkpoint / "trainer_state.json").read_text()).get("best_model_checkpoint")
    except (OSError, ValueError):
        return
    if best and not Path(best).is_dir():
        logger.warning(
            "the best checkpoint before step %d, %s, is not there, perhaps moved beside %s: only a better one after "
            "it is kept as the best, or loaded at the end.",
            resume_step(checkpoint),
            best,
            checkpoint,
        )


def finished_steps(output_dir: str | Path, plan: BatchPlan, rows: Any = None, model: str | None = None) -> int | None:
    """The steps of the run in a directory, where it has nothing left to do; else None.

    It ended well, saved its model, was to have as many steps, and was of the same plan, rows and model. One that a
    callback ended early is finished, too.

    Raises:
        CheckpointError: the newest complete checkpoint is of another plan, so the run cannot go on, nor be this one;
            or another run writes to the directory.
    """
    if not Path(output_dir).is_dir():
        return None
    with OutputLock(output_dir):
        finish_putting_aside(output_dir)
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
    return step if is_same_run(saved.get("of") or {}, describe_run(plan, step, rows, model)) else None


def note_saved(
    output_dir: str | Path, step: int, plan: BatchPlan, rows: Any = None, model: str | None = None
) -> None:
    """Write down that the model of a finished run is saved; a disk that refuses costs the next run a save."""
    path = Path(output_dir) / RUN
    of = describe_run(plan, step, rows, model)
    saved = {"at": time.time(), "step": step, "max_steps": plan.max_steps, "of": of}
    run = {**read_run(output_dir), "saved": saved}
    partial = path.with_name(f".{RUN}.partial")
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8", errors="backslashreplace")
        os.replace(partial, path)
