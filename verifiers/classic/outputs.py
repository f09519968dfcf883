"""Results of `generate` and `evaluate` as both generations of the classic API read them."""

from __future__ import annotations

import asyncio
import datetime
import json
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verifiers.errors import GradingError
from verifiers.loop_thread import run_blocking
from verifiers.parsers.messages import plain, sanitize_tool_calls
from verifiers.rollouts.rollout import Rollout
from verifiers.types import GenerateOutputs, Outcome, Record, SamplingArgs

if TYPE_CHECKING:
    from datasets import Dataset

Column = Sequence[float | None]
Work = Callable[[], Coroutine[Any, Any, GenerateOutputs]]

_COLUMNS = ("prompt", "completion", "answer", "state", "task", "info")


def raise_failure(rollout: Rollout, kept: type[Exception] | tuple[()] = ()) -> None:
    """Raise the failure of a rollout, unless it is of a kind that its state keeps."""
    failure = rollout.failure
    if failure is not None and not isinstance(failure.exception, kept):
        raise failure.exception or TimeoutError(failure.text)


def generate_outputs(
    env: Any,
    rollouts: Sequence[Rollout],
    scored: bool,
    model: str,
    client: Any,
    sampling_args: SamplingArgs | None,
    started: float,
) -> GenerateOutputs:
    """Return finished rollouts as columns, as one record each (`outputs`), and what they have in common (`metadata`).

    Where they are scored, one without a reward, whose `reward` and metrics are None, has failed. The call began at
    `started`, by `time.time`.

    Raises:
        Exception: no rollout came to its end; the first one's failure.
    """
    if all(rollout.failure and rollout.outcome is not Outcome.GRADING_ERROR for rollout in rollouts):
        for rollout in rollouts:
            raise_failure(rollout)
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
    examples = {output["example_id"] for output in outputs}
    metadata = Record(
        env_id=getattr(env, "env_id", None) or "",
        env_args=getattr(env, "env_args", None) or {},
        num_examples=len(examples),
        rollouts_per_example=len(outputs) // max(1, len(examples)),
        avg_reward=_mean_of_scored(reward),
        avg_metrics={name: _mean_of_scored(values) for name, values in metrics.items()},
        avg_error=_mean_of_scored([float(output["error"] is not None) for output in outputs]),
        state_columns=[],
        path_to_save=None,
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


def _mean_of_scored(values: Column) -> float | None:
    """Return the mean of what is not None; None where all are, 0.0 where there is nothing."""
    scored = [value for value in values if value is not None]
    return sum(scored) / len(scored) if scored else None if values else 0.0


def to_dataset(results: Mapping[str, Any], state_columns: Sequence[str] | None = None) -> Dataset:
    """Return results as a Dataset; `average_reward` is over the rollouts of the same prompt."""
    from datasets import Dataset

    columns: dict[str, Any] = {name: list(results[name]) for name in ("prompt", "completion", "answer", "task")}
    columns["completion"] = [sanitize_tool_calls(completion) for completion in columns["completion"]]
    if results["reward"]:
        prompts = [json.dumps(prompt, sort_keys=True, default=str) for prompt in results["prompt"]]
        rewards: dict[str, list[float | None]] = {}
        for prompt, reward in zip(prompts, results["reward"], strict=True):
            rewards.setdefault(prompt, []).append(reward)
        columns["reward"] = list(results["reward"])
        columns["average_reward"] = [_mean_of_scored(rewards[prompt]) for prompt in prompts]
    if any(results.get("info") or []):
        columns["info"] = list(results["info"])
    columns.update({f"{name}_metric" if name in columns else name: one for name, one in results["metrics"].items()})
    for name in state_columns or []:
        columns[name] = [plain(state.get(name)) for state in results["state"]]
    return Dataset.from_dict(columns)


# -- results that are read at once or awaited ---------------------------------------------------------------------


def complete_or_awaitable(work: Work) -> GenerateOutputs:
    """Return results that can be read at once or awaited.

    Without a running loop the work is done here and now. Inside one it starts when the result is awaited, or,
    for callers of the first generation, when it is first read (the loop then waits).
    """
    outputs = _AwaitableOutputs(work)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        outputs._complete()
    return outputs


class _AwaitableOutputs(GenerateOutputs):
    """GenerateOutputs that may still have to be produced.

    It has a coroutine's methods, since `asyncio.run` and `create_task` take nothing else that can be awaited.
    """

    _work: Work | None
    _coroutine: Coroutine[Any, Any, GenerateOutputs] | None

    def __init__(self, work: Work) -> None:
        dict.__init__(self)
        # a record's attributes are its items
        vars(self).update(_work=work, _coroutine=None)

    async def _awaited(self) -> GenerateOutputs:
        if (work := self._take_work()) is not None:
            self.update(await work())
        return self

    def _complete(self) -> None:
        if (work := self._take_work()) is not None:
            self.update(run_blocking(work))

    def _take_work(self) -> Work | None:
        work = self._work
        vars(self)["_work"] = None
        return work

    def __await__(self) -> Generator[Any, Any, GenerateOutputs]:
        return self._awaited().__await__()

    def _started(self) -> Coroutine[Any, Any, GenerateOutputs]:
        started = self._coroutine or self._awaited()
        vars(self)["_coroutine"] = started
        return started

    def send(self, value: Any) -> Any:
        return self._started().send(value)

    def throw(self, *error: Any) -> Any:
        return self._started().throw(*error)

    def close(self) -> None:
        if self._coroutine is not None:
            self._coroutine.close()

    def __getattr__(self, name: str) -> Any:
        self._complete()
        return super().__getattr__(name)

    # asyncio.gather keeps what it is given in a dict
    __hash__ = object.__hash__  # type: ignore[assignment]


def _completing(name: str) -> Callable[..., Any]:
    read = getattr(dict, name)

    def complete_and_read(self: _AwaitableOutputs, *args: Any) -> Any:
        self._complete()
        return read(self, *args)

    return complete_and_read


for _name in ("__contains__", "__eq__", "__getitem__", "__iter__", "__len__", "__ne__", "__repr__"):
    setattr(_AwaitableOutputs, _name, _completing(_name))
for _name in ("copy", "get", "items", "keys", "values"):
    setattr(_AwaitableOutputs, _name, _completing(_name))
