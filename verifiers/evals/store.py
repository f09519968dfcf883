"""The stored results of an evaluation: one line a rollout as it finishes, and the metadata with its provenance.

A run directory holds `results.jsonl` (a line a rollout, append-only, handed to the operating system one by one),
`failures.jsonl` (the full text and traceback of each failure) and `metadata.json` (what was run, with which versions,
and the summary). Where a rollout was done again, the later line counts. A process that is killed loses nothing
finished; a machine that loses power may.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import traceback
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from verifiers.data.sampler import Shard
from verifiers.envs.registry import declared_by, module_of
from verifiers.errors import ConfigError
from verifiers.log import Redactor
from verifiers.rollouts.rollout import Rollout
from verifiers.rubrics.scoring import is_finite_number
from verifiers.types import Outcome

RESULTS, FAILURES, METADATA = "results.jsonl", "failures.jsonl", "metadata.json"

_NUMBERS = ("reward", "generation_ms", "scoring_ms", "prompt_tokens", "completion_tokens", "turns", "attempts")
_LONGEST_ERROR = 1000
_DEEPEST = 50


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run as it lies on disk: a row for each rollout, by example and generation; of one done again, its last."""

    directory: Path
    metadata: dict[str, Any]
    rows: list[dict[str, Any]]


def run_at(path: str | Path) -> Path:
    """Return the directory of a run, given that or its results.jsonl; raise ConfigError where there is none."""
    directory = Path(path)
    if directory.name == RESULTS:
        directory = directory.parent
    if not (directory / RESULTS).is_file():
        raise ConfigError(f"{str(path)!r} holds no {RESULTS}; give the directory of a run.")
    return directory


def read_run(directory: str | Path) -> StoredRun:
    """Read a run by its directory or its results.jsonl, also one being written: an incomplete last line is left out.

    Raises:
        ConfigError: there is no run there, or a line before the last is damaged.
    """
    path = run_at(directory)
    last: dict[tuple[Any, Any], dict[str, Any]] = {}
    for row in iter_rows(path):
        # rows of other packages have no number: each is a rollout of its own
        number = row.get("generation")
        last[row.get("example_id"), (len(last),) if number is None else number] = row
    rows = [last[key] for key in sorted(last, key=lambda key: [(str(type(part)), part) for part in key])]
    return StoredRun(path, read_metadata(path), rows)


def is_own_file(path: Path) -> bool:
    """Return whether a run's file is a regular one; a run may be a stranger's, and a link show any file of ours."""
    return path.is_file() and not path.is_symlink()


def read_metadata(directory: Path) -> dict[str, Any]:
    """Return the content of metadata.json, empty where it is missing; raise ConfigError where it is damaged."""
    path = directory / METADATA
    if os.path.lexists(path) and not is_own_file(path):
        raise ConfigError(f"{str(path)!r} is not a regular file; put the run's metadata in its place or delete it.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} is not valid JSON ({error}); repair or delete it.") from None
    return found if isinstance(found, dict) else {}


def iter_rows(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of results.jsonl in the order in which they were written; none where there is no file."""
    for _, row in iter_lines(directory):
        yield row


def iter_lines(directory: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each line of results.jsonl as stored, and its row; an incomplete last line is left out."""
    path = directory / RESULTS
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = parse_row(line)
                _check_row(row)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise ConfigError(
                    f"line {number} of {str(path)!r} is damaged ({error}); repair or delete it."
                ) from error
            yield line, row


def _check_row(row: Mapping[str, Any]) -> None:
    """Raise ValueError where a column does not hold what is counted, sorted or added up."""
    for name in _NUMBERS:
        number = finite(row.get(name))
        if row.get(name) is not None and (number is None or (name != "reward" and abs(number) >= 2**62)):
            raise ValueError(f"{name} is {str(row[name])[:40]!r}, which is no number")
    for name in ("example_id", "generation"):
        if not isinstance(row.get(name), (int, str, type(None))):
            raise ValueError(f"{name} is {str(row[name])[:40]!r}, which names nothing")
    if row.get("outcome") not in (None, *Outcome):
        raise ValueError(f"outcome is {str(row['outcome'])[:40]!r}, which is none of {', '.join(Outcome)}")


def require_whole(directory: Path, row: Mapping[str, Any]) -> None:
    """Raise ConfigError where a row does not say which rollout it is and how that ended."""
    for name in ("example_id", "generation", "outcome"):
        if row.get(name) is None:
            place = f"a row of {str(directory / RESULTS)!r}"
            raise ConfigError(f"{place} has no {name} ({plain(row)!r:.80}); give it one, or take the row out.")


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return each reward function's value in a row: the finite numbers of its column `metrics`."""
    found = row.get("metrics")
    if not isinstance(found, Mapping):
        return {}
    return {name: number for name, value in found.items() if (number := finite(value)) is not None}


def new_run_directory(
    env_id: str, model: str, root: str | Path = "outputs/evals", *, shard: Shard | None = None
) -> Path:
    """Return a fresh directory `<root>/<env>--<model>/<run id>`; slashes in the names become `--`.

    The id of a shard's run ends as in `1a2b3c4d-3-of-8`.
    """
    directory = Path(root) / f"{env_id}--{model}".replace("/", "--")
    directory /= uuid.uuid4().hex[:8] + ("" if shard is None else f"-{shard.number}-of-{shard.of}")
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"results cannot be written under {str(root)!r}: {error}.") from error
    return directory


def result_row(rollout: Rollout) -> dict[str, Any]:
    """Return one line of results.jsonl: a rollout without its state."""
    row: dict[str, Any] = {
        "example_id": rollout.key.example_id,
        "generation": rollout.key.generation,
        "prompt": rollout.prompt,
        "completion": rollout.completion,
        "answer": rollout.answer,
        "task": rollout.task,
        "info": rollout.info,
        "outcome": str(rollout.outcome),
        "reward": rollout.reward,
        "error": None if rollout.failure is None else _shortened(str(rollout.failure)),
        "generation_ms": round(rollout.timing.generation_s * 1000, 3),
        "scoring_ms": round(rollout.timing.scoring_s * 1000, 3),
        "prompt_tokens": rollout.usage.prompt_tokens,
        "completion_tokens": rollout.usage.completion_tokens,
        "turns": rollout.turns,
        "attempts": rollout.attempts,
        "refusal": None if rollout.refusal is None else _shortened(rollout.refusal),
        # a state made from a row refuses to be asked for what it lacks
        "tool_call_errors": [_shortened(str(text)) for text in dict.get(rollout.state, "tool_call_errors") or ()],
        "metrics": dict(rollout.metrics),
    }
    # a reward function must not overwrite a column of ours
    row.update({name: value for name, value in rollout.metrics.items() if name not in row})
    return row


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]} ... ({len(text)} characters)"


def _failure_row(rollout: Rollout) -> dict[str, Any]:
    failure = rollout.failure
    assert failure is not None
    trace = None if failure.exception is None else "".join(traceback.format_exception(failure.exception))
    return {
        "example_id": rollout.key.example_id,
        "generation": rollout.key.generation,
        "outcome": str(rollout.outcome),
        "kind": failure.kind,
        "text": failure.text,
        "traceback": trace,
    }


class ResultStore:
    """A writer of rollouts to `results.jsonl` as they finish, and of `metadata.json` at the start.

    Args:
        directory: an existing directory, empty or of the run that is continued.
        metadata: what was run; never a key or its value.
        redact: takes secrets out of every line and text before it is written.

    Raises:
        ConfigError: on entering, when another process writes to the directory.
    """

    def __init__(self, directory: Path, metadata: Mapping[str, Any], redact: Redactor | None = None) -> None:
        self.directory = directory
        self.metadata = dict(metadata)
        self._redact = redact or Redactor(())
        self._open = contextlib.ExitStack()
        self._file: IO[str] | None = None

    def __enter__(self) -> ResultStore:
        with contextlib.ExitStack() as opened:
            lock = opened.enter_context((self.directory / ".lock").open("w"))
            try:
                # the kernel lets go of it when the process dies, however it dies
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another process is writing to {str(self.directory)!r}; wait for it, or use --fresh for a new "
                    "run."
                ) from None
            for name in (RESULTS, FAILURES):
                repair_last_line(self.directory / name)
            self.write_metadata()
            self._file = opened.enter_context((self.directory / RESULTS).open("a", encoding="utf-8"))
            # a full disk may refuse the last bytes; the lock is let go of all the same, and last
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def append(self, rollout: Rollout) -> None:
        """Write one rollout and hand it to the operating system, so that a killed run loses nothing finished."""
        assert self._file is not None
        if rollout.failure is not None:
            # before the row, so that every row's failure is there
            with (self.directory / FAILURES).open("a", encoding="utf-8") as failures:
                failures.write(self._redact.json(json_line(_failure_row(rollout))) + "\n")
        self._file.write(self._redact.json(json_line(result_row(rollout))) + "\n")
        self._file.flush()

    def write_metadata(self, **more: Any) -> None:
        """Write metadata.json again, with `more` added."""
        self.metadata.update(more)
        partial = self.directory / ".metadata.json.partial"
        text = json.dumps(plain(self.metadata), indent=2, ensure_ascii=False)
        partial.write_text(self._redact.json(text, indent=2) + "\n", encoding="utf-8", errors="replace")
        os.replace(partial, self.directory / METADATA)


# -- lines of JSON -------------------------------------------------------------------------------------------------


def json_line(row: Mapping[str, Any]) -> str:
    """Return a row as one line of strict JSON, whatever an environment put into it; without the line's end."""
    try:
        line = json.dumps(row, ensure_ascii=False, allow_nan=False, default=str)
        line.encode()
    except (ValueError, TypeError):
        # NaN, keys that are not text, a cycle, or half of a surrogate pair, which models do write
        line = json.dumps(plain(row), ensure_ascii=True, allow_nan=False)
    return line


def finite(value: Any) -> float | None:
    """Return a stored number; None for anything else, also for what no float holds."""
    return float(value) if is_finite_number(value) and not isinstance(value, bool) else None


def plain(value: Any, depth: int = 0) -> Any:
    """Return nested data as JSON takes it: no NaN, texts as keys, no cycles."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if depth < _DEEPEST:
        if isinstance(value, Mapping):
            return {str(name): plain(item, depth + 1) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item, depth + 1) for item in value]
    return f"<{type(value).__name__}>" if depth >= _DEEPEST else str(value)


def parse_row(line: bytes) -> dict[str, Any]:
    """Return the row of a line; raise ValueError where that is not a JSON object."""
    try:
        row = json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError("it is not a JSON object")
    return row


def repair_last_line(path: Path) -> None:
    """Cut off what a killed process left half-written, so that the next line begins a line."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        tail, start = b"", end
        while start > 0 and b"\n" not in tail:
            start = max(0, start - 65536)
            file.seek(start)
            tail = file.read(end - start)
        incomplete = tail.rpartition(b"\n")[2]
        if not incomplete:
            return
        try:
            whole = isinstance(json.loads(incomplete), dict)
        except (ValueError, RecursionError):
            whole = False
        if whole:
            file.seek(end)
            file.write(b"\n")
        else:
            file.truncate(end - len(incomplete))


# -- provenance ---------------------------------------------------------------------------------------------------

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
