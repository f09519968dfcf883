"""Checkpoints: complete or ignored. A marker is written last, and only marked checkpoints are resumed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers.data.batch_plan import BatchPlan
from verifiers.data.row_source import StagedRows
from verifiers.envs.datasets import row_fields
from verifiers.errors import CheckpointError, Error
from verifiers.train.checkpoint.pending_blocks import PENDING_BLOCKS

__all__ = [
    "MARKER",
    "check_resumable",
    "checkpoints_in",
    "dataset_fingerprint",
    "describe_run",
    "extra_state",
    "is_same_run",
    "mark_complete",
    "mark_incomplete",
    "model_name",
    "newest_complete",
    "raises_checkpoint_error",
    "resume_step",
    "rotate_checkpoints",
    "sync_to_disk",
]

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

_START_NEW = "start again at step 0 (vf-train --fresh, or train() alone), or give another output_dir"


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
        directory: the checkpoint.
        plan: the run's batch plan.
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


@contextlib.contextmanager
def raises_checkpoint_error(directory: Path, output_dir: Path | None = None) -> Iterator[None]:
    """Raise CheckpointError for what libraries raise of a full or broken disk while a model is written.

    Args:
        directory: the directory that is written.
        output_dir: the run's directory; the one above `directory` when left out.

    Raises:
        CheckpointError: with the first failure as its cause, the space left, and the newest complete checkpoint.
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
    # what a hub answers, or that it does not, is an OSError too
    if isinstance(error, (ConnectionError, TimeoutError)) or {"request", "response"} & set(dir(error)):
        return False
    # torch's archives and safetensors' files are written by code that knows no OSError
    return isinstance(error, OSError) or type(error).__name__ == "SafetensorError" or "inline_container" in str(error)


def newest_complete(output_dir: str | Path) -> Path | None:
    """Return the complete checkpoint with the highest step, or None."""
    complete = [path for path in checkpoints_in(output_dir) if (path / MARKER).is_file()]
    return complete[-1] if complete else None


def checkpoints_in(output_dir: str | Path) -> list[Path]:
    """Return the checkpoints of a directory in the order of their steps, complete or not."""
    found = [(path.name.removeprefix("checkpoint-"), path) for path in Path(output_dir).glob("checkpoint-*")]
    return [path for _, path in sorted((int(step), path) for step, path in found if step.isdigit())]


def check_resumable(directory: str | Path, plan: BatchPlan, rows: Any = None, model: str | None = None) -> None:
    """Refuse a checkpoint that is incomplete, or was written under other sizes, another seed, rows or model.

    Args:
        directory: the checkpoint.
        plan: the run's batch plan.
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
                f"change only what comes later, or {_START_NEW}."
            )
        if saved.get(name) != value:
            raise CheckpointError(
                f"{directory} was written with {name}={saved.get(name)!r}, and this run has {value!r}: its blocks "
                f"would hold other prompts; use the same settings, or {_START_NEW}."
            )
    had = saved.get("rows")
    if had is not None and dataset_fingerprint(rows, plan, int(saved["optimizer_step"])) not in (None, had):
        raise CheckpointError(
            f"{directory} was written with other training rows than the environment has now (or another environment, "
            f"or other arguments of it), so its blocks would hold other prompts; use the same rows, or {_START_NEW}."
        )
    if not _is_same_model(saved.get("model"), model):
        raise CheckpointError(
            f"{directory} is of a run that began from the model {saved['model']!r}, and this one is to begin from "
            f"{model!r}, whose weights it would never see; use the same model, or {_START_NEW}."
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


def rotate_checkpoints(output_dir: str | Path, limit: int | None, best: str | Path | None = None) -> None:
    """Delete the oldest checkpoints over `limit`; the newest, the newest complete one and the best always stay.

    To be called when the newest is marked complete: a process that is killed before has the one before it.

    Args:
        output_dir: the run's directory.
        limit: checkpoints that stay; None or 0 for all.
        best: the directory of the best checkpoint so far, where there is one.
    """
    checkpoints = checkpoints_in(output_dir)
    kept = {os.path.abspath(path) for path in (*checkpoints[-1:], newest_complete(output_dir), best) if path}
    over = max(0, len(checkpoints) - max(limit, len(kept))) if limit and limit > 0 else 0
    for path in [path for path in checkpoints if os.path.abspath(path) not in kept][:over]:
        # transformers' own rotation leaves the marker on what a kill in the middle does not delete
        with contextlib.suppress(OSError):
            mark_incomplete(path)
        shutil.rmtree(path, ignore_errors=True)
