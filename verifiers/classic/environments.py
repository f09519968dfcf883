"""Environments of verifiers 0.1.x: its calls on any environment, and methods that are written for it, put on once.

`Environment.__init_subclass__` hands a class here when one of its own methods is written for either generation of
0.1.x; an assignment to an environment hands a method. Nothing else in the package asks how a method is written.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import time
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

from verifiers.classic import token_processing
from verifiers.classic.hooks import CLASSIC_METHODS, PRESENT_FIRST, is_state_call
from verifiers.classic.outputs import complete_or_awaitable, generate_outputs, raise_failure, to_dataset
from verifiers.classic.rubrics import scores_by_columns
from verifiers.concurrency import gather_owned
from verifiers.data.sampler import Shard
from verifiers.envs.datasets import row_fields
from verifiers.envs.environment import offered_tools
from verifiers.envs.lifecycle import marked_methods, maybe_await, teardown_at_exit
from verifiers.envs.multiturn_env import add_response, begin_turns, change, tools_of_info
from verifiers.envs.tools import openai_tools
from verifiers.errors import ConfigError, Error
from verifiers.inference.limiter import Limiter
from verifiers.inference.server_pool import backend_for
from verifiers.keywords import check_keywords, ignore_keywords, parameter_names
from verifiers.loop_thread import run_blocking
from verifiers.rollouts.rollout import Rollout, RolloutRequest, requests_by_prompt
from verifiers.rollouts.run import Run, begin_state, take_score
from verifiers.types import (
    GenerateOutputs,
    Messages,
    ModelResponse,
    ProcessedOutputs,
    RolloutKey,
    SamplingArgs,
    State,
    as_messages,
    joined,
)

if TYPE_CHECKING:
    from datasets import Dataset

# -- methods of the present interface, called as in 0.1.x ---------------------------------------------------------


def classic_call(method: Callable[..., Any], env: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the present interface with the arguments of the first generation."""
    calls: dict[str, Callable[..., Any]]
    calls = {"is_completed": _ask_completed, "run_rollouts": _run_rollouts, "get_model_response": _ask_model}
    return calls[method.__name__](method, env, *args, **kwargs)


async def _ask_completed(method: Callable[..., Any], env: Any, messages: Any, state: State, **_: Any) -> bool:
    given = State(state, prompt=messages[:0], completion=messages)
    is_completed = bool(await method(env, given))
    if given.get("stop_condition") is not None:
        state["stop_condition"] = given["stop_condition"]
    return is_completed


def _ask_model(
    method: Callable[..., Any],
    env: Any,
    client: Any,
    model: str,
    prompt: Messages,
    oai_tools: list[dict[str, Any]] | None = None,
    sampling_args: SamplingArgs | None = None,
    message_type: Any = None,
    **_: Any,
) -> Any:
    return method(env, State(), prompt, client, model, oai_tools or [], sampling_args or {}, message_type)


async def _run_rollouts(
    method: Callable[..., Any],
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
    requests = requests_of(rows_of({"prompt": prompts, "answer": answers, "task": tasks, "info": infos}))
    async with run_of(env, client, model, sampling_args, max_concurrent) as run:
        run.on_end = raise_failure
        rollouts = await run.play(requests)
    for rollout in rollouts:
        # results are stored and copied, and connections are neither
        rollout.state.pop("client", None)
    return [(rollout.completion, rollout.state) for rollout in rollouts]


# -- one rollout ---------------------------------------------------------------------------------------------------


async def _play_row(
    self: Any,
    input: Mapping[str, Any],  # noqa: A002 - the classic name
    client: Any,
    model: str,
    sampling_args: SamplingArgs | None = None,
) -> State:
    """Play a row by the environment's own loop, beneath what overrides `rollout`; return its state."""
    (request,) = requests_of([input])
    state = begin_state(request, client, model, sampling_args or {})
    plays = [vars(base)["play"] for base in type(self).__mro__ if "play" in vars(base)]
    own = next(play for play in plays if getattr(play, "__name__", "") != "play_by_rollout")
    await own(self, state)
    return state


async def _play_columns(
    self: Any,
    client: Any,
    model: str,
    prompt: Messages,
    answer: Any = "",
    task: str = "default",
    info: Any = None,
    sampling_args: SamplingArgs | None = None,
    **kwargs: Any,
) -> tuple[Messages, State]:
    row = {"prompt": prompt, "answer": answer, "task": task, "info": info}
    if "example_id" in kwargs:
        row["example_id"] = kwargs.pop("example_id")
    env = self
    if kwargs:
        # further keywords reach what the environment overrides
        env = copy.copy(self)
        for name in ("setup_state", "env_response"):
            if hasattr(self, name):
                env.__dict__[name] = functools.partial(getattr(self, name), **kwargs)
    state = await _play_row(env, row, client, model, sampling_args)
    if isinstance(error := state.get("error"), BaseException):
        raise error
    completion, state["completion"] = state["completion"], type(state["completion"])()
    return completion, state


class _AwaitableBool(int):
    """A bool that may also be awaited, for conditions that subclasses ask for in either way."""

    def __await__(self) -> Generator[Any, Any, bool]:
        yield from ()
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))


class ClassicCalls:
    """The calls of verifiers 0.1.x, as methods of `Environment`."""

    async def rollout(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Play one rollout, called in either generation's way.

        First: `rollout(client, model, prompt, answer="", task="default", info=None, sampling_args=None, **kwargs)`
        returns (completion, state), where the state's own `completion` is empty as it was then, and raises errors.
        Second: `rollout(input, client, model, sampling_args=None)` returns the state; a `vf.Error` that is raised
        inside stands in `state["error"]`, and the conversation so far is kept.
        """
        is_row = "input" in kwargs or (args and isinstance(args[0], Mapping) and "prompt" in args[0])
        return await (_play_row if is_row else _play_columns)(self, *args, **kwargs)

    rollout.__signature__ = inspect.signature(_play_columns)  # type: ignore[attr-defined]

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

    def max_turns_reached(self: Any, state: State) -> Any:
        """Return whether `max_turns` is a bound and is reached; may be awaited or not."""
        bare = State(state, error=None, prompt_too_long=False, final_env_response=None)
        return _AwaitableBool(type(self).bound_reached(self, bare) is not None)

    def prompt_too_long(self: Any, state: State) -> Any:
        """Return whether the newest prompt did not fit the model's context; may be awaited or not."""
        return _AwaitableBool(bool(state.get("prompt_too_long")))

    async def get_prompt_messages(self: Any, state: State) -> Messages:
        """Return what the policy is asked next: the prompt, or what was said so far and the environment's reply."""
        messages: Messages = conversation_of(state)
        return await next_prompt(self, messages, state) if state["trajectory"] else messages

    async def add_model_response(self: Any, state: State, prompt_messages: Messages, response: ModelResponse) -> None:
        """Note an answer of the policy in the state: `responses`, `turn`, and a step of the trajectory."""
        before = state["completion"]
        add_response(state, prompt_messages, response, self.message_type)
        step = state["trajectory"].pop()
        state["completion"] = before
        await maybe_await(self.add_trajectory_step, state, step)

    async def add_trajectory_step(self: Any, state: State, trajectory_step: Any) -> None:
        """Append a step to the trajectory; the next prompt continues from the newest step."""
        state["trajectory"].append(trajectory_step)

    async def render_completion(self: Any, state: State) -> None:
        """Set `state["completion"]` to all that was said after the prompt."""
        state["completion"] = conversation_of(state)[len(state["prompt"]) :]

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

        `run_rollouts` is asked for what is scored together: each row, each prompt's rows where the rubric compares
        them, or all rows where they are scored at the end or not at all. Outcomes and rewards are those of `vf-eval`:
        a rollout that failed, or whose grade failed, has no reward.

        Args:
            client: left out, the one that the environment was made with; `model` likewise.

        Returns:
            prompt, completion, answer, state, task, info, reward, metrics; `reward` is [] with
            `score_rollouts=False`.

        Raises:
            ConfigError: a misspelled keyword; one that is unknown is ignored, with a warning.
            Exception: the first failure that is no `vf.Error`; the other rollouts are cancelled. A `vf.Error` is kept
                in its rollout's state, and raised only where every rollout failed.
        """
        started = time.time()
        rubric: Any = getattr(self, "rubric")  # noqa: B009 - the class that is typed has none
        ignore_keywords(self, kwargs, ClassicCalls.a_generate)
        client = client if client is not None else getattr(self, "client", None)
        model = model if model is not None else getattr(self, "model", None)
        if client is None or model is None:
            raise ConfigError(
                f"{type(self).__name__} has no client and model; give both to this call or when you make it."
            )
        most_played = max_concurrent if max_concurrent_generation is None else max_concurrent_generation
        most_scored = max_concurrent if max_concurrent_scoring is None else max_concurrent_scoring
        scoring = Limiter(most_scored or -1)
        requests = requests_of(rows_of(inputs))
        in_groups = score_rollouts and getattr(rubric, "has_group_funcs", False) is True
        interleaved = in_groups or (score_rollouts and interleave_scoring)
        raise_unless_kept = functools.partial(raise_failure, kept=Error)

        async def play(unit: Sequence[RolloutRequest]) -> list[Rollout]:
            rollouts = await run.play(unit)
            for rollout in rollouts:
                raise_unless_kept(rollout)
            if interleaved:
                async with scoring.slot():
                    await run.score(rollouts)
            return rollouts

        if in_groups:
            units = requests_by_prompt(requests)
        elif interleaved or not requests:
            units = [[request] for request in requests]
        else:
            units = [requests]
        async with run_of(self, client, model, sampling_args, most_played) as run:
            run.on_end = raise_unless_kept
            done = await gather_owned(map(play, units))
            finished = {rollout.key: rollout for rollouts in done for rollout in rollouts}
            rollouts = [finished[request.key] for request in requests]
            if score_rollouts and not interleaved:
                played = [rollout for rollout in rollouts if rollout.failure is None]
                states = [rollout.state for rollout in played]
                scores = await scores_by_columns(rubric, states, max_concurrent=most_scored)
                for rollout, score in zip(played, scores, strict=True):
                    take_score(rollout, score)
        return generate_outputs(self, rollouts, score_rollouts, model, client, sampling_args, started)

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `a_generate` for both generations of callers: read the result at once, or await it."""
        return complete_or_awaitable(lambda: self.a_generate(*args, **kwargs))

    def generate_sync(self: Any, *args: Any, **kwargs: Any) -> GenerateOutputs:
        """Run `a_generate` and wait for the result; also inside a running event loop."""
        return run_blocking(lambda: self.a_generate(*args, **kwargs))

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
        inputs = dataset.select(list(range(len(dataset))) * rollouts_per_example)
        return await self.a_generate(inputs, client, model, sampling_args, score_rollouts, **kwargs)

    def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `a_evaluate` for both generations of callers: read the result at once, or await it."""
        return complete_or_awaitable(lambda: self.a_evaluate(*args, **kwargs))

    def evaluate_sync(self: Any, *args: Any, **kwargs: Any) -> GenerateOutputs:
        """Run `a_evaluate` and wait for the result."""
        return run_blocking(lambda: self.a_evaluate(*args, **kwargs))

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

    parse_chat_completion_tokens = parse_completion_tokens = staticmethod(token_processing.sampled_ids)
    parse_chat_completion_logprobs = parse_completion_logprobs = staticmethod(token_processing.sampled_logprobs)
    process_completion_format_vllm = staticmethod(token_processing.process_completion)

    def process_chat_format_vllm(
        self: Any,
        prompt: Messages,
        completion: Messages,
        state: State,
        processing_class: Any,
        mask_env_responses: bool = False,
    ) -> token_processing.TokenLists:
        """Return the token lists of a chat rollout; see `verifiers.classic.token_processing.process_chat`."""
        env = self.get_env_for_task(state.get("task", ""))
        if env is not self:
            return env.process_chat_format_vllm(prompt, completion, state, processing_class, mask_env_responses)
        tools = openai_tools(tools_of_info(state.get("info") or {}) or self.oai_tools or ())
        return token_processing.process_chat(prompt, completion, state, processing_class, mask_env_responses, tools)

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
        """Return the token lists of finished rollouts, cut to `max_seq_len` tokens of prompt and completion together.

        Args:
            max_seq_len: -1 never cuts.
            mask_truncated_completions: a completion that was cut gets mask 0 throughout.
            zero_truncated_completions: a completion that was cut gets reward 0.
        """
        is_chat = self.message_type == "chat"
        process = self.process_chat_format_vllm if is_chat else self.process_completion_format_vllm
        processed: list[tuple[Any, ...]] = []
        for prompt, completion, state, reward in zip(prompts, completions, states, rewards, strict=True):
            lists = process(prompt, completion, state, processing_class, mask_env_responses)
            if 0 < max_seq_len < len(lists[0]) + len(lists[2]):
                reward = 0.0 if zero_truncated_completions else reward
                lists = token_processing.cut(lists, max_seq_len, mask_truncated_completions)
            processed.append((*lists, reward))
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "completion_logprobs", "rewards")
        return ProcessedOutputs(**{name: [row[place] for row in processed] for place, name in enumerate(names)})

    process_env_results = process_env_results_vllm


def rows_of(inputs: Any) -> list[Mapping[str, Any]]:
    """Return the rows of a dict of columns, GenerateInputs or a Dataset; a list of rows is returned as it is.

    Raises:
        ConfigError: no `prompt` column.
    """
    if isinstance(inputs, list):
        rows: list[Mapping[str, Any]] = inputs
        names = list(dict.fromkeys(name for row in rows for name in row))
    else:
        # the whole table at once: a column of its own is read row by row
        table = inputs if isinstance(inputs, Mapping) else inputs[:]
        names = list(table)
        columns = {name: table[name] for name in names if table[name] is not None}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if "prompt" not in names:
        raise ConfigError(f"the inputs have no column 'prompt', only {sorted(names)}.")
    return rows


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


async def next_prompt(env: Any, messages: Any, state: State) -> Any:
    """Return the conversation with the environment's reply."""
    reply = await maybe_await(env.env_response, messages, state)
    if isinstance(reply, tuple):
        reply, entries = reply
        change(state, entries)
    return joined(messages, reply) if reply else messages


def conversation_of(state: State) -> Any:
    """Return the whole conversation so far: what the newest step saw and said, and the environment's last word."""
    final = state.get("final_env_response")
    trajectory = state["trajectory"]
    said = joined(trajectory[-1]["prompt"], trajectory[-1]["completion"]) if trajectory else state["prompt"]
    return joined(said, final) if final else said


# -- methods that are written for 0.1.x ------------------------------------------------------------------------------

STEPS = CLASSIC_METHODS - PRESENT_FIRST.keys() - {"init_state", "rollout"}


def adapt(cls: Any, methods: Mapping[str, Any]) -> None:
    """Replace or add methods of a class, so that these that it has take effect in the present interface."""
    for name, method in methods.items():
        for place, wrapper in _wrappers(cls, name, method).items():
            setattr(cls, place, wrapper)


def set_on(env: Any, name: str, value: Any) -> None:
    """Set a method on one environment, as `adapt` does on a class."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return value(*args, **kwargs)

    for place, wrapper in _wrappers(type(env), name, method).items():
        env.__dict__[place] = MethodType(wrapper, env) if callable(wrapper) else wrapper


def _wrappers(cls: Any, name: str, method: Any) -> dict[str, Any]:
    """Return what is to stand in a class, by name, for one of its own methods."""
    if name == "rollout":
        return {"play": play_by_rollout}
    if name in STEPS:
        return {"_converse": converse}
    if name == "init_state":
        return {"setup_state": _after_init_state(cls)}
    if name == "env_response":
        # it says that it returns a tuple, so it unpacks one of `super().env_response`
        above = next((base for base in cls.__mro__[1:] if name in vars(base)), None)
        return {"replies_with_state": True} if above is not None and _is_ours(above) else {}
    if name == "run_rollouts":
        names = ", ".join(list(inspect.signature(method).parameters)[1:])
        raise ConfigError(
            f"{cls.__name__}.run_rollouts takes {names}, as in verifiers 0.1.x; write it as run_rollouts(self, "
            "requests, run), which returns a Rollout for each request, as DebateEnv in the guide on environments."
        )
    wrap = {"is_completed": _is_completed, "get_model_response": _get_model_response, "post_rollout": _post_rollout}
    return {name: _present(functools.wraps(method)(wrap[name](method)))}


def _present(wrapper: Any) -> Any:
    wrapper.__dict__["is_present"] = True
    return wrapper


# -- a rollout, and what comes before it ---------------------------------------------------------------------------


async def play_by_rollout(self: Any, state: State) -> None:
    """Play a rollout by an override of `rollout`, of either generation.

    Raises:
        TypeError: it returned neither (completion, state) nor the state.
    """
    row = {name: state[name] for name in ("prompt", "example_id", "task", "answer", "info")}
    client, model, sampling_args = state["client"], state["model"], state["sampling_args"]
    names = list(inspect.signature(self.rollout).parameters)
    if names[:1] in (["input"], ["rollout_input"]) or names[1:2] == ["client"]:
        result = await self.rollout(row, client, model, sampling_args)
    else:
        columns = {name: row[name] for name in ("answer", "task", "info")}
        result = await self.rollout(client, model, row["prompt"], **columns, sampling_args=sampling_args)
    completion, made = result if isinstance(result, tuple) and len(result) == 2 else (None, result)
    if not isinstance(made, dict):
        raise TypeError(
            f"rollout returned {result!r:.200}; it must return (completion, state), or the state as a dict"
        )
    if made is not state:
        state.update(made)
    state["completion"] = made.get("completion") if made is result else completion


def _after_init_state(cls: Any) -> Any:
    inherited = cls.setup_state

    async def setup_state(self: Any, state: State, **kwargs: Any) -> Any:
        row = state["input"]
        made = await maybe_await(self.init_state, row, state["client"], state["model"], state["sampling_args"])
        if made is not None and made is not state:
            state.update(made)
        return await maybe_await(inherited, self, state, **kwargs)

    return setup_state


# -- methods with another signature --------------------------------------------------------------------------------


def _is_completed(method: Callable[..., Any]) -> Any:
    async def is_completed(self: Any, *args: Any, **kwargs: Any) -> bool:
        if not is_state_call(args, kwargs):
            return bool(await maybe_await(method, self, *args, **kwargs))
        state = args[0] if args else kwargs["state"]
        if await maybe_await(method, self, joined(state["prompt"], state["completion"]), state):
            return True
        for stop in marked_methods(self, "stop"):
            if await maybe_await(stop, state):
                state["stop_condition"] = state.get("stop_condition") or stop.__name__
                return True
        return False

    return is_completed


def _get_model_response(method: Callable[..., Any]) -> Any:
    async def get_model_response(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_state_call(args, kwargs):
            return await maybe_await(method, self, *args, **kwargs)
        given = dict(zip(("state", "prompt"), args, strict=False)) | kwargs
        state: Mapping[str, Any] = given["state"]
        return await maybe_await(
            method,
            self,
            state["client"],
            state["model"],
            given["prompt"],
            oai_tools=offered_tools(state, self.oai_tools),
            sampling_args=state["sampling_args"],
            message_type=self.message_type,
        )

    return get_model_response


def _post_rollout(method: Callable[..., Any]) -> Any:
    async def post_rollout(self: Any, *args: Any) -> Any:
        return await maybe_await(method, self, *(args if len(args) > 1 else (args[0].get("completion"), args[0])))

    return post_rollout


# -- the loop of an environment that overrides steps -----------------------------------------------------------------


async def converse(env: Any, state: State) -> None:
    """Let the policy and the environment speak in turns, each step called as the second generation does."""
    own = {name for name in STEPS if name in vars(env) or _overrides(type(env), name)}
    try:
        await _take_turns(env, state, own)
    except Error:
        # the state keeps it, and no other
        with contextlib.suppress(Exception):
            await maybe_await(env.render_completion, state)
        raise
    await maybe_await(env.render_completion, state)


def _overrides(kind: Any, name: str) -> bool:
    return any(name in vars(base) for base in kind.__mro__ if not _is_ours(base))


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "verifiers"


async def _take_turns(env: Any, state: State, own: set[str]) -> None:
    own_prompts = "get_prompt_messages" in own
    messages: Any = state["prompt"]
    said: Any = messages
    while not await _is_over(env, state, own):
        if own_prompts and not state["trajectory"]:
            messages = as_messages(await maybe_await(env.get_prompt_messages, state))
        response = await maybe_await(env.get_model_response, state, messages)
        await maybe_await(env.add_model_response, state, messages, response)
        said = messages = conversation_of(state)
        state["completion"] = messages[len(state["prompt"]) :]
        if await _is_over(env, state, own):
            break
        if own_prompts:
            prompt = as_messages(await maybe_await(env.get_prompt_messages, state))
        else:
            prompt = await next_prompt(env, messages, state)
        if state.get("final_env_response") is None:
            messages = prompt
            state["completion"] = messages[len(state["prompt"]) :]
    if len(messages) > len(said) and not own_prompts:
        # the rollout ended on the environment's reply, which no step has seen
        state["final_env_response"] = messages[len(said) :]


async def _is_over(env: Any, state: State, own: set[str]) -> bool:
    is_completed = await maybe_await(env.is_completed, state)
    reason = env.bound_reached(state)
    for name in ("prompt_too_long", "max_turns_reached"):
        # an override decides instead of the limit
        if name in own:
            reason = None if reason == name else reason
            if reason is None and await maybe_await(getattr(env, name), state):
                reason = name
    if not (is_completed or reason):
        return False
    state["stop_condition"] = state.get("stop_condition") or reason or "is_completed"
    return True
