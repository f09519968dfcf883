"""Environments in a module that workers can import, and workers in the test's own event loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(params=["processes", pytest.param("ray", marks=pytest.mark.ray)])
def new_engine(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return what makes an engine of so many workers, of each kind that starts processes."""
    if request.param == "processes":
        from verifiers.workers.processes import ProcessEngine

        return ProcessEngine
    cluster = request.getfixturevalue("ray_cluster")
    from verifiers.workers.ray_engine import RayEngine

    return functools.partial(RayEngine, address=cluster.address)
