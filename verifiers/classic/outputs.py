"""Results of `generate` and `evaluate` as both generations of the classic API read them."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.errors import Error, GradingError
from verifiers.rollouts.rollout import Rollout
from verifiers.types import GenerateOutputs, Outcome, Record, SamplingArgs

__all__ = ["generate_outputs", "mean_of_scored", "raise_unless_kept"]

Column = Sequence[float | None]

_COLUMNS = ("prompt", "completion", "answer", "state", "task", "info")


def raise_unless_kept(rollouts: Sequence[Rollout]) -> None:
    """Raise the failure of a rollout, unless it is a `vf.Error`, which its state keeps.

    Raises:
        Exception: the first failure of another kind.
    """
    for rollout in rollouts:
        if rollout.failure is not None and not isinstance(rollout.failure.exception, Error):
            raise rollout.failure.exception or TimeoutError(rollout.failure.text)


def generate_outputs(
    env: Any,
    rollouts: Sequence[Rollout],
    *,
    scored: bool,
    model: str,
    client: Any,
    sampling_args: SamplingArgs | None,
    started: float,
) -> GenerateOutputs:
    """Return finished rollouts as columns, as one record each (`outputs`), and what they have in common (`metadata`).

    Args:
        env: the environment that played them.
        rollouts: in the order of the inputs.
        scored: they have been scored; one without a reward, whose `reward` and metrics are None, has failed.
        model: the policy's name.
        client: where it was called.
        sampling_args: of the call.
        started: when the call began, by `time.time`.

    Raises:
        Exception: no rollout came to its end; the first one's failure.
    """
    if rollouts and all(rollout.failure and rollout.outcome is not Outcome.GRADING_ERROR for rollout in rollouts):
        raise_first(rollouts)
    columns: dict[str, list[Any]] = {name: [getattr(rollout, name) for rollout in rollouts] for name in _COLUMNS}
    reward: Column = []
    metrics: dict[str, Column] = {}
    if scored and rollouts:
        reward = [rollout.reward for rollout in rollouts]
        names = dict.fromkeys(name for rollout in rollouts for name in rollout.metrics)
        for name in names:
            metrics[name] = [one.metrics.get(name, 0.0) if one.is_scored else None for one in rollouts]
        metrics["num_turns"] = [float(_turns(rollout.state)) for rollout in rollouts]
    outputs = []
    for place, rollout in enumerate(rollouts):
        # results are stored and copied, and connections are neither
        rollout.state.pop("client", None)
        if rollout.failure is not None and rollout.state.get("error") is None:
            rollout.state["error"] = rollout.failure.exception or GradingError(rollout.failure.text)
        rollout.state.setdefault("stop_condition", None)
        rollout.state["is_truncated"] = rollout.is_truncated or bool(rollout.state.get("is_truncated"))
        of_rollout = {name: values[place] for name, values in metrics.items()}
        if reward:
            rollout.state["reward"] = rollout.reward
            rollout.state["metrics"] = {**rollout.metrics, "num_turns": of_rollout["num_turns"]}
        outputs.append(_output(rollout, of_rollout))
    metadata = _metadata(env, outputs, reward, metrics)
    metadata.update(
        model=model,
        base_url=str(getattr(client, "base_url", client if isinstance(client, str) else "")),
        sampling_args={**env.sampling_args, **(sampling_args or {})},
        date=datetime.datetime.now(datetime.UTC).isoformat(),
        time=time.time() - started,
        time_ms=(time.time() - started) * 1000,
    )
    return GenerateOutputs(
        **columns,
        reward=reward,
        metrics=metrics,
        example_id=[output["example_id"] for output in outputs],
        stop_conditions=[output["stop_condition"] for output in outputs],
        is_truncated=[output["is_truncated"] for output in outputs],
        outputs=outputs,
        metadata=metadata,
    )


def raise_first(rollouts: Sequence[Rollout]) -> None:
    """Raise the failure of the first rollout that has one."""
    for rollout in rollouts:
        if rollout.failure is not None:
            raise rollout.failure.exception or TimeoutError(rollout.failure.text)


def _turns(state: Mapping[str, Any]) -> int:
    return len(state.get("trajectory") or state.get("responses") or ())


def _output(rollout: Rollout, metrics: Mapping[str, float | None]) -> Record:
    state = rollout.state
    error = state.get("error")
    return Record(
        {
            **metrics,
            "example_id": rollout.key.example_id,
            "prompt": rollout.prompt,
            "completion": rollout.completion,
            "answer": rollout.answer,
            "task": rollout.task,
            "info": rollout.info,
            "reward": rollout.reward,
            "outcome": str(rollout.outcome),
            "metrics": dict(metrics),
            "timing": state.get("timing"),
            "is_completed": bool(state.get("is_completed", True)),
            "is_truncated": state["is_truncated"],
            "stop_condition": state["stop_condition"],
            "error": None if error is None else {"error": type(error).__name__, "error_chain_str": str(error)},
        }
    )


def _metadata(
    env: Any, outputs: Sequence[Mapping[str, Any]], reward: Column, metrics: Mapping[str, Column]
) -> Record:
    examples = {output["example_id"] for output in outputs}
    return Record(
        env_id=getattr(env, "env_id", None) or "",
        env_args=getattr(env, "env_args", None) or {},
        num_examples=len(examples),
        rollouts_per_example=len(outputs) // max(1, len(examples)),
        avg_reward=mean_of_scored(reward),
        avg_metrics={name: mean_of_scored(values) for name, values in metrics.items()},
        avg_error=mean_of_scored([float(output["error"] is not None) for output in outputs]),
        state_columns=[],
        path_to_save=None,
    )


def mean_of_scored(values: Column) -> float | None:
    """Return the mean of what is not None; None where all are, 0.0 where there is nothing."""
    scored = [value for value in values if value is not None]
    return sum(scored) / len(scored) if scored else None if values else 0.0
