"""The block log, blocks.jsonl in the run directory: the fate of every planned rollout, a line a block.

    {"block_id": 3, "optimizer_step": 3, "trained": {"17": "0-15", "9": "0-1,3-15"},
     "routine": {"zero_advantage": {"21": "0-15"}},
     "dropped": [{"example_id": 9, "generation": 2, "reason": "timed_out", "row": null, "tokens": 0, "seconds": 9.5}]}

`trained` and `routine` have ranges of generations by example id; `routine` has what is left out by a rule of the run,
`dropped` the exceptions. `read_block_log` gives one entry a rollout.

A line is written when a block is taken for training, and again where an update of it is not applied; a run that
resumes from a checkpoint removes the lines of blocks that it will train again. So after a run has ended well or was
resumed, the file has the lineage of the weights, each block once and in order; where the checkpoint is in another
directory, from there on. The file of an interrupted run also has blocks that will be trained again.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from verifiers.errors import CheckpointError
from verifiers.monitoring.run_log import replace_file
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.train.batching.training_block import Dropped
from verifiers.train.checkpoint.checkpoint import sync_to_disk

BLOCK_LOG = "blocks.jsonl"

ROUTINE_REASONS = ("zero_advantage", "zero_variance", "masked_truncated", "run_ended")
"""Reasons by which whole groups are left out every block: identities suffice."""


def block_record(block: ScoredBlock, optimizer_step: int, dropped: Sequence[Dropped]) -> dict[str, Any]:
    """Return the record of one block: each of its rollouts is trained, or dropped for a reason, or in part both."""
    whole = {item.key for item in dropped if item.row is None}
    lost_rows = Counter(item.key for item in dropped if item.row is not None)
    seconds = {rollout.key: rollout.timing.generation_s for rollout in block.launched}
    trained = [
        [rollout.key.example_id, rollout.key.generation]
        for rollout in block.launched
        if rollout.key not in whole and lost_rows[rollout.key] < sum(row.sampled_tokens > 0 for row in rollout.rows)
    ]
    return {
        "block_id": block.block_id,
        "optimizer_step": optimizer_step,
        "trained": trained,
        "dropped": [
            {
                "example_id": item.key.example_id,
                "generation": item.key.generation,
                "reason": item.reason,
                "row": item.row,
                "tokens": item.tokens,
                "seconds": round(seconds.get(item.key, 0.0), 3),
            }
            for item in dropped
        ],
    }


def _line(record: dict[str, Any]) -> str:
    routine: dict[str, list[list[int]]] = {}
    dropped = []
    for item in record["dropped"]:
        if item["reason"] in ROUTINE_REASONS and item["row"] is None:
            routine.setdefault(item["reason"], []).append([item["example_id"], item["generation"]])
        else:
            dropped.append(item)
    short = {reason: ranges_by_example(rollouts) for reason, rollouts in routine.items()}
    return (
        json.dumps({**record, "trained": ranges_by_example(record["trained"]), "routine": short, "dropped": dropped})
        + "\n"
    )


def _record(line: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(line)
    routine = [
        {"example_id": example, "generation": generation, "reason": reason, "row": None}
        for reason, ranges in record.pop("routine", {}).items()
        for example, generation in _rollouts(ranges)
    ]
    trained = [list(rollout) for rollout in _rollouts(record["trained"])]
    return {**record, "trained": trained, "dropped": record["dropped"] + routine}


def ranges_by_example(rollouts: Sequence[Sequence[int]]) -> dict[str, str]:
    """Return (example id, generation) pairs as ranges of generations by example id: {"17": "0-2,5"}."""
    spans: dict[str, list[list[int]]] = {}
    for example, generation in sorted((pair[0], pair[1]) for pair in rollouts):
        of_example = spans.setdefault(str(example), [])
        if of_example and of_example[-1][1] == generation - 1:
            of_example[-1][1] = generation
        else:
            of_example.append([generation, generation])
    return {
        example: ",".join(str(first) if first == last else f"{first}-{last}" for first, last in of_example)
        for example, of_example in spans.items()
    }


def _rollouts(ranges: dict[str, str]) -> Iterator[tuple[int, int]]:
    for example, spans in ranges.items():
        for span in spans.split(","):
            first, _, last = span.partition("-")
            yield from ((int(example), generation) for generation in range(int(first), int(last or first) + 1))


def read_block_log(directory: str | Path) -> list[dict[str, Any]]:
    """Return the records of a run's block log, in order, without one that was cut off while it was written.

    They are as of `block_record`; rollouts left out for one of `ROUTINE_REASONS` have no tokens and seconds.
    """
    path = Path(directory) / BLOCK_LOG
    if not path.is_file():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(_record(line))
        except ValueError:
            # only the last can be incomplete: the process was killed while it wrote
            break
    return records


class BlockLog:
    """The block log of a run that is written to, without lines of the blocks that this process will train."""

    def __init__(self, directory: str | Path, first_block: int) -> None:
        self.path = Path(directory) / BLOCK_LOG
        self._last: tuple[int, int] | None = None
        kept = [record for record in read_block_log(directory) if record["block_id"] < first_block]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, "".join(map(_line, kept)))
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be written ({error}); make room, or give another output_dir."
            ) from error

    def write(self, record: dict[str, Any]) -> None:
        """Append one block's line, in place of the last one where that is of the same block."""
        try:
            if self._last is not None and self._last[0] == record["block_id"]:
                os.truncate(self.path, self._last[1])
            self._last = record["block_id"], self.path.stat().st_size
            with open(self.path, "a") as file:
                file.write(_line(record))
        except OSError as error:
            raise CheckpointError(
                f"the record of block {record['block_id']} could not be written to {self.path} ({error}); make room, "
                "and give the same command again."
            ) from error

    def sync(self) -> None:
        """Flush what was written to the disk; called before a checkpoint is marked complete."""
        sync_to_disk(self.path)
