"""JudgeRubric: reward functions that ask a language model."""

from __future__ import annotations

import asyncio
import functools
import re
import string
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, MutableMapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from verifiers.errors import ConfigError, GradingError
from verifiers.loop_thread import run_blocking
from verifiers.parsers.messages import message_field, message_text
from verifiers.parsers.parser import Parser
from verifiers.rubrics.judge import Gate, JudgeCall, LazyOpenAI
from verifiers.rubrics.rubric import Rubric
from verifiers.rubrics.single_flight import SingleFlight
from verifiers.types import Messages, RewardFunc, State

__all__ = ["DEFAULT_JUDGE_PROMPT", "JudgeRubric", "judge_yes_no", "parse_yes_no", "question_text"]

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_JUDGE_PROMPT = """Compare a response with the reference answer to the same question. \
Is the response correct?

<question>
{question}
</question>

<reference>
{answer}
</reference>

<response>
{response}
</response>

Answer with one word: "yes" or "no"."""


class _ReadyText(str):
    """A text that may be awaited too, also as a coroutine: `asyncio.run` takes nothing else."""

    def __await__(self) -> Generator[Any, Any, str]:
        yield from ()
        return str(self)

    def send(self, value: Any) -> Any:
        raise StopIteration(str(self))

    def throw(self, error: BaseException, *_: Any) -> Any:
        raise error

    def close(self) -> None:
        pass


def read_or_awaited(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, str]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, str]]:
    """Return an async method whose text is there at once where no event loop runs, and still may be awaited."""

    @functools.wraps(method)
    def call(rubric: Any, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, str]:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return _ReadyText(run_blocking(lambda: method(rubric, *args, **kwargs)))  # type: ignore[return-value]
        return method(rubric, *args, **kwargs)

    return call


class JudgeRubric(Rubric):
    """A rubric whose reward functions may ask a judge: a language model behind any OpenAI-compatible endpoint.

    It has no reward function of its own; add some, or `judge_yes_no`. Besides the usual arguments they may name

    - `judge`: `await judge(prompt, completion, answer, state)` is the judge's answer, as text;
    - `verdict`: `await verdict(prompt, completion, answer, state, parse=...)` is what `parse` reads in it;
    - judge_client, judge_model, judge_prompt, judge_sampling_args, as given here.

    Answers are kept in `state["judge_response"]`, a dict from the judge's prompt to its answer, and functions that
    ask the same thing at the same time share one call. A judge that fails (no connection, an error status, an empty
    message) raises inside the function, which makes it a failed grade and never a reward of 0.

    Args:
        parser: finds the response in a completion; default: the last message's text.
        parallelize_scoring: functions of one rollout run side by side; default: one after the other.
        judge_client: an AsyncOpenAI or OpenAI, or any object with `chat.completions.create`. Left out, an
            AsyncOpenAI is made at the first call, from OPENAI_API_KEY and OPENAI_BASE_URL.
        judge_model: the judge's name on its server.
        judge_sampling_args: OpenAI's sampling arguments; max_tokens is sent as max_completion_tokens.
        judge_prompt: may have {question} (the prompt's last user message), {answer} and {response} (the parsed
            completion); other braces are written twice.
        funcs: as for `Rubric`.
        weights: as for `Rubric`.
        judge_base_url: of the endpoint, where no client is given, e.g. "http://127.0.0.1:8000/v1".
        judge_api_key_var: environment variable with the key for it; left out with a base URL, no key is sent.
        judge_timeout_s: for one answer with all its tries, in seconds.
        judge_tries: how often a call that failed for a passing reason is tried in all.
        judge_max_concurrent: calls at once; -1 for no bound.
        **kwargs: every further keyword becomes an attribute.

    Raises:
        ConfigError: a client and a base URL were both given, or a bound cannot work.
    """

    def __init__(
        self,
        parser: Parser | None = None,
        parallelize_scoring: bool = False,
        judge_client: Any = None,
        judge_model: str = "gpt-4.1-nano",
        judge_sampling_args: Mapping[str, Any] | None = None,
        judge_prompt: str = DEFAULT_JUDGE_PROMPT,
        *,
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        judge_base_url: str | None = None,
        judge_api_key_var: str | None = None,
        judge_timeout_s: float = 90.0,
        judge_tries: int = 4,
        judge_max_concurrent: int = 64,
        **kwargs: Any,
    ) -> None:
        if judge_client is not None and judge_base_url is not None:
            raise ConfigError(f"The judge has a judge_client, and judge_base_url={judge_base_url!r} too; give one.")
        if judge_tries < 1 or judge_timeout_s <= 0:
            raise ConfigError(
                f"A judge needs at least 1 try and more than 0 s, but has judge_tries={judge_tries!r} and "
                f"judge_timeout_s={judge_timeout_s!r}."
            )
        super().__init__(
            funcs=funcs, weights=weights, parser=parser, parallelize_scoring=parallelize_scoring, **kwargs
        )
        self.judge_client = (
            judge_client if judge_client is not None else LazyOpenAI(judge_base_url, judge_api_key_var)
        )
        self.judge_model = judge_model
        self.judge_sampling_args = dict(judge_sampling_args or {})
        self.judge_prompt = judge_prompt
        self.judge_timeout_s = judge_timeout_s
        self.judge_tries = judge_tries
        self._judge_gate = Gate(judge_max_concurrent)
        self._asked = SingleFlight()
        self.class_objects.update(
            judge=self.judge,
            judge_client=self.judge_client,
            judge_model=self.judge_model,
            judge_prompt=self.judge_prompt,
            judge_sampling_args=self.judge_sampling_args,
            verdict=self.verdict,
        )

    @read_or_awaited
    async def judge(self, prompt: Messages, completion: Messages, answer: Any, state: State, **kwargs: Any) -> str:
        """Return the judge's answer about a completion; from `state["judge_response"]` where it is there.

        Synchronous functions call it without `await`, as packages of 0.1.0 to 0.1.2 do: without a running event loop
        the answer is there at once.

        Raises:
            GradingError: the judge failed, or its prompt names a text that there is none of.
            ConfigError: there is no API key.
        """
        text = self._judge_text(prompt, completion, answer)
        known = _responses(state).get(text)
        if known is not None:
            return str(known)
        return await self._asked.result((id(state), text), lambda: self._answer(text, state))

    async def verdict(
        self,
        prompt: Messages,
        completion: Messages,
        answer: Any,
        state: State,
        *,
        parse: Callable[[str], T | None],
        attempts: int = 3,
        **kwargs: Any,
    ) -> T:
        """Return what `parse` reads in the judge's answer; an answer that it cannot read is sampled again.

        Args:
            prompt: as for `judge`, with the other arguments that reward functions get.
            completion: as for `judge`.
            answer: as for `judge`.
            state: as for `judge`.
            parse: gets the answer's text; raises, or returns None, where there is no verdict in it.
            attempts: answers that are read, at most; from the second on they are fresh samples.
            **kwargs: not used.

        Raises:
            GradingError: no answer had a verdict, or the judge failed.
        """
        response = await self.judge(prompt, completion, answer, state)
        text = self._judge_text(prompt, completion, answer)
        return await self._readable(response, lambda: self._answer(text, state), parse, attempts)

    async def _readable(
        self, response: str, again: Callable[[], Awaitable[str]], parse: Callable[[str], T | None], attempts: int
    ) -> T:
        problem: Exception | None = None
        for attempt in range(1, attempts + 1):
            if attempt > 1:
                response = await again()
            try:
                value = parse(response)
            except Exception as error:
                problem = error
                continue
            if value is not None:
                return value
        reason = f" ({type(problem).__name__}: {problem})" if problem is not None else ""
        raise GradingError(
            f"The judge {self.judge_model!r} gave no verdict that can be read in {attempts} attempts{reason}; the "
            f"last answer was {response[:200]!r}."
        ) from problem

    async def _answer(self, text: str, *states: State) -> str:
        """Sample an answer, and keep it in the states."""
        call = JudgeCall(
            self.judge_client,
            self.judge_model,
            self.judge_sampling_args or {},
            self.judge_timeout_s,
            self.judge_tries,
        )
        async with self._judge_gate.slot():
            response = await call.ask(text)
        for state in states:
            if isinstance(state, MutableMapping):
                state["judge_response"] = {**_responses(state), text: response}
        return response

    def _judge_text(self, prompt: Messages, completion: Messages, answer: Any) -> str:
        return self._filled(question=question_text(prompt), answer=answer, response=self._response(completion))

    def _response(self, completion: Messages) -> str:
        response = self.parser.parse_answer(completion)
        return "" if response is None else str(response)

    def _filled(self, **texts: Any) -> str:
        try:
            return self.judge_prompt.format(**texts)
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise GradingError(
                f"The judge_prompt cannot be filled in ({type(error).__name__}: {error}): it may have "
                f"{', '.join(f'{{{name}}}' for name in texts)}; write other braces twice. It names "
                f"{_names_in(self.judge_prompt)}."
            ) from error


async def judge_yes_no(
    verdict: Any, prompt: Messages, completion: Messages, answer: Any, state: State, **_: Any
) -> float:
    """Reward a rollout with 1.0 where the judge says yes and 0.0 where it says no; for a `JudgeRubric`."""
    return float(await verdict(prompt, completion, answer, state, parse=parse_yes_no))


def parse_yes_no(text: str) -> bool:
    """Return True for yes and False for no: by a text's first or last word, else by the only one of the two in it.

    Text before `</think>` does not count.

    Raises:
        ValueError: it says neither, or both.
    """
    words = re.findall(r"[a-z]+", text.rpartition("</think>")[2].lower())
    ends = {word for word in (*words[:1], *words[-1:]) if word in ("yes", "no")}
    said = ends or {word for word in words if word in ("yes", "no")}
    if len(said) != 1:
        raise ValueError("it says neither yes nor no" if not said else "it says yes and no")
    return said == {"yes"}


def question_text(prompt: Any) -> str:
    """Return the text of the last user message; of the last message where there is none of a user."""
    if isinstance(prompt, str):
        return prompt
    messages = list(prompt or ())
    asked = [message for message in messages if message_field(message, "role") == "user"]
    return message_text((asked or messages)[-1]) if messages else ""


def _responses(state: Any) -> Mapping[str, Any]:
    known = state.get("judge_response") if isinstance(state, Mapping) else None
    # anything else under this key is the environment's own
    return known if isinstance(known, dict) else {}


def _names_in(template: str) -> str:
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError:
        return "a brace that is not closed"
    return ", ".join(f"{{{name}}}" for name in dict.fromkeys(names)) or "none"
