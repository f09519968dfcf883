"""One evaluation from its plan to its summary: new or continued by the same command, run, stored, counted.

Two commands are the same where environment (name, version, source), its arguments, prompts, model, endpoint,
sampling, seed, numbers of prompts and rollouts, and shard are the same. Rollouts with a reward are kept, those that
failed are done again; where the rubric compares a prompt's rollouts, a prompt that lacks one is done again whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from verifiers.data.shard import Shard
from verifiers.errors import ConfigError
from verifiers.evals.evaluation_loop import Interruption, LoopLag, iter_requests, nothing_scored, run_units
from verifiers.evals.progress import Progress
from verifiers.evals.store import METADATA, iter_rows, new_run_directory, read_metadata
from verifiers.evals.summary import rollouts_planned
from verifiers.log import Redactor
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.run import Run
from verifiers.types import Outcome

__all__ = [
    "EvaluationRun",
    "Finished",
    "KeepsRollouts",
    "find_run",
    "fingerprint",
    "finished_rollouts",
    "open_run",
    "run_identity",
    "run_in",
    "scores_whole_groups",
]


class KeepsRollouts(Protocol):
    """A receiver of finished rollouts; `ResultStore` writes them down."""

    def append(self, rollout: Rollout) -> None: ...


@dataclass(slots=True)
class EvaluationRun:
    """An evaluation that is new or continued; made by `open_run`.

    Attributes:
        directory: where it is stored.
        metadata: what is run.
        planned: rollouts in all.
        finished: what was done before.
        whole_groups: the rubric scores a prompt's rollouts together.
        ran, tokens: rollouts and completion tokens of this process.
        interruption: ends it before its time.
    """

    directory: Path
    metadata: dict[str, Any]
    planned: int
    finished: Finished
    whole_groups: bool
    redact: Redactor
    interruption: Interruption = field(default_factory=Interruption)
    lag: LoopLag = field(default_factory=LoopLag)
    ran: int = 0
    tokens: int = 0

    @property
    def progress(self) -> Progress:
        """Numbers of all rollouts so far, this process's and those before."""
        return self.finished.progress

    @property
    def is_complete(self) -> bool:
        """True where every rollout has a reward already, so that nothing is left to run."""
        return self.finished.count >= self.planned

    async def run(self, runner: Run, dataset: Any, store: KeepsRollouts | None) -> None:
        """Run what is left. Returns early after an interruption; everything finished is stored in any case."""

        def take(rollout: Rollout) -> None:
            if store is not None:
                store.append(rollout)
            self.progress.add(rollout)
            self.ran += 1
            self.tokens += rollout.usage.completion_tokens or 0

        shard = Shard.of_run(self.metadata)
        requests = iter_requests(dataset, self.metadata["rollouts_per_example"], self.metadata["seed"], shard)
        units = self.finished.left(requests, whole_groups=self.whole_groups)
        async with self.lag.measured():
            await run_units(runner, units, take, self.interruption)

    def summary(self, seconds: float, **options: Any) -> dict[str, Any]:
        """Return the run in numbers.

        Args:
            seconds: that this process ran rollouts; those of earlier ones are added.
            **options: `right_from` and `prices` of `summarize`.
        """
        before = (self.metadata.get("summary") or {}).get("seconds") or 0.0
        found = self.progress.summary(before + seconds, self.metadata, **options)
        found["prompts_trained_on"] = self.metadata.get("prompts_trained_on")
        if self.lag.samples:
            found["loop_lag_ms"] = {"p50": self.lag.quantile_ms(0.5), "p95": self.lag.quantile_ms(0.95)}
            found["loop_lag_ms"]["max"] = round(self.lag.max_ms, 1)
        return found

    @property
    def lag_distorts(self) -> bool:
        """True where the event loop was so late that measured times are not the server's."""
        return bool(self.ran) and self.lag.distorts(self.progress.generation_s / len(self.progress) * 1000)

    def require_scores(self) -> None:
        """Raise NothingScoredError, with the commonest cause, where no rollout got a reward."""
        if not self.progress.scored:
            raise nothing_scored(len(self.progress), self.progress.commonest_failure())


def open_run(
    plan: Mapping[str, Any],
    rubric: Any,
    root: str | Path,
    *,
    fresh: bool = False,
    redact: Redactor | None = None,
) -> EvaluationRun:
    """Return the newest run that this plan belongs to, or a new one.

    Args:
        plan: metadata of the run, with every entry of `IDENTITY`; `shard`, such as "3/8", for a part of it.
        rubric: of the environment.
        root: directory of all evaluations.
        fresh: never continue a run.
        redact: takes secrets out of what is written.

    Raises:
        ConfigError: nothing can be written there, or a stored run is damaged.
    """
    _planned(plan)  # refuses before a directory is made
    parent = Path(root) / f"{plan['env']}--{plan['model']}".replace("/", "--")
    directory = None if fresh else find_run(parent, run_identity(plan), plan.get("shard"))
    if directory is None:
        directory = new_run_directory(plan["env"], plan["model"], root, shard=Shard.of_run(plan))
    return run_in(directory, plan, rubric, redact=redact)


def run_in(
    directory: Path, plan: Mapping[str, Any], rubric: Any, *, fresh: bool = False, redact: Redactor | None = None
) -> EvaluationRun:
    """Return the run of this plan in a directory: continued where the directory holds that run, else new.

    Args:
        directory: of the run; it need not exist yet.
        plan: as in `open_run`.
        rubric: as in `open_run`.
        fresh: ignore what is stored there.
        redact: takes secrets out of what is written.

    Raises:
        ConfigError: the stored run is damaged, or there is no prompt to run, or fewer than shards.
    """
    redact = redact or Redactor(())
    metadata: dict[str, Any] = {**plan, "identity": run_identity(plan)}
    planned = _planned(metadata)
    whole_groups = scores_whole_groups(rubric)
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    session = {"started": now, "versions": plan.get("versions"), "git": plan.get("git")}
    stored = {} if fresh else read_metadata(directory)
    if not _is_part(stored, metadata["identity"], metadata.get("shard")):
        metadata |= {"started": now, "started_at": time.time(), "sessions": [session]}
        return EvaluationRun(directory, metadata, planned, Finished(Progress(redact)), whole_groups, redact)
    each = metadata["rollouts_per_example"]
    finished = finished_rollouts(directory, each, whole_groups=whole_groups, redact=redact)
    if finished.count >= planned:
        # nothing is run today, so nothing of today belongs to the run
        return EvaluationRun(directory, stored, planned, finished, whole_groups, redact)
    metadata |= {name: stored[name] for name in ("started", "started_at", "summary") if name in stored}
    metadata["sessions"] = [*stored.get("sessions", ()), session]
    return EvaluationRun(directory, metadata, planned, finished, whole_groups, redact)


def _planned(plan: Mapping[str, Any]) -> int:
    planned = rollouts_planned(plan)
    if planned is None:
        raise ConfigError("the dataset has no rows to evaluate; give the environment an eval_dataset that has some.")
    return planned


# -- what is the same evaluation, and what of it is finished -----------------------------------------------------

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
"""Entries of metadata.json that make two commands the same evaluation, or shards of the same."""


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


def find_run(directory: Path, identity: str, shard: str | None = None) -> Path | None:
    """Return the newest run of this identity and shard below `directory`, or None."""
    found: list[tuple[float, str, Path]] = []
    entries = os.scandir(directory) if directory.is_dir() else ()
    for entry in entries:
        path = Path(entry.path)
        if (path / METADATA).is_file():
            try:
                metadata = read_metadata(path)
            except ConfigError:
                continue  # foreign or damaged: not a run to continue
            if _is_part(metadata, identity, shard):
                found.append((float(metadata.get("started_at") or 0.0), entry.name, path))
    return max(found)[2] if found else None


def _is_part(stored: Mapping[str, Any], identity: str, shard: str | None) -> bool:
    return stored.get("identity") == identity and stored.get("shard") == shard


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
    finished.progress.mark_done(finished.done)
    return finished


def scores_whole_groups(rubric: Any) -> bool:
    """Return whether a rollout's reward may depend on the other rollouts of its prompt."""
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
