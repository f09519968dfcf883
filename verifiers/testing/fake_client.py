"""A client shaped like `openai.AsyncOpenAI` that answers from a script, in process and without network."""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
from types import SimpleNamespace
from typing import Any

from verifiers.errors import ConfigError
from verifiers.inference.wire import WireObject, request_body
from verifiers.testing.faults import Fault, Faults, fault_schedule
from verifiers.testing.script import Answers, RecordedRequest, Script, response_body


class FakeClient:
    """A client with `chat.completions.create` and `completions.create`; answers are objects with `model_dump()`.

    Faults raise what `openai.AsyncOpenAI` without retries would raise (the `openai` package is imported then):
    its status errors, APIConnectionError for a disconnect, json.JSONDecodeError for a malformed body; a hang
    waits until cancelled, or raises APITimeoutError after the call's `timeout` in seconds.

    Args:
        answers: what is answered (see `testing.script.Answers`), from a function of the request body too.
        faults: when calls fail (see `testing.faults.Faults`); default never.
        token_ids: False makes it a provider that reports no token ids.
        weight_version: reported as the version of sampled tokens; may be assigned.

    Attributes:
        requests: calls in order of arrival, `extra_body` merged in.
        in_flight, max_in_flight: calls being answered, now and at most.
    """

    def __init__(
        self,
        answers: Answers = None,
        *,
        faults: Faults = None,
        model: str = "fake",
        token_ids: bool = True,
        weight_version: int | str = 0,
        base_url: str = "http://fake.invalid/v1",
        api_key: str = "fake-key",
    ) -> None:
        self._script = Script(answers)
        self._fault_of = fault_schedule(faults)
        self._reported: dict[str, Any] = {"model": model, "token_ids": token_ids}
        self.weight_version = weight_version
        self.base_url = base_url
        self.api_key = api_key
        self.timeout: float | None = None
        self.max_retries = 0
        self.requests: list[RecordedRequest] = []
        self.in_flight = 0
        self.max_in_flight = 0
        self.closed = False
        self.completions = SimpleNamespace(create=functools.partial(self._call, "/v1/completions"))
        chats = SimpleNamespace(create=functools.partial(self._call, "/v1/chat/completions"))
        self.chat = SimpleNamespace(completions=chats)

    def with_options(self, **_: Any) -> FakeClient:
        return self

    copy = with_options

    async def close(self) -> None:
        self.closed = True

    async def __aenter__(self) -> FakeClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, path: str, **arguments: Any) -> Any:
        body = request_body(arguments)
        if body.get("stream"):
            raise ConfigError("the fake client does not stream; leave stream out.")
        number = len(self.requests)
        headers = {name.lower(): str(value) for name, value in (arguments.get("extra_headers") or {}).items()}
        self.requests.append(RecordedRequest(number, path, body, headers, {}))
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            return await self._answer(body, number, arguments.get("timeout"))
        finally:
            self.in_flight -= 1

    async def _answer(self, body: dict[str, Any], number: int, timeout_s: Any) -> Any:
        fault = self._fault_of(number)
        answers = fault if fault is not None else await self._script.answers(body)
        if isinstance(answers, Fault):
            return await _fail(answers, self.base_url, timeout_s)
        options = {"number": number, "weight_version": self.weight_version, **self._reported}
        return WireObject(response_body(body, answers, **options))


async def _fail(fault: Fault, base_url: str, timeout_s: Any) -> Any:
    if fault.kind == "malformed":
        return json.loads(fault.text)
    if fault.kind == "status" and fault.status < 400:
        return WireObject(json.loads(fault.text))
    openai = importlib.import_module("openai")
    # the HTTP library is whichever this openai was built on: its request and response types go into errors
    http = importlib.import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.split(".")[0])
    request = http.Request("POST", base_url)
    if fault.kind == "hang":
        seconds = timeout_s if isinstance(timeout_s, (int, float)) else None
        try:
            async with asyncio.timeout(seconds):
                await asyncio.get_running_loop().create_future()
        except TimeoutError:
            raise openai.APITimeoutError(request=request) from None
    if fault.kind == "disconnect":
        raise openai.APIConnectionError(request=request)
    response = http.Response(fault.status, text=fault.text, headers=fault.headers, request=request)
    kinds = {getattr(kind, "status_code", None): kind for kind in openai.APIStatusError.__subclasses__()}
    kind = kinds.get(fault.status, openai.InternalServerError if fault.status >= 500 else openai.APIStatusError)
    message = f"Error code: {fault.status} - {fault.text}"
    raise kind(message, response=response, body=_error_body(fault.text))


def _error_body(text: str) -> Any:
    # as the SDK does: the object under "error" where there is one, else the text
    try:
        body = json.loads(text)
    except ValueError:
        return text
    return body.get("error", body) if isinstance(body, dict) else body
