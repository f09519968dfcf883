"""Every code block in README and docs runs as it stands.

Blocks of a page run in order and share one namespace, in an empty directory that is importable. A block with
`title="name.py"` is written to that file first; a TOML block titled *.toml is checked as a run file.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(?P<language>\w+)(?P<options>[^\n]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]+)"')


def blocks_of(page: Path) -> list[tuple[str, str | None, str]]:
    found = []
    for match in BLOCK.finditer(page.read_text()):
        title = TITLE.search(match["options"])
        found.append((match["language"], title[1] if title else None, match["code"]))
    return found


def test_the_pages_have_blocks_to_run() -> None:
    assert sum(language == "python" for page in PAGES for language, _, _ in blocks_of(page)) >= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    modules = set(sys.modules)
    for number, (language, title, code) in enumerate(blocks_of(page), 1):
        if title is not None:
            (tmp_path / title).write_text(code)
        if language == "toml":
            tomllib.loads(code)
            if title is not None:
                from verifiers.train.run_file import load_run_file

                load_run_file(tmp_path / title)
        elif language == "python":
            exec(compile(code, f"{page.name}, block {number}", "exec"), namespace)
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]
