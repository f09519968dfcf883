"""Environment: a dataset of prompts, a way to play one of them out, and a rubric that scores what came of it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from verifiers.classic.hooks import ClassicCalls, adapt_attribute, adapt_class, by_requests, by_state
from verifiers.concurrency import gather_owned
from verifiers.envs import datasets
from verifiers.envs.lifecycle import run_teardown
from verifiers.envs.tools import openai_tools
from verifiers.errors import ConfigError, EmptyModelResponseError, OverlongPromptError
from verifiers.inference.retry import is_context_overflow
from verifiers.inference.wire import overlong_response
from verifiers.keywords import set_extra_keywords
from verifiers.notebook import environment_html
from verifiers.parsers.parser import Parser
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import Run, play
from verifiers.rubrics.rubric import Rubric, RubricGroup
from verifiers.types import (
    ChatMessage,
    Messages,
    MessageType,
    ModelResponse,
    RewardFunc,
    SamplingArgs,
    State,
    message_field,
)

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger("verifiers.envs")


class OfferedTools(list[Any]):
    """The tools that a state begins with, under both names; another list there is the environment's own."""


def offered_tools(state: Mapping[str, Any], default: list[Any] | None) -> list[Any] | None:
    """Return the tools of the next model call: what was set in the state, those it began with, or the default."""
    named = [tools for name in ("tool_defs", "oai_tools") if (tools := state.get(name)) is not None]
    own = [tools for tools in named if type(tools) is not OfferedTools]
    return own[0] if own else next((tools for tools in named if tools), default)


def _holds_text(few_shot: Any) -> bool:
    return isinstance(few_shot, str | Mapping) or any(isinstance(message, str) for message in few_shot or ())


def _has_audio(messages: list[ChatMessage]) -> bool:
    contents = [message_field(message, "content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any("audio" in str(message_field(part, "type", "")) for part in parts)


class EnvironmentOptions(TypedDict, total=False):
    """The keywords of `Environment`, by which type checkers find a misspelled one in calls of its subclasses."""

    dataset: Dataset | Sequence[Mapping[str, Any]] | Callable[[], Any] | None
    eval_dataset: Dataset | Sequence[Mapping[str, Any]] | Callable[[], Any] | None
    system_prompt: str | None
    few_shot: list[ChatMessage] | None
    parser: Parser | None
    rubric: Rubric | None
    sampling_args: SamplingArgs | None
    message_type: MessageType
    oai_tools: list[dict[str, Any]] | None
    max_workers: int
    tool_defs: Sequence[Any] | None


class Environment(ClassicCalls):
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
        tool_defs: another name of `oai_tools`; `vf.Tool`s, or dicts of name, description, parameters.
        **kwargs: every further keyword becomes an attribute, with a warning.

    Raises:
        ConfigError: a misspelled keyword; no dataset; another object than a rubric, parser, text or list of messages;
            system prompt or examples in completion mode; rows without prompt and question.
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
        for name, given, is_one, wanted in (
            ("rubric", rubric, hasattr(rubric, "score_rollout"), "a rubric, such as Rubric(funcs=[my_function])"),
            ("parser", parser, hasattr(parser, "parse"), 'a parser, such as XMLParser(["answer"])'),
            ("system_prompt", system_prompt, isinstance(system_prompt, str), "a text"),
            ("few_shot", few_shot, not _holds_text(few_shot), "a list of messages"),
        ):
            if given and (isinstance(given, type) or not is_one):
                raise ConfigError(f"{name} is {given!r}; give {wanted}.")
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
        self.dataset = dataset
        self.eval_dataset = eval_dataset

    def _repr_html_(self) -> str:
        return environment_html(self)

    dataset = datasets.LazyDataset()
    eval_dataset = datasets.LazyDataset()

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

    def get_env_for_task(self, task: str) -> Environment:
        """Return the environment that plays rows of this task: this one, where it is no group."""
        return self

    def get_reward_funcs(self) -> list[RewardFunc]:
        """Return the rubric's reward functions."""
        return self.rubric.get_reward_funcs()

    def get_reward_weights(self) -> list[float]:
        """Return the rubric's weights, one a reward function."""
        return self.rubric.get_reward_weights()

    def add_rubric(self, rubric: Rubric) -> None:
        """Add a rubric's rewards to those of the rubric that is there."""
        present = self.rubric if isinstance(self.rubric, RubricGroup) else RubricGroup([self.rubric])
        self.rubric = present.with_rubric(rubric)

    async def play(self, state: State) -> None:
        """Play one rollout out in its state; the method that environments with a loop of their own override.

        Ask `state["client"]`, which records what it answers, for `state["model"]` with `state["sampling_args"]`, and
        leave the messages after the prompt in `state["completion"]`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must override play, or subclass SingleTurnEnv or MultiTurnEnv."
        )

    @by_requests
    async def run_rollouts(self, requests: Sequence[RolloutRequest], run: Run) -> list[Rollout]:
        """Play every request side by side, each by calls of its own, under the run's semaphore.

        Training, evaluation and the classic calls ask this method for what is scored together: the rollouts of a
        prompt, or fewer. So an override takes effect in all of them. It may change requests (`dataclasses.replace`)
        and call `super().run_rollouts` again: a rollout that is played a second time continues its trace. It returns
        one rollout for each request, in order, without scores; failures are outcomes of their rollouts.
        """
        return await gather_owned([play(self, request, run) for request in requests])

    @property
    def plays_groups_itself(self) -> bool:
        """Return whether `run_rollouts` is an override, which may play the rollouts of a prompt together."""
        return getattr(self.run_rollouts, "__func__", None) is not Environment.run_rollouts

    @by_state
    async def get_model_response(
        self,
        state: State,
        prompt: Messages,
        client: Any = None,
        model: str | None = None,
        oai_tools: list[dict[str, Any]] | None = None,
        sampling_args: SamplingArgs | None = None,
        message_type: MessageType | None = None,
        tool_defs: list[Any] | None = None,
        **_: Any,
    ) -> ModelResponse:
        """Return the policy's answer to `prompt`; what is left out is taken from the state.

        One with id "overlong-prompt" stands for a prompt that does not fit the context. Chat renames max_tokens to
        max_completion_tokens, OpenAI's present name; None values are dropped; a prompt with audio asks for text back
        unless told otherwise.

        Raises:
            ConfigError: tools in completion mode.
        """
        client = client if client is not None else state["client"]
        model = model if model is not None else state["model"]
        message_type = message_type or self.message_type
        tools = tool_defs if oai_tools is None else oai_tools
        if tools is None:
            tools = offered_tools(state, self.oai_tools)
        sampling_args = sampling_args if sampling_args is not None else state.get("sampling_args")
        arguments = {name: value for name, value in (sampling_args or {}).items() if value is not None}
        if message_type == "chat":
            if "max_tokens" in arguments:
                arguments.setdefault("max_completion_tokens", arguments["max_tokens"])
                del arguments["max_tokens"]
            if tools:
                arguments["tools"] = openai_tools(tools)
            if isinstance(prompt, list) and _has_audio(prompt):
                arguments.setdefault("modalities", ["text"])
            create, content = client.chat.completions.create, {"messages": prompt}
        else:
            if tools:
                raise ConfigError("oai_tools are not supported for completion tasks; use message_type='chat'.")
            create, content = client.completions.create, {"prompt": prompt}
        try:
            result = create(model=model, **content, **arguments)
            response = await result if inspect.isawaitable(result) else result
        except Exception as error:
            status, text = getattr(error, "status_code", None), f"{error} {getattr(error, 'body', '')}"
            if not isinstance(error, OverlongPromptError) and not is_context_overflow(status, text):
                raise
            logger.debug("prompt too long, the rollout ends as truncated: %s", error)
            return overlong_response(model, message_type)
        # a test double of the classic API may answer with a dict of its own
        if not isinstance(response, dict) and not getattr(response, "choices", None):
            raise EmptyModelResponseError(f"the answer of model {model!r} has no choices: {response!r:.300}")
        return response

    @property
    def tool_defs(self) -> Any:
        """`oai_tools`, its items as `vf.Tool`s; given as those, or as dicts of name, description, parameters."""
        from verifiers.classic.late_names import tool_defs_of

        self.oai_tools = tool_defs_of(self.oai_tools)
        return self.oai_tools

    @tool_defs.setter
    def tool_defs(self, tools: Any) -> None:
        from verifiers.classic.late_names import tool_defs_of

        self.oai_tools = tool_defs_of(tools)

    async def teardown(self) -> None:
        """Run the methods marked `@vf.teardown`, once; see `verifiers.envs.lifecycle.run_teardown`."""
        await run_teardown(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adapt_class(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        adapt_attribute(self, name, value)
