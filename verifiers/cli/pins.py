"""Whether a package can be installed beside the `verifiers` that is here, which no installer may replace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from verifiers.errors import ConfigError

__all__ = ["Requirements", "read_requirements"]


@dataclass(frozen=True, slots=True)
class Requirements:
    """A package's requirements, with those on verifiers taken apart.

    Attributes:
        excluding: the first requirement that the installed verifiers does not meet; None where it meets all.
        extras: those of verifiers that the package asks for.
        others: requirements on everything else that apply here.
    """

    excluding: str | None
    extras: tuple[str, ...]
    others: tuple[str, ...]


def read_requirements(package: str, lines: Iterable[str], installed_version: str) -> Requirements:
    """Compare a package's requirements with the installed verifiers.

    A development version counts as what it is: 1.0.0.dev0 meets `>=0.1.4` and `>=1.0.0.dev0`, not `>=1.0` or `<0.2`.

    Args:
        lines: requirements as in a package's metadata (PEP 508).

    Raises:
        ConfigError: a line that is no requirement.
    """
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    excluding: str | None = None
    extras: set[str] = set()
    others: list[str] = []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            # its further lines point at the place with a caret
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"{package} has the requirement {line!r}, which is none: {reason}.") from error
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if canonicalize_name(requirement.name) != "verifiers":
            others.append(line)
            continue
        extras |= requirement.extras
        # a requirement with a URL asks for another copy of verifiers, whatever its version
        met = requirement.url is None and requirement.specifier.contains(installed_version, prereleases=True)
        if not met and excluding is None:
            excluding = line.partition(";")[0].strip()
    return Requirements(excluding, tuple(sorted(extras)), tuple(others))
