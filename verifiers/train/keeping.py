"""Which checkpoints of a run are kept: `save_total_limit`, but never the last one that a run could go on from."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from verifiers.train.checkpoint import mark_incomplete, newest_complete

__all__ = ["drop_old_checkpoints"]


def drop_old_checkpoints(output_dir: str | Path, limit: int | None, best: str | Path | None = None) -> None:
    """Delete the oldest checkpoints over `limit`; the newest, the newest complete one and the best always stay.

    To be called when the newest is marked complete: a process that is killed before has the one before it.

    Args:
        limit: checkpoints that stay; None or 0 for all.
        best: the directory of the best checkpoint so far, where there is one.
    """
    if not limit or limit < 0:
        return
    found = []
    for path in Path(output_dir).glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdigit() and path.is_dir():
            found.append((int(step), path))
    checkpoints = [path for _, path in sorted(found)]
    kept = {os.path.abspath(path) for path in (*checkpoints[-1:], newest_complete(output_dir), best) if path}
    over = len(checkpoints) - max(limit, len(kept))
    for path in checkpoints:
        if over > 0 and os.path.abspath(path) not in kept:
            # a process that is killed meanwhile leaves a part, which must not count
            with contextlib.suppress(OSError):
                mark_incomplete(path)
            shutil.rmtree(path, ignore_errors=True)
            over -= 1
