"""Provenance of a result: versions, the environment's source, and the git revision."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from verifiers.envs.registry import declared_by, module_of

_GIT_TIMEOUT_S = 5.0
_MOST_FILES = 500


def versions() -> dict[str, str | None]:
    """Return the versions of what takes part in every evaluation."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("verifiers", "openai", "aiohttp", "datasets"):
        found[name] = _version(name)
    return found


def environment_provenance(env_id: str) -> dict[str, str | None]:
    """Return the loaded environment's package version, a hash of its source and its directory; None where unknown.

    An installed version says little about a package that is edited in place; the source says what was run.
    """
    entry, module = declared_by(env_id), module_of(env_id) or ""
    version = entry.dist.version if entry is not None and entry.dist is not None else None
    file = getattr(sys.modules.get(module), "__file__", None)
    path = None if file is None else Path(file)
    levels = module.count(".") + (path is not None and path.name == "__init__.py")
    return {
        "env_version": version or _version(env_id.strip().rsplit("/", 1)[-1].replace("_", "-")),
        "env_source": None if path is None else _source_hash(path),
        "env_directory": None if path is None else str(path.resolve().parents[levels]),
    }


def git_provenance() -> dict[str, Any] | None:
    """Return the revision of the current directory's repository, and whether it has changes; None outside of one."""
    revision = _git("rev-parse", "HEAD")
    if not revision:
        return None
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "has_changes": None if changes is None else bool(changes)}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _source_hash(path: Path) -> str | None:
    """Return a hash of a package's files, or of a module and those beside it that are loaded."""
    if path.name == "__init__.py":
        files = sorted(path.parent.rglob("*.py"))[:_MOST_FILES]
    else:
        loaded = {Path(file) for one in list(sys.modules.values()) if (file := getattr(one, "__file__", None))}
        beside = {file for file in loaded if file.parent == path.parent and "site-packages" not in file.parts}
        files = sorted({path, *beside})
    digest = hashlib.blake2b(digest_size=8)
    try:
        for source in files:
            digest.update(f"{source.relative_to(path.parent)}\n".encode() + source.read_bytes())
    except OSError:
        return None
    return digest.hexdigest()


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
