"""The classic batch calls of an environment: columns in, columns out, usable with and without an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from verifiers.concurrency import gather_owned
from verifiers.envs.dataset_format import row_fields
from verifiers.envs.ending import teardown_at_exit
from verifiers.errors import ConfigError
from verifiers.parsers.printable import plain, sanitize_tool_calls
from verifiers.rollouts.endpoint import backend_for
from verifiers.rollouts.limits import Limiter
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import RolloutRunner, RunsRollouts
from verifiers.rubrics.calling import parameters_of
from verifiers.rubrics.rows import score_from, set_score
from verifiers.types import GenerateOutputs, RolloutKey, RolloutScore, SamplingArgs

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = [
    "columns_of",
    "complete_or_awaitable",
    "drop_clients",
    "generate",
    "run_columns",
    "run_to_completion",
    "to_dataset",
]

T = TypeVar("T")


def columns_of(inputs: Any) -> dict[str, Sequence[Any]]:
    """Columns of a dict, GenerateInputs, Dataset or list of rows.

    Raises:
        ConfigError: no `prompt` column.
    """
    if isinstance(inputs, list):
        names = dict.fromkeys(name for row in inputs for name in row)
        columns: dict[str, Sequence[Any]] = {name: [row.get(name) for row in inputs] for name in names}
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
    numbers: dict[Any, int] = {}
    requests = []
    for index in range(len(present["prompt"])):
        row = {name: values[index] for name, values in present.items()}
        prompt, answer, task, info = row_fields(row)
        name = row.get("example_id", row.get("id", index))
        # a dataset's own ids may be anything; rows of one id are rollouts of one prompt
        example_id = name if isinstance(name, int) else numbers.setdefault(str(name), index)
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
    teardown_at_exit(env)
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


def drop_clients(rollouts: Sequence[Rollout]) -> None:
    """Take the clients out of finished states: results are stored and copied, and connections are neither."""
    for rollout in rollouts:
        rollout.state.pop("client", None)


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
    limiter = Limiter(max_concurrent_scoring or -1)
    in_groups = score and getattr(rubric, "has_group_funcs", False) is True
    interleaved = score and interleave_scoring and not in_groups
    scores: dict[RolloutKey, RolloutScore] = {}

    async def score_one(rollout: Rollout) -> None:
        async with limiter.slot():
            scores[rollout.key] = await _score_rollout(rubric, rollout)
        set_score(rollout.state, scores[rollout.key])

    then = score_one if interleaved else None
    rollouts = await run_columns(env, columns_of(inputs), client, model, sampling_args, max_concurrent, then)
    names = ("prompt", "completion", "answer", "state", "task", "info")
    columns = {name: [getattr(rollout, name) for rollout in rollouts] for name in names}
    if in_groups:
        scores = await _score_groups(rubric, rollouts, limiter)
    if interleaved or in_groups or not score:
        drop_clients(rollouts)
    if interleaved or in_groups:
        in_order = [scores[rollout.key] for rollout in rollouts]
        metric_names = dict.fromkeys(name for item in in_order for name in item.metrics)
        metrics = {name: [item.metrics.get(name, 0.0) for item in in_order] for name in metric_names}
        return GenerateOutputs(**columns, reward=[item.reward for item in in_order], metrics=metrics)
    if not score:
        return GenerateOutputs(**columns, reward=[], metrics={})
    every = await rubric.score_rollouts(
        **{f"{name}s": column for name, column in columns.items()}, max_concurrent=max_concurrent_scoring
    )
    drop_clients(rollouts)
    return GenerateOutputs(**columns, reward=every.reward, metrics=every.metrics)


async def _score_rollout(rubric: Any, rollout: Rollout) -> RolloutScore:
    """The score of one rollout, whichever generation the rubric's `score_rollout` is written for."""
    names, _ = parameters_of(getattr(rubric.score_rollout, "__func__", rubric.score_rollout))
    if "state" in names and "completion" not in names:
        semaphore = {"score_sem": contextlib.nullcontext()} if "score_sem" in names else {}
        return score_from(await rubric.score_rollout(state=rollout.state, **semaphore), rollout.state)
    score: RolloutScore = await rubric.score_rollout(
        prompt=rollout.prompt,
        completion=rollout.completion,
        answer=rollout.answer,
        state=rollout.state,
        task=rollout.task,
        info=rollout.info,
    )
    return score


async def _score_groups(rubric: Any, rollouts: Sequence[Rollout], limiter: Limiter) -> dict[RolloutKey, RolloutScore]:
    """Scores by functions that compare the rollouts of one prompt."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.key.example_id, []).append(rollout)

    async def score_group(group: list[Rollout]) -> None:
        async with limiter.slot():
            await rubric.score_group([rollout.state for rollout in group])

    await gather_owned([score_group(group) for group in groups.values()])
    return {rollout.key: score_from(None, rollout.state) for rollout in rollouts}


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
        return _AwaitableOutputs(None, run_to_completion(work))
    return _AwaitableOutputs(work)


class _AwaitableOutputs(GenerateOutputs):
    """GenerateOutputs that may still have to be produced.

    It has a coroutine's methods, since `asyncio.run` and `create_task` take nothing else that can be awaited.
    """

    _work: Callable[[], Coroutine[Any, Any, GenerateOutputs]] | None
    _coroutine: Coroutine[Any, Any, GenerateOutputs] | None

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, GenerateOutputs]] | None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        dict.__init__(self, outputs or {})
        object.__setattr__(self, "_work", work)
        object.__setattr__(self, "_coroutine", None)

    async def _awaited(self) -> GenerateOutputs:
        work = self._take_work()
        if work is not None:
            self.update(await work())
        return self

    def _take_work(self) -> Callable[[], Coroutine[Any, Any, GenerateOutputs]] | None:
        work = self._work
        object.__setattr__(self, "_work", None)
        return work

    def _started(self) -> Coroutine[Any, Any, GenerateOutputs]:
        if self._coroutine is None:
            object.__setattr__(self, "_coroutine", self._awaited())
        assert self._coroutine is not None
        return self._coroutine

    def _complete(self) -> None:
        work = self._take_work()
        if work is not None:
            self.update(run_to_completion(work))

    def __await__(self) -> Generator[Any, Any, GenerateOutputs]:
        return self._awaited().__await__()

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


def to_dataset(results: Mapping[str, Any], state_columns: Sequence[str] | None = None) -> Dataset:
    """Results as a Dataset; `average_reward` is over the rollouts of the same prompt."""
    from datasets import Dataset

    columns: dict[str, Any] = {
        "prompt": list(results["prompt"]),
        "completion": [sanitize_tool_calls(completion) for completion in results["completion"]],
        "answer": list(results["answer"]),
        "task": list(results["task"]),
    }
    if results["reward"]:
        prompts = [json.dumps(prompt, sort_keys=True, default=str) for prompt in results["prompt"]]
        rewards: dict[str, list[float]] = {}
        for prompt, reward in zip(prompts, results["reward"], strict=True):
            rewards.setdefault(prompt, []).append(reward)
        columns["reward"] = list(results["reward"])
        columns["average_reward"] = [sum(rewards[prompt]) / len(rewards[prompt]) for prompt in prompts]
    if any(results.get("info") or []):
        columns["info"] = list(results["info"])
    columns.update(results["metrics"])
    for name in state_columns or []:
        columns[name] = [plain(state.get(name)) for state in results["state"]]
    return Dataset.from_dict(columns)
