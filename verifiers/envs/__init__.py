"""Environments: what a policy is asked, and what answers it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["names_of_classic"]


def names_of_classic(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module in which `verifiers.classic` has further names."""

    def get(name: str) -> Any:
        if name.startswith("__"):
            # asked by `from ... import`
            raise AttributeError(name)
        from verifiers.classic.import_paths import classic_name

        return classic_name(module, name)

    return get
