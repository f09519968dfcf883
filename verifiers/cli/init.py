"""`vf-init ENV`: start a new environment package from a small task that runs as it is."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import keyword
import os
import re
import shutil
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from verifiers.cli.arguments import ENVIRONMENTS_DIRECTORY, module_name
from verifiers.cli.exit_codes import DONE, run_command
from verifiers.errors import ConfigError

__all__ = ["main"]

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    args = _parser().parse_args(argv)
    return run_command("vf-init", lambda: init(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vf-init", description="Start a new environment package from a small task that runs as it is."
    )
    add = parser.add_argument
    add("env", help="name of the environment: lower-case words with hyphens between them")
    add("-p", "--path", default=ENVIRONMENTS_DIRECTORY, help="where its directory goes (default: %(default)s)")
    add("--kind", choices=("single-turn", "multi-turn", "tool"), default="single-turn", help="default: %(default)s")
    add("--multi-file", action="store_true", help="a package of several files instead of one module")
    return parser


def init(args: argparse.Namespace) -> int:
    """Do what the command does; raises instead of printing errors."""
    from verifiers.cli.package_template import package_files

    name, module = args.env.replace("_", "-"), module_name(args.env)
    _check_name(args.env)
    target = Path(args.path) / module
    _refuse_existing(target)
    _refuse_taken_module(args.env, module)
    files = package_files(name, module, kind=args.kind, multi_file=args.multi_file)
    _write_all(target, files)
    print(f"{target}/")
    for path in sorted(files):
        print(f"  {path}")
    where = "" if args.path == ENVIRONMENTS_DIRECTORY else f" -p {args.path}"
    print("\nnext:")
    print(f"  vf-play {name}{where}")
    print(f"  vf-install {name}{where}")
    print(f"  vf-eval {name} -m MODEL -b URL")
    return DONE


def _check_name(env: str) -> None:
    if not _NAME.fullmatch(env):
        raise ConfigError(
            f"the name {env!r} cannot be one of a package; give lower-case letters and digits in words with a hyphen "
            "between them, and begin with a letter, like 'my-env'."
        )
    if keyword.iskeyword(module_name(env)):
        raise ConfigError(f"the name {env!r} is a word of Python itself; choose another, like '{env}-env'.")


def _refuse_existing(target: Path) -> None:
    if not os.path.lexists(target):
        return
    held = sorted(os.listdir(target)) if target.is_dir() else []
    shown = ", ".join(held[:5]) + (", ..." if len(held) > 5 else "")
    what = f"a directory with {shown}" if held else "an empty directory" if target.is_dir() else "a file"
    raise ConfigError(f"{str(target)!r} is already there ({what}); choose another name or path, or remove it first.")


def _refuse_taken_module(env: str, module: str) -> None:
    """A module or distribution of that name would be hidden or replaced by the new one."""
    if module in sys.stdlib_module_names:
        raise ConfigError(f"the name {env!r} would hide Python's own module {module}; choose another.")
    try:
        version = importlib.metadata.version(env)
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        raise ConfigError(
            f"a package called {env!r} is already installed (version {version}), and installing the new one would "
            "replace it; choose another name, or uninstall that one first."
        )
    spec = importlib.util.find_spec(module)
    # a directory without __init__.py may be found too, but hides nothing
    if spec is not None and spec.origin is not None:
        raise ConfigError(
            f"the name {env!r} would hide the installed module {module} ({spec.origin}); choose another."
        )


def _write_all(target: Path, files: Mapping[str, str]) -> None:
    """Write the files beside their place and rename, so that the directory is never there half-written."""
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        for path, text in files.items():
            file = partial / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        partial.rename(target)
    except OSError as error:
        raise ConfigError(f"{str(target)!r} cannot be written: {error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
