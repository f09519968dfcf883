"""Append-only files of one JSON object a line: strict JSON, and repaired where a killed process left half a line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["json_line", "parse_row", "plain", "repair_last_line"]

_DEEPEST = 50


def json_line(row: Mapping[str, Any]) -> str:
    """Return a row as one line of strict JSON, whatever an environment put into it; without the line's end."""
    try:
        line = json.dumps(row, ensure_ascii=False, allow_nan=False, default=str)
        line.encode()
    except (ValueError, TypeError):
        # NaN, keys that are not text, a cycle, or half of a surrogate pair, which models do write
        line = json.dumps(plain(row), ensure_ascii=True, allow_nan=False)
    return line


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
    """Return the row of a line.

    Raises:
        ValueError: the line is not a JSON object.
    """
    row = json.loads(line)
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
        except ValueError:
            whole = False
        if whole:
            file.seek(end)
            file.write(b"\n")
        else:
            file.truncate(end - len(incomplete))
