"""Install hints for missing extras and server packages.

On PyPI the name `verifiers` belongs to another project. A requirement on exactly the installed version is already
met, so that an installer fetches only what the extra adds.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

EXTRAS = {
    # what came with 0.1.x, so that its packages import it without requiring it
    **dict.fromkeys(("httpx", "jinja2", "nest_asyncio", "numpy", "requests", "tenacity"), "classic"),
    **dict.fromkeys(("accelerate", "peft", "safetensors", "torch", "transformers", "trl"), "train"),
    "anthropic": "anthropic",
    "gymnasium": "gym",
    "mcp": "mcp",
    "opentelemetry": "otel",
    "ray": "ray",
    "reasoning_gym": "rg",
    "textarena": "ta",
}
"""The extra that brings a module."""

SERVERS = ("dataserver", "embedded", "vllm")
"""Packages in servers/, each named verifiers-NAME."""

_CHECKOUT = Path(__file__).resolve().parents[1]


def installer() -> list[str]:
    """Return the command that installs: uv's in a virtual environment, which may be without pip, else pip's."""
    uv = shutil.which("uv")
    if uv is not None and sys.prefix != sys.base_prefix:
        return [uv, "pip", "install", "--python", sys.executable]
    return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]


def missing_extra(what: str, error: ImportError) -> str | None:
    """Return the sentence for what failed to import a module that an extra brings; None for any other module."""
    missing = (error.name or "").partition(".")[0]
    if missing not in EXTRAS:
        return None
    return f"{what} needs {missing}, which is not installed or does not fit; {install_hint(EXTRAS[missing])}."


def install_hint(part: str, of: str = "verifiers") -> str:
    """Return how to install a missing part, as the end of an error message.

    Args:
        part: an extra of the package `of`, or the name of a server package: embedded, dataserver or vllm.
        of: the package whose extra it is.
    """
    if part in SERVERS:
        command = _server_command(part)
        return f"install it by `{command}`" if command else f"install verifiers-{part} from {_place()}"
    try:
        return f"install it by `pip install '{of}[{part}]=={metadata.version(of)}'`"
    except metadata.PackageNotFoundError:
        # a checkout that is on the path without being installed
        return f"install it by `pip install -e {shlex.quote(f'{_CHECKOUT}[{part}]')}`"


def _place() -> str:
    url = urlsplit(_origin().get("url", ""))
    where = "the place that verifiers was installed from"
    # neither a password nor a signed query
    return f"{where}, {url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}" if url.scheme else where


def _server_command(server: str) -> str | None:
    """Return the command for a server package from the place of verifiers; None where that place has none."""
    # vLLM's CUDA build is an extra: its CPU build needs another recipe, which install.sh has
    extra = "[cuda]" if server == "vllm" else ""
    origin = _origin()
    if "vcs_info" in origin:
        repository = f"{origin['url']}@{origin['vcs_info']['commit_id']}"
        return f"pip install 'verifiers-{server}{extra} @ git+{repository}#subdirectory=servers/{server}'"
    address = urlsplit(origin.get("url", ""))
    place = Path(unquote(address.path)) if address.scheme == "file" else _CHECKOUT
    if (folder := place / "servers" / server).is_dir():
        quoted = shlex.quote(str(folder))
        return f"{quoted}/install.sh cuda" if server == "vllm" else f"pip install {quoted}"
    if wheels := sorted(place.parent.glob(f"verifiers_{server}-*.whl")):
        return f"pip install {shlex.quote(f'{wheels[-1]}{extra}')}"
    return None


def _origin() -> dict[str, Any]:
    """Return where verifiers was installed from, as PEP 610 records it; empty for a wheel from an index."""
    try:
        text = metadata.distribution("verifiers").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, Any] = json.loads(text or "{}")
    return found
