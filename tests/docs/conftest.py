"""A browser to look at the site with."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "reports"))
sys.path.insert(0, str(Path(__file__).parent))

from chromium import Page, opened_browser


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Page]:
    async with opened_browser(tmp_path / "profile") as page:
        yield page
