"""Both ways of a model call out of this process: our own HTTP path, or a client object that the user handed in."""

from __future__ import annotations

import asyncio
import functools
import inspect
import io
import json
import re
import ssl
import sys
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from verifiers.concurrency import at_loop_end, is_async_function, threads_for
from verifiers.errors import ConfigError, OverlongPromptError, ProviderError
from verifiers.inference.retry import RetryableError, client_error, reason, retry_after_s, status_error
from verifiers.inference.wire import WireObject, read_completion, request_body, whole_characters, with_readable_calls
from verifiers.log import Redactor, secrets_of_run, url_without_secrets
from verifiers.server_process import is_loopback

if TYPE_CHECKING:
    import aiohttp


# labels of a name, which are not all numbers, or an address of version 4
_BYTE = r"(25[0-5]|(2[0-4]|1?\d)?\d)"
_HOST = re.compile(rf"(?![\d.]+$)([^\s.%\\]{{1,63}}\.)*[^\s.%\\]{{1,63}}\.?|{_BYTE}(\.{_BYTE}){{3}}")

_HEADER_NAME = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)


def check_base_url(url: str) -> None:
    """Raise ConfigError where a base URL is no address that every route can be added to."""
    problem = ""
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            problem = "is not an HTTP address"
        elif parts.username is not None or parts.password is not None:
            problem = "has a user or password in it; send that as a key or a header"
        elif parts.netloc.count(":") > 1 and "]" not in parts.netloc:
            problem = "has an IPv6 address without brackets"
        elif not re.fullmatch(r"[^\]]*(\](:.*)?)?", parts.netloc):
            problem = "has something behind the brackets of its address that is no port"
        elif ":" not in parts.hostname and not _HOST.fullmatch(parts.hostname):
            problem = "has a host that is neither a name nor an address"
        elif parts.port == 0:
            problem = "has port 0"
        elif parts.query or parts.fragment or re.search(r"[\s?#\x00-\x1f]", url):
            problem = "has a query, a fragment or white space in it"
    except ValueError as error:
        problem = f"cannot be read: {error}"
    if problem:
        shown = url_without_secrets(url)
        raise ConfigError(f"the base URL {shown!r} {problem}; give one like 'http://127.0.0.1:8000/v1'.")


def proxy_for(url: str) -> str | None:
    """Return the proxy that HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY give for a URL; None for loopback."""
    if is_loopback(url):
        return None
    parts = urllib.parse.urlsplit(url)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    scheme = urllib.parse.urlsplit(proxy).scheme
    if scheme not in ("http", "https"):
        # not the whole of it: it may hold a password
        raise ConfigError(
            f"the environment names a {scheme} proxy for {parts.hostname}, and only HTTP proxies are supported; "
            "set HTTPS_PROXY to one, or list the host in NO_PROXY."
        )
    return proxy


CHAT = "/chat/completions"
COMPLETIONS = "/completions"
# vLLM's routes for token ids: a conversation as ids, ids in and out, and ids as a chat completion
TOKENIZE = "/tokenize"
GENERATE = "/inference/v1/generate"
DERENDER = "/chat/completions/derender"
_TOKEN_ROUTES = frozenset({TOKENIZE, GENERATE, DERENDER})
_SENT_AT_ONCE = 2**20
_MOST_SYNCHRONOUS_CALLS = 32
# characters of an error that are looked at
_LONGEST_ERROR = 2**16
# a longer answer is parsed in a thread
_PARSED_AT_ONCE = 2**20
MAX_ANSWER_MB = 32
_ANSWERS_WITHOUT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL")
"""What OpenSSL, by its version, calls bytes that are no handshake."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of an OpenAI-compatible server, with key, headers and deadlines.

    Attributes:
        base_url: with the version, e.g. "http://127.0.0.1:8000/v1".
        api_key: sent as a bearer token; never logged or stored.
        timeout_s: deadline of one try of one call, in seconds.
        max_answer_mb: longest answer that is read, unpacked, in MiB; a longer one is a failed try.
    """

    base_url: str
    api_key: str = field(default="EMPTY", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 600.0
    connect_timeout_s: float = 10.0
    max_answer_mb: float = MAX_ANSWER_MB

    def __post_init__(self) -> None:
        check_base_url(self.base_url)
        for name, value in {"Authorization": self.api_key, **self.headers}.items():
            if re.search(r"[\r\n\0]", name + value):
                what = "API key" if value is self.api_key else f"header {name!r}"
                raise ConfigError(
                    f"the {what} for {self.base_url} has a line break in it, which no request can hold."
                )
            if not _HEADER_NAME.fullmatch(name):
                raise ConfigError(f"the header {name!r} for {self.base_url} has a name that no request can hold.")

    @classmethod
    def from_openai(cls, client: Any) -> Endpoint:
        """Return the endpoint that an `openai.OpenAI` or `openai.AsyncOpenAI` was configured with.

        The SDK's default of 5 s for a connection becomes our 10 s: a thousand at once take longer on one host.
        """
        timeout = client.timeout
        total = timeout if isinstance(timeout, (int, float)) else getattr(timeout, "read", None)
        connect = None if isinstance(timeout, (int, float)) else getattr(timeout, "connect", None)
        if timeout == getattr(sys.modules.get("openai"), "DEFAULT_TIMEOUT", None):
            connect = None
        headers = {
            "OpenAI-Organization": getattr(client, "organization", None),
            "OpenAI-Project": getattr(client, "project", None),
            **(getattr(client, "_custom_headers", None) or {}),
        }
        return cls(
            base_url=str(client.base_url).rstrip("/"),
            api_key=client.api_key if isinstance(client.api_key, str) else "EMPTY",
            # the SDK marks headers to leave out by objects of its own
            headers={name: value for name, value in headers.items() if isinstance(value, str)},
            timeout_s=float(total) if total else 600.0,
            connect_timeout_s=float(connect) if connect else 10.0,
        )


class Backend(Protocol):
    """One try of one model call. Retries, recording and limits are the caller's."""

    base_url: str
    api_key: str

    async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        """POST the keyword arguments of `create` to `path` ("/chat/completions" or "/completions").

        A backend that speaks HTTP also takes the token routes (`TOKENIZE`, `GENERATE`, `DERENDER`): then `arguments`
        are the body, and the answer is the plain JSON object.

        Raises:
            OverlongPromptError: the prompt does not fit the context.
            RetryableError: another try may succeed.
            ProviderError: it will not.
        """
        ...

    async def close(self) -> None: ...


class HttpBackend:
    """The hot path: OpenAI's wire format over aiohttp, one connection pool, no limit of its own."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.base_url = endpoint.base_url.rstrip("/")
        self._root = self.base_url.removesuffix("/v1")
        self.api_key = endpoint.api_key
        self._redact = Redactor(secrets_of_run(self.base_url, self.api_key, endpoint.headers, environ={}))
        self._has_answered = False
        self._session: aiohttp.ClientSession | None = None
        self._close_session: Callable[[], Awaitable[None]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def _open_session(self) -> aiohttp.ClientSession:
        import aiohttp

        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            timeout = aiohttp.ClientTimeout(
                total=self.endpoint.timeout_s, sock_connect=self.endpoint.connect_timeout_s
            )
            given = {name.lower() for name in self.endpoint.headers}
            ours = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
            headers = {name: value for name, value in ours.items() if name.lower() not in given}
            headers.update(self.endpoint.headers)
            # the limiter bounds what is in flight; a second bound here would only hide the queue. uvicorn, and so
            # vLLM, closes a connection that was idle for 5 s; a request that crosses that would be lost
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
            # looked up once: aiohttp's trust_env does so for every request, and replaces our key by .netrc's password
            proxy = proxy_for(self.base_url)
            self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector, proxy=proxy)
            # rubrics, and programs of several asyncio.run, have no place to close it
            self._close_session = at_loop_end(functools.partial(_close, self._session))
            self._loop = loop
        return self._session

    async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        if path in _TOKEN_ROUTES:
            data, field = await self.post(path, arguments), "message" if path == DERENDER else None
            return data if path == TOKENIZE else self.read(data, path, field, may_be_empty=True)
        body = request_body(arguments)
        if body.get("stream"):
            raise ConfigError(
                "stream=True was asked of a rollout's client, which records whole answers; leave it out."
            )
        if path == CHAT and isinstance(body.get("messages"), list):
            body["messages"] = [with_readable_calls(message) for message in body["messages"]]
        data = await self.post(path, body, arguments)
        return WireObject(self.read(data, path, "message" if path == CHAT else "text"))

    def read(self, data: dict[str, Any], path: str, field: str | None, **options: Any) -> dict[str, Any]:
        """Return an answer as `read_completion` does; errors do not quote key and headers."""
        try:
            return read_completion(data, self.base_url + path, field, **options)
        except Exception as error:
            self._redact.clean(error)
            raise

    async def post(
        self, path: str, body: Mapping[str, Any] | None, arguments: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """POST `body` as JSON, or GET without one, and return the JSON object of a 200.

        Errors do not quote key and headers.

        Of the arguments of `create` those about the call itself are heeded: extra_headers, extra_query, timeout.
        """
        try:
            return await self._request(path, body, arguments or {})
        except Exception as error:
            self._redact.clean(error)
            raise

    async def _request(
        self, path: str, body: Mapping[str, Any] | None, arguments: Mapping[str, Any]
    ) -> dict[str, Any]:
        import aiohttp

        session = self._open_session()
        url = (self._root if path in (TOKENIZE, GENERATE) else self.base_url) + path
        options: dict[str, Any] = {}
        if headers := arguments.get("extra_headers"):
            options["headers"] = headers
        if query := arguments.get("extra_query"):
            # as the SDK writes them
            texts = {name: json.dumps(value) if isinstance(value, bool) else value for name, value in query.items()}
            options["params"] = {name: value for name, value in texts.items() if value is not None}
        content = None if body is None else encoded(body)
        # a large one is written piece by piece, so that other calls have the loop between them
        sent = io.BytesIO(content) if content is not None and len(content) > _SENT_AT_ONCE else content
        method = "GET" if body is None else "POST"
        limit_s, timeout_s = self.endpoint.timeout_s, arguments.get("timeout")
        if timeout_s is not None:
            # a number of seconds, or the SDK's Timeout object
            given = timeout_s if isinstance(timeout_s, (int, float)) else getattr(timeout_s, "read", None)
            limit_s = float(given) if given else limit_s
            options["timeout"] = aiohttp.ClientTimeout(total=limit_s, sock_connect=self.endpoint.connect_timeout_s)
        try:
            # elsewhere neither the headers with their keys nor what is said is meant for
            async with session.request(method, url, data=sent, allow_redirects=False, **options) as response:
                place = response.headers.get("Location") if 300 <= response.status < 400 else None
                status, self._has_answered = response.status, True
                answer = await read_body(response, self.endpoint.max_answer_mb)
                retry_after = None if status == 200 else retry_after_s(response.headers)
        except aiohttp.ConnectionTimeoutError as error:
            raise RetryableError(
                f"{self.base_url} could not be reached within {self.endpoint.connect_timeout_s:g} s", unreachable=True
            ) from error
        except TimeoutError as error:
            raise RetryableError(f"no answer from {url} within {limit_s:g} s") from error
        except RetryableError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            if problem := await self._tls_problem(error):
                raise ProviderError(problem) from error
            text = f"{self.base_url} could not be reached: {reason(error)}"
            refused, unresolved = (
                isinstance(error, kind) for kind in (aiohttp.ClientConnectorError, aiohttp.ClientConnectorDNSError)
            )
            raise RetryableError(text, unreachable=True, broke=not refused, unresolved=unresolved) from error
        if status == 200:
            return await _decode(answer, url)
        if place is not None:
            there = url_without_secrets(urllib.parse.urljoin(url, place))
            raise ProviderError(f"{url} answered {status} and sends on to {there!r:.200}; give the base URL of that.")
        text = self._redact(answer.decode(errors="replace"))[:_LONGEST_ERROR]
        refusal = status_error(url, status, text, retry_after)
        if status == 404 and re.search(r"/v\d", self.base_url) is None:
            refusal = ProviderError(f"{refusal}; is the base URL {self.base_url}/v1?", status=status, body=text)
        raise refusal

    async def _tls_problem(self, error: Exception) -> str | None:
        """Return why no try can succeed, where client and server disagree about TLS; else None."""
        import aiohttp

        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return (
                f"the certificate of {self.base_url} cannot be verified ({error.certificate_error}); let "
                "SSL_CERT_FILE name a file with the certificate of who signed it."
            )
        if isinstance(error, aiohttp.ClientConnectorSSLError):
            found = error.os_error
            is_plain = isinstance(found, ssl.SSLError) and found.reason in _ANSWERS_WITHOUT_TLS
            return f"{self.base_url} does not speak TLS ({found}); is it http://?" if is_plain else None
        never_met = isinstance(error, aiohttp.ClientConnectorError) or proxy_for(self.base_url)
        if self._has_answered or never_met or not self.base_url.startswith("http://"):
            return None
        parts = urllib.parse.urlsplit(self.base_url)
        context = ssl._create_unverified_context()
        try:
            async with asyncio.timeout(self.endpoint.connect_timeout_s):
                _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, ssl=context)
        except (OSError, TimeoutError):
            return None
        writer.transport.abort()
        return f"{self.base_url} speaks TLS; is it https://?"

    async def close(self) -> None:
        close, self._session, self._close_session = self._close_session, None, None
        if close is not None and self._loop is asyncio.get_running_loop():
            await close()


async def _close(session: aiohttp.ClientSession) -> None:
    await session.close()
    # sockets are closed one iteration of the loop later, and the loop may end with this call
    await asyncio.sleep(0)


class ClientBackend:
    """A client object that is called as it was handed in: a mock, a wrapper, or an SDK class we do not replace.

    Its `chat.completions.create` / `completions.create` may be sync (run in a thread) or async. An SDK's own client
    (Azure's too) is told not to retry, as the caller does; wrappers and subclasses are left as they are.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self._calls = _without_retries(client)
        self.base_url = str(getattr(client, "base_url", None) or "")
        self.api_key = str(getattr(client, "api_key", ""))
        self._redact = Redactor(secrets_of_run(self.base_url, self.api_key, {}, environ={}))

    async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        if path in _TOKEN_ROUTES:
            raise ProviderError(f"this client object has no route {path}; give an Endpoint or a URL.", status=404)
        owner = self._calls.chat.completions if path == CHAT else self._calls.completions
        try:
            if _is_async(self._calls, owner.create):
                result = owner.create(**arguments)
            else:
                # it may block, or be a wrapper that gives a coroutine: either is welcome from a thread
                create = functools.partial(owner.create, **arguments)
                result = await threads_for("client", _MOST_SYNCHRONOUS_CALLS).run(create)
            answer = await result if inspect.isawaitable(result) else result
            if type(answer).__module__.startswith("openai.types."):
                # the SDK makes its objects of whatever came
                field = "message" if path == CHAT else "text"
                read_completion(answer.model_dump(warnings=False), self.base_url, field)
            return answer
        except (ProviderError, OverlongPromptError):
            raise
        except Exception as error:
            meaning = client_error(url_without_secrets(self.base_url), error)
            with self._redact.in_errors():
                if meaning is error:
                    raise
                raise meaning from error

    async def close(self) -> None:
        """Leave the client open: it belongs to the caller."""


def single_backend_for(client: Any) -> Backend:
    """Return the backend for a backend, an Endpoint, a base URL, an openai client, or an object shaped like one.

    A base URL is an Endpoint with the defaults. Plain `openai.OpenAI` and `openai.AsyncOpenAI` take HTTP with
    their base URL, key, headers and timeouts; subclasses (Azure), clients with an HTTP client or a `create` of their
    own, mocks and wrappers are called as given.
    """
    if hasattr(type(client), "call") and not hasattr(client, "chat"):
        backend: Backend = client
        return backend
    if isinstance(client, Endpoint):
        return HttpBackend(client)
    if isinstance(client, str):
        return HttpBackend(Endpoint(client))
    kind = type(client)
    if kind.__module__.split(".")[0] == "openai" and kind.__name__ in ("OpenAI", "AsyncOpenAI"):
        own_http = type(getattr(client, "_client", None)).__name__
        # a key that is looked up for each request, and query parameters, are left to the SDK
        special = getattr(client, "_api_key_provider", None) or getattr(client, "_custom_query", None)
        has_own = _is_patched(client) or own_http not in ("AsyncHttpxClientWrapper", "SyncHttpxClientWrapper")
        if client.api_key and not (has_own or special):
            return HttpBackend(Endpoint.from_openai(client))
    if not (hasattr(client, "chat") or hasattr(client, "completions")):
        raise ConfigError(
            f"the client is {client!r}, which has neither chat.completions nor completions; "
            "give an openai.AsyncOpenAI, an Endpoint, or a base URL."
        )
    return ClientBackend(client)


def _without_retries(client: Any) -> Any:
    """Return an SDK's client without its retry loop, over the same connections; anything else as it is."""
    kind = type(client)
    if kind.__module__.split(".")[0] != "openai" or not getattr(client, "max_retries", 0):
        # a copy of a wrapper or a subclass would lack its own state
        return client
    return client if _is_patched(client) else client.with_options(max_retries=0)


def _is_patched(client: Any) -> bool:
    """Return whether a part of this one object of the SDK was replaced."""
    chat = vars(client).get("chat")
    parts = [chat, getattr(chat, "completions", None)]
    is_foreign = any(part is not None and type(part).__module__.split(".")[0] != "openai" for part in parts)
    return is_foreign or "create" in vars(parts[1] or object) or "request" in vars(client)


def _is_async(client: Any, create: Any) -> bool:
    """Return whether calling `create` cannot block: an async function, or the async SDK's decorated one."""
    sdk = [kind.__name__ for kind in type(client).__mro__ if kind.__module__.split(".")[0] == "openai"]
    return is_async_function(create) or bool(sdk and sdk[0].startswith("Async"))


async def read_body(response: aiohttp.ClientResponse, max_mb: float) -> bytes:
    """Return an answer's body, unpacked, reading no more than the limit.

    Raises:
        RetryableError: it is longer.
    """
    pieces: list[bytes] = []
    left = int(max_mb * 2**20)
    async for piece in response.content.iter_any():
        left -= len(piece)
        if left < 0:
            raise RetryableError(
                f"{response.url} answered with more than {max_mb:g} MiB, which is all that is read; an endpoint's "
                "max_answer_mb sets that"
            )
        if pieces:
            # unpacked pieces follow one another without a wait
            await asyncio.sleep(0)
        pieces.append(piece)
    return b"".join(pieces)


def encoded(body: Mapping[str, Any]) -> bytes:
    """Return a body as it is sent; halves of surrogate pairs, which models do write, are U+FFFD."""
    try:
        text = json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    except TypeError as error:
        said = [message for message in body.get("messages") or () if not _is_json(message)]
        if said:
            # the environment's own words, and no setting that every rollout has
            raise TypeError(f"a message cannot be written as JSON ({error}): {said[0]!r:.200}; give text") from error
        raise ConfigError(f"a request body cannot be written as JSON: {error}") from error
    try:
        return text.encode()
    except UnicodeEncodeError:
        return whole_characters(text).encode()


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


async def _decode(content: bytes, url: str) -> dict[str, Any]:
    try:
        at_once = len(content) <= _PARSED_AT_ONCE
        data = json.loads(content) if at_once else await asyncio.to_thread(json.loads, content)
    except (ValueError, RecursionError) as error:
        raise RetryableError(f"{url} answered 200 with a body that is not JSON: {content[:200]!r}") from error
    if not isinstance(data, dict):
        raise RetryableError(f"{url} answered 200 with {type(data).__name__} instead of an object")
    return data
