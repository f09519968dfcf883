"""One checkpoint, complete or ignored: a marker is written last, and only a marked checkpoint is resumed.

It also keeps blocks that are generated but not yet trained: they were sampled from weights that are gone, and a
resumed run trains on what the uninterrupted one would have. The sampled tokens are exact for any server, and smaller
than the weights: some 30 bytes a token (and 8 for each it was drawn from), against 2 bytes a parameter and version.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers.data.batch_plan import BatchPlan
from verifiers.data.row_source import ObservesBlocks, StagedRows
from verifiers.envs.datasets import row_fields
from verifiers.errors import CheckpointError
from verifiers.monitoring.run_log import replace_file
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock, TokenSequence
from verifiers.types import Failure, Outcome, RolloutKey, Timing, Usage

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

PENDING_BLOCKS = "blocks_in_flight.jsonl"
"""The name of the file in a checkpoint, with one line a block."""

KEPT = ("optim", "metric_for_best_model")
"""Settings that a checkpoint has in its `extra`: what it holds fits no others."""

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
        extra: further state by the name of what it belongs to, as JSON; `extra_state` gives it back.
        rows: the training rows; left out, the checkpoint does not say which they were.
        model: path or hub name of what the policy was at step 0; likewise.
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
    replace_file(directory / MARKER, json.dumps(state, indent=2) + "\n")
    sync_to_disk(directory)


def check_resumable(directory: str | Path, plan: BatchPlan, rows: Any = None, model: str | None = None) -> None:
    """Refuse a checkpoint that is incomplete, or was written under other sizes, another seed, rows or model.

    Rows and model are not looked at where they are left out, or where the checkpoint does not know its own.
    """
    marker = Path(directory) / MARKER
    if not marker.is_file():
        raise CheckpointError(
            f"{directory} has no {MARKER}, so it is incomplete or of another program; give the path of a complete "
            "checkpoint, or resume_from_checkpoint=True for the newest one."
        )
    saved = _marker(directory)
    step = int(saved["optimizer_step"])
    if (own := Path(directory) / "trainer_state.json").is_file():
        # transformers' own
        _read_json(own)
    if text := run_difference(saved, describe_run(plan, step, rows, model)):
        raise CheckpointError(f"{directory} {text}, or {START_NEW}.")


def describe_run(plan: BatchPlan, optimizer_step: int, rows: Any = None, model: str | None = None) -> dict[str, Any]:
    """Return what must stay the same when a run is resumed, as JSON; None where it is not known.

    It decides which prompts a block holds and where blocks begin. max_steps may grow, and so may what a curriculum
    says of later steps.
    """
    drawn_by = plan.source.fingerprint(optimizer_step) if plan.source is not None else None
    return {
        "seed": plan.seed,
        "shuffle": plan.shuffle,
        "num_prompts": plan.num_prompts,
        "num_generations": plan.num_generations,
        "completions_per_block": plan.completions_per_block,
        "updates_per_block": plan.updates_per_block,
        "curriculum": json.loads(json.dumps(drawn_by)),
        "rows": dataset_fingerprint(rows, plan, optimizer_step),
        "model": model,
    }


def run_difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return in what a saved `describe_run` differs from this one, and what to do; None where they may be of one run.

    Rows and models that are not known are not compared.
    """
    for name, value in now.items():
        had: Any = saved.get(name)
        if had == value or (name in ("rows", "model") and None in (had, value)):
            continue
        if name == "curriculum":
            return (
                f"was written under another curriculum than this run has up to step {saved.get('optimizer_step')} "
                f"({_difference(had, value)}), so its rows would be others; change only what comes later"
            )
        if name == "rows":
            return (
                "was written with other training rows than the environment has now (or another environment, or other "
                "arguments of it), so its blocks would hold other prompts; use the same rows"
            )
        if name != "model":
            return (
                f"was written with {name}={had!r}, and this run has {value!r}: its blocks would hold other prompts; "
                "use the same settings"
            )
        if os.path.realpath(os.path.expanduser(str(had))) != os.path.realpath(os.path.expanduser(str(value))):
            return (
                f"is of a run that began from the model {had!r}, and this one is to begin from {value!r}, whose "
                "weights it would never see; use the same model"
            )
    return None


def model_name(model: Any) -> str | None:
    """Return path or hub name of a model, given as such or loaded; None for a run's own checkpoint."""
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", None)
    if not name or (Path(name) / MARKER).is_file():
        return None
    return str(name)


def resume_step(directory: str | Path) -> int:
    return int(_marker(directory)["optimizer_step"])


def extra_state(directory: str | Path) -> dict[str, Any]:
    """Return what `mark_complete` was given as `extra`; empty for a checkpoint without any."""
    extra: dict[str, Any] = _marker(directory).get("extra") or {}
    return extra


def curriculum_state(plan: BatchPlan) -> dict[str, Any]:
    """Return what a checkpoint keeps of an adaptive curriculum, as JSON."""
    return {"curriculum": plan.source.state()} if isinstance(plan.source, ObservesBlocks) else {}


def _marker(directory: str | Path) -> dict[str, Any]:
    marker: dict[str, Any] = _read_json(Path(directory) / MARKER)
    return marker


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); resume from an earlier checkpoint by its path, or {START_NEW}."
        ) from error


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


# -- blocks in flight ------------------------------------------------------------------------------------------------


def save_pending_blocks(directory: Path, blocks: Iterable[ScoredBlock]) -> None:
    """Write blocks into a checkpoint that is not marked complete yet."""
    with open(directory / PENDING_BLOCKS, "w") as file:
        for block in blocks:
            json.dump(block, file, default=_plain)
            file.write("\n")


def load_pending_blocks(directory: str | Path) -> list[ScoredBlock]:
    """Return the blocks that a checkpoint keeps; none for a run without blocks in flight."""
    path = Path(directory) / PENDING_BLOCKS
    if not path.is_file():
        return []
    try:
        with open(path) as file:
            return [_block_from(json.loads(line)) for line in file]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}); resume from an older checkpoint, or remove "
            "the file to generate these blocks again."
        ) from error


_OURS = (ScoredBlock, Group, Rollout, TokenSequence, RolloutKey, Failure, Timing, Usage)
_NOT_KEPT = ("info", "refusal", "state", "exception")
"""Fields of a rollout and its failure that nothing reads once it is scored."""


def _plain(value: Any) -> Any:
    """Return for JSON what json does not know: what is ours by its fields, arrays as lists, the rest as text."""
    if isinstance(value, _OURS):
        names = (field.name for field in dataclasses.fields(value))
        return {name: getattr(value, name) for name in names if name not in _NOT_KEPT}
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _block_from(saved: dict[str, Any]) -> ScoredBlock:
    groups, filtered = (
        [Group(group["example_id"], [_rollout_from(one) for one in group["rollouts"]]) for group in saved[name]]
        for name in ("groups", "filtered")
    )
    return ScoredBlock(**{**saved, "groups": groups, "filtered": filtered})


def _rollout_from(saved: dict[str, Any]) -> Rollout:
    failure = saved["failure"]
    made = {
        "key": RolloutKey(**saved["key"]),
        "outcome": Outcome(saved["outcome"]),
        "rows": [_row_from(row) for row in saved["rows"]],
        "failure": None if failure is None else Failure(**failure),
        "timing": Timing(**saved["timing"]),
        "usage": Usage(**saved["usage"]),
    }
    return Rollout(**{**saved, **made})


def _row_from(saved: dict[str, Any]) -> TokenSequence:
    # JSON has no numbers as keys, and no tuples
    lengths = {int(turn): count for turn, count in saved["turn_lengths"].items()}
    return TokenSequence(**{**saved, "turn_lengths": lengths, "images": tuple(saved["images"])})
