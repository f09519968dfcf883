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
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from verifiers.errors import ConfigError
from verifiers.inference.endpoint import MAX_ANSWER_MB, Backend, Endpoint, HttpBackend, check_base_url
from verifiers.inference.responses_api import ResponsesBackend
from verifiers.inference.server_pool import ServerPool

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def is_variable(value: str) -> bool:
    # keys of some providers have the form of a name; names of variables are in capitals, or set
    return bool(_VARIABLE.match(value)) and (value == value.upper() or value in os.environ)


def _variable(value: str) -> str:
    if not is_variable(value):
        # not quoted: it may well be the key itself
        text = "it is not an environment variable's name; put the key into a variable, and the variable's name here"
        raise PydanticCustomError("variable", text)
    return value


def _base_url(value: str) -> str:
    try:
        check_base_url(value)
    except ConfigError as error:
        raise PydanticCustomError("url", "{problem}", {"problem": str(error)}) from None
    return value.rstrip("/")


def _without_secrets(headers: Mapping[str, str]) -> Mapping[str, str]:
    for header in headers:
        if header.lower() in ("authorization", "api-key", "x-api-key"):
            raise PydanticCustomError("secret", "{name} is a secret; give it in header_vars", {"name": header})
    return headers


Variable = Annotated[str, AfterValidator(_variable)]
Positive = Annotated[float, Field(gt=0, strict=True)]


@dataclass(frozen=True, slots=True)
class EndpointEntry:
    """One endpoint of a registry. From a file it holds no secret, so that all of it may be stored with a run.

    Attributes:
        key_var: environment variable that holds the API key.
        headers: further HTTP headers, none of them secret.
        header_vars: further HTTP headers whose values are secret: header name to environment variable.
        max_concurrent: rollouts in flight; on a remote provider the most that adaptive growth may reach.
        api: "chat" for chat completions and completions, "responses" for OpenAI's Responses API.
    """

    name: str
    model: Annotated[str, Field(min_length=1)]
    urls: Annotated[tuple[Annotated[str, AfterValidator(_base_url)], ...], Field(min_length=1)]
    key_var: Variable = "OPENAI_API_KEY"
    headers: Annotated[Mapping[str, str], AfterValidator(_without_secrets)] = field(default_factory=dict, repr=False)
    header_vars: Mapping[str, Variable] = field(default_factory=dict)
    max_concurrent: Annotated[int, Field(gt=0, strict=True)] | None = None
    requests_per_second: Positive | None = None
    attempt_timeout_s: Positive | None = None
    api: Literal["chat", "responses"] = "chat"
    max_answer_mb: Positive | None = None


_ENTRY = TypeAdapter(EndpointEntry)


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

    `attempt_timeout_s` wins over the entry's; it is 600 s where neither is given.
    """
    headers = dict(entry.headers)
    for header, variable in entry.header_vars.items():
        if not os.environ.get(variable):
            raise ConfigError(
                f"endpoint {entry.name!r} takes its header {header!r} from the environment variable {variable!r}, "
                "which is not set."
            )
        headers[header] = _secret_in(variable)
    key = _secret_in(entry.key_var) or "EMPTY"
    timeout_s = attempt_timeout_s or entry.attempt_timeout_s or 600.0
    kind = ResponsesBackend if entry.api == "responses" else HttpBackend
    limit_mb = entry.max_answer_mb or MAX_ANSWER_MB
    backends = [kind(Endpoint(url, key, headers, timeout_s=timeout_s, max_answer_mb=limit_mb)) for url in entry.urls]
    return backends[0] if len(backends) == 1 else ServerPool(backends)


def _secret_in(variable: str) -> str:
    """Return what a variable holds, without white space around it; raise ConfigError for a line break inside."""
    value = os.environ.get(variable, "").strip()
    if re.search(r"[\r\n\0]", value):
        raise ConfigError(f"the environment variable {variable!r} holds a key with a line break in it; set it again.")
    return value


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
    if ("url" in settings) == ("urls" in settings):
        raise ConfigError(f"{place} must have either url or urls.")
    chosen = {setting: value for setting, value in settings.items() if setting != "url"}
    urls = settings.get("urls", settings.get("url"))
    chosen["urls"] = [urls] if isinstance(urls, str) else urls
    try:
        return _ENTRY.validate_python({"name": name, **chosen})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        setting = ".".join(map(str, first["loc"]))
        # not chained: it would quote what may be a key
        raise ConfigError(f"{place}: {setting}: {first['msg']}.") from None
