"""The check that every size of a run goes through."""

from __future__ import annotations

from verifiers.errors import ConfigError

__all__ = ["check_size"]


def check_size(name: str, value: object, minimum: int) -> int:
    """Return `value` where it is a whole number of at least `minimum`.

    Raises:
        ConfigError: it is not; the message names the setting, the value and the bound.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} is {value!r}, but it must be a whole number of at least {minimum}.")
    return value
