"""One evaluation from its plan to its summary: new or continued by the same command, run, stored, counted.

Two commands are the same where environment (name, version, source), its arguments, prompts, model, endpoint,
sampling, seed, numbers of prompts and rollouts, and shard are the same. Rollouts with a reward are kept, those that
failed are done again; where the rubric compares a prompt's rollouts, a prompt that lacks one is done again whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verifiers.data.sampler import Shard, rollout_seed
from verifiers.envs.datasets import row_fields
from verifiers.errors import ConfigError, NothingScoredError
from verifiers.evals.results import RolloutResults
from verifiers.evals.store import (
    METADATA,
    RESULTS,
    finite,
    iter_rows,
    new_run_directory,
    read_metadata,
    require_whole,
)
from verifiers.evals.summary import rollouts_planned, run_summary
from verifiers.inference.limiter import Limiter, NoMoreSlotsError
from verifiers.log import Redactor
from verifiers.rollouts.rollout import Rollout, RolloutRequest, most_often
from verifiers.rollouts.run import Run, relaxed_gc
from verifiers.rubrics.rubric import Rubric
from verifiers.types import Outcome, RolloutKey

EVALUATION_BLOCK = 2**31
"""Block id of evaluation rollouts: far from any training block's, so that their sampling seeds differ."""

# few enough that reading or beginning them takes a fraction of a millisecond each time
_ROWS_READ_TOGETHER = 32
_BEGUN_TOGETHER = 32
# a score may take 31 times as long as a rollout until it slows down the run
_LEAST_UNFINISHED = 2048
_UNFINISHED_FOR_EACH_SLOT = 32


def iter_requests(
    dataset: Any, rollouts_per_example: int, seed: int | None, shard: Shard | None = None
) -> Iterator[list[RolloutRequest]]:
    """Yield the rollouts of an evaluation, one prompt at a time: a long dataset is never held as a whole.

    Args:
        seed: each rollout's sampling seed is derived from it; None sends no seed.
        shard: leaves out the prompts of other shards; ids and seeds are those of the whole evaluation.
    """
    examples = None if shard is None else shard.examples(len(dataset))
    for example_id, row in enumerate(_rows(dataset)):
        if examples is not None and example_id not in examples:
            continue
        prompt, answer, task, info = row_fields(row)
        keys = [RolloutKey(EVALUATION_BLOCK, example_id, generation) for generation in range(rollouts_per_example)]
        yield [
            RolloutRequest(key, prompt, answer, task, info, None if seed is None else rollout_seed(seed, key))
            for key in keys
        ]


def _rows(dataset: Any) -> Iterator[Mapping[str, Any]]:
    if not hasattr(dataset, "iter"):
        yield from (dataset[index] for index in range(len(dataset)))
        return
    # a row read by itself takes longer than a call to a quick server
    for batch in dataset.iter(batch_size=_ROWS_READ_TOGETHER):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


class Interruption:
    """The end of a run of many rollouts in two steps: `drain` lets what is in flight finish, `abort` does not.

    Both may be called on the event loop only, e.g. from its signal handlers.
    """

    def __init__(self, drain_s: float = 30.0) -> None:
        self.drain_s = drain_s
        self.requested = False
        self.exit_code = 130
        self._deadline: asyncio.Timeout | None = None
        self._limiter: Limiter | None = None

    def drain(self) -> None:
        """Begin nothing more, and give what is in flight `drain_s` seconds."""
        self._end_in(self.drain_s)

    def abort(self) -> None:
        """Cancel what is in flight."""
        self._end_in(0.0)

    def _end_in(self, seconds: float) -> None:
        self.requested = True
        if self._limiter is not None:
            # rollouts that queue for a slot have not begun
            self._limiter.close()
        if self._deadline is not None:
            self._deadline.reschedule(asyncio.get_running_loop().time() + seconds)


async def run_units(
    runner: Run,
    units: Iterable[Sequence[RolloutRequest]],
    on_rollout: Callable[[Rollout], None],
    interruption: Interruption | None = None,
) -> None:
    """Run and score many rollouts under the runner's limiter and keep none of them.

    Args:
        units: rollouts that are scored together; taken one by one, when there is room.
        on_rollout: called with every finished, scored rollout, as it finishes.
        interruption: ends the run before its time; then this returns as if all were done. It closes the runner's
            limiter. A unit of which not all have begun is given up: it could not be scored as a whole.

    Raises:
        ConfigError: a mistake that every other rollout would repeat; the others are cancelled.
    """
    interruption = interruption or Interruption()
    runner.on_rollout = on_rollout

    unfinished, finished = 0, asyncio.Event()

    async def run(unit: Sequence[RolloutRequest]) -> None:
        nonlocal unfinished
        # nothing is returned: the task group's tasks must not hold on to rollouts
        try:
            with contextlib.suppress(NoMoreSlotsError):
                await runner.run_group(unit)
        finally:
            unfinished -= len(unit)
            finished.set()

    deadline = asyncio.timeout(None)
    try:
        with relaxed_gc():
            async with deadline, asyncio.TaskGroup() as tasks:
                interruption._deadline, interruption._limiter = deadline, runner.limiter
                room = 0
                for unit in units:
                    # scoring holds no slot, so where it is the slower part its queue would grow with the run
                    while unfinished >= _most_unfinished(runner.limiter) and not interruption.requested:
                        finished.clear()
                        await finished.wait()
                    if room <= 0 or len(unit) > 1:
                        # a turn of the loop for each single rollout would cost more than a call to a quick server
                        await runner.limiter.wait_for_room()
                        free = runner.limiter.free_slots
                        room = _BEGUN_TOGETHER if free is None else min(free, _BEGUN_TOGETHER)
                    if interruption.requested:
                        break
                    room -= len(unit)
                    unfinished += len(unit)
                    tasks.create_task(run(unit))
    except BaseExceptionGroup as failed:
        first = failed.exceptions[0]
    except TimeoutError:
        if not (interruption.requested and deadline.expired()):
            raise
        return
    else:
        return
    finally:
        interruption._deadline = interruption._limiter = None
    raise first


def _most_unfinished(limiter: Limiter) -> float:
    """Return how many rollouts may be in flight, wait for their score or be scored, all together."""
    slots = limiter.max_concurrent
    return math.inf if slots is None else max(_LEAST_UNFINISHED, _UNFINISHED_FOR_EACH_SLOT * slots)


class LoopLag:
    """A measurement, every `every_s` seconds, of how late a timer fires.

    Attributes:
        late_ms: each delay, in milliseconds; 7 MB a day.
    """

    def __init__(self, every_s: float = 0.1) -> None:
        self._every_s = every_s
        self.late_ms = array("d")

    def quantile_ms(self, share: float) -> float:
        """Return the delay that this share of all does not exceed, in milliseconds; 0 without delays.

        The share is rounded down to whole delays: in a short run the longest alone, as while the first connection
        imports, is not 1 in 20.
        """
        count = int(share * len(self.late_ms))
        return sorted(self.late_ms)[count - 1] if count else 0.0

    @contextlib.asynccontextmanager
    async def measured(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._measure())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _measure(self) -> None:
        while True:
            due = time.perf_counter() + self._every_s
            await asyncio.sleep(self._every_s)
            self.late_ms.append(max(0.0, (time.perf_counter() - due) * 1000))


# -- the run ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class EvaluationRun:
    """An evaluation that is new or continued; made by `open_run` or `new_run`.

    Attributes:
        whole_groups: a prompt's rollouts are played, or scored, together.
        results: numbers of all rollouts so far, this process's and those before.
        done: for each prompt, the generations that were finished before.
        ran, tokens: rollouts and completion tokens of this process.
        newest: when the last of them ended, by `time.perf_counter`; 0 where none has.
    """

    directory: Path
    metadata: dict[str, Any]
    planned: int
    whole_groups: bool
    redact: Redactor
    results: RolloutResults
    done: dict[int, set[int]] = field(default_factory=dict)
    interruption: Interruption = field(default_factory=Interruption)
    lag: LoopLag = field(default_factory=LoopLag)
    ran: int = 0
    tokens: int = 0
    newest: float = 0.0

    @property
    def finished_before(self) -> int:
        """Number of rollouts that an earlier process finished."""
        return sum(map(len, self.done.values()))

    @property
    def is_complete(self) -> bool:
        """True where every rollout has a reward already, so that nothing is left to run."""
        return self.finished_before >= self.planned

    async def run(self, runner: Run, dataset: Any, keep: Callable[[Rollout], None] | None) -> None:
        """Run what is left. Returns early after an interruption; everything finished is kept in any case."""

        def take(rollout: Rollout) -> None:
            if keep is not None:
                keep(rollout)
            self.results.add_rollout(rollout)
            self.ran += 1
            self.newest = time.perf_counter()
            self.tokens += rollout.usage.completion_tokens or 0

        shard = Shard.of_run(self.metadata)
        requests = iter_requests(dataset, self.metadata["rollouts_per_example"], self.metadata["seed"], shard)
        async with self.lag.measured():
            await run_units(runner, self._units_left(requests), take, self.interruption)

    def _units_left(self, groups: Iterable[list[RolloutRequest]]) -> Iterator[list[RolloutRequest]]:
        """Yield the remaining rollouts in units that are played together: a rollout, or a prompt's group."""
        for group in groups:
            done = self.done.get(group[0].key.example_id, ())
            missing = [request for request in group if request.key.generation not in done]
            if not self.whole_groups:
                yield from ([request] for request in missing)
            elif missing:
                yield group

    def summary(self, seconds: float, **options: Any) -> dict[str, Any]:
        """Return the run in numbers; to the seconds of this process those of earlier ones are added."""
        before = _seconds_before(self.metadata)
        found = run_summary(self.results, self.metadata, before + seconds, **options)
        if self.lag.late_ms:
            shares = {"p50": 0.5, "p95": 0.95, "max": 1.0}
            found["loop_lag_ms"] = {name: round(self.lag.quantile_ms(share), 1) for name, share in shares.items()}
        return found

    @property
    def lag_distorts(self) -> bool:
        """True where a common delay of the event loop, 1 in 20, is over 20 ms and a tenth of a rollout's time.

        Measured times are not the server's then.
        """
        late_ms = self.lag.quantile_ms(0.95)
        return bool(self.ran) and late_ms > max(20.0, self.results.generation_s / len(self.results) * 100)

    def require_scores(self) -> None:
        """Raise NothingScoredError, with the commonest cause, where no rollout got a reward."""
        if not self.results.scored:
            cause = most_often(self.results.commonest_failure())
            raise NothingScoredError(f"none of {len(self.results)} evaluation rollouts got a reward{cause}")


# -- new, or continued ---------------------------------------------------------------------------------------------

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

_SIZE = ("prompts", "num_examples", "rollouts_per_example")


def open_run(
    plan: Mapping[str, Any],
    env: Any,
    root: str | Path,
    *,
    rows: Any = None,
    fresh: bool = False,
    redact: Redactor | None = None,
) -> EvaluationRun:
    """Return the newest run that this plan belongs to, or a new one.

    Args:
        plan: metadata of the run, with every entry of `IDENTITY`; `shard`, such as "3/8", for a part of it.
        rows: of the plan; with them a run of fewer of these prompts, or of fewer rollouts of each, is continued, too.
    """
    planned = _planned(plan)  # refuses before a directory is made
    parent = Path(root) / f"{plan['env']}--{plan['model']}".replace("/", "--")
    directory = None if fresh else find_run(parent, plan, rows)
    if directory is None:
        directory = new_run_directory(plan["env"], plan["model"], root, shard=Shard.of_run(plan))
        return new_run(directory, plan, env, redact=redact)
    redact, whole_groups, stored = redact or Redactor(()), in_whole_groups(env), read_metadata(directory)
    if stored.get("status") == "running" and (directory / RESULTS).is_file():
        # killed, so nobody wrote its seconds: they are those from its first metadata to its last rollout
        last, first = ((directory / name).stat().st_mtime for name in (RESULTS, METADATA))
        summary = stored.get("summary")
        known = summary if isinstance(summary, Mapping) else {}
        stored["summary"] = {**known, "seconds": _seconds_before(stored) + max(0.0, last - first)}
    results, done = finished_rollouts(
        directory, plan["rollouts_per_example"], whole_groups=whole_groups, redact=redact
    )
    run = EvaluationRun(directory, stored, planned, whole_groups, redact, results, done)
    if not run.is_complete:
        # else nothing is run today, so nothing of today belongs to the run
        kept: dict[str, Any] = {name: stored[name] for name in ("started", "started_at", "summary") if name in stored}
        begun = _begun(plan, env.rubric)
        run.metadata = {**begun, **kept, "sessions": [*stored.get("sessions", ()), *begun["sessions"]]}
    return run


def new_run(directory: Path, plan: Mapping[str, Any], env: Any, *, redact: Redactor | None = None) -> EvaluationRun:
    """Return a new run of a plan in a directory, which need not exist yet."""
    redact = redact or Redactor(())
    results = RolloutResults(redact=redact)
    return EvaluationRun(directory, _begun(plan, env.rubric), _planned(plan), in_whole_groups(env), redact, results)


def _begun(plan: Mapping[str, Any], rubric: Any) -> dict[str, Any]:
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    session = {"started": now, "versions": plan.get("versions"), "git": plan.get("git")}
    begun = {"started": now, "started_at": time.time(), "sessions": [session]}
    return {**plan, **reward_bounds(rubric), "identity": run_identity(plan), **begun}


def reward_bounds(rubric: Any) -> dict[str, Any]:
    """Return the entry of metadata.json with a rubric's bounds; none for a rubric of another kind."""
    return {"reward_bounds": rubric.declared_bounds()} if isinstance(rubric, Rubric) else {}


def _planned(plan: Mapping[str, Any]) -> int:
    planned = rollouts_planned(plan)
    if planned is None:
        raise ConfigError("the dataset has no rows to evaluate; give the environment an eval_dataset that has some.")
    return planned


def run_identity(metadata: Mapping[str, Any], *, but_for: Sequence[str] = ()) -> str:
    """Return a short hash of what makes two commands the same evaluation."""
    entries = {name: metadata.get(name) for name in IDENTITY if name not in but_for}
    text = json.dumps(entries, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def fingerprint(dataset: Any) -> str:
    """Return a hash of all rows, so that prompts that changed under the same name are not taken for the same."""
    digest = hashlib.blake2b(digest_size=16)
    batches = dataset.iter(batch_size=256) if hasattr(dataset, "iter") else iter(dataset)
    for batch in batches:
        digest.update(json.dumps(batch, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _seconds_before(metadata: Mapping[str, Any]) -> float:
    summary = metadata.get("summary")
    return (finite(summary.get("seconds")) or 0.0) if isinstance(summary, Mapping) else 0.0


def find_run(directory: Path, plan: Mapping[str, Any], rows: Any = None) -> Path | None:
    """Return the newest run below `directory` that a plan continues, or None; `rows` as in `open_run`."""
    found: list[tuple[bool, float, str, Path]] = []
    for path in directory.glob(f"*/{METADATA}"):
        try:
            metadata = read_metadata(path.parent)
        except ConfigError:
            continue  # foreign or damaged: not a run to continue
        is_same = metadata.get("identity") == run_identity(plan)
        if metadata.get("shard") == plan.get("shard") and (is_same or _is_part(metadata, plan, rows)):
            found.append((is_same, finite(metadata.get("started_at")) or 0.0, path.parent.name, path.parent))
    return max(found)[-1] if found else None


def _is_part(metadata: Mapping[str, Any], plan: Mapping[str, Any], rows: Any) -> bool:
    """Return whether a run played the first of the plan's rows, as often or less often, and all else is the same."""
    # a run that was graded again has no identity: its rewards may be another rubric's
    if rows is None or "identity" not in metadata:
        return False
    if run_identity(metadata, but_for=_SIZE) != run_identity(plan, but_for=_SIZE):
        return False
    # a stranger's may be anything
    match metadata.get("num_examples"), metadata.get("rollouts_per_example"):
        case (int() as prompts, int() as each) if 0 < prompts <= len(rows) and each <= plan["rollouts_per_example"]:
            return bool(metadata.get("prompts") == fingerprint(rows.select(range(prompts))))
    return False


def finished_rollouts(
    directory: Path, rollouts_per_example: int, *, whole_groups: bool, redact: Redactor
) -> tuple[RolloutResults, dict[int, set[int]]]:
    """Read what a run has done so far: the numbers of all rollouts, and for each prompt the generations to keep.

    Args:
        whole_groups: a prompt counts only when all of its rollouts have a reward.
    """
    scored: dict[int, set[int]] = {}
    results = RolloutResults(redact=redact)
    for row in iter_rows(directory):
        require_whole(directory, row)
        generations = scored.setdefault(int(row["example_id"]), set())
        done = generations.discard if Outcome(row["outcome"]).is_failure else generations.add
        done(int(row["generation"]))
        results.add(row)
    least = rollouts_per_example if whole_groups else 0
    return results, {example: done for example, done in scored.items() if len(done) >= least}


def in_whole_groups(env: Any) -> bool:
    """Return whether a rollout may depend on the others of its prompt: as it is played, or by its reward."""
    return env.plays_groups_itself or scores_whole_groups(env.rubric)


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
