"""Models by their name on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from verifiers_embedded.errors import StartError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def is_hub_name(text: str) -> bool:
    """Return true where a text could be OWNER/NAME. A path can look like one, too: see first if it is a directory."""
    return _NAME.fullmatch(text) is not None


def from_hub(name: str) -> Path:
    """Return the directory of a model that is downloaded, unless the local cache has it already.

    Raises:
        StartError: there is no such model, or it cannot be reached.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:
        # the network, the hub and the cache each fail in their own ways
        reason = str(error).strip().splitlines() or [""]
        raise StartError(
            f"--model {name!r} is no directory here, and cannot be had from the hub "
            f"({type(error).__name__}: {reason[0]}); give a directory, or check the name and the network",
            1,
        ) from error
