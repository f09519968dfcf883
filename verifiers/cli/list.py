"""`vf-list`: the installed environments, without importing any of them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from verifiers.cli.exit_codes import DONE, run_command

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    args = _parser().parse_args(argv)
    return run_command("vf-list", lambda: list_environments(as_json=args.json))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vf-list", description="List the installed environments, without importing any of them."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON array of objects")
    return parser


def list_environments(*, as_json: bool = False) -> int:
    """Do what the command does."""
    from verifiers.cli.installed import installed_environments

    found = installed_environments()
    if as_json:
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


if __name__ == "__main__":
    sys.exit(main())
