"""JudgeRubric: reward functions that ask a language model behind any OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import os
import re
import string
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

from verifiers.errors import ConfigError, GradingError, ModelError
from verifiers.inference.endpoint import CHAT, Backend, single_backend_for
from verifiers.inference.retry import RetryableError, RetryPolicy, retry
from verifiers.keywords import warn_once
from verifiers.log import url_without_secrets
from verifiers.loop_thread import run_blocking
from verifiers.parsers.parser import Parser, after_thought
from verifiers.rubrics.rubric import Rubric
from verifiers.rubrics.scoring import SingleFlight, signature_of
from verifiers.types import Messages, RewardFunc, State, content_text, message_field, message_text

T = TypeVar("T")

_TRY_TIMEOUT_S = 60.0
_BACKOFF_S = 0.5
_LONGEST_WAIT_S = 20.0
_JUDGES = "_judges"  # by prompt, the judge whose answer is in the state
_SHORTEST_SECRET = 8  # shorter keys are placeholders such as EMPTY

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


MAX_TOKENS = 4096
"""Tokens of a judge's answer where nothing else is asked for: one that rambles would hold up its rollout."""


class LazyOpenAI:
    """An `openai.AsyncOpenAI` that is made at the first call, one for each event loop.

    Every method of it can be awaited here: `chat.completions.create`, `responses.create` and so on. Calls are tried
    once and end after a minute; retries are the caller's. Connections are not kept, since nothing could close them
    when their event loop ends. OpenAI's key is sent to no other server than OPENAI_BASE_URL's.
    """

    def __init__(self, base_url: str | None = None, api_key_var: str | None = None) -> None:
        self.base_url = base_url
        self.api_key_var = api_key_var
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"LazyOpenAI has no attribute {name!r}")
        return _LazyMethod(self, (name,))

    def __reduce__(self) -> Any:
        return type(self), (self.base_url, self.api_key_var)

    async def client(self) -> Any:
        """Return the AsyncOpenAI of this event loop; a ConfigError where there is no API key."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            # importing and building it takes half a second, which other rollouts need not wait for
            made = await asyncio.to_thread(self._make, self.api_key)
            self._clients.setdefault(loop, made)
        return self._clients[loop]

    def _make(self, key: str) -> Any:
        openai = importlib.import_module("openai")
        return openai.AsyncOpenAI(
            base_url=self.base_url,
            api_key=key,
            timeout=_TRY_TIMEOUT_S,
            max_retries=0,
            default_headers={"Connection": "close"},
        )

    @property
    def api_key(self) -> str:
        """The key to send; "EMPTY" for servers that need none; a ConfigError where OpenAI is asked without one."""
        key = os.environ.get(self.api_key_var or "OPENAI_API_KEY")
        if self.api_key_var is None and (self.base_url or (os.environ.get("OPENAI_BASE_URL") and not key)):
            return "EMPTY"
        if not key:
            raise ConfigError(
                f"The judge has no API key: set the environment variable {self.api_key_var or 'OPENAI_API_KEY'}, or "
                "give the rubric a judge_client, or a judge_base_url whose server needs no key."
            )
        return key


class _LazyMethod:
    """A method of a client that is not made yet, e.g. `chat.completions.create`."""

    def __init__(self, owner: LazyOpenAI, path: tuple[str, ...]) -> None:
        self._owner = owner
        self._path = path

    def __getattr__(self, name: str) -> _LazyMethod:
        if name.startswith("_"):
            raise AttributeError(f"this method of a LazyOpenAI has no attribute {name!r}")
        return _LazyMethod(self._owner, (*self._path, name))

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = functools.reduce(getattr, self._path, await self._owner.client())
        result = method(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result


class Gate:
    """A bound on the judge calls at once on each event loop; the others wait. -1 for no bound."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._semaphores: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._semaphores = weakref.WeakKeyDictionary()

    def __reduce__(self) -> Any:
        return type(self), (self.limit,)

    def slot(self) -> contextlib.AbstractAsyncContextManager[Any]:
        if self.limit <= 0:
            return contextlib.nullcontext()
        return self._semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.limit))


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


class JudgeRubric(Rubric):
    """A rubric whose reward functions may ask a judge: a language model behind any OpenAI-compatible endpoint.

    It has no reward function of its own; add some, or `judge_yes_no`. Besides the usual arguments they may name

    - `judge`: `await judge(prompt, completion, answer, state)` is the judge's answer, as text;
    - `verdict`: `await verdict(prompt, completion, answer, state, parse=...)` is what `parse` reads in it;
    - judge_client, judge_model, judge_prompt, judge_sampling_args, as given here.

    Answers are kept in `state["judge_response"]`, a dict from the judge's prompt to its answer (of another judge that
    is asked the same, from model, URL and sampling arguments too), and functions that ask the same thing at the same
    time share one call. A judge that fails (no connection, an error status, an empty message) raises inside the
    function, which makes it a failed grade and never a reward of 0.

    Args:
        parser: finds the response in a completion; default: the last message's text.
        parallelize_scoring: functions of one rollout run side by side; default: one after the other.
        judge_client: an AsyncOpenAI or OpenAI, or any object with `chat.completions.create`. Left out, an
            AsyncOpenAI is made at the first call, from OPENAI_API_KEY and OPENAI_BASE_URL.
        judge_model: the judge's name on its server.
        judge_sampling_args: OpenAI's sampling arguments; max_tokens is sent as max_completion_tokens, 4,096 where it
            is left out.
        judge_prompt: may have {question} (the prompt's last user message), {answer} and {response} (the parsed
            completion); other braces are written twice.
        funcs, weights: as for `Rubric`.
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
        if "{response" not in judge_prompt:
            text = "A judge_prompt has no {response}: the judge is not shown what the policy said."
            warn_once(self.logger.name, text)
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

    def refuse_unsupplied(self) -> None:
        super().refuse_unsupplied()
        self.refuse_unfillable()
        if isinstance(self.judge_client, LazyOpenAI) and self._asked_for & {"judge", "judge_client", "verdict"}:
            _ = self.judge_client.api_key

    @property
    def _asked_for(self) -> set[str]:
        return {name for func in self.reward_funcs for name in signature_of(func).names}

    def refuse_unfillable(self) -> None:
        """Raise ConfigError for a judge_prompt with placeholders that nobody fills."""
        # a judge of a subclass's own, or an object in its place, may fill the prompt in another way
        given = {name: getattr(self.class_objects.get(name), "__func__", None) for name in self._asked_for}
        if given.get("verdict") is JudgeRubric.verdict or given.get("judge") is JudgeRubric.judge:
            self._refuse_unfillable("question", "answer", "response")

    def _refuse_unfillable(self, *names: str) -> None:
        try:
            fields = [field for _, field, *_ in string.Formatter().parse(self.judge_prompt) if field is not None]
            unknown = {re.split(r"[.\[]", field)[0] for field in fields} - {*names}
            if unknown:
                raise LookupError(min(unknown))
        except (LookupError, ValueError) as error:
            raise ConfigError(_unfillable(error, names)) from error

    def judge(
        self, prompt: Messages, completion: Messages, answer: Any, state: State, **kwargs: Any
    ) -> Coroutine[Any, Any, str]:
        """Return the judge's answer about a completion; from `state["judge_response"]` where it is there.

        Synchronous functions call it without `await`: without a running event loop the answer is there at once. It
        is a GradingError where the judge failed, or its prompt names a text that there is none of.
        """

        async def answered() -> str:
            text = self._judge_text(prompt, completion, answer)
            known = _kept(state, "judge_response").get(self._place(text, state))
            if known is not None:
                return str(known)
            return await self._asked.result((id(state), text), lambda: self._answer(text, state))

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return _ReadyText(run_blocking(answered))  # type: ignore[return-value]
        return answered()

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

        `parse` gets the answer's text, and raises, or returns None, where there is no verdict in it. It reads at most
        `attempts` answers, from the second on fresh samples. A GradingError where none had a verdict.
        """
        text = self._judge_text(prompt, completion, answer)
        first = await self.judge(prompt, completion, answer, state)
        return await self._readable(lambda: self._answer(text, state), parse, attempts, first)

    async def _readable(
        self,
        sample: Callable[[], Awaitable[str]],
        parse: Callable[[str], T | None],
        attempts: int,
        first: str | None = None,
    ) -> T:
        problem: Exception | None = None
        for attempt in range(attempts):
            response = first if first is not None and attempt == 0 else await sample()
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
        async with self._judge_gate.slot():
            response = await self._ask(text)
        for state in states:
            if isinstance(state, MutableMapping):
                place = self._place(text, state)
                state["judge_response"] = {**_kept(state, "judge_response"), place: response}
                state[_JUDGES] = {**_kept(state, _JUDGES), place: self._identity}
        return response

    @property
    def _identity(self) -> str:
        asked = {name: value for name, value in (self.judge_sampling_args or {}).items() if name != "extra_headers"}
        return f"{self.judge_model} {getattr(self.judge_client, 'base_url', '')} {asked}"

    def _place(self, text: str, state: Any) -> str:
        """Return what this judge's answer is kept under: the prompt, unless that is another judge's."""
        own, known = f"{self._identity}\n{text}", _kept(state, "judge_response")
        # what has no judge is the environment's, or of a run that is graded again
        is_free = own not in known and _kept(state, _JUDGES).get(text, self._identity) == self._identity
        return text if is_free else own

    async def _ask(self, text: str) -> str:
        client = self.judge_client
        # a judge's answers are not the policy's
        client = client.untrained if hasattr(type(client), "untrained") else client
        given = {name: value for name, value in (self.judge_sampling_args or {}).items() if value is not None}
        most = given.pop("max_tokens", MAX_TOKENS)
        given = {"max_completion_tokens": most, **given}
        arguments = {**given, "model": self.judge_model, "messages": [{"role": "user", "content": text}]}
        policy = RetryPolicy(max_attempts=self.judge_tries, base_s=_BACKOFF_S, cap_s=_LONGEST_WAIT_S)
        deadline = asyncio.timeout(self.judge_timeout_s)
        try:
            async with deadline:
                if isinstance(client, LazyOpenAI):
                    client = await client.client()
                backend: Backend = single_backend_for(client)
                try:
                    return await retry(functools.partial(_answered_text, backend, arguments), policy)
                finally:
                    if backend is not client:
                        await backend.close()
        except ConfigError:
            raise
        except Exception as error:
            problem = f"no answer within {self.judge_timeout_s:g} s." if deadline.expired() else self._problem(error)
            raise GradingError(f"The judge {self.judge_model!r} gave {problem}") from error

    def _problem(self, error: Exception) -> str:
        url, key = getattr(self.judge_client, "base_url", None), getattr(self.judge_client, "api_key", None)
        text = str(error).removeprefix(str(url)).lstrip(": ")
        if not isinstance(error, ModelError):
            text = f"{type(error).__name__}: {text}"
        # servers quote the key that they refuse
        if isinstance(key, str) and len(key) >= _SHORTEST_SECRET:
            text = text.replace(key, "***")
        # a mock has any attribute
        at = f" ({url_without_secrets(str(url))})" if isinstance(url, str) or type(url).__name__ == "URL" else ""
        return f"no verdict{at}: {text}"

    def _judge_text(self, prompt: Messages, completion: Messages, answer: Any) -> str:
        return self._filled(question=question_text(prompt), answer=answer, response=self._response(completion))

    def _response(self, completion: Messages) -> str:
        response = self.parser.parse_answer(completion)
        return "" if response is None else str(response)

    def _filled(self, **texts: Any) -> str:
        try:
            return self.judge_prompt.format(**texts)
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise GradingError(_unfillable(error, texts)) from error


def _unfillable(error: Exception, names: Iterable[str]) -> str:
    return (
        f"The judge_prompt cannot be filled in ({type(error).__name__}: {error}): it may have "
        f"{', '.join(f'{{{name}}}' for name in names)}; write other braces twice."
    )


async def _answered_text(backend: Backend, arguments: Mapping[str, Any]) -> str:
    choices = message_field(await backend.call(CHAT, arguments), "choices")
    if not choices:
        raise RetryableError("it answered without a choice", empty=True)
    answer = content_text(message_field(message_field(choices[0], "message"), "content"))
    if not answer.strip():
        reason = message_field(choices[0], "finish_reason")
        raise RetryableError(f"it answered with an empty message (finish_reason {reason!r})", empty=True)
    return answer


async def judge_yes_no(
    verdict: Any, prompt: Messages, completion: Messages, answer: Any, state: State, **_: Any
) -> float:
    """Reward a rollout with 1.0 where the judge says yes and 0.0 where it says no; for a `JudgeRubric`."""
    return float(await verdict(prompt, completion, answer, state, parse=parse_yes_no))


def parse_yes_no(text: str) -> bool:
    """Return True for yes and False for no: by a text's first or last word, else by the only one of the two in it.

    Text before `</think>` does not count, nor do thoughts that were cut off, nor the no of "no errors" or "no doubt".

    Raises:
        ValueError: it says neither, or both.
    """
    nothing_wrong = r"\bno (?=(?:\w+ )?(?:error|mistake|issue|problem|difference|discrepanc|doubt))"
    words = re.findall(r"[a-z]+", re.sub(nothing_wrong, "", after_thought(text).lower()))
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


def _kept(state: Any, name: str) -> Mapping[str, Any]:
    known = state.get(name) if isinstance(state, Mapping) else None
    # anything else under this key is the environment's own
    return known if isinstance(known, dict) else {}
