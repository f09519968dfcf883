"""The package's layout: one name for one thing, files of one subject, nothing exported that nobody uses."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import verifiers

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "verifiers"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "templates" not in path.parts)
PROMISES = ROOT / "docs" / "design" / "promises.md"
QUESTION_WORD = re.compile(r"\s*(What|Whether|Where|How|Which|Who|Why)\b")
MOST_FILES_IN_A_FOLDER = 16
MOST_LINES_IN_A_FILE = 450


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


def test_a_folder_can_be_read_at_a_glance() -> None:
    folders = defaultdict(list)
    for path in MODULES:
        # a module of a few lines is an import path of the classic API
        if len(path.read_text(encoding="utf-8").splitlines()) > 10:
            folders[relative(path.parent)].append(path.name)
    assert {folder: len(files) for folder, files in folders.items() if len(files) > MOST_FILES_IN_A_FOLDER} == {}


def test_a_file_is_short_enough_to_be_read_in_one_go() -> None:
    others = [path for folder in ("servers", "tests") for path in (ROOT / folder).rglob("*.py")]
    kept = [path for path in [*MODULES, *others] if ".venv" not in path.parts]
    lines = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in kept}
    assert {name: count for name, count in lines.items() if count > MOST_LINES_IN_A_FILE} == {}


def test_no_docstring_begins_with_a_question_word() -> None:
    folders = ("verifiers", "servers", "environments", "examples")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = []
    for path in paths:
        if ".venv" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            # a string as a statement: the docstring of a module, class or function, or of the name above it
            text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
            if isinstance(text, str) and QUESTION_WORD.match(text):
                found.append(f"{relative(path)}:{node.lineno}: {text.strip().splitlines()[0]}")
    assert found == []


def test_every_public_name_is_used_by_the_package_an_environment_an_example_or_a_page() -> None:
    folders = ("verifiers", "environments", "examples", "docs", "servers")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
    # the pages under reference/api name everything
    others = {"__init__.py", ".venv", "api"}
    kept = [path for path in [*files, ROOT / "README.md"] if not others.intersection(path.parts)]
    words = {relative(path): set(re.findall(r"\w+", path.read_text(encoding="utf-8"))) for path in kept}
    unused = []
    for name, place in verifiers._LAZY_IMPORTS.items():
        home = place.partition(":")[0].replace(".", "/") + ".py"
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
