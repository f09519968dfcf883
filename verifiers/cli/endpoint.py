"""The model of `vf-eval` and `vf-gateway`: the flags that name it, its endpoint, key and limits."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
import urllib.parse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verifiers.cli.main import AddFlag, CommandParser, json_object
from verifiers.errors import ConfigError, ProviderError

if TYPE_CHECKING:
    from verifiers.inference.endpoint import Backend
    from verifiers.inference.endpoint_registry import EndpointEntry
    from verifiers.log import Redactor

SAMPLING_ARGS = ("temperature", "top_p", "max_tokens", "stop", "seed", "frequency_penalty", "presence_penalty")
OPENAI_KEY = "OPENAI_API_KEY"
OPENAI_URL = "https://api.openai.com/v1"
LISTENER_GRACE_S = 5.0
_LONGEST_ATTEMPT_S = 600.0


def add_endpoint_group(parser: CommandParser) -> None:
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


def add_timeouts(add: AddFlag, what: str) -> None:
    """Add the deadlines of a rollout, which the command calls `what`, and of an attempt."""
    told = f"deadline of one {what}, seconds"
    add("--rollout-timeout", type=float, above=0, default=1800.0, metavar="S", help=told)
    add(
        "--attempt-timeout",
        type=float,
        above=0,
        metavar="S",
        help="deadline of one HTTP attempt, seconds (default: a third of --rollout-timeout, at most 600)",
    )


def add_grading_timeout(add: AddFlag) -> None:
    told = "deadline for one prompt's rollouts, seconds"
    add("--grading-timeout", type=float, above=0, default=120.0, metavar="S", help=told)


def add_sampling_group(parser: CommandParser, owner: str) -> AddFlag:
    """Add the flags of sampling, whose defaults are the owner's, and return what adds more to their group."""
    add = parser.group("sampling")
    told = f"tokens of one answer (default: the {owner}'s)"
    add("-t", "--max-tokens", type=int, at_least=1, metavar="N", help=told)
    add("-T", "--temperature", type=float, at_least=0, metavar="X", help=f"0 is greedy (default: the {owner}'s)")
    add("-S", "--sampling-args", default="{}", metavar="JSON", help="further OpenAI sampling arguments")
    return add


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling arguments that the flags give; raise ConfigError for one that cannot be."""
    from verifiers.keywords import check_keywords

    sampling = json_object("--sampling-args", args.sampling_args)
    check_keywords("--sampling-args", sampling, SAMPLING_ARGS)
    given = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    return sampling | {name: value for name, value in given.items() if value is not None}


def chosen_endpoint(args: argparse.Namespace, command: str) -> EndpointEntry:
    """Return the endpoint that the flags name: an entry of a registry, the built-in fake, or what they spell out.

    Raises:
        ConfigError: flags that contradict each other, no model, a registry that cannot be read, or a key that a flag
            names, or that OpenAI asks for, and that is not set.
    """
    from verifiers.inference.endpoint_registry import EndpointEntry, discover_endpoint, find_endpoint, is_variable
    from verifiers.testing.fake_model import FAKE_MODEL, FAKE_URL

    if args.model == "" or (args.model is None and not args.api_base_url):
        raise ConfigError("-m is missing: name a model, or 'fake' for the built-in one, which needs no endpoint.")
    args.model = args.model or "gpt-4.1-mini"
    if args.api_key_var and not is_variable(args.api_key_var):
        # not quoted: it may well be the key itself
        raise ConfigError(
            "--api-key-var is not an environment variable's name; put the key into a variable, and give its name."
        )
    from verifiers.inference.endpoint import check_base_url

    headers = dict(_header(text) for text in args.header)
    for url in args.api_base_url or ():
        check_base_url(url)
    urls = tuple(args.api_base_url or ([FAKE_URL] if args.model == FAKE_MODEL else []))
    if args.endpoints_path is not None:
        if args.api_base_url or args.header:
            raise ConfigError("--endpoints-path names the endpoint; leave --api-base-url and --header out.")
        entry = find_endpoint(args.model, args.endpoints_path)
    elif not urls and (found := discover_endpoint(args.model)) is not None:
        entry, registry = found
        if args.header:
            raise ConfigError(
                f"-m {args.model} is an endpoint of {str(registry)!r}; put the headers there, or give --api-base-url."
            )
        from verifiers.log import url_without_secrets

        # a key goes to this address because of a file that no flag named
        url = url_without_secrets(entry.urls[0])
        print(f"{command}: -m {args.model} is {entry.model} at {url}, as {registry} says", file=sys.stderr)
    else:
        key_var = args.api_key_var or OPENAI_KEY
        entry = EndpointEntry(args.model, args.model, urls or (OPENAI_URL,), key_var=key_var, headers=headers)
    asks = any(urllib.parse.urlsplit(url).hostname == "api.openai.com" for url in entry.urls)
    if (asks or args.api_key_var == entry.key_var) and not os.environ.get(entry.key_var):
        raise ConfigError(
            f"the environment variable {entry.key_var!r} holds no key for {entry.urls[0]}; set it, name another "
            "by -k, or give a server's address by -b."
        )
    return entry


def typed_redactor(args: argparse.Namespace) -> Redactor:
    """Return what takes the key that the flags name out of texts, before it is known whose key it is."""
    from verifiers.log import Redactor, secrets_of_run

    return Redactor(secrets_of_run("", os.environ.get(args.api_key_var or OPENAI_KEY, ""), {}))


def endpoint_redactor(entry: EndpointEntry, arguments: Mapping[str, Any]) -> Redactor:
    """Return what takes the secrets of an endpoint, and of the arguments of a run, out of texts."""
    from verifiers.log import Redactor, secrets_of_run

    keys = [os.environ.get(name, "") for name in (entry.key_var, *entry.header_vars.values())]
    found = [secret for key in keys for secret in secrets_of_run("", key, {}, environ={})]
    found += [secret for url in entry.urls for secret in secrets_of_run(url, "", entry.headers, arguments)]
    return Redactor(found)


def attempt_timeout_s(args: argparse.Namespace, entry: EndpointEntry) -> float:
    """Return the deadline of one HTTP attempt: the flag's, the entry's, else one with time for two more tries."""
    given: float | None = args.attempt_timeout or entry.attempt_timeout_s
    return given or min(_LONGEST_ATTEMPT_S, args.rollout_timeout / 3)


def opened_model(
    args: argparse.Namespace, entry: EndpointEntry, rows: Any = (), env: Any = None, seed: int | None = None
) -> Backend:
    """Return the backend of an endpoint; the built-in fake one answers from rows, by the parsers of their tasks."""
    from verifiers.inference.endpoint_registry import open_backend
    from verifiers.testing.fake_model import FAKE_URL, FakeEndpoint

    if entry.urls != (FAKE_URL,):
        return open_backend(entry, attempt_timeout_s=attempt_timeout_s(args, entry))
    from verifiers.evals.evaluation_run import iter_requests

    return FakeEndpoint(
        iter_requests(rows, 1, None), lambda task: getattr(env.get_env_for_task(task), "parser", None), seed
    )


def endpoint_metadata(args: argparse.Namespace, entry: EndpointEntry) -> dict[str, Any]:
    """Return what is recorded of an endpoint and its limits; names of keys and headers, never their values."""
    from verifiers.log import url_without_secrets

    urls = [url_without_secrets(url) for url in entry.urls]
    return {
        "model": entry.model,
        "base_url": urls[0],
        "base_urls": urls,
        "endpoint": entry.name,
        "api": entry.api,
        "api_key_var": entry.key_var,
        "headers": sorted({*entry.headers, *entry.header_vars}),
        "max_concurrent": args.max_concurrent,
        "attempt_timeout_s": attempt_timeout_s(args, entry),
        "rollout_timeout_s": args.rollout_timeout,
    }


async def require_listener(entry: EndpointEntry) -> None:
    """Make sure that something listens where the servers of this machine should be.

    Rollouts wait for a server that restarts; a mistaken port should fail without that wait.

    Raises:
        ProviderError: all servers are on this machine, and none takes a connection within `LISTENER_GRACE_S`.
    """
    from verifiers.server_process import is_loopback
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
