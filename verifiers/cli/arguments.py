"""What several commands take alike: JSON arguments, and the directory whose packages can be imported too."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from verifiers.errors import ConfigError

__all__ = ["ENVIRONMENTS_DIRECTORY", "json_object", "make_importable", "module_name"]

ENVIRONMENTS_DIRECTORY = "./environments"


def json_object(flag: str, text: str) -> dict[str, Any]:
    """The JSON object that was given for a flag.

    Raises:
        ConfigError: it is no JSON, or no object.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{flag} is {text!r}, which is no JSON ({error}); give an object like '{{\"n\": 1}}'."
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} is {text!r}; give a JSON object like '{{\"n\": 1}}'.")
    return value


def make_importable(directory: str) -> None:
    """Put a directory of environment packages, and each package in it, at the front of the import path."""
    # absolute, because worker processes that inherit it run elsewhere
    root = os.path.abspath(directory)
    if os.path.isdir(root):
        packages = (entry.path for entry in os.scandir(root) if entry.is_dir() and entry.name[0] not in "._")
        sys.path[:0] = [root, *sorted(packages)]


def module_name(env_name: str) -> str:
    """The module of an environment's name: underscores for hyphens."""
    return env_name.replace("-", "_")
