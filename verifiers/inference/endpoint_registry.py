"""The registry of endpoints: short names for a model, where it is served, and which variable holds its key.

Two forms are read. TOML:

    [endpoints.small]
    model = "my-model"
    urls = ["http://gpu1:8000/v1", "http://gpu2:8000/v1"]
    key_var = "GPU_KEY"

and the classic `endpoints.py`, whose `ENDPOINTS` dict is read as data: the file is never executed. Keys stand in
neither, only the names of the environment variables that hold them.
"""

from __future__ import annotations

import ast
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from verifiers.errors import ConfigError
from verifiers.inference.endpoint import MAX_ANSWER_MB, Backend, Endpoint, HttpBackend
from verifiers.inference.responses_api import ResponsesBackend
from verifiers.inference.server_pool import ServerPool

Api = Literal["chat", "responses"]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_URL = re.compile(r"https?://[^/]")


@dataclass(frozen=True, slots=True)
class EndpointEntry:
    """One endpoint of a registry. From a file it holds no secret, so that all of it may be stored with a run.

    Attributes:
        name: what `-m` calls it.
        key_var: environment variable that holds the API key.
        headers: further HTTP headers, none of them secret.
        header_vars: further HTTP headers whose values are secret: header name to environment variable.
        max_concurrent: rollouts in flight; on a remote provider the most that adaptive growth may reach.
        api: "chat" for chat completions and completions, "responses" for OpenAI's Responses API.
    """

    name: str
    model: str
    urls: tuple[str, ...]
    key_var: str = "OPENAI_API_KEY"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    header_vars: Mapping[str, str] = field(default_factory=dict)
    max_concurrent: int | None = None
    requests_per_second: float | None = None
    attempt_timeout_s: float | None = None
    api: Api = "chat"
    max_answer_mb: float | None = None


def load_endpoints(path: str | Path) -> dict[str, EndpointEntry]:
    """Read a registry, TOML or the classic `endpoints.py`.

    Raises:
        ConfigError: no such file, not of either form, or an entry that cannot work. A message quotes no value that
            could be a key.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the endpoint registry {str(path)!r} cannot be read: {error}.") from error
    entries = _from_python(path, text) if path.suffix == ".py" else _from_toml(path, text)
    return {name: _entry(path, name, settings) for name, settings in entries.items()}


def find_endpoint(name: str, path: str | Path) -> EndpointEntry:
    """Return the entry of that name in the registry at `path`.

    Raises:
        ConfigError: there is none; the message lists those that there are.
    """
    entries = load_endpoints(path)
    if name not in entries:
        raise ConfigError(f"{str(path)!r} has no endpoint {name!r}; it has {', '.join(sorted(entries)) or 'none'}.")
    return entries[name]


def registries() -> list[Path]:
    """Return the files in which registries are looked for, in this order: the working directory, then the user's own.

    `./endpoints.toml`, `./configs/endpoints.toml`, `./endpoints.py`, `./configs/endpoints.py`, and
    `verifiers/endpoints.toml` in `$XDG_CONFIG_HOME`, which is `~/.config` where it is not set.
    """
    own = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    here = ("endpoints.toml", "configs/endpoints.toml", "endpoints.py", "configs/endpoints.py")
    return [*map(Path, here), Path(own, "verifiers", "endpoints.toml")]


def discover_endpoint(name: str) -> tuple[EndpointEntry, Path] | None:
    """Return the entry of that name in the first of `registries` that has it, and that file, or None.

    Raises:
        ConfigError: one of them, up to the one that has it, cannot be read.
    """
    for path in registries():
        if path.is_file():
            entries = load_endpoints(path)
            if name in entries:
                return entries[name], path
    return None


def open_backend(entry: EndpointEntry, *, attempt_timeout_s: float | None = None) -> Backend:
    """Return the backend for an entry, with keys taken from the environment; "EMPTY" where there is no key.

    Args:
        entry: of a registry.
        attempt_timeout_s: wins over the entry's; 600 s where neither says.

    Raises:
        ConfigError: a variable named in `header_vars` is not set.
    """
    headers = dict(entry.headers)
    for header, variable in entry.header_vars.items():
        if not os.environ.get(variable):
            raise ConfigError(
                f"endpoint {entry.name!r} takes its header {header!r} from the environment variable {variable!r}, "
                "which is not set."
            )
        headers[header] = os.environ[variable].strip()
    key = os.environ.get(entry.key_var, "").strip() or "EMPTY"
    timeout_s = attempt_timeout_s or entry.attempt_timeout_s or 600.0
    kind = ResponsesBackend if entry.api == "responses" else HttpBackend
    limit_mb = entry.max_answer_mb or MAX_ANSWER_MB
    backends = [kind(Endpoint(url, key, headers, timeout_s=timeout_s, max_answer_mb=limit_mb)) for url in entry.urls]
    return backends[0] if len(backends) == 1 else ServerPool(backends)


def _from_toml(path: Path, text: str) -> dict[str, dict[str, Any]]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the endpoint registry {str(path)!r} is not valid TOML: {error}.") from error
    entries = data.get("endpoints")
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ConfigError(f"the endpoint registry {str(path)!r} has no tables [endpoints.NAME].")
    return entries


def _from_python(path: Path, text: str) -> dict[str, dict[str, Any]]:
    try:
        tree = ast.parse(text, filename=str(path))
    except (SyntaxError, ValueError) as error:
        # not chained: a traceback would print the line, and whatever key is in it
        raise ConfigError(f"the endpoint registry {str(path)!r} is not valid Python: {error}.") from None
    value: ast.expr | None = None
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "ENDPOINTS" for target in targets):
            value = getattr(node, "value", None)
    if value is None:
        raise ConfigError(f"the endpoint registry {str(path)!r} assigns no ENDPOINTS dict.")
    try:
        entries = ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ConfigError(
            f"ENDPOINTS in {str(path)!r}, line {value.lineno}, is computed, and the file is not executed; write it "
            'as a plain dict {"name": {"model": ..., "url": ..., "key": "VARIABLE"}}, or as TOML.'
        ) from error
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ConfigError(f"ENDPOINTS in {str(path)!r} is not a dict of dicts.")
    # classic files name the variable "key"
    return {
        str(name): {"key_var" if setting == "key" else str(setting): item for setting, item in entry.items()}
        for name, entry in entries.items()
    }


def _entry(path: Path, name: str, settings: Mapping[str, Any]) -> EndpointEntry:
    place = f"endpoint {name!r} in {str(path)!r}"
    known = {item.name for item in fields(EndpointEntry)} - {"name"} | {"url"}
    for setting in settings:
        if setting in ("key", "api_key"):
            raise ConfigError(
                f"{place} has {setting!r}; keys do not belong in files: give key_var, a variable's name."
            )
        if setting not in known:
            raise ConfigError(f"{place} has the unknown setting {setting!r}; it takes {', '.join(sorted(known))}.")
    chosen = {setting: value for setting, value in settings.items() if setting != "url"}
    chosen["urls"] = _urls(place, settings)
    if not isinstance(chosen.get("model"), str) or not chosen["model"]:
        raise ConfigError(f"{place} names no model.")
    if "key_var" in chosen:
        _check_variable(place, "key_var", chosen["key_var"])
    for table in ("headers", "header_vars"):
        value = chosen.setdefault(table, {})
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            raise ConfigError(f"{place}: {table} must be a table of strings.")
    for header, variable in chosen["header_vars"].items():
        _check_variable(place, f"header_vars.{header}", variable)
    for header in chosen["headers"]:
        if header.lower() in ("authorization", "api-key", "x-api-key"):
            raise ConfigError(f"{place} has the header {header!r}, which is a secret; give it in header_vars.")
    for number in ("max_concurrent", "requests_per_second", "attempt_timeout_s", "max_answer_mb"):
        value = chosen.get(number)
        whole = number == "max_concurrent"
        right = isinstance(value, int) or (isinstance(value, float) and not whole)
        if value is not None and (not right or isinstance(value, bool) or value <= 0):
            raise ConfigError(f"{place} has {number} = {value!r}; give a {'whole ' if whole else ''}number above 0.")
    if chosen.get("api", "chat") not in ("chat", "responses"):
        raise ConfigError(f"{place} has api = {chosen['api']!r}; give 'chat' or 'responses'.")
    return EndpointEntry(name=name, **chosen)


def _urls(place: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    if ("url" in settings) == ("urls" in settings):
        raise ConfigError(f"{place} must have either url or urls.")
    given = settings.get("urls", settings.get("url"))
    urls = [given] if isinstance(given, str) else given
    if not isinstance(urls, (list, tuple)) or not urls or not all(isinstance(url, str) for url in urls):
        raise ConfigError(f"{place} has {given!r} for base URLs; give one text, or a list of texts.")
    for url in urls:
        if not _URL.match(url):
            raise ConfigError(f"{place} has the base URL {url!r}; give one like 'http://127.0.0.1:8000/v1'.")
        if "@" in url.split("/")[2]:
            raise ConfigError(f"{place} has a password in a base URL; give it as a header in header_vars.")
    return tuple(url.rstrip("/") for url in urls)


def _check_variable(place: str, setting: str, value: Any) -> None:
    is_name = isinstance(value, str) and _VARIABLE.match(value)
    # keys of some providers have the form of a name; names of variables are in capitals, or set
    if not is_name or (value != value.upper() and value not in os.environ):
        # not quoted: it may well be the key itself
        raise ConfigError(
            f"{place} has a {setting} that is not an environment variable's name; put the key into a variable, and "
            "the variable's name here."
        )
