"""Speaking to a dataserver: version 2 of its routes, with retries, for code with and without an event loop."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifiers.data.curriculum import Curriculum, curriculum_from
from verifiers.envs.generation import run_to_completion
from verifiers.errors import ConfigError, InfraError
from verifiers.rollouts.proxies import proxy_for
from verifiers.rollouts.retries import is_retryable_status

__all__ = ["Dataserver", "Limits", "ServerMeta", "encoded", "rank_of_process"]

RETRY_WAITS_S = (1.0, 2.0, 4.0)
_QUOTED = 300


class _FailedTry(Exception):
    """A try that may succeed when it is repeated."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server takes in one request; the defaults hold where it does not say.

    Attributes:
        max_batch: most samples or completions.
        max_body_bytes: largest body, in bytes.
        grade_timeout_s: seconds that it gives its graders.
    """

    max_batch: int
    max_body_bytes: int = 8 * 2**20
    grade_timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ServerMeta:
    """What a server says of itself.

    Attributes:
        curriculum: its stages.
        sizes: rows of each dataset, in the server's order.
        total_steps: optimizer steps that its curriculum is made for, or None.
        limits: of its requests.
    """

    curriculum: Curriculum
    sizes: Mapping[str, int]
    total_steps: int | None
    limits: Limits


@dataclass(frozen=True, slots=True)
class Dataserver:
    """Where a dataserver is, and how patiently it is asked.

    Attributes:
        url: its address, without a path, e.g. "http://127.0.0.1:9000".
        token_var: environment variable that holds its bearer token; None where it asks for none.
        timeout_s: of one try, from its beginning to the last byte of its answer, in seconds.
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
        """The stages, the datasets and the limits of the server."""
        data = self.request("/v2/meta")
        try:
            stages = {name: data[name] for name in ("stages", "seed", "replacement")}
            sizes = {dataset["id"]: int(dataset["rows"]) for dataset in data["datasets"]}
            own = {name: data[name] for name in ("max_body_bytes", "grade_timeout_s") if data.get(name) is not None}
            limits, total_steps = Limits(int(data["max_batch"]), **own), data["total_steps"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InfraError(
                f"the answer of {self.url} to /v2/meta is not a dataserver's ({type(error).__name__}: {error})."
            ) from error
        return ServerMeta(curriculum_from(stages), sizes, total_steps, limits)

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

    # -- how ------------------------------------------------------------------------------------------------

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """GET a route, or POST a body to it; returns its JSON.

        Raises:
            ConfigError: the server refuses the request; it would refuse it again.
            InfraError: it gave no usable answer, also after all retries.
        """
        return run_to_completion(lambda: self.request_async(path, None if body is None else encoded(body)))

    async def request_async(self, path: str, data: bytes | None = None, timeout_s: float | None = None) -> Any:
        """As `request`, on an event loop and of a body that is encoded; `timeout_s` in place of the server's."""
        import aiohttp

        # a session a request: scoring runs on whichever loop it is called on, and nobody tells which was the last
        timeout = aiohttp.ClientTimeout(total=self.timeout_s if timeout_s is None else timeout_s)
        async with aiohttp.ClientSession(timeout=timeout, headers=self._headers()) as session:
            for wait_s in (*self.retry_waits_s, None):
                try:
                    return await self._try(session, path, data)
                except _FailedTry as error:
                    if wait_s is None:
                        raise InfraError(self._gave_up(error)) from error
                await asyncio.sleep(wait_s)
        raise AssertionError("the last try returns or raises")

    async def _try(self, session: Any, path: str, data: bytes | None) -> Any:
        import aiohttp

        # redirects are not followed: they would carry the token to another host, and make a GET of a POST
        options: dict[str, Any] = {"data": data, "proxy": proxy_for(self.url), "allow_redirects": False}
        try:
            async with session.request("GET" if data is None else "POST", self.url + path, **options) as response:
                if 300 <= response.status < 400:
                    raise self._redirected(path, response.status, response.headers.get("Location"))
                return self._read(path, response.status, await response.read())
        except TimeoutError as error:
            raise _FailedTry(f"{path}: no answer within {session.timeout.total:g} s") from error
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
        mend = "; raise max_body_mib or max_batch under `server` in its file" if status == 413 else ""
        raise ConfigError(f"the dataserver at {self.url} refused {path} with status {status}: {said}{mend}.")

    def _redirected(self, path: str, status: int, location: str | None) -> ConfigError:
        return ConfigError(
            f"the dataserver at {self.url} answered {path} with status {status}, a redirect to {location!r}, "
            "which is not followed; give the address that it leads to."
        )

    def _gave_up(self, error: Exception) -> str:
        tries = len(self.retry_waits_s) + 1
        return f"the dataserver at {self.url} gave no answer in {tries} tries; the last: {error}."


def encoded(value: Any) -> bytes:
    """A value as JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def rank_of_process() -> int:
    """The rank that a launcher gave this process; 0 without one."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


def _message(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:_QUOTED].decode(errors="replace")
