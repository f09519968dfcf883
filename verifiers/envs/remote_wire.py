"""Speaking to a dataserver: version 2 of its routes, with retries, for code with and without an event loop."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifiers.data.curriculum import Curriculum, curriculum_from
from verifiers.errors import ConfigError, InfraError
from verifiers.parsers.messages import message_text
from verifiers.rollouts.proxies import proxy_for
from verifiers.rollouts.retries import is_retryable_status

__all__ = ["Dataserver", "Grade", "ServerMeta", "completion_for_wire", "rank_of_process"]

RETRY_WAITS_S = (1.0, 2.0, 4.0)
_QUOTED = 300


class _FailedTry(Exception):
    """A try that may succeed when it is repeated."""


@dataclass(frozen=True, slots=True)
class ServerMeta:
    """What a server says of itself.

    Attributes:
        curriculum: its stages.
        sizes: rows of each dataset, in the server's order.
        total_steps: optimizer steps that its curriculum is made for, or None.
        max_batch: most samples or completions in one request.
    """

    curriculum: Curriculum
    sizes: Mapping[str, int]
    total_steps: int | None
    max_batch: int


@dataclass(frozen=True, slots=True)
class Grade:
    """The answer for one completion: a reward, or the reason why there is none."""

    reward: float | None
    metrics: Mapping[str, float]
    error: str | None


@dataclass(frozen=True, slots=True)
class Dataserver:
    """Where a dataserver is, and how patiently it is asked.

    Attributes:
        url: its address, without a path, e.g. "http://127.0.0.1:9000".
        token_var: environment variable that holds its bearer token; None where it asks for none.
        timeout_s: of one try, in seconds.
        retry_waits_s: seconds to wait before each repetition of a request that failed.
    """

    url: str
    token_var: str | None = None
    timeout_s: float = 90.0
    retry_waits_s: Sequence[float] = field(default=RETRY_WAITS_S)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"the dataserver's URL {self.url!r} is no HTTP address; give one like 'http://127.0.0.1:9000'."
            )
        object.__setattr__(self, "url", self.url.rstrip("/"))

    # -- what is asked --------------------------------------------------------------------------------------

    def meta(self) -> ServerMeta:
        """The stages and datasets of the server."""
        data = self.request("/v2/meta")
        stages = {name: data[name] for name in ("stages", "seed", "replacement")}
        sizes = {dataset["id"]: dataset["rows"] for dataset in data["datasets"]}
        return ServerMeta(curriculum_from(stages), sizes, data["total_steps"], data["max_batch"])

    def rows(self, dataset: str, page: int) -> Iterable[dict[str, Any]]:
        """All samples of one dataset, in order; `page` of them a request."""
        offset, total = 0, 1
        while offset < total:
            answer = self.request("/v2/rows", {"dataset": dataset, "offset": offset, "limit": page})
            yield from answer["samples"]
            offset, total = offset + page, answer["total"]

    def samples(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The samples of a block or a part of it.

        Raises:
            InfraError: the server gave another number of them.
        """
        found: list[dict[str, Any]] = self.request("/v2/sample", body)["samples"]
        if len(found) != body["batch_size"]:
            raise InfraError(
                f"the dataserver at {self.url} was asked for {body['batch_size']} samples and gave {len(found)}."
            )
        return found

    def grades(self, items: Sequence[Mapping[str, Any]]) -> list[Grade]:
        """The grade of each item, in order; joined on `completion_index`."""
        return _joined(items, self.request("/v2/grade", {"items": list(items), "rank": rank_of_process()}))

    async def grades_async(self, items: Sequence[Mapping[str, Any]]) -> list[Grade]:
        """As `grades`, on an event loop."""
        body = {"items": list(items), "rank": rank_of_process()}
        return _joined(items, await self._request_async("/v2/grade", body))

    # -- how ------------------------------------------------------------------------------------------------

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """GET a route, or POST a body to it; returns its JSON.

        Raises:
            ConfigError: the server refuses the request; it would refuse it again.
            InfraError: it gave no usable answer, also after all retries.
        """
        for wait_s in (*self.retry_waits_s, None):
            try:
                return self._try(path, body)
            except _FailedTry as error:
                if wait_s is None:
                    raise InfraError(self._gave_up(error)) from error
                time.sleep(wait_s)
        raise AssertionError("the last try returns or raises")

    def _try(self, path: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers())
        proxy = proxy_for(self.url)
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({} if proxy is None else {"http": proxy, "https": proxy})
        )
        try:
            with opener.open(request, timeout=self.timeout_s) as response:
                return self._read(path, response.status, response.read())
        except urllib.error.HTTPError as error:
            with error:
                return self._read(path, error.code, error.read())
        except (OSError, http.client.HTTPException) as error:
            raise _FailedTry(f"{path}: {error or type(error).__name__}") from error

    async def _request_async(self, path: str, body: Mapping[str, Any]) -> Any:
        import aiohttp

        # a session a request: scoring runs on whichever loop it is called on, and nobody tells which was the last
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        async with aiohttp.ClientSession(timeout=timeout, headers=self._headers()) as session:
            for wait_s in (*self.retry_waits_s, None):
                try:
                    return await self._try_async(session, path, body)
                except _FailedTry as error:
                    if wait_s is None:
                        raise InfraError(self._gave_up(error)) from error
                await asyncio.sleep(wait_s)
        raise AssertionError("the last try returns or raises")

    async def _try_async(self, session: Any, path: str, body: Mapping[str, Any]) -> Any:
        import aiohttp

        try:
            data = json.dumps(body).encode()
            async with session.post(self.url + path, data=data, proxy=proxy_for(self.url)) as response:
                return self._read(path, response.status, await response.read())
        except TimeoutError as error:
            raise _FailedTry(f"{path}: no answer within {self.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _FailedTry(f"{path}: {error or type(error).__name__}") from error

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.token_var is not None:
            token = os.environ.get(self.token_var, "")
            if not token:
                raise ConfigError(
                    f"the dataserver's token_var is {self.token_var!r}, a variable that is not set; set it."
                )
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _read(self, path: str, status: int, content: bytes) -> Any:
        if status == 200:
            try:
                return json.loads(content)
            except ValueError as error:
                raise _FailedTry(f"{path} answered what is no JSON: {content[:_QUOTED]!r}") from error
        said = _message(content)
        if is_retryable_status(status):
            raise _FailedTry(f"{path} answered with status {status}: {said}")
        raise ConfigError(f"the dataserver at {self.url} refused {path} with status {status}: {said}.")

    def _gave_up(self, error: Exception) -> str:
        tries = len(self.retry_waits_s) + 1
        return f"the dataserver at {self.url} gave no answer in {tries} tries; the last: {error}."


def completion_for_wire(completion: Any) -> str | list[dict[str, Any]]:
    """A completion as /v2/grade takes it: a text, or messages with what graders may read of them."""
    if isinstance(completion, str):
        return _encodable(completion)
    messages = []
    for message in completion:
        fields = dict(message) if isinstance(message, Mapping) else {"role": "assistant"}
        kept = {name: fields[name] for name in ("role", "name", "tool_call_id") if fields.get(name)}
        messages.append({**kept, "content": _encodable(message_text(message))})
    return messages


def _encodable(text: str) -> str:
    """The text without halves of surrogate pairs, which a tokenizer may give and no JSON reader takes."""
    return text.encode("utf-8", "replace").decode()


def rank_of_process() -> int:
    """The rank that a launcher gave this process; 0 without one."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


def _joined(items: Sequence[Mapping[str, Any]], answer: Any) -> list[Grade]:
    """Grades by item; one that the answer lacks is a failed grade, for nothing is known of its reward."""
    try:
        found = {result["completion_index"]: result for result in answer["results"]}
    except (TypeError, KeyError) as error:
        raise InfraError(f"the dataserver's answer to /v2/grade cannot be read: {answer!r:.300}.") from error
    grades = []
    for item in items:
        result = found.get(item["completion_index"])
        if result is None or result.get("reward") is None:
            why = (
                "the answer has no result for it" if result is None else result.get("error") or "no reward was given"
            )
            grades.append(Grade(None, {}, str(why)))
        else:
            grades.append(Grade(float(result["reward"]), dict(result.get("metrics") or {}), None))
    return grades


def _message(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:_QUOTED].decode(errors="replace")
