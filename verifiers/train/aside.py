"""An earlier run's files, put aside where another begins in the same directory.

A run's directory tells one lineage. What a run before left there would be taken for this one's: its checkpoints have
the higher numbers. So it is moved into `earlier-N`, whole: a process that is killed meanwhile leaves
`.earlier-N.partial`, and the next one finishes the move before it looks at anything.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from verifiers.errors import CheckpointError
from verifiers.train.checkpoint import MARKER
from verifiers.train.evaluation_records import EVALUATIONS
from verifiers.train.ledger import LEDGER
from verifiers.train.watching.record import METRICS, RUN, SAMPLES

__all__ = ["finish_putting_aside", "put_aside", "put_later_aside"]

# the tables that TRL writes with log_completions, into a directory that it makes with the trainer
_COMPLETIONS = "completions"
_RECORDS = (LEDGER, METRICS, SAMPLES, _COMPLETIONS)
# says nothing that a run without any of the others would miss
_ABOUT = (RUN, "report.html")

_ASIDE = re.compile(r"\.?earlier-(\d+)(?:\.partial)?")


def put_aside(output_dir: str | Path, keeps: Collection[Path] = ()) -> Path | None:
    """Move everything that an earlier run left into a directory of its own.

    Args:
        output_dir: of the run that begins.
        keeps: stored evaluations that are this run's.

    Returns:
        Where it is now; None where there was nothing.

    Raises:
        CheckpointError: it cannot be moved.
    """
    root = Path(output_dir)
    finish_putting_aside(root)
    if not any(_is_worth_keeping(path) for path in _left_by_a_run(root, keeps)):
        return None
    with _told_what_stays(root):
        return _move(root, _left_by_a_run(root, keeps), _begin(root))


def put_later_aside(output_dir: str | Path, step: int) -> Path | None:
    """Move the complete checkpoints after a step: a run goes on from there that makes others with their numbers.

    Returns:
        Where they are now; None where there were none.

    Raises:
        CheckpointError: they cannot be moved.
    """
    root = Path(output_dir)
    later = [path for path in _checkpoints(root) if _step(path) > step and (path / MARKER).is_file()]
    if not later:
        return None
    with _told_what_stays(root):
        # not through a hidden name: to finish this move is to move less than everything
        aside = root / f"earlier-{_next_number(root)}"
        aside.mkdir()
        # the newest first: what is left of a move that was cut is an older lineage's, never a gap in it
        return _move(root, sorted(later, key=_step, reverse=True), aside)


def finish_putting_aside(output_dir: str | Path) -> None:
    """Finish what a process that was killed has begun."""
    root = Path(output_dir)
    for partial in root.glob(".earlier-*.partial"):
        with _told_what_stays(root):
            _move(root, _left_by_a_run(root), partial)


def _begin(root: Path) -> Path:
    partial = root / f".earlier-{_next_number(root)}.partial"
    partial.mkdir()
    return partial


def _move(root: Path, paths: list[Path], to: Path) -> Path:
    for path in paths:
        target = to / path.relative_to(root)
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
        if path.name == _COMPLETIONS:
            path.mkdir()
    if not to.name.startswith("."):
        return to
    return to.rename(root / to.name.removeprefix(".").removesuffix(".partial"))


def _left_by_a_run(root: Path, keeps: Collection[Path] = ()) -> list[Path]:
    found = [root / name for name in (*_RECORDS, *_ABOUT)]
    found += [*_checkpoints(root), *(root / EVALUATIONS).glob("step-*")]
    empty = {root / _COMPLETIONS} if not any((root / _COMPLETIONS).glob("*")) else set()
    return [path for path in found if path.exists() and path not in keeps and path not in empty]


def _is_worth_keeping(path: Path) -> bool:
    return path.name not in _ABOUT and (path.is_dir() or path.stat().st_size > 0)


def _checkpoints(root: Path) -> list[Path]:
    return [path for path in root.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _next_number(root: Path) -> int:
    found = (_ASIDE.fullmatch(path.name) for path in root.iterdir())
    return 1 + max((int(match[1]) for match in found if match), default=0)


@contextlib.contextmanager
def _told_what_stays(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"what an earlier run left in {root} cannot be put aside ({error}); give another output_dir."
        ) from error
