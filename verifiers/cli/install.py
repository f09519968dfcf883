"""`vf-install ENV`: install an environment package with uv or pip, and keep the installed verifiers as it is."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from verifiers.cli.arguments import ENVIRONMENTS_DIRECTORY
from verifiers.cli.exit_codes import DONE, CommandFailedError, run_command
from verifiers.errors import ConfigError

__all__ = ["main"]

_SNAPSHOT = "import json; from verifiers.cli.installed import snapshot; print(json.dumps(snapshot()))"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    args = _parser().parse_args(argv)
    return run_command("vf-install", lambda: install(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vf-install",
        description="Install an environment package with uv or pip, and keep the installed verifiers as it is.",
    )
    add = parser.add_argument
    add("env", help="a name under PATH, a directory or wheel, or a git URL: git+https://...[@REV][#subdirectory=DIR]")
    add("-p", "--path", default=ENVIRONMENTS_DIRECTORY, help="where names are looked for (default: %(default)s)")
    add("-e", "--editable", action="store_true", help="use the directory in place, so that edits take effect")
    add("--no-deps", action="store_true", help="install the package alone, without what it requires")
    add("--ignore-pin", action="store_true", help="go on though the package excludes the installed verifiers")
    add("--dry-run", action="store_true", help="check the package, print the commands, and stop")
    return parser


def install(args: argparse.Namespace) -> int:
    """Do what the command does; raises instead of printing errors."""
    from verifiers.cli.pins import read_requirements
    from verifiers.cli.sources import opened_source, read_metadata

    installer, builder = _tools()
    before = _snapshot()
    if before["verifiers"] is None:
        raise ConfigError(
            "verifiers runs from files that are not installed, so an installer would fetch another project's package "
            "of that name; install it first, by `pip install -e DIRECTORY`."
        )
    version = before["verifiers"]["version"]
    with opened_source(args.env, args.path) as source:
        if args.editable and not source.is_directory:
            raise ConfigError(f"-e works with a directory only, and {args.env!r} is none; leave it out.")
        metadata = read_metadata(source, builder)
        name = _normalized(metadata.name)
        if name == "verifiers":
            raise ConfigError(f"{args.env!r} is verifiers itself, which vf-install never replaces; use pip or uv.")
        requirements = read_requirements(metadata.name, metadata.requires, version)
        if requirements.excluding and not args.ignore_pin:
            raise ConfigError(
                f"{metadata.name} requires {requirements.excluding}, which excludes the installed verifiers "
                f"{version}; packages written for 0.1.x mostly run unchanged: go on with --ignore-pin, or ask its "
                "authors for a wider pin."
            )
        extras = f"[{','.join(requirements.extras)}]" if requirements.extras else ""
        commands = _commands(
            installer,
            ["-e", source.target] if args.editable else [source.target],
            keep=f"verifiers{extras}=={version}",
            dependencies=None if args.no_deps else requirements.others,
            apart=bool(requirements.excluding),
            # installers leave what is not a directory alone where the version is the same, though its code may differ
            anew=not source.is_directory and name in before["versions"],
        )
        for command in commands:
            print(f"$ {shlex.join(command)}", flush=True)
            if not args.dry_run:
                _run(command)
    if not args.dry_run:
        _report(metadata.name, before, _snapshot())
    return DONE


def _tools() -> tuple[list[str], list[str]]:
    """What installs, and what builds a wheel into a directory: uv in a virtual environment, else pip."""
    uv = shutil.which("uv")
    if uv is not None and sys.prefix != sys.base_prefix:
        build = [uv, "build", "--quiet", "--wheel", "--python", sys.executable, "--out-dir"]
        return [uv, "pip", "install", "--python", sys.executable], build
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode != 0:
        raise ConfigError(f"neither uv nor pip is there for {sys.executable}; install one of them.")
    quiet = "--disable-pip-version-check"
    return [*pip, "install", quiet], [*pip, "wheel", quiet, "--quiet", "--no-deps", "--wheel-dir"]


def _commands(
    installer: Sequence[str],
    target: Sequence[str],
    *,
    keep: str,
    dependencies: Sequence[str] | None,
    apart: bool,
    anew: bool,
) -> list[list[str]]:
    """The installer's calls.

    The installed verifiers is asked for by its exact version, which is met by what is there, so that nothing that
    the package or its dependencies require can bring another.

    Args:
        keep: the requirement that stands for the installed verifiers.
        dependencies: what to install besides; None for nothing.
        apart: the package itself cannot be resolved together with `keep`.
        anew: install the package even where the installer would find it installed.
    """
    alone = ["--force-reinstall", "--no-deps"] if anew else ["--no-deps"]
    if dependencies is None:
        return [[*installer, *alone, *target]]
    if apart or anew:
        return [[*installer, keep, *dependencies], [*installer, *alone, *target]]
    return [[*installer, *target, keep]]


def _run(command: Sequence[str]) -> None:
    code = subprocess.run(command).returncode
    if code != 0:
        raise CommandFailedError(f"the package was not installed: the command above ended with exit code {code}.")


def _snapshot() -> dict[str, Any]:
    """What a fresh interpreter sees: this one has caches, and has read its path files before the installation."""
    # -P: a directory of the current one must not be taken for an installed package
    done = subprocess.run([sys.executable, "-P", "-c", _SNAPSHOT], capture_output=True, text=True)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise CommandFailedError(f"a new Python process cannot tell what is installed: {reason[0]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _report(name: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    was, now = before["verifiers"], after["verifiers"]
    if now != was:
        there = "is gone" if now is None else f"was replaced by {now['version']} in {now['location']}"
        raise CommandFailedError(
            f"verifiers {was['version']} of {was['location']} {there} by what was installed; install it again."
        )
    version = after["versions"].get(_normalized(name))
    if version is None:
        raise CommandFailedError(f"the installer reported success, but {name} is not installed for {sys.executable}.")
    mine = [env for env in after["environments"] if _normalized(env["distribution"]) == _normalized(name)]
    missing = [env for env in mine if env["where"] is None]
    if missing:
        raise CommandFailedError(
            f"{name} {version} is installed, but its environment {missing[0]['name']!r} cannot work: the package "
            f"lacks the module of its entry point {missing[0]['entry_point']!r}."
        )
    print(f"installed {name} {version}; verifiers {was['version']} is as it was")
    for env in mine:
        how = f"entry point {env['entry_point']}" if env["entry_point"] else "module"
        print(f"  environment {env['name']} ({how}, {env['where']})")
    if mine:
        print(f"next: vf-eval {mine[0]['name']} -m MODEL -b URL")
    else:
        print("  it declares no environment, and none of its modules has load_environment")


def _normalized(name: str) -> str:
    from packaging.utils import canonicalize_name

    return canonicalize_name(name)


if __name__ == "__main__":
    sys.exit(main())
