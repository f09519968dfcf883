"""Calls of a judge: a language model behind any OpenAI-compatible endpoint that reward functions ask."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verifiers.errors import ConfigError, GradingError, ModelError
from verifiers.inference.endpoint import CHAT, ClientBackend
from verifiers.inference.retry import RetryableError, RetryPolicy, retry
from verifiers.log import url_without_secrets
from verifiers.parsers.messages import content_text, message_field

__all__ = ["Gate", "JudgeCall", "LazyOpenAI"]

_TRY_TIMEOUT_S = 60.0
_BACKOFF_S = 0.5
_LONGEST_WAIT_S = 20.0
_SHORTEST_SECRET = 8  # shorter keys are placeholders such as EMPTY


class LazyOpenAI:
    """An `openai.AsyncOpenAI` that is made at the first call, one for each event loop.

    Every method of it can be awaited here: `chat.completions.create`, `responses.create` and so on. Calls are tried
    once and end after a minute; retries are the caller's. Connections are not kept, since nothing could close them
    when their event loop ends.

    Args:
        base_url: of the endpoint; None: OPENAI_BASE_URL where it is set, else OpenAI's.
        api_key_var: the environment variable with the key; None: OPENAI_API_KEY, and no key where `base_url` is
            given, so that OpenAI's key is sent to no other server.
    """

    def __init__(self, base_url: str | None = None, api_key_var: str | None = None) -> None:
        self.base_url = base_url
        self.api_key_var = api_key_var
        self._lock = threading.Lock()
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"LazyOpenAI has no attribute {name!r}")
        return _LazyMethod(self, (name,))

    def __reduce__(self) -> Any:
        return type(self), (self.base_url, self.api_key_var)

    async def client(self) -> Any:
        """Return the AsyncOpenAI of this event loop.

        Raises:
            ConfigError: there is no API key.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            known = self._clients.get(loop)
        if known is not None:
            return known
        key = self.api_key
        # importing and building it takes half a second, which other rollouts need not wait for
        made = await asyncio.to_thread(self._make, key)
        with self._lock:
            return self._clients.setdefault(loop, made)

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
        """The key to send; "EMPTY" for servers that need none.

        Raises:
            ConfigError: there is none, and OpenAI is asked.
        """
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
    """A bound on the judge calls at once on each event loop; the others wait.

    Args:
        limit: calls at once; -1 for no bound.
    """

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


@dataclass(frozen=True, slots=True)
class JudgeCall:
    """One question to a judge.

    Attributes:
        client: has `chat.completions.create`, sync or async. Of a rollout's recording client its untrained handle
            is used: a judge's answers are not the policy's.
        sampling_args: OpenAI's; entries that are None are left out, max_tokens is sent as max_completion_tokens.
        timeout_s: for all tries together, in seconds.
        tries: how often it is tried where that makes sense; retries of an SDK's client are switched off.
    """

    client: Any
    model: str
    sampling_args: Mapping[str, Any]
    timeout_s: float
    tries: int

    async def ask(self, text: str) -> str:
        """Return the judge's answer to `text`.

        Raises:
            GradingError: the judge refused, failed, could not be reached, answered without text, or took too long.
            ConfigError: there is no API key.
        """
        deadline = asyncio.timeout(self.timeout_s)
        client = self.client.untrained if hasattr(type(self.client), "untrained") else self.client
        policy = RetryPolicy(max_attempts=self.tries, base_s=_BACKOFF_S, cap_s=_LONGEST_WAIT_S)
        attempt = functools.partial(_answer, ClientBackend(client), self._arguments(text))
        try:
            async with deadline:
                return await retry(attempt, policy)
        except ConfigError:
            raise
        except Exception as error:
            if deadline.expired():
                text = f"The judge {self.model!r} gave no answer within {self.timeout_s:g} s."
                raise GradingError(text) from error
            raise GradingError(self._failure(error)) from error

    def _arguments(self, text: str) -> dict[str, Any]:
        arguments = {name: value for name, value in self.sampling_args.items() if value is not None}
        if "max_tokens" in arguments:
            arguments.setdefault("max_completion_tokens", arguments["max_tokens"])
            del arguments["max_tokens"]
        return {**arguments, "model": self.model, "messages": [{"role": "user", "content": text}]}

    def _failure(self, error: Exception) -> str:
        url, key = getattr(self.client, "base_url", None), getattr(self.client, "api_key", None)
        text = str(error).removeprefix(f"{url}: ")
        if not isinstance(error, ModelError):
            text = f"{type(error).__name__}: {text}"
        # servers quote the key that they refuse
        if isinstance(key, str) and len(key) >= _SHORTEST_SECRET:
            text = text.replace(key, "***")
        # a mock has any attribute
        at = f" ({url_without_secrets(str(url))})" if isinstance(url, str) or type(url).__name__ == "URL" else ""
        return f"The judge {self.model!r} gave no verdict{at}: {text}"


async def _answer(backend: ClientBackend, arguments: Mapping[str, Any]) -> str:
    choices = message_field(await backend.call(CHAT, arguments), "choices")
    if not choices:
        raise RetryableError("it answered without a choice", empty=True)
    answer = content_text(message_field(message_field(choices[0], "message"), "content"))
    if not answer.strip():
        reason = message_field(choices[0], "finish_reason")
        raise RetryableError(f"it answered with an empty message (finish_reason {reason!r})", empty=True)
    return answer
