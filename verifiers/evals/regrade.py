"""Grade stored rollouts again with today's rubric, without asking the policy for anything.

What is stored of a rollout is its conversation, answer, task and info. A reward function that reads more of the
state, such as a game's board, cannot be answered: it fails as a grading error that names what it asked for, and is
never a reward of 0. A rubric that asks a judge asks it again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifiers.concurrency import gather_owned
from verifiers.errors import ConfigError, GradingError
from verifiers.evals.evaluation_run import EVALUATION_BLOCK, reward_bounds
from verifiers.evals.results import RolloutResults
from verifiers.evals.store import ResultStore, StoredRun, require_whole, versions
from verifiers.evals.summary import RIGHT_FROM, run_summary
from verifiers.inference.limiter import Limiter
from verifiers.log import Redactor
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.run import Run
from verifiers.types import Failure, MessageRecord, Outcome, RolloutKey, State, Timing, Usage

# what rubrics themselves look for and may miss
_MAY_BE_MISSING = frozenset({
    "_judges", "advantage", "error", "grading_errors", "input", "is_truncated", "judge_response", "metrics", "reward",
})  # fmt: skip

_OF_THE_RUN = ("identity", "reward_bounds", "summary")


class RestoredState(State):
    """A state made from a stored row. Reading what is not stored raises, also through `get`.

    A default would be taken for the truth: a function that counts `state.get("moves", [])` would grade 0 moves.
    """

    def __missing__(self, name: str) -> Any:
        raise GradingError(f"it reads state[{name!r}], which is not stored with a run")

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value, `default` for what rubrics themselves may miss."""
        return self[name] if name in self or name not in _MAY_BE_MISSING else default


@dataclass(frozen=True, slots=True)
class Regraded:
    """A run that was graded again: the new one, numbers before and after, and how many rewards are others or gone."""

    directory: Path
    before: RolloutResults
    after: RolloutResults
    changed: int


async def regrade(
    env: Any,
    run: StoredRun,
    *,
    max_concurrent: int = 64,
    grading_timeout_s: float = 120.0,
    redact: Redactor | None = None,
) -> Regraded:
    """Grade a stored run with the environment's rubric, and store the result as a run beside it.

    Rollouts that failed before they were graded stay as they are. `max_concurrent` prompts are graded at once, and
    the rollouts of one have `grading_timeout_s` seconds.
    """
    if not run.rows:
        raise ConfigError(f"{str(run.directory)!r} holds no rollouts, so there is nothing to grade.")
    before, after = RolloutResults(run.rows), RolloutResults(redact=redact or Redactor(()))
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in run.rows:
        require_whole(run.directory, row)
        groups.setdefault(row["example_id"], []).append(row)
    directory = _directory_beside(run.directory)
    runner = Run(env, None, "", grading_timeout_s=grading_timeout_s)  # type: ignore[arg-type]
    limiter = Limiter(max_concurrent)
    metadata = {
        **{name: value for name, value in run.metadata.items() if name not in _OF_THE_RUN},
        **reward_bounds(env.rubric),
        "regraded_from": str(run.directory),
        "regraded": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions(),
        "status": "running",
    }
    started = time.perf_counter()
    with ResultStore(directory, metadata, redact) as store:

        async def one(rows: list[dict[str, Any]]) -> int:
            async with limiter.slot():
                rollouts = [_restored(row) for row in rows]
                await runner.score(rollouts)
            for rollout in rollouts:
                store.append(rollout)
                after.add_rollout(rollout)
            return sum(rollout.reward != row.get("reward") for rollout, row in zip(rollouts, rows, strict=True))

        changed = sum(await gather_owned([one(rows) for rows in groups.values()]))
        # an unfinished run has no summary
        right_from = run.metadata.get("summary", {}).get("right_from", RIGHT_FROM)
        summary = run_summary(after, metadata, time.perf_counter() - started, right_from=right_from)
        store.write_metadata(summary=summary, status="finished")
    return Regraded(directory, before, after, changed)


def _restored(row: Mapping[str, Any]) -> Rollout:
    outcome = Outcome(row["outcome"])
    if outcome is Outcome.GRADING_ERROR:
        # the rollout itself had ended well
        outcome = Outcome.COMPLETED
    failure = None
    if outcome.is_failure:
        kind, _, text = str(row.get("error") or "unknown").partition(": ")
        failure = Failure(kind, text)
    completion = _messages(row.get("completion"))
    state = RestoredState(
        id=row["example_id"],
        example_id=row["example_id"],
        prompt=_messages(row.get("prompt")),
        completion=completion,
        answer=row.get("answer", ""),
        task=row.get("task", "default"),
        info=row.get("info") or {},
        turn=row.get("turns"),
        tool_call_errors=row.get("tool_call_errors") or [],
        timing={
            "generation_ms": row.get("generation_ms") or 0.0,
            "scoring_ms": 0.0,
            "total_ms": row.get("generation_ms") or 0.0,
        },
    )
    return Rollout(
        key=RolloutKey(EVALUATION_BLOCK, row["example_id"], row["generation"]),
        outcome=outcome,
        prompt=state["prompt"],
        completion=completion,
        answer=state["answer"],
        task=state["task"],
        info=state["info"],
        turns=row.get("turns") or 0,
        failure=failure,
        attempts=row.get("attempts") or 1,
        refusal=row.get("refusal"),
        timing=Timing(generation_s=(row.get("generation_ms") or 0.0) / 1000),
        usage=Usage(row.get("prompt_tokens"), row.get("completion_tokens")),
        state=state,
    )


def _messages(value: Any) -> Any:
    """Return messages as reward functions get them in a live rollout: dicts whose fields are attributes too."""
    if isinstance(value, list):
        return [MessageRecord(message) if isinstance(message, dict) else message for message in value]
    return "" if value is None else value


def _directory_beside(directory: Path) -> Path:
    run, number = directory.resolve(), 1
    while (path := run.with_name(f"{run.name}-regraded-{number}")).exists():
        number += 1
    try:
        path.mkdir()
    except OSError as error:
        raise ConfigError(f"nothing can be written beside {str(directory)!r}: {error}.") from error
    return path
