"""One checkpoint, complete or ignored: a marker is written last, and only a marked checkpoint is resumed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers.data.batch_plan import BatchPlan
from verifiers.data.row_source import ObservesBlocks, StagedRows
from verifiers.envs.datasets import row_fields
from verifiers.errors import CheckpointError
from verifiers.train.checkpoint.pending_blocks import PENDING_BLOCKS

__all__ = [
    "MARKER",
    "START_NEW",
    "TENSORS",
    "check_resumable",
    "curriculum_state",
    "dataset_fingerprint",
    "describe_run",
    "extra_state",
    "is_same_run",
    "mark_complete",
    "mark_incomplete",
    "model_name",
    "resume_step",
    "sync_to_disk",
    "warn_if_best_is_gone",
]

logger = logging.getLogger("verifiers.train")

_HASHED_ROWS = 1000
"""Rows that are hashed; of more, so many at equal distances."""


def dataset_fingerprint(rows: Any, plan: BatchPlan, optimizer_step: int) -> str | None:
    """Return a hash of prompt, answer and task of the rows that may have been drawn before a step.

    Of a curriculum those are the datasets of the stages that have begun; of another row source nothing is known, and
    the hash is None. `info` is left out: it may hold a path or an address that differs from start to start. The
    fingerprint that `datasets` keeps is random where rows come from a function that cannot be pickled.
    """
    drawn = _drawn_from(plan, optimizer_step)
    if rows is None or not drawn:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for place in range(min(len(drawn), _HASHED_ROWS)):
        fields = row_fields(rows[drawn[place * len(drawn) // min(len(drawn), _HASHED_ROWS)]])[:3]
        digest.update(json.dumps(fields, sort_keys=True, default=str).encode(errors="surrogatepass"))
    return digest.hexdigest()


def _drawn_from(plan: BatchPlan, optimizer_step: int) -> Sequence[int]:
    source = plan.source
    if source is None:
        return range(plan.num_prompts)
    datasets: dict[str, Sequence[int]] = getattr(source, "datasets", {})
    names = list(datasets)
    if isinstance(source, StagedRows):
        begun = source.fingerprint(optimizer_step)["stages"]
        names = sorted({name for stage in begun for name in stage["datasets"]})
    return [row for name in names for row in datasets[name]]


MARKER = "verifiers_state.json"
TENSORS = "tensors"
"""The part of a checkpoint's further state that has the checksum of each tensor."""

START_NEW = "start again at step 0 (vf-train --fresh, or train() alone), or give another output_dir"
"""The remedy for a checkpoint that cannot be resumed."""


def mark_incomplete(directory: Path) -> None:
    """Take the marker away before a checkpoint's files are written again, or removed."""
    (directory / MARKER).unlink(missing_ok=True)
    # a save that keeps no blocks would leave those of an older lineage
    (directory / PENDING_BLOCKS).unlink(missing_ok=True)


def mark_complete(
    directory: Path,
    plan: BatchPlan,
    optimizer_step: int,
    extra: Mapping[str, Any] | None = None,
    rows: Any = None,
    model: str | None = None,
) -> None:
    """Sync the files of a checkpoint to disk, then write the marker that says it is whole.

    Args:
        optimizer_step: the step after which it was written.
        extra: further state by the name of what it belongs to, as JSON; `extra_state` gives it back.
        rows: the training rows; left out, the checkpoint does not say which they were.
        model: path or hub name of what the policy was at step 0; left out, the checkpoint does not say.
    """
    for path in sorted(directory.rglob("*")):
        # a directory holds the names of its files
        if path.is_file() or path.is_dir():
            sync_to_disk(path)
    # the new directory's own name
    sync_to_disk(directory.parent)
    state = {
        "optimizer_step": optimizer_step,
        "block_id": plan.first_block_after(optimizer_step),
        **describe_run(plan, optimizer_step, rows, model),
        "extra": dict(extra or {}),
    }
    partial = directory / f".{MARKER}.partial"
    partial.write_text(json.dumps(state, indent=2) + "\n")
    sync_to_disk(partial)
    partial.rename(directory / MARKER)
    sync_to_disk(directory)


def check_resumable(directory: str | Path, plan: BatchPlan, rows: Any = None, model: str | None = None) -> None:
    """Refuse a checkpoint that is incomplete, or was written under other sizes, another seed, rows or model.

    Args:
        rows: the training rows; left out, they are not looked at, nor where the checkpoint does not know its own.
        model: path or hub name of what the policy is at step 0; likewise.

    Raises:
        CheckpointError: with the setting that differs, or what is missing.
    """
    marker = Path(directory) / MARKER
    if not marker.is_file():
        raise CheckpointError(
            f"{directory} has no {MARKER}, so it is incomplete or of another program; give the path of a complete "
            "checkpoint, or resume_from_checkpoint=True for the newest one."
        )
    saved = _marker(directory)
    for name, value in _fingerprint(plan, int(saved["optimizer_step"])).items():
        if name == "curriculum" and saved.get(name) != value:
            raise CheckpointError(
                f"{directory} was written under another curriculum than this run has up to step "
                f"{saved['optimizer_step']} ({_difference(saved.get(name), value)}), so its rows would be others; "
                f"change only what comes later, or {START_NEW}."
            )
        if saved.get(name) != value:
            raise CheckpointError(
                f"{directory} was written with {name}={saved.get(name)!r}, and this run has {value!r}: its blocks "
                f"would hold other prompts; use the same settings, or {START_NEW}."
            )
    had = saved.get("rows")
    if had is not None and dataset_fingerprint(rows, plan, int(saved["optimizer_step"])) not in (None, had):
        raise CheckpointError(
            f"{directory} was written with other training rows than the environment has now (or another environment, "
            f"or other arguments of it), so its blocks would hold other prompts; use the same rows, or {START_NEW}."
        )
    if not _is_same_model(saved.get("model"), model):
        raise CheckpointError(
            f"{directory} is of a run that began from the model {saved['model']!r}, and this one is to begin from "
            f"{model!r}, whose weights it would never see; use the same model, or {START_NEW}."
        )


def describe_run(plan: BatchPlan, optimizer_step: int, rows: Any = None, model: str | None = None) -> dict[str, Any]:
    """Return what must stay the same when a run is resumed, as JSON; None where it is not known."""
    return {
        **_fingerprint(plan, optimizer_step),
        "rows": dataset_fingerprint(rows, plan, optimizer_step),
        "model": model,
    }


def is_same_run(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two of `describe_run` may be of one run; unknown values are not compared."""
    if not _is_same_model(one.get("model"), other.get("model")):
        return False
    if None not in (one.get("rows"), other.get("rows")) and one["rows"] != other["rows"]:
        return False
    return all(one[name] == other[name] for name in ({*one} & {*other}) - {"model", "rows"})


def model_name(model: Any) -> str | None:
    """Return path or hub name of a model, given as such or loaded; None for a run's own checkpoint."""
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", None)
    if not name or (Path(name) / MARKER).is_file():
        return None
    return str(name)


def _is_same_model(one: str | None, other: str | None) -> bool:
    if one is None or other is None or one == other:
        return True
    return os.path.realpath(os.path.expanduser(one)) == os.path.realpath(os.path.expanduser(other))


def resume_step(directory: str | Path) -> int:
    """Return the optimizer step of a complete checkpoint, from its marker."""
    return int(_marker(directory)["optimizer_step"])


def extra_state(directory: str | Path) -> dict[str, Any]:
    """Return what `mark_complete` was given as `extra`; empty for a checkpoint without any."""
    extra: dict[str, Any] = _marker(directory).get("extra") or {}
    return extra


def curriculum_state(plan: BatchPlan) -> dict[str, Any]:
    """Return what a checkpoint keeps of an adaptive curriculum, as JSON."""
    return {"curriculum": plan.source.state()} if isinstance(plan.source, ObservesBlocks) else {}


def warn_if_best_is_gone(checkpoint: Path) -> None:
    """Warn where the best checkpoint before this one, which a resumed run is to keep, is not where it was."""
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


def _marker(directory: str | Path) -> dict[str, Any]:
    marker: dict[str, Any] = json.loads((Path(directory) / MARKER).read_text())
    return marker


def _fingerprint(plan: BatchPlan, optimizer_step: int) -> dict[str, Any]:
    # what decides which prompts a block holds and where blocks begin; max_steps may grow, and so may what a
    # curriculum says of later steps
    drawn_by = plan.source.fingerprint(optimizer_step) if plan.source is not None else None
    return {
        "seed": plan.seed,
        "shuffle": plan.shuffle,
        "num_prompts": plan.num_prompts,
        "num_generations": plan.num_generations,
        "completions_per_block": plan.completions_per_block,
        "updates_per_block": plan.updates_per_block,
        "curriculum": json.loads(json.dumps(drawn_by)),
    }


def _difference(saved: Any, now: Any, where: str = "curriculum") -> str:
    """Return the first place where two values of JSON differ, in words."""
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in [*saved, *now]:
            if saved.get(key) != now.get(key):
                return _difference(saved.get(key), now.get(key), f"{where}.{key}")
    if isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        for index, (one, other) in enumerate(zip(saved, now, strict=True)):
            if one != other:
                return _difference(one, other, f"{where}[{index}]")
    return f"{where} was {saved!r} and is {now!r}"


def sync_to_disk(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
