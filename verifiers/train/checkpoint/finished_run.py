"""A run that has nothing left to do: `vf-train` asks before it loads a model, and notes when one is saved."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from verifiers.data.batch_plan import BatchPlan
from verifiers.monitoring.run_log import RUN, read_run, replace_file
from verifiers.train.checkpoint.checkpoint import check_resumable, describe_run, is_same_run
from verifiers.train.checkpoint.run_directory import lock_output_dir, newest_complete

__all__ = ["finished_steps", "note_saved"]


def finished_steps(output_dir: str | Path, plan: BatchPlan, rows: Any = None, model: str | None = None) -> int | None:
    """Return the steps of the run in a directory, where it has nothing left to do; else None.

    Such a run ended well, saved its model, was to have as many steps, and was of the same plan, rows and model. A run
    that a callback ended early is finished, too.

    Raises:
        CheckpointError: the newest complete checkpoint is of another plan, so the run can neither be resumed nor be
            this one; or another run writes to the directory.
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
    return step if is_same_run(saved.get("of") or {}, describe_run(plan, step, rows, model)) else None


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
