"""The classic batch calls of an environment: columns in, columns out, usable with and without an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from verifiers.envs.dataset_format import row_fields
from verifiers.errors import ConfigError
from verifiers.rollouts.endpoint import backend_for
from verifiers.rollouts.limits import Limiter
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import RolloutRunner, RunsRollouts, gather_owned
from verifiers.types import GenerateOutputs, RolloutKey, SamplingArgs

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["columns_of", "complete_or_awaitable", "generate", "run_columns", "run_to_completion", "to_dataset"]

T = TypeVar("T")


def columns_of(inputs: Any) -> dict[str, Sequence[Any]]:
    """Columns of a dict, GenerateInputs, Dataset or list of rows.

    Raises:
        ConfigError: no `prompt` column.
    """
    if isinstance(inputs, list):
        columns: dict[str, Sequence[Any]] = {name: [row.get(name) for row in inputs] for name in inputs[0]}
    elif isinstance(inputs, Mapping):
        columns = dict(inputs)
    else:
        columns = {name: inputs[name] for name in inputs.column_names}
    if columns.get("prompt") is None:
        raise ConfigError(f"the inputs have no column 'prompt', only {sorted(columns)}.")
    return columns


def _requests(columns: Mapping[str, Any]) -> list[RolloutRequest]:
    present = {name: values for name, values in columns.items() if values is not None}
    seen: dict[int, int] = {}
    requests = []
    for index in range(len(present["prompt"])):
        row = {name: values[index] for name, values in present.items()}
        prompt, answer, task, info = row_fields(row)
        example_id = int(row.get("id", row.get("example_id", index)))
        generation = seen.get(example_id, 0)
        seen[example_id] = generation + 1
        key = RolloutKey(0, example_id, generation)
        requests.append(RolloutRequest(key, prompt, answer, task, info))
    return requests


async def run_columns(
    env: RunsRollouts,
    columns: Mapping[str, Any],
    client: Any,
    model: str,
    sampling_args: SamplingArgs | None,
    max_concurrent: int = -1,
    then: Callable[[Rollout], Coroutine[Any, Any, None]] | None = None,
) -> list[Rollout]:
    """Run one rollout a row, in order; `then` is awaited with each as soon as it ends.

    Raises:
        Exception: the first failure; the other rollouts are cancelled.
    """
    backend = backend_for(client)
    sampling = {**env.sampling_args, **(sampling_args or {})} if sampling_args else dict(env.sampling_args)
    runner = RolloutRunner(env, backend, model, sampling, limiter=Limiter(max_concurrent or -1))

    async def one(request: RolloutRequest) -> Rollout:
        rollout = await runner.run_one(request)
        if rollout.failure is not None:
            raise rollout.failure.exception or TimeoutError(rollout.failure.text)
        if then is not None:
            await then(rollout)
        return rollout

    try:
        return await gather_owned([one(request) for request in _requests(columns)])
    finally:
        if backend is not client:
            await backend.close()


async def generate(
    env: RunsRollouts,
    inputs: Any,
    client: Any,
    model: str,
    *,
    sampling_args: SamplingArgs | None,
    score: bool,
    max_concurrent: int,
    max_concurrent_scoring: int,
    interleave_scoring: bool,
) -> GenerateOutputs:
    """`Environment.a_generate`."""
    rubric: Any = env.rubric
    scoring = Limiter(max_concurrent_scoring or -1)
    scores: dict[RolloutKey, Any] = {}

    async def score_one(rollout: Rollout) -> None:
        async with scoring.slot():
            scores[rollout.key] = await rubric.score_rollout(
                prompt=rollout.prompt,
                completion=rollout.completion,
                answer=rollout.answer,
                state=rollout.state,
                task=rollout.task,
                info=rollout.info,
            )

    then = score_one if score and interleave_scoring else None
    rollouts = await run_columns(env, columns_of(inputs), client, model, sampling_args, max_concurrent, then)
    outputs = GenerateOutputs(
        prompt=[rollout.prompt for rollout in rollouts],
        completion=[rollout.completion for rollout in rollouts],
        answer=[rollout.answer for rollout in rollouts],
        state=[rollout.state for rollout in rollouts],
        task=[rollout.task for rollout in rollouts],
        info=[rollout.info for rollout in rollouts],
        reward=[],
        metrics={},
    )
    if not score:
        return outputs
    if interleave_scoring:
        in_order = [scores[rollout.key] for rollout in rollouts]
        outputs["reward"] = [item.reward for item in in_order]
        names = dict.fromkeys(name for item in in_order for name in item.metrics)
        outputs["metrics"] = {name: [item.metrics.get(name, 0.0) for item in in_order] for name in names}
    else:
        everything = await rubric.score_rollouts(
            prompts=outputs["prompt"],
            completions=outputs["completion"],
            answers=outputs["answer"],
            states=outputs["state"],
            tasks=outputs["task"],
            infos=outputs["info"],
            max_concurrent=max_concurrent_scoring,
        )
        outputs["reward"], outputs["metrics"] = everything.reward, everything.metrics
    return outputs


def run_to_completion(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine and wait for it; in a thread of its own where an event loop is already running here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    with concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="verifiers-sync") as pool:
        return pool.submit(lambda: asyncio.run(work())).result()


def complete_or_awaitable(work: Callable[[], Coroutine[Any, Any, GenerateOutputs]]) -> GenerateOutputs:
    """Results that can be read at once or awaited.

    Without a running loop the work is done here and now. Inside one it starts when the result is awaited, or,
    for callers of the first generation, when it is first read (the loop then waits).
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _AwaitableOutputs(None, asyncio.run(work()))
    return _AwaitableOutputs(work)


class _AwaitableOutputs(GenerateOutputs):
    """GenerateOutputs that may still have to be produced."""

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, GenerateOutputs]] | None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        dict.__init__(self, outputs or {})
        object.__setattr__(self, "_work", work)

    def __await__(self) -> Generator[Any, None, GenerateOutputs]:
        work = object.__getattribute__(self, "_work")
        if work is not None:
            object.__setattr__(self, "_work", None)
            outputs = yield from work().__await__()
            self.update(outputs)
        return self

    def _complete(self) -> None:
        work = object.__getattribute__(self, "_work")
        if work is not None:
            object.__setattr__(self, "_work", None)
            self.update(run_to_completion(work))

    def __getattr__(self, name: str) -> Any:
        self._complete()
        return super().__getattr__(name)

    def __getitem__(self, name: str) -> Any:
        self._complete()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._complete()
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self._complete()
        return super().__contains__(name)

    def keys(self) -> Any:
        self._complete()
        return super().keys()

    def items(self) -> Any:
        self._complete()
        return super().items()


def to_dataset(results: Mapping[str, Any], state_columns: Sequence[str] | None = None) -> Dataset:
    """Results as a Dataset; `average_reward` is over the rollouts of the same prompt."""
    import json

    from datasets import Dataset

    prompts = [json.dumps(prompt, sort_keys=True, default=str) for prompt in results["prompt"]]
    rewards: dict[str, list[float]] = {}
    for prompt, reward in zip(prompts, results["reward"], strict=True):
        rewards.setdefault(prompt, []).append(reward)
    columns: dict[str, Any] = {
        "prompt": list(results["prompt"]),
        "completion": list(results["completion"]),
        "answer": list(results["answer"]),
        "task": list(results["task"]),
        "reward": list(results["reward"]),
        "average_reward": [sum(rewards[prompt]) / len(rewards[prompt]) for prompt in prompts],
    }
    if any(results.get("info") or []):
        columns["info"] = list(results["info"])
    columns.update(results["metrics"])
    for name in state_columns or []:
        columns[name] = [state.get(name) for state in results["state"]]
    return Dataset.from_dict(columns)
