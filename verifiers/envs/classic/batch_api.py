"""The classic batch calls of an environment: columns in, columns out, usable with and without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from verifiers.concurrency import gather_owned
from verifiers.envs.classic.outputs import generate_outputs, mean_of_scored, raise_unless_kept
from verifiers.envs.datasets import row_fields
from verifiers.envs.lifecycle import teardown_at_exit
from verifiers.errors import ConfigError, Error
from verifiers.inference.limiter import Limiter
from verifiers.inference.server_pool import backend_for
from verifiers.loop_thread import run_blocking
from verifiers.parsers.messages import plain, sanitize_tool_calls
from verifiers.rollouts.batch_client import BatchClient, RolloutRecord
from verifiers.rollouts.rollout import Rollout, RolloutRequest, requests_by_prompt
from verifiers.rollouts.runner import RolloutRunner, RunsRollouts
from verifiers.rubrics.overrides import call_score_rollouts
from verifiers.rubrics.scoring import ScoringInput
from verifiers.types import GenerateOutputs, RolloutKey, SamplingArgs

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = [
    "columns_of",
    "complete_or_awaitable",
    "generate",
    "own_batch",
    "to_dataset",
]

T = TypeVar("T")


def columns_of(inputs: Any) -> dict[str, Sequence[Any]]:
    """Return the columns of a dict, GenerateInputs, Dataset or list of rows.

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


def requests_of(rows: Sequence[Mapping[str, Any]]) -> list[RolloutRequest]:
    """Return a rollout for each row; rows of one `example_id` (or `id`) are rollouts of one prompt."""
    seen: dict[int, int] = {}
    numbers: dict[Any, int] = {}
    requests = []
    for index, row in enumerate(rows):
        prompt, answer, task, info = row_fields(row)
        name = row.get("example_id", row.get("id", index))
        # a dataset's own ids may be anything
        example_id = name if isinstance(name, int) else numbers.setdefault(str(name), index)
        generation = seen.get(example_id, 0)
        seen[example_id] = generation + 1
        requests.append(RolloutRequest(RolloutKey(0, example_id, generation), prompt, answer, task, info))
    return requests


@contextlib.asynccontextmanager
async def runner_of(
    env: RunsRollouts, client: Any, model: str, sampling_args: SamplingArgs | None, max_concurrent: int
) -> AsyncIterator[RolloutRunner]:
    """Give a runner on a caller's own client, and close the connections that it opened."""
    teardown_at_exit(env)
    backend = backend_for(client)
    sampling = {**env.sampling_args, **(sampling_args or {})}
    try:
        yield RolloutRunner(env, backend, model, sampling, limiter=Limiter(max_concurrent or -1))
    finally:
        if backend is not client:
            await backend.close()


@contextlib.asynccontextmanager
async def own_batch(
    env: RunsRollouts,
    client: Any,
    model: str,
    rows: Sequence[Mapping[str, Any]],
    sampling_args: SamplingArgs | None,
    max_concurrent: int,
) -> AsyncIterator[BatchClient]:
    """Give the batch with which `run_rollouts` plays rows on a caller's own client; the first failure is raised."""
    async with runner_of(env, client, model, sampling_args, max_concurrent) as runner:
        yield runner.batch_client(requests_of(rows), raises=True)


async def generate(
    env: RunsRollouts,
    inputs: Any,
    client: Any,
    model: str | None,
    *,
    sampling_args: SamplingArgs | None,
    score: bool,
    max_concurrent: int,
    max_concurrent_scoring: int,
    interleave_scoring: bool,
) -> GenerateOutputs:
    """Run the rollouts of `Environment.a_generate` and score them.

    `run_rollouts` is asked for what is scored together: each row, each prompt's rows where the rubric compares them,
    or all rows where they are scored at the end or not at all. Outcomes and rewards are those of `vf-eval`: a rollout
    that failed, or whose grade failed, has no reward.

    Raises:
        Exception: the first failure that is no `vf.Error`; the other rollouts are cancelled. A `vf.Error` is kept in
            its rollout's state, and raised only where every rollout failed.
    """
    started = time.time()
    client = client if client is not None else getattr(env, "client", None)
    model = model if model is not None else getattr(env, "model", None)
    if client is None or model is None:
        raise ConfigError(
            f"{type(env).__name__} has no client and model; give both to this call or when you make it."
        )
    rubric: Any = env.rubric
    limiter = Limiter(max_concurrent_scoring or -1)
    columns = {name: values for name, values in columns_of(inputs).items() if values is not None}
    count = len(columns["prompt"])
    requests = requests_of([{name: values[row] for name, values in columns.items()} for row in range(count)])
    in_groups = score and getattr(rubric, "has_group_funcs", False) is True
    interleaved = in_groups or (score and interleave_scoring)

    async def run(unit: Sequence[RolloutRequest]) -> list[Rollout]:
        rollouts = await runner.run_batch(unit, on_end=raise_other_failures)
        raise_unless_kept(rollouts)
        if interleaved:
            async with limiter.slot():
                await runner.score(rollouts)
        return rollouts

    async with runner_of(env, client, model, sampling_args, max_concurrent) as runner:
        units = requests_by_prompt(requests) if in_groups else [[request] for request in requests]
        done = await gather_owned([run(unit) for unit in (units if interleaved else [requests] if requests else [])])
        finished = {rollout.key: rollout for rollouts in done for rollout in rollouts}
        rollouts = [finished[request.key] for request in requests]
        if score and not interleaved:
            played = [rollout for rollout in rollouts if rollout.failure is None]
            inputs_to_score = [ScoringInput.from_state(rollout.state) for rollout in played]
            scores = await call_score_rollouts(rubric, inputs_to_score, {"max_concurrent": max_concurrent_scoring})
            for rollout, of_rollout in zip(played, scores, strict=True):
                rollout.take_score(of_rollout)
    return generate_outputs(
        env, rollouts, scored=score, model=model, client=client, sampling_args=sampling_args, started=started
    )


def raise_other_failures(record: RolloutRecord) -> None:
    """Raise a rollout's failure as soon as it ends, unless it is a `vf.Error`, so that the others are cancelled."""
    if record.failure is not None and not isinstance(record.failure.exception, Error):
        raise record.failure.exception or TimeoutError(record.failure.text)


def complete_or_awaitable(work: Callable[[], Coroutine[Any, Any, GenerateOutputs]]) -> GenerateOutputs:
    """Return results that can be read at once or awaited.

    Without a running loop the work is done here and now. Inside one it starts when the result is awaited, or,
    for callers of the first generation, when it is first read (the loop then waits).
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _AwaitableOutputs(None, run_blocking(work))
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
            self.update(run_blocking(work))

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
    """Return results as a Dataset; `average_reward` is over the rollouts of the same prompt."""
    from datasets import Dataset

    columns: dict[str, Any] = {
        "prompt": list(results["prompt"]),
        "completion": [sanitize_tool_calls(completion) for completion in results["completion"]],
        "answer": list(results["answer"]),
        "task": list(results["task"]),
    }
    if results["reward"]:
        prompts = [json.dumps(prompt, sort_keys=True, default=str) for prompt in results["prompt"]]
        rewards: dict[str, list[float | None]] = {}
        for prompt, reward in zip(prompts, results["reward"], strict=True):
            rewards.setdefault(prompt, []).append(reward)
        columns["reward"] = list(results["reward"])
        columns["average_reward"] = [mean_of_scored(rewards[prompt]) for prompt in prompts]
    if any(results.get("info") or []):
        columns["info"] = list(results["info"])
    columns.update(results["metrics"])
    for name in state_columns or []:
        columns[name] = [plain(state.get(name)) for state in results["state"]]
    return Dataset.from_dict(columns)
