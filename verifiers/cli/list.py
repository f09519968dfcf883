"""`vf-list`: the installed environments, without importing any of them."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from verifiers.cli.main import DONE, Command, CommandParser

ENTRY_POINT_GROUP = "verifiers.environments"

_NEEDS_VERIFIERS = re.compile(r"verifiers(?![\w.-])", re.IGNORECASE)


def parser() -> CommandParser:
    parser = CommandParser(
        "vf-list",
        "List the installed environments, without importing any of them.",
        examples=("vf-list", "vf-list --json | jq -r '.[].name'"),
    )
    parser.group("output")("--json", action="store_true", help="print one JSON array of objects")
    return parser


def list_environments(args: argparse.Namespace) -> int:
    """Print the installed environments as a table or as JSON."""
    found = installed_environments()
    if args.json:
        print(json.dumps([asdict(env) for env in found]))
        return DONE
    if not found:
        print("no environments are installed; `vf-init my-env` starts one, `vf-install my-env` installs it")
        return DONE
    rows = [("name", "package", "summary", "where")]
    for env in found:
        where = env.where or f"missing: {env.entry_point}"
        rows.append((env.name, f"{env.distribution} {env.version}", env.summary, where))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return DONE


@dataclass(frozen=True, slots=True, order=True)
class InstalledEnvironment:
    """An environment that `load_environment` finds.

    Attributes:
        name: the name that `load_environment` takes.
        distribution, version, summary: of the package that contains it.
        entry_point: "module:attribute"; None for a classic package, whose module is found by its name.
        where: file of the module; None where the metadata names a module that is not there.
        origin: URL that the package was installed from (PEP 610); None where that was an index.
    """

    name: str
    distribution: str
    version: str
    summary: str
    entry_point: str | None
    where: str | None
    origin: str | None


def installed_environments() -> list[InstalledEnvironment]:
    """List the environments of installed packages by name: those with an entry point, and classic packages.

    A classic package has none; it depends on verifiers and has a top-level module with `load_environment`.
    """
    found: list[InstalledEnvironment] = []
    for distribution in distributions_by_name().values():
        declared = [entry for entry in distribution.entry_points if entry.group == ENTRY_POINT_GROUP]
        for entry in declared:
            found.append(_environment(entry.name, distribution, entry.value, _module_file(entry.module)))
        if not declared and any(_NEEDS_VERIFIERS.match(line) for line in distribution.requires or ()):
            for module in sorted(_top_level_modules(distribution)):
                file = _module_file(module)
                if file is not None and _defines_load_environment(Path(file)):
                    found.append(_environment(module.replace("_", "-"), distribution, None, file))
    return sorted(found, key=lambda env: (env.name, env.distribution))


def distributions_by_name() -> dict[str, Distribution]:
    """Return the installed distributions by normalized name; of two with one name, the first on the import path."""
    found: dict[str, Distribution] = {}
    for distribution in distributions():
        name = distribution.metadata["Name"]
        # a directory that an interrupted installation left behind has no metadata
        if name:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution)
    return found


def _environment(
    name: str, distribution: Distribution, entry_point: str | None, where: str | None
) -> InstalledEnvironment:
    metadata = distribution.metadata
    summary = " ".join((metadata["Summary"] or "").split())
    origin = json.loads(distribution.read_text("direct_url.json") or "{}").get("url")
    return InstalledEnvironment(name, metadata["Name"], distribution.version, summary, entry_point, where, origin)


def _module_file(module: str) -> str | None:
    """Find the file of a module without importing it or the packages around it."""
    top, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not inner:
        return spec.origin
    for location in spec.submodule_search_locations or ():
        path = Path(location, *inner)
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return str(file)
    return None


def _top_level_modules(distribution: Distribution) -> Iterator[str]:
    modules = {re.sub(r"[-.]+", "_", distribution.metadata["Name"])}
    for file in distribution.files or ():
        if file.suffix == ".pth":
            # an editable installation names the directory that its modules lie in
            modules.update(_modules_beside(Path(str(distribution.locate_file(file)))))
        elif len(file.parts) == 1 and file.suffix == ".py":
            modules.add(file.stem)
        elif len(file.parts) == 2 and file.name == "__init__.py":
            modules.add(file.parts[0])
    return (module for module in modules if module.isidentifier())


def _modules_beside(path_file: Path) -> Iterator[str]:
    lines = path_file.read_text(errors="replace").splitlines() if path_file.is_file() else []
    for directory in map(Path, lines):
        if directory.is_absolute() and directory.is_dir():
            yield from (file.stem for file in directory.glob("*.py"))
            yield from (file.parent.name for file in directory.glob("*/__init__.py"))


def _defines_load_environment(file: Path) -> bool:
    if file.suffix != ".py":
        return False
    text = file.read_text(errors="replace")
    if "load_environment" not in text:
        return False
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return "load_environment" in set(_bound_names(tree.body))


def _bound_names(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.If | ast.Try):
            yield from _bound_names([*node.body, *node.orelse])


main = Command(parser, list_environments)

if __name__ == "__main__":
    sys.exit(main())
