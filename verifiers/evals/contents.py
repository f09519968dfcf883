"""Large contents once: texts that stand in a file beside the rows, which refer to them by a hash.

Pictures, long system prompts and tool outputs come again in every rollout of a prompt. So a text of `LARGE`
characters or more goes to `contents.jsonl`, a line `{"id", "content"}` each, and the row has `{"$content": id}` in
its place. What the policy wrote stays in the row until the same text comes a second time: it seldom does, and rows
are read by people.

A content is handed to the operating system before the row that names it, so a run that is killed has all contents of
its rows. Ids are hashes (BLAKE2b, 128 bits) of what is stored, after secrets were taken out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from verifiers.errors import ConfigError
from verifiers.evals.json_lines import json_line, mend_last_line

__all__ = ["CONTENTS", "LARGE", "ContentReader", "ContentWriter", "has_references"]

CONTENTS = "contents.jsonl"

LARGE = 1024
"""Characters from which on a text is stored once."""

_MARK = "$content"
_ID = re.compile(r"[0-9a-f]{32}\Z")
_LINE_START = b'{"id": "'
_COLUMNS = ("prompt", "completion", "answer", "info")
# deeper than any message; data of environments may refer to itself
_DEEPEST = 10
_KEPT_CHARACTERS = 32 << 20


def has_references(line: bytes) -> bool:
    """True where a line of results.jsonl may refer to contents; inside of a text the quotes would be escaped."""
    return b'{"$content": "' in line


class ContentWriter:
    """Appends contents, each once.

    Args:
        directory: of the run; contents that are there already are not written again.
        hide: takes secrets out of texts.
    """

    def __init__(self, directory: Path, hide: Callable[[str], str]) -> None:
        self._path = directory / CONTENTS
        self._hide = hide
        self._file: IO[str] | None = None
        self._seen: set[bytes] = set()
        mend_last_line(self._path)
        self._known = {bytes.fromhex(name) for name, _, _ in _places(self._path)}

    def line(self, row: dict[str, Any]) -> str:
        """The row as a line, with references in place of its large texts, which are on their way to the disk then."""
        line = json_line(row)
        # no text is longer than its line, so nearly all rows end here
        if len(line) < LARGE and _MARK not in line:
            return line
        large = [column for column in _COLUMNS if _is_large(row[column])]
        if not large:
            return line
        for column in large:
            value = row[column]
            row[column] = self._completion(value) if column == "completion" else self._shortened(value)
        if self._file is not None:
            self._file.flush()
        return json_line(row)

    def _completion(self, value: Any) -> Any:
        if not isinstance(value, list):
            return self._shortened(value, by_policy=True)
        return [
            self._shortened(message, isinstance(message, Mapping) and message.get("role") == "assistant", 1)
            for message in value
        ]

    def _shortened(self, value: Any, by_policy: bool = False, depth: int = 0) -> Any:
        if isinstance(value, str):
            return value if len(value) < LARGE else self._reference(value, by_policy)
        if depth < _DEEPEST:
            if isinstance(value, Mapping):
                if _MARK in value:
                    # somebody's data that looks like a reference is a content itself
                    return self._reference(value, by_policy=False)
                return {name: self._shortened(item, by_policy, depth + 1) for name, item in value.items()}
            if isinstance(value, (list, tuple)):
                return [self._shortened(item, by_policy, depth + 1) for item in value]
        return value

    def _reference(self, content: Any, by_policy: bool) -> Any:
        text = self._hide(content if isinstance(content, str) else json_line(content))
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest not in self._known:
            if by_policy and digest not in self._seen:
                self._seen.add(digest)
                return content
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8")
            self._file.write(self._hide(json_line({"id": digest.hex(), "content": content})) + "\n")
            self._known.add(digest)
        return {_MARK: digest.hex()}

    def close(self) -> None:
        """Close the file; does nothing the second time."""
        if self._file is not None:
            self._file.close()


class ContentReader:
    """Puts contents back into rows, of a run that may still grow. Holds the places of contents, and few of them.

    Args:
        directory: of the run.
        strict: a content that is missing raises; else a text that says so stands in its place.
    """

    def __init__(self, directory: Path, *, strict: bool = True) -> None:
        self._path = directory / CONTENTS
        self._strict = strict
        self._places: dict[str, tuple[int, int]] = {}
        self._read_to = 0
        self._file_id: tuple[int, int] | None = None
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._kept_characters = 0

    def restored(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row as it was before its large texts were taken out.

        Raises:
            ConfigError: a content is missing or damaged.
        """
        return {name: self._whole(value) if name in _COLUMNS else value for name, value in row.items()}

    def _whole(self, value: Any) -> Any:
        if isinstance(value, dict):
            name = value.get(_MARK)
            if len(value) == 1 and isinstance(name, str) and _ID.match(name):
                return self._content(name)
            return {key: self._whole(item) for key, item in value.items()}
        return [self._whole(item) for item in value] if isinstance(value, list) else value

    def _content(self, name: str) -> Any:
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        if name not in self._places:
            self._look_for_more()
        try:
            offset, length = self._places[name]
            with self._path.open("rb") as file:
                file.seek(offset)
                content = json.loads(file.read(length))["content"]
        except (OSError, KeyError, TypeError, ValueError) as error:
            if not self._strict:
                return f"[content {name} is missing]"
            raise ConfigError(
                f"{str(self._path)!r} lacks the content {name} that a row refers to ({type(error).__name__}); copy a "
                "run with all of its files."
            ) from None
        self._keep(name, content)
        return content

    def _keep(self, name: str, content: Any) -> None:
        self._kept[name] = content
        self._kept_characters += _size(content)
        while self._kept_characters > _KEPT_CHARACTERS:
            self._kept_characters -= _size(self._kept.popitem(last=False)[1])

    def _look_for_more(self) -> None:
        try:
            status = os.stat(self._path)
        except OSError:
            return
        file_id = (status.st_dev, status.st_ino)
        if self._file_id != file_id or status.st_size < self._read_to:
            self._places, self._read_to, self._file_id = {}, 0, file_id
        for name, offset, length in _places(self._path, self._read_to):
            self._places[name] = offset, length
            self._read_to = offset + length


def _places(path: Path, start: int = 0) -> Iterator[tuple[str, int, int]]:
    """Id, offset and length of each line from an offset on; one without its end is still being written."""
    if not path.is_file():
        return
    first = len(_LINE_START)
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            name = line[first : first + 32].decode("ascii", "replace")
            if line.endswith(b"\n") and line.startswith(_LINE_START) and _ID.match(name):
                yield name, start, len(line)
            start += len(line)


def _is_large(value: Any, depth: int = 0) -> bool:
    """True where something of it is stored apart."""
    kind = type(value)
    if kind is str:
        return len(value) >= LARGE
    if kind is int or kind is float or value is None or depth >= _DEEPEST:
        return False
    if isinstance(value, Mapping):
        return _MARK in value or any(_is_large(item, depth + 1) for item in value.values())
    return isinstance(value, (list, tuple)) and any(_is_large(item, depth + 1) for item in value)


def _size(content: Any) -> int:
    return len(content) if isinstance(content, str) else 1000
