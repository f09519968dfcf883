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
# a determiner, a preposition, a noun, a plural or third person in -s, or no word, where an imperative belongs
NO_IMPERATIVE = re.compile(
    r"(A|An|The|This|That|These|Those|Its|One|Two|All|Any|Both|Each|Every|Everything|No|None|Not|Nothing|Never|Some|"
    r"Something|Several|After|As|At|Before|Beside|By|Except|For|From|In|Inside|Like|Of|On|Than|To|Under|Until|Up|"
    r"With|Within|Without|Entry|Mean|Median|Text|Token|Length|[A-Z][a-z-]*[^\Ws]s)\b|[^A-Z]"
)
# words that are nouns as well, such as Counts, Scores and Sums, are left out
THIRD_PERSON = re.compile(
    r"(Adds|Appends|Asks|Begins|Broadcasts|Builds|Chooses|Closes|Compares|Compiles|Connects|Divides|Does|Draws|Ends|"
    r"Evaluates|Fills|Finds|Generates|Gives|Grades|Has|Holds|Keeps|Loads|Makes|Measures|Notices|Opens|Parses|Plays|"
    r"Prints|Reads|Receives|Remembers|Renders|Replaces|Returns|Rolls|Runs|Sends|Serves|Shows|Starts|Stops|Takes|"
    r"Tells|Trains|Turns|Waits|Wakes|Watches|Writes)\b"
)
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
    for path in [*MODULES, *(ROOT / "servers").rglob("*.py")]:
        # a module of a few lines is an import path of the classic API
        if len(path.read_text(encoding="utf-8").splitlines()) > 10:
            folders[relative(path.parent)].append(path.name)
    assert {folder: len(files) for folder, files in folders.items() if len(files) > MOST_FILES_IN_A_FOLDER} == {}


def test_a_file_is_short_enough_to_be_read_in_one_go() -> None:
    others = [path for folder in ("servers", "tests") for path in (ROOT / folder).rglob("*.py")]
    kept = [path for path in [*MODULES, *others] if ".venv" not in path.parts]
    lines = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in kept}
    assert {name: count for name, count in lines.items() if count > MOST_LINES_IN_A_FILE} == {}


def documented_paths() -> list[Path]:
    folders = ("verifiers", "servers", "environments", "examples", "benchmarks")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return [path for path in paths if ".venv" not in path.parts]


def begins_wrongly(node: ast.AST) -> bool:
    """Return whether a function's docstring begins with no imperative, or a class's with no noun."""
    if isinstance(node, ast.ClassDef):
        return THIRD_PERSON.match(ast.get_docstring(node) or "") is not None
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    if any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
        return False
    return NO_IMPERATIVE.match(ast.get_docstring(node) or "") is not None


def test_docstrings_of_functions_begin_with_a_verb_and_those_of_classes_with_a_noun() -> None:
    found = []
    for path in documented_paths():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if begins_wrongly(node):
                found.append(f"{relative(path)}:{node.lineno}: {ast.get_docstring(node).splitlines()[0]}")
    assert found == []


def test_no_docstring_begins_with_a_question_word() -> None:
    found = []
    for path in documented_paths():
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


FORMER_WORDS = {
    "adapts": "curriculum_policy",
    "afresh": "again",
    "anew": "again",
    "aside": "archive, or what the time is spent on",
    "asked_probe": "logprob_check",
    "at_sight": "exact_match",
    "block_feed": "prefetch",
    "calling": "signatures",
    "clear_the_way": "archive_previous_run",
    "correction_weights": "importance_weights",
    "data_plane": "data_loop",
    "deal": "balance_by_length",
    "dealing": "packing",
    "dealt": "packed",
    "farewell": "shutdown",
    "figures": "metrics or numbers",
    "flat_groups": "zero_variance",
    "flat_rows": "zero_variance",
    "fleet": "server_pool",
    "garbage": "relaxed_gc",
    "giving": "apply",
    "held_answer": "cached_prefix",
    "held_out": "eval",
    "held_server": "in_process_server",
    "held_sync": "in_process_sync",
    "hider": "redactor",
    "hiding": "redaction",
    "honoured": "supported",
    "in_training": "data_loop",
    "insist": "retry",
    "judge_answer": "answer_as_judge",
    "keeping": "rotate_checkpoints",
    "lap": "stage",
    "ledger": "block_log",
    "limiter_share": "sub_limiter",
    "meter": "activity or memory",
    "probing": "verification",
    "pushing_trainer": "weight publisher",
    "row_fingerprint": "dataset fingerprint",
    "row_in_turn": "interleave",
    "run_watch": "run_monitor",
    "saved_blocks": "pending_blocks",
    "say_once": "warn_once",
    "seen_from_here": "resume",
    "settle": "a verb that says what happens, such as finish or add_elapsed",
    "settled": "final, finished or done",
    "shared_work": "single_flight",
    "spares": "replacements",
    "split_renderer": "incremental_renderer",
    "steep": "the standard deviation of the group",
    "suit": "adjust",
    "take_leave": "release",
    "tally": "progress",
    "told_what_cannot_be_loaded": "raises_load_error",
    "told_where_writing_fails": "raises_checkpoint_error",
    "tolerated": "best_effort",
    "torn": "incomplete, or partially_loaded",
    "watching": "monitoring",
    "whoever": "the noun",
}
"""Former words of this project, each with the term to use."""

FORMER_WORDS_OF_RUNS = {"feed": "prefetcher", "verdict": "finding or bottleneck"}
"""Former words in the folders of a run; in sandboxes, rubrics and comparisons they are the field's own."""

ORDINARY_WORDS = {"adapts", "calling", "garbage", "giving", "in_training", "watching"}
"""Former words that the name of a test, which is a sentence, may have in their ordinary sense."""

FOREIGN_NAMES = {"ToolCallingAgent"}
"""Names of other libraries."""

WORD_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def identifiers(node: ast.AST) -> set[str]:
    """Return the names in a tree, without those in functions that keep a deprecated name."""
    found = {getattr(node, field, None) for field in ("id", "attr", "arg", "name", "asname")}
    names = {name for name in found if isinstance(name, str)}
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef) or "Deprecated" not in (ast.get_docstring(child) or ""):
            names |= identifiers(child)
    return names


def test_no_private_word_is_an_identifier() -> None:
    found = []
    of_runs = [top / folder for top in (PACKAGE, ROOT / "tests") for folder in ("monitoring", "train", "workers")]
    of_runs.append(ROOT / "tests" / "end_to_end")
    of_deprecated_names = (PACKAGE / "deprecated.py", ROOT / "tests" / "test_deprecated_names.py")
    folders = ("verifiers", "servers", "environments", "examples", "tests", "benchmarks")
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        if ".venv" in path.parts or path in of_deprecated_names:
            continue
        words = FORMER_WORDS | (FORMER_WORDS_OF_RUNS if any(map(path.is_relative_to, of_runs)) else {})
        names = {path.stem} | identifiers(ast.parse(path.read_text(encoding="utf-8")))
        for name in sorted(names - FOREIGN_NAMES):
            parts = f"_{'_'.join(WORD_PART.findall(name))}_".lower()
            found += [
                f"{relative(path)}: {name} has the former word {word!r}; say {term}"
                for word, term in words.items()
                if f"_{word}_" in parts and not (name.startswith("test_") and word in ORDINARY_WORDS)
            ]
    assert not found, "\n".join(found)
