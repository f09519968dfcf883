"""Continuing an evaluation by the same command: its run, what of the run is finished, and what remains.

Two commands are the same where environment (name, version, source), its arguments, prompts, model, endpoint,
sampling, seed, and the numbers of prompts and rollouts are the same. Rollouts with a reward are kept, those that
failed are done again; where the rubric compares a prompt's rollouts, a prompt that lacks one is done again whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.evals.progress import Progress
from verifiers.evals.store import METADATA, iter_rows, read_metadata
from verifiers.types import Outcome

__all__ = ["Finished", "find_run", "fingerprint", "finished_rollouts", "run_identity", "scores_whole_groups"]

IDENTITY = (
    "env",
    "env_version",
    "env_source",
    "env_args",
    "prompts",
    "model",
    "base_url",
    "sampling_args",
    "num_examples",
    "rollouts_per_example",
    "seed",
)
"""Entries of metadata.json that make two commands the same evaluation."""


def run_identity(metadata: Mapping[str, Any]) -> str:
    """Return a short hash of what makes two commands the same evaluation."""
    text = json.dumps({name: metadata.get(name) for name in IDENTITY}, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def fingerprint(dataset: Any) -> str:
    """Return a hash of all rows, so that prompts that changed under the same name are not taken for the same."""
    digest = hashlib.blake2b(digest_size=16)
    batches = dataset.iter(batch_size=256) if hasattr(dataset, "iter") else iter(dataset)
    for batch in batches:
        digest.update(json.dumps(batch, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def find_run(directory: Path, identity: str) -> Path | None:
    """Return the newest run of this identity below `directory`, or None."""
    found: list[tuple[float, str, Path]] = []
    entries = os.scandir(directory) if directory.is_dir() else ()
    for entry in entries:
        path = Path(entry.path)
        if (path / METADATA).is_file():
            try:
                metadata = read_metadata(path)
            except ConfigError:
                continue  # foreign or damaged: not a run to continue
            if metadata.get("identity") == identity:
                found.append((float(metadata.get("started_at") or 0.0), entry.name, path))
    return max(found)[2] if found else None


@dataclass(slots=True)
class Finished:
    """The rollouts that a run has finished.

    Attributes:
        progress: of everything that is stored.
        done: for each prompt, the generations that need not be done again.
    """

    progress: Progress = field(default_factory=Progress)
    done: dict[int, set[int]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(map(len, self.done.values()))

    def left(self, groups: Iterator[Sequence[Any]], *, whole_groups: bool) -> Iterator[list[Any]]:
        """Yield the remaining rollouts in units that are scored together: a rollout, or a prompt's group."""
        for group in groups:
            done = self.done.get(group[0].key.example_id, ())
            missing = [request for request in group if request.key.generation not in done]
            if whole_groups:
                if missing:
                    yield list(group)
            else:
                yield from ([request] for request in missing)


def finished_rollouts(
    directory: Path, rollouts_per_example: int, *, whole_groups: bool, redact: Callable[[str], str] | None = None
) -> Finished:
    """Read what a run has done so far, without keeping its transcripts.

    Args:
        directory: of the run.
        rollouts_per_example: as planned.
        redact: see `Progress`.
        whole_groups: a prompt counts only when all of its rollouts have a reward.
    """
    scored: dict[int, set[int]] = {}
    finished = Finished(Progress(redact))
    for row in iter_rows(directory):
        generations = scored.setdefault(int(row["example_id"]), set())
        done = generations.discard if Outcome(row["outcome"]).is_failure else generations.add
        done(int(row["generation"]))
        finished.progress.add_row(row)
    for example, generations in scored.items():
        if not whole_groups or len(generations) >= rollouts_per_example:
            finished.done[example] = generations
    finished.progress.settle(finished.done)
    return finished


def scores_whole_groups(rubric: Any) -> bool:
    """Return True where a rollout's reward may depend on the other rollouts of its prompt."""
    if getattr(rubric, "has_group_funcs", True) is not False:
        return True
    for name in ("score_rollouts", "score_group"):
        # a rubric of the user's own that takes many rollouts at once may compare them
        module = str(getattr(getattr(rubric, name, None), "__module__", ""))
        if module.partition(".")[0] != "verifiers":
            return True
    members = list(getattr(rubric, "rubrics", None) or ())
    members += [env.rubric for env in (getattr(rubric, "env_map", None) or {}).values()]
    return any(scores_whole_groups(member) for member in members)
