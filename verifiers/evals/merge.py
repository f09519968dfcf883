"""Join the shards of an evaluation into one run, as if one process had run it.

Rows, statistics, tokens, retries and the plan in the metadata are those of the unsharded run; rows stand shard by
shard. What depends on the clock or on the process is not: `started` is the earliest shard's,
`sessions` are all of theirs, `summary.seconds` is their sum, `summary.loop_lag_ms` is left out, and what does not
identify an evaluation (limits, timeouts, versions, git) is as in the first shard.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifiers.data.sampler import Shard
from verifiers.errors import ConfigError
from verifiers.evals.evaluation_run import IDENTITY
from verifiers.evals.results import RolloutResults
from verifiers.evals.store import (
    FAILURES,
    RESULTS,
    ResultStore,
    iter_rows,
    new_run_directory,
    read_metadata,
    repair_last_line,
)
from verifiers.evals.summary import PriceTable, run_summary


@dataclass(frozen=True, slots=True)
class _StoredShard:
    directory: Path
    metadata: dict[str, Any]
    shard: Shard

    def __str__(self) -> str:
        return f"shard {self.shard} ({str(self.directory)!r})"


def merge_runs(
    directories: Sequence[str | Path], root: str | Path = "outputs/evals", *, prices: PriceTable | None = None
) -> Path:
    """Write the run that all shards of an evaluation make together, and return its directory, which is below `root`.

    The shards, given in any order, stay as they are. `prices` are needed where the shards were given some.

    Raises:
        ConfigError: a shard is missing, there twice, unfinished, or of another evaluation; the message names it.
    """
    shards = sorted((_stored_shard(Path(one)) for one in directories), key=lambda one: one.shard.number)
    for other in shards[1:]:
        _require_same_evaluation(shards[0], other)
    _require_each_once(shards)
    right_from, currency = _agreed(shards, "right_from"), _agreed(shards, "currency")
    if (prices is None) != (currency is None):
        given = "without" if currency is None else "with"
        raise ConfigError(f"the shards were run {given} prices, so the merged run is merged {given} --prices too.")
    results = RolloutResults()
    for one in shards:
        _count(one, results)
    metadata = _merged_metadata(shards)
    directory = new_run_directory(metadata["env"], metadata["model"], root)
    # on a disk that fills up the run is known to be unfinished
    with ResultStore(directory, metadata) as store:
        for name in (RESULTS, FAILURES):
            for part in [one.directory / name for one in shards if (one.directory / name).is_file()]:
                with part.open("rb") as source, (directory / name).open("ab") as target:
                    shutil.copyfileobj(source, target)
                # the next shard's first line would continue one that has no end
                repair_last_line(directory / name)
        seconds = sum(one.metadata["summary"]["seconds"] for one in shards)
        summary = run_summary(results, metadata, seconds, right_from=right_from, prices=prices)
        store.write_metadata(summary=summary, status="finished")
    return directory


def _stored_shard(path: Path) -> _StoredShard:
    directory = path.parent if path.name == RESULTS else path
    metadata = read_metadata(directory)
    shard = Shard.of_run(metadata)
    if shard is None or "identity" not in metadata:
        raise ConfigError(f"{str(directory)!r} is not a shard of a run; give directories that vf-eval --shard wrote.")
    found = _StoredShard(directory, metadata, shard)
    if metadata.get("status") != "finished":
        raise ConfigError(f"{found} is unfinished; run its command again to finish it.")
    return found


def _require_same_evaluation(first: _StoredShard, other: _StoredShard) -> None:
    if first.shard.of != other.shard.of:
        raise ConfigError(f"{first} and {other} are of different numbers of shards.")
    if first.metadata["identity"] == other.metadata["identity"]:
        return
    values = [(name, first.metadata.get(name), other.metadata.get(name)) for name in IDENTITY]
    differing = ", ".join(f"{name}: {one!r} and {another!r}" for name, one, another in values if one != another)
    # a secret that is not stored may be the only difference
    raise ConfigError(f"{first} and {other} are of different evaluations ({differing or 'in what is not stored'}).")


def _require_each_once(shards: Sequence[_StoredShard]) -> None:
    by_number: dict[int, _StoredShard] = {}
    for one in shards:
        if one.shard.number in by_number:
            twice = f"{str(by_number[one.shard.number].directory)!r} and {str(one.directory)!r}"
            raise ConfigError(f"shard {one.shard} is there twice: {twice}; give one of them.")
        by_number[one.shard.number] = one
    count = shards[0].shard.of
    missing = [str(Shard(number, count)) for number in range(1, count + 1) if number not in by_number]
    if missing:
        raise ConfigError(f"of {count} shards these are missing: {', '.join(missing)}.")


def _agreed(shards: Sequence[_StoredShard], name: str) -> Any:
    value = shards[0].metadata["summary"].get(name)
    for one in shards:
        found = one.metadata["summary"].get(name)
        if found != value:
            raise ConfigError(
                f"{shards[0]} has {name} {value!r} and {one} {found!r}; run one of them again with the other's."
            )
    return value


def _count(one: _StoredShard, results: RolloutResults) -> None:
    """Add the rows of a shard to the numbers; refuse one that lacks rollouts, or has others'."""
    stored = set()
    for row in iter_rows(one.directory):
        results.add(row)
        stored.add((int(row["example_id"]), int(row["generation"])))
    each = one.metadata["rollouts_per_example"]
    planned = {(i, g) for i in one.shard.examples(one.metadata["num_examples"]) for g in range(each)}
    if stored != planned:
        raise ConfigError(
            f"{one} should hold {len(planned)} rollouts, of which {len(planned - stored)} are missing, "
            f"and holds {len(stored - planned)} of others; copy all of it."
        )


def _merged_metadata(shards: Sequence[_StoredShard]) -> dict[str, Any]:
    earliest = min(shards, key=lambda one: one.metadata["started_at"]).metadata
    metadata = {name: value for name, value in shards[0].metadata.items() if name not in ("shard", "summary")}
    return {
        **metadata,
        "started": earliest["started"],
        "started_at": earliest["started_at"],
        "sessions": [{**session, "shard": str(one.shard)} for one in shards for session in one.metadata["sessions"]],
        "merged_from": [str(one.directory) for one in shards],
        "status": "running",
    }
