"""What vf-eval is asked to run: the endpoint that its flags name, and the plan that metadata.json begins with."""

from __future__ import annotations

import argparse
import asyncio
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError, ProviderError

if TYPE_CHECKING:
    from verifiers.evals.endpoints import EndpointEntry
    from verifiers.rollouts.endpoint import Backend
    from verifiers.rollouts.limits import Limiter

__all__ = [
    "OPENAI_URL",
    "attempt_timeout_s",
    "chosen_endpoint",
    "key_variables",
    "open_endpoint",
    "require_listener",
    "run_plan",
]

OPENAI_URL = "https://api.openai.com/v1"
LISTENER_GRACE_S = 5.0
_FAKE_CONCURRENT = 32
_LONGEST_ATTEMPT_S = 600.0


def chosen_endpoint(args: argparse.Namespace, headers: Mapping[str, str]) -> tuple[EndpointEntry, Path | None]:
    """The endpoint that the flags name: an entry of a registry, the built-in fake, or what they spell out.

    Returns:
        The endpoint, and the registry that was found without a flag where it is from there.

    Raises:
        ConfigError: flags that contradict each other, or a registry that cannot be read.
    """
    from verifiers.evals.endpoints import EndpointEntry, discover_endpoint, find_endpoint
    from verifiers.evals.fake_endpoint import FAKE_MODEL, FAKE_URL

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
        args.model, args.model, urls or (OPENAI_URL,), key_var=args.api_key_var, headers=dict(headers)
    )
    return spelled, None


def attempt_timeout_s(args: argparse.Namespace, entry: EndpointEntry) -> float:
    """Deadline of one HTTP attempt: the flag's, the entry's, else short enough for a hang to be tried again twice."""
    given: float | None = args.attempt_timeout or entry.attempt_timeout_s
    return given or min(_LONGEST_ATTEMPT_S, args.rollout_timeout / 3)


def key_variables(entry: EndpointEntry) -> Iterator[str]:
    """The environment variables whose values are this endpoint's secrets."""
    yield entry.key_var
    yield from entry.header_vars.values()


def open_endpoint(args: argparse.Namespace, entry: EndpointEntry, dataset: Any, env: Any) -> tuple[Backend, Limiter]:
    """The backend of an endpoint and what may be in flight on it.

    Args:
        dataset, env: whose rows and parsers the built-in fake endpoint knows.

    Raises:
        ConfigError: an address or a limit that cannot work.
    """
    from verifiers.evals.endpoints import open_backend
    from verifiers.evals.fake_endpoint import FAKE_URL, FakeEndpoint
    from verifiers.evals.runner import iter_requests
    from verifiers.rollouts.adaptive import limiter_for
    from verifiers.rollouts.limits import Limiter

    if entry.urls == (FAKE_URL,):
        limit = _FAKE_CONCURRENT if args.max_concurrent is None else args.max_concurrent

        def parser_of(task: str) -> Any:
            member = env.get_env_for_task(task) if hasattr(env, "get_env_for_task") else env
            return getattr(member, "parser", None)

        return FakeEndpoint(iter_requests(dataset, 1, None), parser_of, args.seed), Limiter(limit)
    limiter = limiter_for(
        entry.urls,
        args.max_concurrent,
        maximum=entry.max_concurrent,
        requests_per_second=args.requests_per_second or entry.requests_per_second,
    )
    return open_backend(entry, attempt_timeout_s=attempt_timeout_s(args, entry), seed=args.seed or 0), limiter


def run_plan(
    args: argparse.Namespace,
    entry: EndpointEntry,
    env_args: Mapping[str, Any],
    sampling: Mapping[str, Any],
    dataset: Any,
) -> dict[str, Any]:
    """What metadata.json says before the first rollout; names of keys and headers, never their values."""
    from verifiers.evals.hiding import url_without_secrets
    from verifiers.evals.provenance import environment_provenance, git_provenance, versions
    from verifiers.evals.resume import fingerprint

    urls: Sequence[str] = [url_without_secrets(url) for url in entry.urls]
    return {
        "env": args.env,
        **environment_provenance(args.env),
        "env_args": dict(env_args),
        "prompts": fingerprint(dataset),
        "model": entry.model,
        "base_url": urls[0],
        "base_urls": list(urls),
        "endpoint": entry.name,
        "api": entry.api,
        "api_key_var": entry.key_var,
        "headers": sorted({*entry.headers, *entry.header_vars}),
        "sampling_args": dict(sampling),
        "num_examples": len(dataset),
        "rollouts_per_example": args.rollouts_per_example,
        "seed": args.seed,
        "max_concurrent": args.max_concurrent,
        "requests_per_second": args.requests_per_second,
        "attempt_timeout_s": attempt_timeout_s(args, entry),
        "rollout_timeout_s": args.rollout_timeout,
        "versions": versions(),
        "git": git_provenance(),
    }


async def require_listener(entry: EndpointEntry) -> None:
    """Make sure that something listens where the servers of this machine should be.

    Rollouts are patient with a server that is started anew; a mistaken port should not cost that patience.

    Raises:
        ProviderError: all servers are on this machine, and none takes a connection within `LISTENER_GRACE_S`.
    """
    from verifiers.evals.fake_endpoint import FAKE_URL
    from verifiers.rollouts.proxies import is_loopback

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
