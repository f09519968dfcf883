"""The site: what its navigation promises, an entry for each public name, and pages that fit a screen."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SETTINGS = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CUT_LINES = """
Array.from(document.querySelectorAll('pre, pre > code'))
  .filter(block => block.scrollWidth > block.clientWidth && getComputedStyle(block).display !== 'inline')
  .map(block => block.textContent.slice(0, 80))
"""


def navigation(entries: list[Any]) -> Iterator[tuple[str, str]]:
    for entry in entries:
        for title, target in entry.items():
            if isinstance(target, str):
                yield title, target
            else:
                yield from navigation(target)


def names_with_an_entry() -> list[str]:
    pages = sorted((DOCS / "reference" / "api").glob("*.md"))
    return [name for page in pages for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)]


def test_each_page_is_in_the_navigation_under_its_own_title() -> None:
    titles = {path: title for title, path in navigation(SETTINGS["nav"])}
    headings = {
        str(page.relative_to(DOCS)): re.search(r"^# (.+)$", page.read_text(), re.MULTILINE)[1]  # type: ignore[index]
        for page in DOCS.rglob("*.md")
    }
    assert titles == headings


def test_programs_that_read_find_each_page_in_the_order_of_the_navigation() -> None:
    listed = re.findall(r"^- \[(.+)\]\((.+)\)$", (DOCS / "llms.txt").read_text(), re.MULTILINE)
    assert listed == list(navigation(SETTINGS["nav"]))


def test_the_site_names_the_version_that_it_describes() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert SETTINGS["site_name"] == f"verifiers {version}"
    assert version in SETTINGS["copyright"]


def test_each_public_name_has_one_entry_in_the_api_reference() -> None:
    entries = [name.removeprefix("verifiers.") for name in names_with_an_entry()]
    assert sorted(entries) == sorted(set(entries))
    stub = (ROOT / "verifiers" / "__init__.pyi").read_text()
    assert set(re.findall(r" as (\w+)", stub)) - set(entries) == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the built site; `zensical` takes no other place for it than the one beside its settings."""
    pytest.importorskip("mkdocstrings_handlers.python")
    copy = tmp_path_factory.mktemp("project")
    shutil.copytree(DOCS, copy / "docs")
    shutil.copytree(ROOT / "verifiers", copy / "verifiers", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "zensical.toml", copy)
    build = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    ran = subprocess.run(build, cwd=copy, capture_output=True, text=True, timeout=200, env=os.environ)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return copy / "site"


@pytest.mark.slow
def test_the_search_finds_each_public_name_where_it_is_described(site: Path) -> None:
    items = json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    found = {item["location"]: item for item in items}
    for name in names_with_an_entry():
        assert any(location.endswith(f"#{name}") for location in found), name
    trainer = found["reference/api/training/#verifiers.GRPOTrainer"]
    assert "GRPOTrainer" in trainer["title"]
    page = (site / "reference/api/training/index.html").read_text(encoding="utf-8")
    for text in ('id="verifiers.GRPOTrainer"', 'id="verifiers.GRPOConfig"', "num_batches_ahead"):
        assert text in page
    signature = re.search(r'id="verifiers.GRPOTrainer".*?doc-signature.*?</pre>', page, re.DOTALL)
    assert signature is not None
    assert "processing_class" in signature[0]


def built_pages(site: Path) -> list[Path]:
    return sorted(site.rglob("index.html"))


@pytest.mark.slow
async def test_no_page_cuts_a_line_of_code_or_is_wider_than_its_screen(site: Path, browser: Page) -> None:
    found = {}
    for page in built_pages(site):
        await browser.open(page.as_uri())
        for width in (1400, 420):
            await browser.size(width, 1000)
            cut = await browser.run(CUT_LINES) if width == 1400 else []
            if cut or await browser.run(TOO_WIDE) > 0:
                found[f"{page.parent.relative_to(site)} at {width} pixels"] = cut
    assert found == {}
