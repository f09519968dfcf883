"""Checkpoints that are complete or do not count: a marker is written last, and only marked ones are resumed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from verifiers.data.plan import BatchPlan
from verifiers.errors import CheckpointError

__all__ = ["MARKER", "check_resumable", "mark_complete", "mark_incomplete", "newest_complete"]

MARKER = "verifiers_state.json"


def mark_incomplete(directory: Path) -> None:
    """Take the marker away before a checkpoint's files are written again."""
    (directory / MARKER).unlink(missing_ok=True)


def mark_complete(directory: Path, plan: BatchPlan, optimizer_step: int) -> None:
    """Sync the files of a checkpoint to disk, then write the marker that says it is whole."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            _sync(path)
    state = {
        "optimizer_step": optimizer_step,
        "block_id": plan.first_block_after(optimizer_step),
        **_fingerprint(plan),
    }
    partial = directory / f".{MARKER}.partial"
    partial.write_text(json.dumps(state, indent=2) + "\n")
    _sync(partial)
    partial.rename(directory / MARKER)
    _sync(directory)


def newest_complete(output_dir: str | Path) -> Path | None:
    """The checkpoint with the highest step among those that were finished, or None."""
    found = []
    for path in Path(output_dir).glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdigit() and (path / MARKER).is_file():
            found.append((int(step), path))
    return max(found)[1] if found else None


def check_resumable(directory: str | Path, plan: BatchPlan) -> None:
    """Refuse a checkpoint that is incomplete, or was written under other sizes or another seed.

    Raises:
        CheckpointError: with the setting that differs, or what is missing.
    """
    marker = Path(directory) / MARKER
    if not marker.is_file():
        raise CheckpointError(
            f"{directory} has no {MARKER}, so it was not finished or is not ours; give the path of a complete "
            "checkpoint, or resume_from_checkpoint=True for the newest one."
        )
    saved: dict[str, Any] = json.loads(marker.read_text())
    for name, value in _fingerprint(plan).items():
        if saved.get(name) != value:
            raise CheckpointError(
                f"{directory} was written with {name}={saved.get(name)!r}, and this run has {value!r}: its blocks "
                "would hold other prompts; use the same settings, or start a new output_dir."
            )


def _fingerprint(plan: BatchPlan) -> dict[str, Any]:
    # what decides which prompts a block holds and where blocks begin; max_steps may grow
    return {
        "seed": plan.seed,
        "shuffle": plan.shuffle,
        "num_prompts": plan.num_prompts,
        "num_generations": plan.num_generations,
        "completions_per_block": plan.completions_per_block,
        "updates_per_block": plan.updates_per_block,
    }


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
