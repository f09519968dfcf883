"""The client of a dataserver: version 2 of its routes, with retries, for code with and without an event loop."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.data.curriculum import Curriculum, staged_curriculum_from
from verifiers.errors import ConfigError, InfraError, ProviderError
from verifiers.inference.endpoint import proxy_for
from verifiers.inference.retry import RetryableError, RetryPolicy, retry, status_may_pass
from verifiers.loop_thread import run_blocking
from verifiers.rubrics.scoring import is_finite_number
from verifiers.types import message_text

__all__ = [
    "MAX_ATTEMPTS",
    "Dataserver",
    "Grade",
    "RemoteGrader",
    "RequestLimits",
    "ServerMeta",
    "completion_for_wire",
    "encoded",
    "rank_of_process",
]

logger = logging.getLogger("verifiers.envs")

MAX_ATTEMPTS = 4
_BACKOFF_S = 2.0
_QUOTED_BYTES = 300
# time of a grading request beyond that of the server's graders
_GRADE_MARGIN_S = 10.0


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds of one request to a server; the defaults hold where its answer has none.

    Attributes:
        max_batch: most samples or completions.
        max_body_bytes: largest body, in bytes.
        grade_timeout_s: seconds that the server gives its graders.
    """

    max_batch: int
    max_body_bytes: int = 8 * 2**20
    grade_timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ServerMeta:
    """A server's description of itself.

    Attributes:
        curriculum: its stages.
        sizes: rows of each dataset, in the server's order.
        total_steps: optimizer steps of its curriculum, or None.
        limits: of its requests.
    """

    curriculum: Curriculum
    sizes: Mapping[str, int]
    total_steps: int | None
    limits: RequestLimits


@dataclass(frozen=True, slots=True)
class Dataserver:
    """The address of a dataserver, and the timeouts and retries of requests to it.

    Attributes:
        url: its address, without a path, e.g. "http://127.0.0.1:9000".
        token_var: environment variable that holds its bearer token; None for none.
        timeout_s: seconds of one try, up to the last byte of its answer.
        max_attempts: tries of a request in all, where it may pass.
    """

    url: str
    token_var: str | None = None
    timeout_s: float = 90.0
    max_attempts: int = MAX_ATTEMPTS

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"the dataserver's URL {self.url!r} is not an HTTP address; give one like 'http://127.0.0.1:9000'."
            )
        object.__setattr__(self, "url", self.url.rstrip("/"))

    def meta(self) -> ServerMeta:
        """Fetch the stages, the datasets and the limits of the server."""
        data = self.request("/v2/meta")
        try:
            stages = {name: data[name] for name in ("stages", "seed", "replacement")}
            sizes = {dataset["id"]: int(dataset["rows"]) for dataset in data["datasets"]}
            own = {name: data[name] for name in ("max_body_bytes", "grade_timeout_s") if data.get(name) is not None}
            limits, total_steps = RequestLimits(int(data["max_batch"]), **own), data["total_steps"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InfraError(
                f"the answer of {self.url} to /v2/meta is not a dataserver's ({type(error).__name__}: {error})."
            ) from error
        return ServerMeta(staged_curriculum_from(stages), sizes, total_steps, limits)

    def rows(self, dataset: str, page: int) -> Iterable[dict[str, Any]]:
        """Fetch all samples of one dataset, in order; `page` of them a request."""
        offset, total = 0, 1
        while offset < total:
            answer = self.request("/v2/rows", {"dataset": dataset, "offset": offset, "limit": page})
            yield from answer["samples"]
            offset, total = offset + page, answer["total"]

    def samples(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Fetch the samples of a block or a part of it.

        Raises:
            InfraError: the server gave another number of them.
        """
        found: list[dict[str, Any]] = self.request("/v2/sample", body)["samples"]
        if len(found) != body["batch_size"]:
            raise InfraError(
                f"the dataserver at {self.url} was asked for {body['batch_size']} samples and gave {len(found)}."
            )
        return found

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """GET a route, or POST a body to it; returns its JSON.

        Raises:
            ConfigError: the server refuses the request; it would refuse it again.
            InfraError: it gave no usable answer, also after all retries.
        """
        return run_blocking(lambda: self.request_async(path, None if body is None else encoded(body)))

    async def request_async(self, path: str, data: bytes | None = None, timeout_s: float | None = None) -> Any:
        """Send a request as `request` does, on an event loop, the body encoded; `timeout_s` replaces the server's."""
        import aiohttp

        # a session a request: scoring runs on any loop, and none is known to be the last
        timeout = aiohttp.ClientTimeout(total=self.timeout_s if timeout_s is None else timeout_s)
        async with aiohttp.ClientSession(timeout=timeout, headers=self._headers()) as session:
            policy = RetryPolicy(max_attempts=self.max_attempts, base_s=_BACKOFF_S)
            try:
                return await retry(functools.partial(self._try, session, path, data), policy)
            except ProviderError as error:
                raise InfraError(f"the dataserver at {self.url} gave no answer: {error}.") from error

    async def _try(self, session: Any, path: str, data: bytes | None) -> Any:
        import aiohttp

        # redirects are not followed: they would carry the token to another host, and make a GET of a POST
        options: dict[str, Any] = {"data": data, "proxy": proxy_for(self.url), "allow_redirects": False}
        try:
            async with session.request("GET" if data is None else "POST", self.url + path, **options) as response:
                if 300 <= response.status < 400:
                    raise self._redirected(path, response.status, response.headers.get("Location"))
                status, content = response.status, await response.read()
        except TimeoutError as error:
            raise RetryableError(f"{path}: no answer within {session.timeout.total:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise RetryableError(f"{path}: {error or type(error).__name__}") from error
        return self._read(path, status, content)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.token_var is not None:
            token = os.environ.get(self.token_var, "")
            if not token:
                raise ConfigError(
                    f"the dataserver's token_var names the variable {self.token_var!r}, which is not set; set it."
                )
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _read(self, path: str, status: int, content: bytes) -> Any:
        if status == 200:
            try:
                return json.loads(content)
            except ValueError as error:
                raise RetryableError(f"{path} answered with invalid JSON: {content[:_QUOTED_BYTES]!r}") from error
        said = _message(content)
        if status_may_pass(status):
            raise RetryableError(f"{path} answered with status {status}: {said}")
        hint = "; raise max_body_mib or max_batch under `server` in its file" if status == 413 else ""
        raise ConfigError(f"the dataserver at {self.url} refused {path} with status {status}: {said}{hint}.")

    def _redirected(self, path: str, status: int, location: str | None) -> ConfigError:
        return ConfigError(
            f"the dataserver at {self.url} answered {path} with status {status}, a redirect to {location!r}, "
            "which is not followed; give the address that it names."
        )


# -- grades ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of one completion: a reward, or the error in its place."""

    reward: float | None
    metrics: Mapping[str, float]
    error: str | None


@dataclass(frozen=True, slots=True)
class RemoteGrader:
    """The grading of completions by a dataserver.

    Attributes:
        server: the dataserver.
        limits: bounds of one request.
        max_items: completions in one request, where the server takes more.
    """

    server: Dataserver
    limits: RequestLimits
    max_items: int | None = None

    def grades(self, items: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> list[Grade]:
        """Return the grade of each item, in order; joined on `completion_index`.

        Args:
            items: as /v2/grade takes them, each with a `completion_index` of its own.
            about: of all of them: `optimizer_step`, `generation_step`, `seed`, where known.

        Raises:
            ConfigError, InfraError: as `Dataserver.request`.
        """
        return run_blocking(lambda: self.grades_async(items, about))

    async def grades_async(self, items: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> list[Grade]:
        """Return what `grades` returns, on an event loop."""
        about = {"rank": rank_of_process(), **about}
        frame = _body(about, [])
        found: dict[int, Grade] = {}
        # an encoded item, and the comma after it
        sizes = [(item, data := encoded(item), len(data) + 1) for item in items]
        room = self.limits.max_body_bytes - len(frame)
        fitting = [entry for entry in sizes if entry[2] <= room]
        for item, _, size in sizes:
            if size > room:
                found[item["completion_index"]] = Grade(
                    None, {}, f"the completion is {size} bytes long, over the dataserver's max_body_mib"
                )
        timeout_s = max(self.server.timeout_s, self.limits.grade_timeout_s + _GRADE_MARGIN_S)
        most = min(self.limits.max_batch, self.max_items or self.limits.max_batch)
        for part in _whole_groups(fitting, most, room):
            body = _body(about, [data for _, data, _ in part])
            answer = await self.server.request_async("/v2/grade", body, timeout_s)
            found |= _joined([item for item, _, _ in part], answer)
        return [found[item["completion_index"]] for item in items]


_Sized = tuple[Mapping[str, Any], bytes, int]


def _body(about: Mapping[str, Any], items: Sequence[bytes]) -> bytes:
    return encoded(about)[:-1] + b', "items": [' + b",".join(items) + b"]}"


def _whole_groups(items: Sequence[_Sized], most: int, room: int) -> list[list[_Sized]]:
    """Cut items into parts of at most `most` and `room` bytes; completions of one sample together if they fit."""
    parts: list[list[_Sized]] = []
    left, free = 0, 0
    for group in _groups(items):
        size = sum(entry[2] for entry in group)
        if len(group) > left or size > free:
            left, free = 0, 0
        if len(group) > most or size > room:
            logger.warning(
                "the %d completions of sample %s (%d bytes) are more than a request to the dataserver holds and are "
                "graded in parts: a grader that compares them sees one part at a time.",
                len(group),
                group[0][0]["sample_id"],
                size,
            )
        for entry in group:
            if not left or entry[2] > free:
                parts.append([])
                left, free = most, room
            parts[-1].append(entry)
            left, free = left - 1, free - entry[2]
    return parts


def _groups(items: Sequence[_Sized]) -> list[list[_Sized]]:
    groups: list[list[_Sized]] = []
    for entry in items:
        if not groups or groups[-1][0][0]["sample_id"] != entry[0]["sample_id"]:
            groups.append([])
        groups[-1].append(entry)
    return groups


def _joined(items: Sequence[Mapping[str, Any]], answer: Any) -> dict[int, Grade]:
    """Return grades by index; an item that the answer lacks is a failed grade."""
    try:
        found = {result["completion_index"]: _grade(result) for result in answer["results"]}
    except (TypeError, KeyError, AttributeError) as error:
        raise InfraError(f"the dataserver's answer to /v2/grade cannot be read: {answer!r:.300}.") from error
    missing = Grade(None, {}, "the answer has no result for it")
    return {item["completion_index"]: found.get(item["completion_index"], missing) for item in items}


def _grade(result: Mapping[str, Any]) -> Grade:
    reward, metrics = result.get("reward"), result.get("metrics") or {}
    if reward is None:
        return Grade(None, {}, str(result.get("error") or "no reward was given"))
    if not is_finite_number(reward):
        return Grade(None, {}, f"no finite reward was given, but {reward!r:.40}")
    return Grade(
        float(reward), {name: float(value) for name, value in metrics.items() if is_finite_number(value)}, None
    )


def completion_for_wire(completion: Any) -> str | list[dict[str, Any]]:
    """Return a completion as /v2/grade takes it: a text, or messages with the fields for graders."""
    if isinstance(completion, str):
        return _encodable(completion)
    messages = []
    for message in completion:
        fields = dict(message) if isinstance(message, Mapping) else {"role": "assistant"}
        kept = {name: fields[name] for name in ("role", "name", "tool_call_id") if fields.get(name)}
        messages.append({**kept, "content": _encodable(message_text(message))})
    return messages


def _encodable(text: str) -> str:
    """Replace halves of surrogate pairs, which a tokenizer may give and no JSON reader takes."""
    return text.encode("utf-8", "replace").decode()


# -- encoding --------------------------------------------------------------------------------------------------


def encoded(value: Any) -> bytes:
    """Encode a value as JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def rank_of_process() -> int:
    """Return the rank that a launcher gave this process; 0 without one."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


def _message(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:_QUOTED_BYTES].decode(errors="replace")
