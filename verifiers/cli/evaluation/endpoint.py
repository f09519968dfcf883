"""The endpoint of an evaluation: what the flags name, its key, its backend and limits."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.cli.arguments import CommandParser
from verifiers.errors import ConfigError, ProviderError

if TYPE_CHECKING:
    from verifiers.inference.endpoint import Backend
    from verifiers.inference.endpoint_registry import EndpointEntry
    from verifiers.inference.limiter import Limiter

__all__ = [
    "OPENAI_KEY",
    "add_endpoint_group",
    "attempt_timeout_s",
    "chosen_endpoint",
    "key_variables",
    "open_endpoint",
    "require_key",
    "require_listener",
]

OPENAI_KEY = "OPENAI_API_KEY"
OPENAI_URL = "https://api.openai.com/v1"
LISTENER_GRACE_S = 5.0
_FAKE_CONCURRENT = 32
_LONGEST_ATTEMPT_S = 600.0


def add_endpoint_group(parser: CommandParser) -> None:
    """Add the flags that name a model and its endpoint."""
    add = parser.group("model and endpoint")
    add(
        "-m",
        "--model",
        metavar="NAME",
        help="the model's name (default, beside -b: gpt-4.1-mini); 'fake' without -b needs no endpoint",
    )
    add(
        "-b",
        "--api-base-url",
        action="append",
        metavar="URL",
        help="base URL, with /v1; repeatable, for several servers of one model (default: OpenAI's)",
    )
    add("-k", "--api-key-var", metavar="VAR", help=f"variable that holds the API key (default: {OPENAI_KEY})")
    add("--header", action="append", default=[], metavar="'NAME: VALUE'", help="further HTTP header; repeatable")
    add(
        "-e",
        "--endpoints-path",
        metavar="FILE",
        help="registry of endpoints (TOML, or endpoints.py); -m names one (default: the first of ./endpoints.toml, "
        "./configs/endpoints.toml, ./endpoints.py, ./configs/endpoints.py and ~/.config/verifiers/endpoints.toml "
        "that has the name)",
    )


def chosen_endpoint(args: argparse.Namespace) -> tuple[EndpointEntry, Path | None]:
    """Return the endpoint that the flags name: an entry of a registry, the built-in fake, or what they spell out.

    Returns:
        The endpoint, and the registry that was found without a flag where it is from there.

    Raises:
        ConfigError: flags that contradict each other, or a registry that cannot be read.
    """
    from verifiers.inference.endpoint_registry import EndpointEntry, discover_endpoint, find_endpoint
    from verifiers.testing.fake_model import FAKE_MODEL, FAKE_URL

    headers = dict(_header(text) for text in args.header)
    if args.endpoints_path is not None:
        if args.api_base_url or args.header:
            raise ConfigError("--endpoints-path names the endpoint; leave --api-base-url and --header out.")
        return find_endpoint(args.model, args.endpoints_path), None
    urls = tuple(args.api_base_url or ([FAKE_URL] if args.model == FAKE_MODEL else []))
    if not urls:
        found = discover_endpoint(args.model)
        if found is not None and args.header:
            raise ConfigError(
                f"-m {args.model} is an endpoint of {str(found[1])!r}; put the headers there, or give --api-base-url."
            )
        if found is not None:
            return found
    spelled = EndpointEntry(
        args.model, args.model, urls or (OPENAI_URL,), key_var=args.api_key_var or OPENAI_KEY, headers=headers
    )
    return spelled, None


def attempt_timeout_s(args: argparse.Namespace, entry: EndpointEntry) -> float:
    """Return the deadline of one HTTP attempt: the flag's, the entry's, else one with time for two more tries."""
    given: float | None = args.attempt_timeout or entry.attempt_timeout_s
    return given or min(_LONGEST_ATTEMPT_S, args.rollout_timeout / 3)


def key_variables(entry: EndpointEntry) -> Iterator[str]:
    """Return the environment variables whose values are this endpoint's secrets."""
    yield entry.key_var
    yield from entry.header_vars.values()


def open_endpoint(args: argparse.Namespace, entry: EndpointEntry, dataset: Any, env: Any) -> tuple[Backend, Limiter]:
    """Return the backend of an endpoint and what may be in flight on it.

    Args:
        dataset, env: whose rows and parsers the built-in fake endpoint knows.

    Raises:
        ConfigError: an address or a limit that cannot work.
    """
    from verifiers.evals.evaluation_loop import iter_requests
    from verifiers.inference.endpoint_registry import open_backend
    from verifiers.inference.limiter import Limiter, limiter_for
    from verifiers.testing.fake_model import FAKE_URL, FakeEndpoint, play_judges

    if entry.urls == (FAKE_URL,):
        limit = _FAKE_CONCURRENT if args.max_concurrent is None else args.max_concurrent

        def parser_of(task: str) -> Any:
            member = env.get_env_for_task(task) if hasattr(env, "get_env_for_task") else env
            return getattr(member, "parser", None)

        if play_judges(env, args.seed) and not args.json:
            print("vf-eval: the built-in fake endpoint answers for the judge, too", file=sys.stderr)
        return FakeEndpoint(iter_requests(dataset, 1, None), parser_of, args.seed), Limiter(limit)
    limiter = limiter_for(
        entry.urls,
        args.max_concurrent,
        maximum=entry.max_concurrent,
        requests_per_second=args.requests_per_second or entry.requests_per_second,
    )
    return open_backend(entry, attempt_timeout_s=attempt_timeout_s(args, entry)), limiter


def require_key(args: argparse.Namespace, entry: EndpointEntry) -> None:
    """Raise ConfigError where the key that a flag names, or that OpenAI asks for, is not set."""
    asks = any(urllib.parse.urlsplit(url).hostname == "api.openai.com" for url in entry.urls)
    if (asks or args.api_key_var == entry.key_var) and not os.environ.get(entry.key_var):
        raise ConfigError(
            f"the environment variable {entry.key_var!r} holds no key for {entry.urls[0]}; set it, name another "
            "by -k, or give a server's address by -b."
        )


async def require_listener(entry: EndpointEntry) -> None:
    """Make sure that something listens where the servers of this machine should be.

    Rollouts wait for a server that restarts; a mistaken port should fail without that wait.

    Raises:
        ProviderError: all servers are on this machine, and none takes a connection within `LISTENER_GRACE_S`.
    """
    from verifiers.inference.endpoint import is_loopback
    from verifiers.testing.fake_model import FAKE_URL

    if FAKE_URL in entry.urls or not all(is_loopback(url) for url in entry.urls):
        return
    until = time.monotonic() + LISTENER_GRACE_S
    while True:
        for url in entry.urls:
            parts = urllib.parse.urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            try:
                _, writer = await asyncio.open_connection(parts.hostname, port)
            except OSError as error:
                problem = error
            else:
                writer.close()
                return
        if time.monotonic() > until:
            break
        await asyncio.sleep(0.2)
    raise ProviderError(
        f"{', '.join(entry.urls)} could not be reached: {problem}; start the server, or give its address with -b."
    )


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise ConfigError(f"--header is {text!r}; give it as 'Name: value'.")
    return name.strip(), value.strip()
