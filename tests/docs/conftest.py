"""A browser to look at the site with, and a place for the wheels of this checkout."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from chromium import Page, opened_browser


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a path for the wheels, the same on each worker of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    made = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wheels"
    made.mkdir(exist_ok=True)
    return made / "dist"


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Page]:
    async with opened_browser(tmp_path / "profile") as page:
        yield page
