"""`vf-install ENV`: install an environment package with uv or pip, and keep the installed verifiers as it is."""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from verifiers.cli.arguments import CommandParser
from verifiers.cli.list import distributions_by_name, installed_environments
from verifiers.cli.main import DONE, ENVIRONMENTS_DIRECTORY, CommandFailedError, module_name, run_command
from verifiers.errors import ConfigError
from verifiers.installation import EXTRAS, install_hint

__all__ = ["Requirements", "main", "parser", "read_requirements", "snapshot"]

_CHECKOUT = Path(__file__).resolve().parents[2]
_SNAPSHOT = "import json; from verifiers.cli.install import snapshot; print(json.dumps(snapshot()))"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_command("vf-install", lambda: install(parser().parse_args(argv)))


def parser() -> CommandParser:
    """Return the command line."""
    parser = CommandParser(
        "vf-install",
        "Install an environment package with uv or pip, and keep the installed verifiers as it is.",
        examples=("vf-install my-env", "vf-install git+https://example.org/envs.git@v2#subdirectory=my_env"),
    )
    add = parser.group("package")
    add(
        "env",
        metavar="ENV",
        help="a name in DIR, a directory or wheel, or a git URL: git+https://...[@REV][#subdirectory=DIR]",
    )
    add(
        "-p",
        "--env-dir-path",
        default=ENVIRONMENTS_DIRECTORY,
        metavar="DIR",
        help="directory of environment packages",
    )
    add = parser.group("installation")
    add("--editable", action="store_true", help="use the directory in place, so that edits take effect")
    add("--no-deps", action="store_true", help="install the package alone, without what it requires")
    add("--ignore-pin", action="store_true", help="install the package even if it excludes the installed verifiers")
    add("--dry-run", action="store_true", help="let the installer print what it would do, and change nothing")
    return parser


def install(args: argparse.Namespace) -> int:
    """Install the package and check the result; raise errors instead of printing them.

    The installer gets the package and `verifiers==VERSION` of the installed one, which is met already: no
    requirement of the package or of its dependencies can bring another.
    """
    installer = [*_installer(), *(["--dry-run"] if args.dry_run else [])]
    before = _fresh_snapshot()
    if before["verifiers"] is None:
        raise ConfigError(
            "verifiers runs from files that are not installed, so an installer would fetch another project's package "
            f"of that name; install verifiers first, by `pip install -e {shlex.quote(str(_CHECKOUT))}`."
        )
    version = before["verifiers"]["version"]
    target = _target(args.env, args.env_dir_path)
    if args.editable and not Path(target).is_dir():
        raise ConfigError(f"--editable works with a directory only, and {args.env!r} is none; leave it out.")
    package = ["-e", target] if args.editable else [target]
    alone = [*installer, "--force-reinstall", "--no-deps", *package]
    pinned = _requirements_of(target, version) if args.ignore_pin else None
    if args.no_deps:
        _run(alone)
    elif pinned is not None and pinned.excluding:
        _run([*installer, pinned.verifiers(version), *pinned.others])
        _run(alone)
    else:
        try:
            _run([*installer, *package, f"verifiers=={version}"])
        except CommandFailedError:
            _raise_if_excluded(target, version)
            raise
    if args.dry_run:
        return DONE
    after = _fresh_snapshot()
    if after == before:
        # installers skip a package of the installed version, though its code may differ
        _run(alone)
        after = _fresh_snapshot()
    _add_undeclared(_report(before, after), [] if args.no_deps else [*installer, f"verifiers[classic]=={version}"])
    return DONE


def _installer() -> list[str]:
    """Return the command that installs: uv's in a virtual environment, else pip's."""
    uv = shutil.which("uv")
    if uv is not None and sys.prefix != sys.base_prefix:
        return [uv, "pip", "install", "--python", sys.executable]
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode != 0:
        raise ConfigError(f"neither uv nor pip is installed for {sys.executable}; install one of them.")
    return [*pip, "install", "--disable-pip-version-check"]


def _run(command: Sequence[str]) -> None:
    print(f"$ {shlex.join(command)}", flush=True)
    code = subprocess.run(command).returncode
    if code != 0:
        raise CommandFailedError(f"the package was not installed: the command above ended with exit code {code}.")


# -- the package -----------------------------------------------------------------------------------------------


def _target(env: str, directory: str) -> str:
    """Return the installer's argument for a name under `directory`, a path, or a URL that begins with git+.

    Raises:
        ConfigError: there is no such package.
    """
    url = env.partition(" @ ")[2].strip() or env
    if url.startswith("git+"):
        return url
    if "://" in env:
        raise ConfigError(f"{env!r} is not a git URL that can be installed; write it as 'git+https://...'.")
    path = Path(env) if env.endswith(".whl") and Path(env).is_file() else _directory(env, directory)
    # an installer must not take the path for the name of a package
    return str(path.resolve())


def _directory(env: str, directory: str) -> Path:
    if env.startswith((".", "~")) or "/" in env:
        path = Path(env).expanduser()
        if not path.is_dir():
            raise ConfigError(f"there is no directory {str(path)!r}; give a package's name, directory or git URL.")
    else:
        names = dict.fromkeys((module_name(env), env))
        found = next((Path(directory, name) for name in names if Path(directory, name).is_dir()), None)
        if found is None:
            raise ConfigError(_unknown_name(env, directory))
        path = found
    project = path / "pyproject.toml"
    if not project.is_file():
        if (path / "setup.py").is_file():
            return path
        raise ConfigError(f"{str(path)!r} is not a package: it has no pyproject.toml; `vf-init` writes an example.")
    try:
        name = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {}).get("name")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(project)!r} cannot be read: {error}.") from error
    if name == "verifiers":
        raise ConfigError(f"{env!r} is verifiers itself, which vf-install never replaces; use pip or uv.")
    return path


def _unknown_name(env: str, directory: str) -> str:
    root = Path(directory)
    if not root.is_dir():
        return (
            f"there is no directory {directory!r} to look for {env!r} in; name it with -p, or give the package's "
            "path or a git URL."
        )
    names = sorted(entry.name for entry in root.iterdir() if (entry / "pyproject.toml").is_file())
    near = difflib.get_close_matches(module_name(env), names, n=3) or names[:5]
    has = f"it has {', '.join(near)}" if near else "it has no packages"
    beside = f"; there is a directory {env!r} here: write './{env}' for it" if Path(env).is_dir() else ""
    return f"there is no package {env!r} in {directory!r} ({has}){beside or '; a path or a git URL would do too'}."


# -- its pin ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Requirements:
    """A package's requirements, those on verifiers apart from the others.

    Attributes:
        package: name of the package.
        excluding: the first requirement that the installed verifiers does not meet; None where it meets all.
        extras: extras of verifiers that the package requires.
        others: requirements on everything else that apply here.
    """

    package: str
    excluding: str | None
    extras: tuple[str, ...]
    others: tuple[str, ...]

    def verifiers(self, version: str) -> str:
        """Return the requirement that stands for the installed verifiers."""
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        return f"verifiers{extras}=={version}"


def read_requirements(package: str, lines: Iterable[str], installed_version: str) -> Requirements:
    """Compare a package's requirements with the installed verifiers.

    A development version counts as what it is: 1.0.0.dev0 meets `>=0.1.4` and `>=1.0.0.dev0`, not `>=1.0` or `<0.2`.

    Args:
        package: name of the package.
        lines: requirements as in a package's metadata (PEP 508).
        installed_version: of verifiers.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    excluding: str | None = None
    extras: set[str] = set()
    others: list[str] = []
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if canonicalize_name(requirement.name) != "verifiers":
            others.append(line)
            continue
        extras |= requirement.extras
        # a requirement with a URL means another copy of verifiers, of any version
        met = requirement.url is None and requirement.specifier.contains(installed_version, prereleases=True)
        if not met and excluding is None:
            excluding = line.partition(";")[0].strip()
    return Requirements(package, excluding, tuple(sorted(extras)), tuple(others))


def _requirements_of(target: str, version: str) -> Requirements:
    """Return what a package requires, after its installation alone into a temporary directory.

    Raises:
        CommandFailedError: the package cannot be built.
    """
    with tempfile.TemporaryDirectory(prefix="vf-install-") as directory:
        command = [*_installer(), "--quiet", "--no-deps", "--target", directory, target]
        done = subprocess.run(command, capture_output=True, text=True)
        found = next(iter(distributions(path=[directory])), None)
        if done.returncode != 0 or found is None:
            raise CommandFailedError(f"the package {target!r} cannot be built: {done.stderr.strip()}")
        return read_requirements(found.metadata["Name"], found.requires or (), version)


def _raise_if_excluded(target: str, version: str) -> None:
    try:
        requirements = _requirements_of(target, version)
    except CommandFailedError:
        return  # the installer has printed why
    if requirements.excluding:
        raise ConfigError(
            f"{requirements.package} requires {requirements.excluding}, which excludes the installed verifiers "
            f"{version}; packages written for 0.1.x mostly run unchanged: install it with --ignore-pin, or ask its "
            "authors for a wider pin."
        )


# -- the check after -------------------------------------------------------------------------------------------


def snapshot() -> dict[str, Any]:
    """Return the installed packages and environments, as plain data."""
    found = distributions_by_name()
    verifiers = found.get("verifiers")
    return {
        "verifiers": verifiers and {"version": verifiers.version, "location": str(verifiers.locate_file(""))},
        "packages": {name: _state_of(distribution) for name, distribution in found.items()},
        "environments": [
            {**asdict(env), "missing": missing_modules(Path(env.where)) if env.where else []}
            for env in installed_environments()
        ],
    }


def missing_modules(file: Path) -> list[str]:
    """Return the top-level modules that an environment imports and that are not installed.

    Imports inside `try`, which the code can do without, and those for type checkers alone do not count.

    Args:
        file: of the environment's module; of a package its `__init__.py`, which stands for all files below it.
    """
    names: set[str] = set()
    for source in file.parent.rglob("*.py") if file.name == "__init__.py" else [file]:
        with contextlib.suppress(SyntaxError, ValueError):
            names.update(_imported_modules(ast.parse(source.read_text(encoding="utf-8", errors="replace"))))
    return sorted(name for name in names if importlib.util.find_spec(name) is None)


def _imported_modules(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            if child.module and not child.level:
                yield child.module.partition(".")[0]
        elif not isinstance(child, ast.Try) and not (
            isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        ):
            yield from _imported_modules(child)


def _state_of(distribution: Distribution) -> dict[str, Any]:
    """Return what changes with an installation; only a package from a path or URL has `origin` and `written_ns`."""
    state = {"name": distribution.metadata["Name"], "version": distribution.version, "origin": None}
    if (origin := distribution.read_text("direct_url.json")) is None:
        return state
    written = [distribution.locate_file(file) for file in distribution.files or () if file.name == "METADATA"]
    return {**state, "origin": origin, "written_ns": [Path(str(file)).stat().st_mtime_ns for file in written]}


def _fresh_snapshot() -> dict[str, Any]:
    """Take a snapshot in a new interpreter: this one read its path files before the installation."""
    # -P: a directory of the current one must not be taken for an installed package
    done = subprocess.run([sys.executable, "-P", "-c", _SNAPSHOT], capture_output=True, text=True)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise CommandFailedError(f"a new Python process cannot list what is installed: {reason[0]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _report(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """Print what was installed, and return its environments."""
    was, now = before["verifiers"], after["verifiers"]
    if now != was or after["packages"]["verifiers"] != before["packages"]["verifiers"]:
        found = "is gone" if now is None else f"was replaced by {now['version']} in {now['location']}"
        raise CommandFailedError(f"verifiers {was['version']} of {was['location']} {found}; install it again.")
    changed = {name: new for name, new in after["packages"].items() if new != before["packages"].get(name)}
    packages = {name: new for name, new in changed.items() if new["origin"] is not None}
    if not packages:
        raise CommandFailedError(f"the installer reported success, but installed nothing for {sys.executable}.")
    environments = [env for env in after["environments"] if _normalized(env["distribution"]) in packages]
    for env in environments:
        if env["where"] is None:
            raise CommandFailedError(
                f"{env['distribution']} {env['version']} is installed, but its environment {env['name']!r} cannot "
                f"work: the package lacks the module of its entry point {env['entry_point']!r}."
            )
    installed = ", ".join(f"{new['name']} {new['version']}" for new in packages.values())
    print(f"installed {installed}; verifiers {was['version']} is unchanged")
    for env in environments:
        how = f"entry point {env['entry_point']}" if env["entry_point"] else "module"
        print(f"  environment {env['name']} ({how}, {env['where']})")
    if environments:
        print(f"next: vf-eval {environments[0]['name']} -m MODEL -b URL")
    else:
        print("  it declares no environment, and none of its modules has load_environment")
    return environments


def _add_undeclared(environments: Iterable[dict[str, Any]], command: Sequence[str]) -> None:
    """Print which modules environments import that are not installed, and install those that 0.1.x brought.

    Args:
        environments: those that were installed.
        command: installs the extra `classic`; empty to install nothing.
    """
    brings = False
    for env in environments:
        for module in env["missing"]:
            extra = EXTRAS.get(module)
            brings = brings or extra == "classic"
            how = install_hint(extra) if extra else "install the package that provides it"
            print(f"{env['distribution']} imports {module}, which it does not require and is not installed: {how}")
    if brings and command:
        _run(command)


def _normalized(name: str) -> str:
    from packaging.utils import canonicalize_name

    return canonicalize_name(name)


if __name__ == "__main__":
    sys.exit(main())
