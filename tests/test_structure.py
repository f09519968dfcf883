"""The package's layout: one name for one thing, nothing exported that nobody uses, a test for each promise."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "verifiers"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "templates" not in path.parts)
PROMISES = ROOT / "docs" / "design" / "promises.md"


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_two_files_share_a_name_outside_the_commands() -> None:
    places = defaultdict(list)
    for path in MODULES:
        if path.name not in ("__init__.py", "__main__.py") and "cli" not in path.parts:
            places[path.name].append(relative(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_two_classes_share_a_name() -> None:
    places = defaultdict(list)
    for path in MODULES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(relative(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_every_public_name_is_used_by_the_package_an_environment_an_example_or_a_page() -> None:
    folders = ("verifiers", "environments", "examples", "docs", "servers")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
    # the pages under reference/api name everything
    others = {"__init__.py", ".venv", "api"}
    kept = [path for path in [*files, ROOT / "README.md"] if not others.intersection(path.parts)]
    words = {relative(path): set(re.findall(r"\w+", path.read_text(encoding="utf-8"))) for path in kept}
    unused = []
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    for statement in (node for node in stub.body if isinstance(node, ast.ImportFrom) and node.level):
        home = f"verifiers/{(statement.module or '').replace('.', '/')}.py"
        for name in (alias.asname or alias.name for alias in statement.names):
            if not any(name in found for path, found in words.items() if path != home):
                unused.append(name)
    assert unused == []


def test_every_test_that_a_promise_names_is_there() -> None:
    missing = []
    for line in PROMISES.read_text(encoding="utf-8").splitlines():
        folder = Path()
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", line.rpartition("|")[0].rpartition("|")[2]):
            given = Path("tests/end_to_end") / name[4:] if name.startswith("e2e/") else Path(name)
            path = given if len(given.parts) > 1 or name.endswith("/") else folder / given
            folder = path.parent
            if not (ROOT / path).exists():
                missing.append(str(path))
    assert missing == []
