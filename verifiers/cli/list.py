"""`vf-list`: the installed environments, without importing any of them."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import symtable
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

from verifiers.cli.main import DONE, Command, CommandParser
from verifiers.envs.registry import ENTRY_POINT_GROUP

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
    found = installed_environments()
    if args.json:
        print(json.dumps(found))
        return DONE
    if not found:
        print("no environments are installed; `vf-init my-env` starts one, `vf-install my-env` installs it")
        return DONE
    rows = [("name", "package", "summary", "where")]
    for env in found:
        where = env["where"] or f"missing: {env['entry_point']}"
        rows.append((str(env["name"]), f"{env['distribution']} {env['version']}", str(env["summary"]), where))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return DONE


def installed_environments() -> list[dict[str, str | None]]:
    """Return the environments that `load_environment` finds in installed packages, by name.

    Each has the name, version and summary of its distribution, the `entry_point` ("module:attribute"), the file
    `where` its module is, None where that is not there, and the URL of its `origin` (PEP 610), None for an index. A
    classic package has no entry point; it depends on verifiers and has a top-level module with `load_environment`.
    """
    found: list[dict[str, str | None]] = []
    for distribution in _distributions_by_name().values():
        declared = [entry for entry in distribution.entry_points if entry.group == ENTRY_POINT_GROUP]
        for entry in declared:
            found.append(_environment(entry.name, distribution, entry.value, _module_file(entry.module)))
        if not declared and any(_NEEDS_VERIFIERS.match(line) for line in distribution.requires or ()):
            for module in sorted(_top_level_modules(distribution)):
                file = _module_file(module)
                if file is not None and _defines_load_environment(Path(file)):
                    found.append(_environment(module.replace("_", "-"), distribution, None, file))
    return sorted(found, key=lambda env: (env["name"], env["distribution"]))


def _distributions_by_name() -> dict[str, Distribution]:
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
) -> dict[str, str | None]:
    return {
        "name": name,
        "distribution": distribution.metadata["Name"],
        "version": distribution.version,
        "summary": " ".join((distribution.metadata["Summary"] or "").split()),
        "entry_point": entry_point,
        "where": where,
        "origin": json.loads(distribution.read_text("direct_url.json") or "{}").get("url"),
    }


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
        symbol = symtable.symtable(text, str(file), "exec").lookup("load_environment")
    except (KeyError, SyntaxError, ValueError):
        return False
    return symbol.is_assigned() or symbol.is_imported()


main = Command(parser, list_environments)

if __name__ == "__main__":
    sys.exit(main())
