"""Where a package to be installed comes from: a name under ./environments, a path, or a git URL; and its metadata."""

from __future__ import annotations

import contextlib
import difflib
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

from verifiers.cli.arguments import module_name
from verifiers.cli.exit_codes import CommandFailedError
from verifiers.errors import ConfigError

__all__ = ["PackageMetadata", "Source", "opened_source", "read_metadata"]


@dataclass(frozen=True, slots=True)
class Source:
    """A package that can be installed.

    Attributes:
        target: what the installer is given: a path, or a git URL with the commit that was looked at.
        files: the package's directory or wheel on this machine.
        is_directory: the target is a directory, which installers install anew even where the version is the same.
    """

    target: str
    files: Path
    is_directory: bool


@dataclass(frozen=True, slots=True)
class PackageMetadata:
    """What of a package's metadata decides whether it can be installed here."""

    name: str
    requires: tuple[str, ...]


@contextlib.contextmanager
def opened_source(env: str, directory: str) -> Iterator[Source]:
    """Find the package; of a git URL a checkout is kept until the end of the block.

    Args:
        env: a name under `directory`, a path (it has a slash, or begins with a dot), or a URL that begins with git+.

    Raises:
        ConfigError: there is no such package.
        CommandFailedError: git could not fetch it.
    """
    url = env.partition(" @ ")[2].strip() or env
    if url.startswith("git+"):
        with tempfile.TemporaryDirectory(prefix="vf-install-") as temporary:
            yield _cloned(url, Path(temporary) / "checkout")
    elif "://" in env:
        raise ConfigError(f"{env!r} is no git URL that can be installed; write it as 'git+https://...'.")
    else:
        yield _local(env, directory)


def read_metadata(source: Source, build_command: Sequence[str]) -> PackageMetadata:
    """Name and requirements: from pyproject.toml where they stand there, else from a wheel built for it.

    Args:
        build_command: gets the wheel's directory and the package's directory as further arguments.

    Raises:
        ConfigError: a pyproject.toml that cannot be read.
        CommandFailedError: the wheel could not be built.
    """
    if source.files.is_file():
        return _wheel_metadata(source.files)
    project = _project_table(source.files)
    if "name" in project and "dependencies" not in project.get("dynamic", ()):
        return PackageMetadata(str(project["name"]), tuple(map(str, project.get("dependencies", ()))))
    with tempfile.TemporaryDirectory(prefix="vf-install-") as temporary:
        done = subprocess.run([*build_command, temporary, str(source.files)], stdout=sys.stderr)
        wheels = sorted(Path(temporary).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise CommandFailedError(f"the package in {str(source.files)!r} could not be built; see above.")
        return _wheel_metadata(wheels[0])


def _local(env: str, directory: str) -> Source:
    if env.endswith(".whl") and Path(env).is_file():
        return Source(str(Path(env)), Path(env), is_directory=False)
    if env.startswith(".") or "/" in env or Path(env).is_absolute():
        path = Path(env).expanduser()
    else:
        names = dict.fromkeys((module_name(env), env))
        path = next((Path(directory, name) for name in names if Path(directory, name).is_dir()), Path())
        if path == Path():
            raise ConfigError(_unknown_name(env, directory))
    if not path.is_dir():
        raise ConfigError(f"there is no directory {str(path)!r}; give a package's name, its directory or a git URL.")
    _check_is_package(path, str(path))
    # a path that an installer cannot take for the name of a package
    return Source(str(path.resolve()), path.resolve(), is_directory=True)


def _check_is_package(path: Path, shown: str) -> None:
    if not (path / "pyproject.toml").is_file() and not (path / "setup.py").is_file():
        raise ConfigError(
            f"{shown!r} is no package: it has no pyproject.toml; `vf-init` writes one that can serve as an example."
        )


def _unknown_name(env: str, directory: str) -> str:
    root = Path(directory)
    if not root.is_dir():
        return (
            f"there is no directory {directory!r} to look for {env!r} in; give it with -p, or give the package's "
            "path or a git URL."
        )
    names = sorted(entry.name for entry in root.iterdir() if (entry / "pyproject.toml").is_file())
    near = difflib.get_close_matches(module_name(env), names, n=3) or names[:5]
    has = f"it has {', '.join(near)}" if near else "it has no packages"
    beside = f"; there is a directory {env!r} here: write './{env}' for it" if Path(env).is_dir() else ""
    return f"there is no package {env!r} in {directory!r} ({has}){beside or '; a path or a git URL would do too'}."


def _project_table(directory: Path) -> dict[str, Any]:
    file = directory / "pyproject.toml"
    if not file.is_file():
        return {}
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error}.") from error
    return project if isinstance(project, dict) else {}


def _wheel_metadata(wheel: Path) -> PackageMetadata:
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = zipfile.Path(archive)
            (info,) = (entry for entry in inside.iterdir() if entry.name.endswith(".dist-info"))
            distribution: Distribution = PathDistribution(info)
            return PackageMetadata(distribution.metadata["Name"], tuple(distribution.requires or ()))
    except (zipfile.BadZipFile, ValueError) as error:
        raise ConfigError(f"{str(wheel)!r} is no wheel that can be read: {error}.") from error


def _cloned(url: str, checkout: Path) -> Source:
    """Clone the repository at the URL; the target names the commit, so that what was read is what is installed."""
    if shutil.which("git") is None:
        raise ConfigError(f"{url!r} needs git, which is not on PATH; install git, or give a directory.")
    parts = urlsplit(url.removeprefix("git+"))
    path, at, revision = parts.path.rpartition("@") if "@" in parts.path else (parts.path, "", "")
    if at and (not revision or revision.startswith("-")):
        raise ConfigError(f"{url!r} has no usable revision after the @; give a branch, a tag or a commit.")
    repository = urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))
    _git(url, "clone", "--quiet", repository, str(checkout))
    if at:
        in_checkout = ("-C", str(checkout))
        fetched = _git(url, *in_checkout, "fetch", "--quiet", "origin", revision, may_fail=True)
        if _git(url, *in_checkout, "checkout", "--quiet", revision, may_fail=True) is None:
            if fetched is None:
                raise ConfigError(f"{url!r}: the repository has no branch, tag or commit {revision!r}.")
            # a ref that a clone does not bring, such as refs/pull/1/head
            _git(url, *in_checkout, "checkout", "--quiet", "FETCH_HEAD")
    commit = _git(url, "-C", str(checkout), "rev-parse", "HEAD")
    subdirectory = parse_qs(parts.fragment).get("subdirectory", [""])[0].strip("/")
    package = (checkout / subdirectory).resolve()
    if not package.is_relative_to(checkout.resolve()) or not package.is_dir():
        raise ConfigError(f"{url!r}: the repository has no directory {subdirectory!r}.")
    if not subdirectory and not (package / "pyproject.toml").is_file() and not (package / "setup.py").is_file():
        raise ConfigError(
            f"{url!r}: the repository itself is no package; name one in it with '#subdirectory=environments/NAME'."
        )
    _check_is_package(package, url)
    fragment = f"#subdirectory={subdirectory}" if subdirectory else ""
    return Source(f"git+{repository}@{commit}{fragment}", package, is_directory=False)


def _git(url: str, *arguments: str, may_fail: bool = False) -> str | None:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, stdin=None)
    if done.returncode == 0:
        return done.stdout.strip()
    if may_fail:
        return None
    reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    raise CommandFailedError(f"git could not fetch {url!r}: {reason}")
