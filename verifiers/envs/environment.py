"""Environment: a dataset of prompts, a way to play one of them out, and a rubric that scores what came of it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verifiers.data.shard import Shard
from verifiers.envs import datasets
from verifiers.envs.classic import batch_api, token_processing
from verifiers.envs.classic.tool_defs import ToolDefs
from verifiers.envs.conversation import call_model, default_step, new_state, tools_of_info
from verifiers.envs.lifecycle import run_teardown
from verifiers.envs.signatures import asks_by_state, call_model_by_state, call_rollout, either_generation
from verifiers.envs.tools import openai_tools
from verifiers.errors import ConfigError
from verifiers.keywords import check_keywords, ignore_keywords, parameter_names, set_extra_keywords
from verifiers.loop_thread import run_blocking
from verifiers.notebook import environment_html
from verifiers.parsers.parser import Parser
from verifiers.rollouts.batch_client import BatchClient
from verifiers.rubrics.rubric import Rubric
from verifiers.types import (
    ChatMessage,
    GenerateOutputs,
    Info,
    Messages,
    MessageType,
    ModelResponse,
    ProcessedOutputs,
    RewardFunc,
    RolloutInput,
    SamplingArgs,
    State,
)

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["Environment"]


class Environment:
    """Base of all environments; subclass `SingleTurnEnv` or `MultiTurnEnv` unless you own the whole rollout.

    Args:
        dataset: training rows, a `datasets.Dataset` or a list of dicts with `prompt` (messages or a string) or
            `question`, and optionally `answer`, `info` (a dict or JSON text), `task`; or a function that returns
            them, called when they are first needed.
        eval_dataset: eval rows of the same form.
        system_prompt: put before every question, in chat mode.
        few_shot: example messages put between the system prompt and the question.
        parser: turns completions into answers; a plain `Parser` when left out.
        rubric: scores rollouts; an empty `Rubric` when left out.
        sampling_args: OpenAI sampling arguments that rollouts use unless told otherwise.
        message_type: "chat" or "completion".
        oai_tools: tool definitions offered to the policy in every rollout.
        max_workers: kept for the classic signature.
        tool_defs: the second generation's name of `oai_tools`; `vf.Tool`s, or dicts of name, description, parameters.
        **kwargs: every further keyword becomes an attribute, with a warning.

    Raises:
        ConfigError: a misspelled keyword; no dataset; another object than a rubric; system prompt or examples in
            completion mode; rows without prompt and question.
    """

    def __init__(
        self,
        dataset: Dataset | Sequence[Mapping[str, Any]] | Callable[[], Any] | None = None,
        eval_dataset: Dataset | Sequence[Mapping[str, Any]] | Callable[[], Any] | None = None,
        system_prompt: str | None = None,
        few_shot: list[ChatMessage] | None = None,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
        sampling_args: SamplingArgs | None = None,
        message_type: MessageType = "chat",
        oai_tools: list[dict[str, Any]] | None = None,
        max_workers: int = 512,
        tool_defs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.logger = logging.getLogger(f"verifiers.envs.{type(self).__name__}")
        set_extra_keywords(self, kwargs, ("env_id", "env_args", "client", "model"))
        if rubric is not None and not hasattr(rubric, "score_rollout"):
            raise ConfigError(f"rubric is {rubric!r}; give a rubric, such as Rubric(funcs=[my_reward_function]).")
        if message_type not in ("chat", "completion"):
            raise ConfigError(f"message_type is {message_type!r}; give 'chat' or 'completion'.")
        self.message_type: MessageType = message_type
        self.oai_tools = oai_tools
        if tool_defs is not None:
            self.tool_defs = tool_defs
        self.system_prompt = system_prompt
        self.few_shot = few_shot
        self.parser = parser or Parser()
        self.rubric = rubric or Rubric()
        self.sampling_args: SamplingArgs = {"n": 1, "extra_body": {}, **(sampling_args or {})}
        self.max_workers = max_workers
        if type(self.rubric.parser) is not type(self.parser):
            self.logger.warning(
                "The parser of the rubric is a %s, the environment's a %s: rewards and prompts may disagree.",
                type(self.rubric.parser).__name__,
                type(self.parser).__name__,
            )
        if dataset is None and eval_dataset is None:
            raise ConfigError("Either dataset or eval_dataset must be provided")
        if message_type == "completion" and (system_prompt or few_shot):
            raise ConfigError(
                'system_prompt and few_shot are not supported for completion tasks; use message_type="chat".'
            )
        self.dataset = datasets.formatted(self, dataset)
        self.eval_dataset = datasets.formatted(self, eval_dataset)

    def _repr_html_(self) -> str:
        return environment_html(self)

    dataset = datasets.LazyDataset()
    eval_dataset = datasets.LazyDataset()
    tool_defs = ToolDefs()

    # -- data -----------------------------------------------------------------------------------------------

    def format_prompt(
        self, prompt_str: str, system_prompt: str | None = None, few_shot: list[ChatMessage] | None = None
    ) -> list[ChatMessage]:
        """Return the messages for a question: system prompt, examples, question."""
        return datasets.format_prompt(prompt_str, system_prompt, few_shot)

    def format_dataset(
        self,
        dataset: Any,
        system_prompt: str | None = None,
        few_shot: list[ChatMessage] | None = None,
        question_key: str = "question",
        answer_key: str = "answer",
    ) -> Dataset:
        """Return the dataset with columns `id` (0 .. N-1) and `prompt` added where they are absent."""
        return datasets.format_dataset(
            dataset, system_prompt, few_shot, question_key, answer_key, message_type=self.message_type
        )

    def build_dataset(self) -> Dataset | None:
        """Return the training rows, all of them; None where there are none."""
        return self.dataset

    def build_eval_dataset(self) -> Dataset | None:
        """Return the eval rows, all of them; None where there are none."""
        return self.eval_dataset

    def get_dataset(self, n: int = -1, seed: int | None = None) -> Dataset:
        """Return the training rows; the first `n` of them, after a shuffle where `seed` is given.

        Raises:
            ConfigError: the environment has only an eval dataset.
        """
        if self.dataset is None:
            raise ConfigError(f"{type(self).__name__} has no training dataset; pass dataset= when you make it.")
        return datasets.selected(self.dataset, n, seed)

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> Dataset:
        """Return the eval rows, or, with a warning, the training rows where there are none."""
        if self.eval_dataset is None:
            self.logger.warning("No eval dataset was given: evaluating on the training dataset.")
            return self.get_dataset(n, seed)
        return datasets.selected(self.eval_dataset, n, seed)

    def rows_to_evaluate(self, n: int = -1) -> Dataset:
        """Return the rows that an evaluation of `n` prompts plays; -1 for all."""
        return self.get_eval_dataset(n)

    def get_reward_funcs(self) -> list[RewardFunc]:
        """Return the rubric's reward functions."""
        return self.rubric.get_reward_funcs()

    def get_reward_weights(self) -> list[float]:
        """Return the rubric's weights, one a reward function."""
        return self.rubric.get_reward_weights()

    def add_rubric(self, rubric: Rubric) -> None:
        """Add a rubric's rewards to those of the rubric that is there."""
        from verifiers.rubrics.rubric_group import RubricGroup

        present = self.rubric if isinstance(self.rubric, RubricGroup) else RubricGroup([self.rubric])
        self.rubric = present.with_rubric(rubric)

    # -- one rollout ----------------------------------------------------------------------------------------

    @default_step
    async def init_state(
        self,
        input: RolloutInput,  # noqa: A002 - the classic API's name
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
    ) -> State:
        """Return the state that a rollout of this row begins with, before `setup_state`."""
        return new_state(input, client, model, sampling_args, self.oai_tools)

    @default_step
    @either_generation(asks_by_state, call_model_by_state)
    async def get_model_response(
        self,
        client: Any,
        model: str,
        prompt: Messages,
        oai_tools: list[dict[str, Any]] | None = None,
        sampling_args: SamplingArgs | None = None,
        message_type: MessageType | None = None,
        **kwargs: Any,
    ) -> ModelResponse:
        """Return the policy's answer to `prompt`; see `verifiers.envs.conversation.call_model`.

        Second generation: `get_model_response(state, prompt, client=None, model=None, oai_tools=None,
        sampling_args=None, message_type=None)`; what is left out is taken from the state.
        """
        return await call_model(
            client,
            model,
            prompt,
            message_type=message_type or self.message_type,
            oai_tools=oai_tools,
            sampling_args=sampling_args,
            logger=getattr(self, "logger", None),
        )

    async def rollout(self, *args: Any, **kwargs: Any) -> Any:
        """Play one prompt out.

        `rollout(client, model, prompt, answer, task, info, sampling_args)` returns (completion, state).
        """
        raise NotImplementedError(
            f"{type(self).__name__} must override rollout, or subclass SingleTurnEnv or MultiTurnEnv."
        )

    def _play_row(self, row: RolloutInput, model: str, sampling_args: SamplingArgs, client: Any) -> Awaitable[Any]:
        return call_rollout(self, row, client, model, sampling_args)

    async def teardown(self) -> None:
        """Run the methods marked `@vf.teardown`, once; see `verifiers.envs.lifecycle.run_teardown`."""
        await run_teardown(self)

    # -- many rollouts --------------------------------------------------------------------------------------

    async def run_rollouts(
        self,
        client: Any,
        model: str,
        prompts: Sequence[Messages],
        answers: Sequence[Any],
        tasks: Sequence[str] | None = None,
        infos: Sequence[Info] | None = None,
        sampling_args: SamplingArgs | None = None,
        max_concurrent: int = -1,
        **kwargs: Any,
    ) -> list[tuple[Messages, State]]:
        """Play all prompts out with independent calls under one semaphore; no scores.

        Training, evaluation and the classic calls ask this method for their rollouts, so an override takes effect in
        all of them. They give it a `BatchClient`: `client[i]` is the client of prompt i, which records its tokens,
        and `client[i:j]` that of several prompts, for `super().run_rollouts`. A failure is then recorded as the
        outcome of its rollout instead of raised.

        Args:
            client: that, or any client shaped like `openai.AsyncOpenAI`.
            max_concurrent: rollouts in flight at once, of a client that has no limit of its own; -1 for no bound.

        Returns:
            (completion, state) of each prompt, in order.

        Raises:
            ConfigError: another number of prompts than the client was made for.
            Exception: with a client of the caller's own, the first rollout's failure; the others are cancelled.
        """
        rows: list[RolloutInput] = [
            {
                "prompt": prompt,
                "answer": answer,
                "task": tasks[index] if tasks is not None else "default",
                "info": infos[index] if infos is not None else {},
            }
            for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
        batch = BatchClient.of(client, len(rows))
        if batch is not None:
            return await batch.play_rows(rows, self._play_row, model, sampling_args)
        async with batch_api.own_batch(self, client, model, rows, sampling_args, max_concurrent) as batch:
            results = await batch.play_rows(rows, self._play_row, model)
        for _, state in results:
            # results are stored and copied, and connections are neither
            state.pop("client", None)
        return results

    async def a_generate(
        self,
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
        ignore_keywords(self, kwargs, Environment.a_generate)
        return await batch_api.generate(
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

    def generate(self, inputs: Any, client: Any = None, model: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Run `a_generate` for both generations of callers: read the result at once, or await it."""
        return batch_api.complete_or_awaitable(lambda: self.a_generate(inputs, client, model, *args, **kwargs))

    def generate_sync(
        self, inputs: Any, client: Any = None, model: str | None = None, *args: Any, **kwargs: Any
    ) -> GenerateOutputs:
        """Run `a_generate` and wait for the result; also inside a running event loop."""
        return run_blocking(lambda: self.a_generate(inputs, client, model, *args, **kwargs))

    async def a_evaluate(
        self,
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
        check_keywords(type(self).__name__, kwargs, parameter_names(Environment.a_evaluate, Environment.a_generate))
        dataset = self.get_eval_dataset(n=num_examples)
        if shard is not None:
            dataset = dataset.select(Shard(*shard).examples(len(dataset)))
        inputs = {name: list(values) * rollouts_per_example for name, values in batch_api.columns_of(dataset).items()}
        return await self.a_generate(inputs, client, model, sampling_args, score_rollouts, **kwargs)

    def evaluate(self, client: Any = None, model: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Run `a_evaluate` for both generations of callers: read the result at once, or await it."""
        return batch_api.complete_or_awaitable(lambda: self.a_evaluate(client, model, *args, **kwargs))

    def evaluate_sync(
        self, client: Any = None, model: str | None = None, *args: Any, **kwargs: Any
    ) -> GenerateOutputs:
        """Run `a_evaluate` and wait for the result."""
        return run_blocking(lambda: self.a_evaluate(client, model, *args, **kwargs))

    def make_dataset(
        self,
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
        dataset = batch_api.to_dataset(results, state_columns)
        if push_to_hf_hub:
            dataset.push_to_hub(hub_name)
        return dataset

    # -- tokens, for training loops written for the classic API -----------------------------------------------

    parse_chat_completion_tokens = staticmethod(token_processing.chat_tokens)
    parse_chat_completion_logprobs = staticmethod(token_processing.chat_logprobs)
    parse_completion_tokens = staticmethod(token_processing.completion_tokens)
    parse_completion_logprobs = staticmethod(token_processing.completion_logprobs)

    def process_chat_format_vllm(
        self,
        prompt: list[ChatMessage],
        completion: list[ChatMessage],
        state: State,
        processing_class: Any,
        mask_env_responses: bool = False,
    ) -> token_processing.TokenLists:
        """Return the token lists of a chat rollout; see `verifiers.envs.classic.token_processing.process_chat`."""
        tools = openai_tools(tools_of_info(state.get("info") or {}) or self.oai_tools or ())
        return token_processing.process_chat(prompt, completion, state, processing_class, mask_env_responses, tools)

    def process_completion_format_vllm(
        self,
        prompt: str,
        completion: str,
        state: State,
        processing_class: Any,
        mask_env_responses: bool = False,
    ) -> token_processing.TokenLists:
        """Return the token lists of a rollout in completion mode; see `token_processing.process_completion`."""
        return token_processing.process_completion(prompt, completion, state, processing_class, mask_env_responses)

    def process_env_results_vllm(
        self,
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
