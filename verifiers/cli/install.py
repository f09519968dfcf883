"""`vf-install ENV`: install an environment package with uv or pip, and keep the installed verifiers as it is."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

from verifiers.cli.main import DONE, ENVIRONMENTS_DIRECTORY, Command, CommandFailedError, CommandParser
from verifiers.errors import ConfigError
from verifiers.installation import installer


def parser() -> CommandParser:
    parser = CommandParser(
        "vf-install",
        "Install an environment package with uv or pip, and keep the installed verifiers as it is.",
        examples=("vf-install my-env", "vf-install git+https://example.org/envs.git@v2#subdirectory=my_env"),
    )
    add = parser.group("package")
    kinds = "a name in DIR, a directory (of a package or of Harbor's task folders) or wheel, or a git URL: "
    kinds += "git+https://...[@REV][#subdirectory=DIR]"
    add("env", metavar="ENV", help=kinds)
    packages = "directory of environment packages"
    add("-p", "--env-dir-path", default=ENVIRONMENTS_DIRECTORY, metavar="DIR", help=packages)
    add = parser.group("installation")
    add("--editable", action="store_true", help="use the directory in place, so that edits take effect")
    add("--no-deps", action="store_true", help="install the package alone, without what it requires")
    add("--ignore-pin", action="store_true", help="install the package even if it excludes the installed verifiers")
    add("--dry-run", action="store_true", help="let the installer print what it would do, and change nothing")
    return parser


def install(args: argparse.Namespace) -> int:
    try:
        # a requirement that is met already: neither the package nor its dependencies can bring another verifiers
        ours = f"verifiers=={version('verifiers')}"
    except PackageNotFoundError:
        raise ConfigError(
            "verifiers runs from files that are not installed, so an installer would fetch another project's package "
            f"of that name; install verifiers first, by `pip install -e {Path(__file__).resolve().parents[2]}`."
        ) from None
    with contextlib.ExitStack() as opened:
        return _install(args, ours, _target(args.env, args.env_dir_path, opened))


def _install(args: argparse.Namespace, ours: str, target: str) -> int:
    if args.editable and (not Path(target).is_dir() or _has_tasks(Path(args.env))):
        raise ConfigError(
            f"--editable works with a directory only, and {args.env!r} is none of a package; leave it out."
        )
    install = [*installer(), *(["--dry-run"] if args.dry_run else [])]
    package = ["-e", target] if args.editable else [target]
    alone = [*install, "--force-reinstall", "--no-deps", *package]
    before = _environments()
    if args.ignore_pin and not args.no_deps:
        _run([*install, ours, *_requirements(target, ours)[1]])
    if args.ignore_pin or args.no_deps:
        _run(alone)
    else:
        try:
            _run([*install, *package, ours])
        except CommandFailedError:
            excluding, _ = _requirements(target, ours)
            if not excluding:
                raise
            raise ConfigError(
                f"{args.env} requires {excluding[0]}, which excludes the installed {ours}; packages written for "
                "0.1.x mostly run unchanged: install it with --ignore-pin, or ask its authors for a wider pin."
            ) from None
    if args.dry_run:
        return DONE
    after = _environments()
    if after == before and not (args.ignore_pin or args.no_deps):
        # installers skip a package of the installed version, though its code may differ
        _run(alone)
        after = _environments()
    place = target if target.startswith("git+") else Path(target).as_uri()
    found = [env for env in after if env not in before] or [e for e in after if e["origin"] and e["origin"] in place]
    if not found:
        raise CommandFailedError(
            f"no environment was installed for {sys.executable}: the package declares none, and none of its modules "
            "has load_environment."
        )
    for env in found:
        if env["where"] is None:
            raise CommandFailedError(
                f"{env['distribution']} {env['version']} is installed, but its environment {env['name']!r} cannot "
                f"work: the package lacks the module of its entry point {env['entry_point']!r}."
            )
        how = f"entry point {env['entry_point']}" if env["entry_point"] else "module"
        print(f"installed {env['distribution']} {env['version']}: environment {env['name']} ({how}, {env['where']})")
    print(f"next: vf-eval {found[0]['name']} -m MODEL -b URL")
    return DONE


def _run(command: Sequence[str]) -> None:
    print(f"$ {shlex.join(command)}", flush=True)
    if code := subprocess.run(command).returncode:
        raise CommandFailedError(f"the package was not installed: the command above ended with exit code {code}.")


def _environments() -> list[dict[str, Any]]:
    """Return what `vf-list` finds, in a new interpreter: this one read its path files before the installation."""
    command = [sys.executable, "-P", "-m", "verifiers.cli.list", "--json"]
    found: list[dict[str, Any]] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found


def _target(env: str, directory: str, opened: contextlib.ExitStack) -> str:
    """Return the installer's argument for a name under `directory`, a path, or a URL that begins with git+.

    Harbor's task folders become a package, which is there until `opened` is closed.
    """
    url = env.partition(" @ ")[2].strip() or env
    if url.startswith("git+"):
        return url
    if "://" in env:
        raise ConfigError(f"{env!r} is not a git URL that can be installed; write it as 'git+https://...'.")
    path = Path(env).expanduser() if env.startswith((".", "~")) or "/" in env or env.endswith(".whl") else None
    if path is None:
        module = env.replace("-", "_")
        named = [Path(directory, name) for name in (module, env)]
        path = next((found for found in named if found.is_dir()), None)
        if path is None:
            names = sorted(found.parent.name for found in Path(directory).glob("*/pyproject.toml"))
            near = difflib.get_close_matches(module, names, n=3) or names[:5] or ["no packages"]
            raise ConfigError(
                f"there is no package {env!r} in {directory!r} (it has {', '.join(near)}); name the directory of "
                "packages with -p, or give the package's path, such as './my_env', or a git URL."
            )
    if not path.exists():
        raise ConfigError(f"there is no {str(path)!r}; give a package's name, directory or git URL.")
    if path.is_dir() and not any((path / name).is_file() for name in ("pyproject.toml", "setup.py")):
        if _has_tasks(path):
            return _package_of_tasks(path.resolve(), Path(opened.enter_context(tempfile.TemporaryDirectory())))
        raise ConfigError(f"{str(path)!r} is not a package: it has no pyproject.toml; `vf-init` writes an example.")
    # an installer must not take the path for the name of a package
    return str(path.resolve())


_OF_TASKS = """\
[build-system]
requires = ["hatchling>=1.25"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
description = "Task folders in Harbor's format."
requires-python = ">=3.11"
dependencies = ["verifiers>=1.0.0.dev0"]

[project.entry-points."verifiers.environments"]
{name} = "{module}:load_environment"

[tool.hatch.build.targets.wheel]
only-include = ["{module}.py", "{module}_tasks"]
"""
_LOADS_TASKS = """\
from pathlib import Path
from typing import Any

import verifiers as vf


def load_environment(agent: Any = "shell", **kwargs: Any) -> vf.Environment:
    return vf.HarborEnv(Path(__file__).with_name("{module}_tasks"), agent, **kwargs)
"""


def _has_tasks(path: Path) -> bool:
    return (path / "task.toml").is_file() or any(path.glob("*/task.toml"))


def _package_of_tasks(path: Path, parent: Path) -> str:
    """Write a package of Harbor's task folders, named after their directory; raise ConfigError for a wrong one."""
    from verifiers.integrations.harbor_task import read_tasks

    name = re.sub(r"[^a-z0-9]+", "-", path.name.lower()).strip("-")
    name = name if name[:1].isalpha() else f"tasks-{name}".rstrip("-")
    names = {"name": name, "module": name.replace("-", "_")}
    package = parent / name
    for task in read_tasks(path):
        shutil.copytree(task.path, package / f"{names['module']}_tasks" / task.name, symlinks=True)
    (package / "pyproject.toml").write_text(_OF_TASKS.format(**names))
    (package / f"{names['module']}.py").write_text(_LOADS_TASKS.format(**names))
    return str(package)


def _requirements(target: str, ours: str) -> tuple[list[str], list[str]]:
    """Return what a package requires here: pins that exclude the installed verifiers, and all other packages."""
    from packaging.requirements import Requirement

    with tempfile.TemporaryDirectory(prefix="vf-install-") as directory:
        subprocess.run([*installer(), "--quiet", "--no-deps", "--target", directory, target], capture_output=True)
        lines = [line for found in distributions(path=[directory]) for line in found.requires or ()]
    needs = [need for need in map(Requirement, lines) if need.marker is None or need.marker.evaluate({"extra": ""})]
    on_verifiers = [need for need in needs if need.name.lower() == "verifiers"]
    installed = ours.partition("==")[2]
    allowing = [n for n in on_verifiers if n.url is None and n.specifier.contains(installed, prereleases=True)]
    return [str(n) for n in on_verifiers if n not in allowing], [str(n) for n in needs if n not in on_verifiers]


main = Command(parser, install)
