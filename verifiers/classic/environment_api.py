"""The calls of verifiers 0.1.x on an environment: one rollout; columns in and columns out, with or without a loop."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from verifiers.classic import token_processing
from verifiers.classic.outputs import generate_outputs, mean_of_scored, raise_unless_kept
from verifiers.classic.rubrics import scores_by_columns
from verifiers.classic.steps import Steps
from verifiers.classic.tool_defs import ToolDefs
from verifiers.concurrency import gather_owned
from verifiers.data.shard import Shard
from verifiers.envs.conversation import begin_turns, call_model, tools_of_info
from verifiers.envs.datasets import row_fields
from verifiers.envs.lifecycle import teardown_at_exit
from verifiers.envs.tools import openai_tools
from verifiers.errors import ConfigError
from verifiers.inference.limiter import Limiter
from verifiers.inference.server_pool import backend_for
from verifiers.keywords import check_keywords, ignore_keywords, parameter_names
from verifiers.loop_thread import run_blocking
from verifiers.parsers.messages import plain, sanitize_tool_calls
from verifiers.rollouts.rollout import Rollout, RolloutRequest, requests_by_prompt
from verifiers.rollouts.run import Run, begin_state, take_score
from verifiers.types import (
    ChatMessage,
    GenerateOutputs,
    Messages,
    ProcessedOutputs,
    RolloutKey,
    SamplingArgs,
    State,
)

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["ClassicCalls", "call_rollout", "classic_call", "is_state_call"]

T = TypeVar("T")

_ROLLOUT_ARGUMENTS = ("client", "model", "prompt", "answer", "task", "info", "sampling_args")


# -- one rollout, and its methods ---------------------------------------------------------------------------------


def is_state_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a method is called with the state first, as the present interface does."""
    return isinstance(args[0], Mapping) if args else "state" in kwargs and "messages" not in kwargs


def classic_call(method: Callable[..., Any], env: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the present interface with the arguments of the first generation."""
    if method.__name__ == "is_completed":
        return _completed_of_messages(method, env, *args, **kwargs)
    if method.__name__ == "run_rollouts":
        return _run_columns(env, *args, **kwargs)
    return _answer_of_client(env, *args, **kwargs)


async def _run_columns(
    env: Any,
    client: Any,
    model: str,
    prompts: Sequence[Messages],
    answers: Sequence[Any],
    tasks: Sequence[str] | None = None,
    infos: Sequence[Any] | None = None,
    sampling_args: SamplingArgs | None = None,
    max_concurrent: int = -1,
    **_: Any,
) -> list[tuple[Messages, State]]:
    """Play prompts and return (completion, state) of each, without scores; the first failure is raised."""
    columns = {"prompt": prompts, "answer": answers, "task": tasks, "info": infos}
    given = {name: values for name, values in columns.items() if values is not None}
    requests = requests_of([dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)])
    async with run_of(env, client, model, sampling_args, max_concurrent) as run:
        run.on_end = raise_failure
        rollouts = await run.play(requests)
    for rollout in rollouts:
        # results are stored and copied, and connections are neither
        rollout.state.pop("client", None)
    return [(rollout.completion, rollout.state) for rollout in rollouts]


async def _completed_of_messages(
    method: Callable[..., Any], env: Any, messages: Any, state: State, **kwargs: Any
) -> bool:
    given = State(state, prompt=messages[:0], completion=messages)
    is_completed = bool(await method(env, given))
    if given.get("stop_condition") is not None:
        state["stop_condition"] = given["stop_condition"]
    return is_completed


async def _answer_of_client(
    env: Any,
    client: Any,
    model: str,
    prompt: Messages,
    oai_tools: list[dict[str, Any]] | None = None,
    sampling_args: SamplingArgs | None = None,
    message_type: Any = None,
    **_: Any,
) -> Any:
    return await call_model(
        client,
        model,
        prompt,
        message_type=message_type or env.message_type,
        oai_tools=oai_tools,
        sampling_args=sampling_args,
        logger=getattr(env, "logger", None),
    )


def call_rollout(
    env: Any, row: Mapping[str, Any], client: Any, model: str, sampling_args: SamplingArgs
) -> Awaitable[Any]:
    """Call an environment's own `rollout` in the generation that it is written for.

    Args:
        row: prompt, example_id, task, answer, info.

    Returns:
        What the method returns, to be awaited: (completion, state), or the state.
    """
    names = list(inspect.signature(env.rollout).parameters)
    if names[:1] in (["input"], ["rollout_input"]) or names[1:2] == ["client"]:
        by_input: Awaitable[Any] = env.rollout(row, client, model, sampling_args)
        return by_input
    columns = {name: row[name] for name in ("answer", "task", "info")}
    by_columns: Awaitable[Any] = env.rollout(client, model, row["prompt"], **columns, sampling_args=sampling_args)
    return by_columns


async def _play_row(
    env: Any,
    input: Mapping[str, Any],  # noqa: A002 - the classic name
    client: Any,
    model: str,
    sampling_args: SamplingArgs | None = None,
) -> State:
    """Play a row by the environment's own loop, beneath what overrides `rollout`; return its state."""
    (request,) = requests_of([input])
    state = begin_state(request, client, model, sampling_args or {})
    plays = [vars(base)["play"] for base in type(env).__mro__ if "play" in vars(base)]
    own = next(play for play in plays if getattr(play, "__name__", "") != "play_by_rollout")
    await own(env, state)
    return state


def _first_generation(
    self: Any,
    client: Any,
    model: str,
    prompt: Messages,
    answer: Any = "",
    task: str = "default",
    info: Any = None,
    sampling_args: SamplingArgs | None = None,
    **kwargs: Any,
) -> None:
    """Have the signature of `rollout` that is shown."""


class ClassicCalls(Steps):
    """The calls of verifiers 0.1.x, as methods of `Environment`."""

    tool_defs = ToolDefs()

    async def rollout(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Play one rollout, called in either generation's way.

        First: `rollout(client, model, prompt, answer="", task="default", info=None, sampling_args=None, **kwargs)`
        returns (completion, state), where the state's own `completion` is empty as it was then, and raises errors.
        Second: `rollout(input, client, model, sampling_args=None)` returns the state; a `vf.Error` that is raised
        inside stands in `state["error"]`, and the conversation so far is kept.
        """
        if "input" in kwargs or (args and isinstance(args[0], Mapping) and "prompt" in args[0]):
            return await _play_row(self, *args, **kwargs)
        given = dict(zip(_ROLLOUT_ARGUMENTS, args, strict=False)) | kwargs
        client, model, sampling_args = given.pop("client"), given.pop("model"), given.pop("sampling_args", None)
        row = {name: given.pop(name) for name in (*_ROLLOUT_ARGUMENTS[2:6], "example_id") if name in given}
        env = self
        if given:
            # further keywords reach what the environment overrides
            env = copy.copy(self)
            for name in ("setup_state", "env_response"):
                if hasattr(self, name):
                    env.__dict__[name] = functools.partial(getattr(self, name), **given)
        state = await _play_row(env, row, client, model, sampling_args)
        if isinstance(error := state.get("error"), BaseException):
            raise error
        completion, state["completion"] = state["completion"], type(state["completion"])()
        return completion, state

    rollout.__signature__ = inspect.signature(_first_generation)  # type: ignore[attr-defined]

    async def init_state(
        self: Any,
        input: Any,  # noqa: A002 - the classic name
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
    ) -> State:
        """Return the state that a rollout of this row begins with, before `setup_state`."""
        (request,) = requests_of([input])
        state = begin_state(request, client, model, sampling_args or {})
        begin_turns(state, self.oai_tools)
        return state

    async def a_generate(
        self: Any,
        inputs: Any,
        client: Any = None,
        model: str | None = None,
        sampling_args: SamplingArgs | None = None,
        score_rollouts: bool = True,
        max_concurrent: int = -1,
        max_concurrent_generation: int | None = None,
        max_concurrent_scoring: int | None = None,
        interleave_scoring: bool = True,
        **kwargs: Any,
    ) -> GenerateOutputs:
        """Roll out and score columns of prompts (a dict, GenerateInputs, or a Dataset).

        Args:
            client: left out, the one that the environment was made with; `model` likewise.

        Returns:
            prompt, completion, answer, state, task, info, reward, metrics; `reward` is [] with
            `score_rollouts=False`.

        Raises:
            ConfigError: a misspelled keyword; one that is unknown is ignored, with a warning.
        """
        ignore_keywords(self, kwargs, ClassicCalls.a_generate)
        return await generate(
            self,
            inputs,
            client,
            model,
            sampling_args=sampling_args,
            score=score_rollouts,
            max_concurrent=max_concurrent if max_concurrent_generation is None else max_concurrent_generation,
            max_concurrent_scoring=max_concurrent if max_concurrent_scoring is None else max_concurrent_scoring,
            interleave_scoring=interleave_scoring,
        )

    def generate(
        self: Any, inputs: Any, client: Any = None, model: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Run `a_generate` for both generations of callers: read the result at once, or await it."""
        return complete_or_awaitable(lambda: self.a_generate(inputs, client, model, *args, **kwargs))

    def generate_sync(
        self: Any, inputs: Any, client: Any = None, model: str | None = None, *args: Any, **kwargs: Any
    ) -> GenerateOutputs:
        """Run `a_generate` and wait for the result; also inside a running event loop."""
        return run_blocking(lambda: self.a_generate(inputs, client, model, *args, **kwargs))

    async def a_evaluate(
        self: Any,
        client: Any = None,
        model: str | None = None,
        sampling_args: SamplingArgs | None = None,
        num_examples: int = -1,
        rollouts_per_example: int = 1,
        score_rollouts: bool = True,
        shard: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> GenerateOutputs:
        """Roll out and score the eval dataset, of `shard=(3, 8)` every eighth row; e0 .. eN-1, e0 .. eN-1."""
        check_keywords(type(self).__name__, kwargs, parameter_names(ClassicCalls.a_evaluate, ClassicCalls.a_generate))
        dataset = self.get_eval_dataset(n=num_examples)
        if shard is not None:
            dataset = dataset.select(Shard(*shard).examples(len(dataset)))
        inputs = {name: list(values) * rollouts_per_example for name, values in columns_of(dataset).items()}
        return await self.a_generate(inputs, client, model, sampling_args, score_rollouts, **kwargs)

    def evaluate(self: Any, client: Any = None, model: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Run `a_evaluate` for both generations of callers: read the result at once, or await it."""
        return complete_or_awaitable(lambda: self.a_evaluate(client, model, *args, **kwargs))

    def evaluate_sync(
        self: Any, client: Any = None, model: str | None = None, *args: Any, **kwargs: Any
    ) -> GenerateOutputs:
        """Run `a_evaluate` and wait for the result."""
        return run_blocking(lambda: self.a_evaluate(client, model, *args, **kwargs))

    def make_dataset(
        self: Any,
        results: GenerateOutputs,
        rollouts_per_example: int = 1,
        push_to_hf_hub: bool = False,
        hub_name: str | None = None,
        state_columns: list[str] | None = None,
        **kwargs: Any,
    ) -> Dataset:
        """Return results as a Dataset: prompt, completion, answer, task, reward, average_reward, [info], each metric.

        Args:
            rollouts_per_example: kept for the classic signature; averages go by prompt, whatever the order.
            state_columns: keys of the states that become columns.
        """
        if push_to_hf_hub and hub_name is None:
            raise ConfigError("push_to_hf_hub needs hub_name, such as 'user/my-results'.")
        dataset = to_dataset(results, state_columns)
        if push_to_hf_hub:
            dataset.push_to_hub(hub_name)
        return dataset

    # -- tokens, for training loops written for the classic API -----------------------------------------------

    parse_chat_completion_tokens = staticmethod(token_processing.chat_tokens)
    parse_chat_completion_logprobs = staticmethod(token_processing.chat_logprobs)
    parse_completion_tokens = staticmethod(token_processing.completion_tokens)
    parse_completion_logprobs = staticmethod(token_processing.completion_logprobs)

    def process_chat_format_vllm(
        self: Any,
        prompt: list[ChatMessage],
        completion: list[ChatMessage],
        state: State,
        processing_class: Any,
        mask_env_responses: bool = False,
    ) -> token_processing.TokenLists:
        """Return the token lists of a chat rollout; see `verifiers.classic.token_processing.process_chat`."""
        if hasattr(self, "get_env_for_task"):
            env = self.get_env_for_task(state["task"])
            return env.process_chat_format_vllm(prompt, completion, state, processing_class, mask_env_responses)
        tools = openai_tools(tools_of_info(state.get("info") or {}) or self.oai_tools or ())
        return token_processing.process_chat(prompt, completion, state, processing_class, mask_env_responses, tools)

    def process_completion_format_vllm(
        self: Any,
        prompt: str,
        completion: str,
        state: State,
        processing_class: Any,
        mask_env_responses: bool = False,
    ) -> token_processing.TokenLists:
        """Return the token lists of a rollout in completion mode; see `token_processing.process_completion`."""
        return token_processing.process_completion(prompt, completion, state, processing_class, mask_env_responses)

    def process_env_results_vllm(
        self: Any,
        prompts: Sequence[Messages],
        completions: Sequence[Messages],
        states: Sequence[State],
        rewards: Sequence[float],
        processing_class: Any,
        max_seq_len: int = -1,
        mask_env_responses: bool = False,
        mask_truncated_completions: bool = False,
        zero_truncated_completions: bool = False,
    ) -> ProcessedOutputs:
        """Return the token lists of finished rollouts; see `token_processing.process_results`."""
        is_chat = self.message_type == "chat"
        of_one: Callable[..., token_processing.TokenLists] = (
            self.process_chat_format_vllm if is_chat else self.process_completion_format_vllm
        )
        return token_processing.process_results(
            lambda prompt, completion, state: of_one(prompt, completion, state, processing_class, mask_env_responses),
            prompts,
            completions,
            states,
            rewards,
            max_seq_len,
            mask_truncated_completions,
            zero_truncated_completions,
        )

    process_env_results = process_env_results_vllm


# -- columns in, columns out ---------------------------------------------------------------------------------------


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
async def run_of(
    env: Any, client: Any, model: str, sampling_args: SamplingArgs | None, max_concurrent: int
) -> AsyncIterator[Run]:
    """Give a run on a caller's own client, and close the connections that it opened."""
    teardown_at_exit(env)
    backend = backend_for(client)
    sampling = {**env.sampling_args, **(sampling_args or {})}
    try:
        yield Run(env, backend, model, sampling, limiter=Limiter(max_concurrent or -1))
    finally:
        if backend is not client:
            await backend.close()


async def generate(
    env: Any,
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
        rollouts = await of_all.play(unit)
        raise_unless_kept(rollouts)
        if interleaved:
            async with limiter.slot():
                await of_all.score(rollouts)
        return rollouts

    async with run_of(env, client, model, sampling_args, max_concurrent) as of_all:
        of_all.on_end = raise_other_failures
        units = requests_by_prompt(requests) if in_groups else [[request] for request in requests]
        done = await gather_owned([run(unit) for unit in (units if interleaved else [requests] if requests else [])])
        finished = {rollout.key: rollout for rollouts in done for rollout in rollouts}
        rollouts = [finished[request.key] for request in requests]
        if score and not interleaved:
            played = [rollout for rollout in rollouts if rollout.failure is None]
            states = [rollout.state for rollout in played]
            scores = await scores_by_columns(rubric, states, max_concurrent=max_concurrent_scoring)
            for rollout, of_rollout in zip(played, scores, strict=True):
                take_score(rollout, of_rollout)
    return generate_outputs(
        env, rollouts, scored=score, model=model, client=client, sampling_args=sampling_args, started=started
    )


def raise_failure(rollout: Rollout) -> None:
    """Raise a rollout's failure as soon as it ends, so that the others are cancelled."""
    if rollout.failure is not None:
        raise rollout.failure.exception or TimeoutError(rollout.failure.text)


def raise_other_failures(rollout: Rollout) -> None:
    """Raise a rollout's failure as soon as it ends, unless it is a `vf.Error`, so that the others are cancelled."""
    raise_unless_kept([rollout])


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
