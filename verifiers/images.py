"""Images in messages: how environments write them, and where a run keeps those that its rows refer to."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.types import image_url_of, message_field

MOST_BYTES = 32 * 2**20
"""Bytes of an encoded image."""


def is_image(value: Any) -> bool:
    """Return whether a value is an image of PIL, which need not be installed."""
    return hasattr(value, "save") and hasattr(value, "convert")


def image_part(image: Any) -> dict[str, Any]:
    """Return an image as a part of a message's content, with the image itself in it as a data URL.

    Args:
        image: an image of PIL, which becomes a PNG; the bytes of an image file, or its path, as they are.
    """
    if is_image(image):
        file = io.BytesIO()
        (image if image.mode == "RGBA" else image.convert("RGB")).save(file, "PNG")
        image = file.getvalue()
    elif isinstance(image, str | os.PathLike):
        image = Path(image).read_bytes()
    if not isinstance(image, bytes | bytearray):
        raise TypeError(
            f"an image is given as {type(image).__name__}; give an image of PIL (Image.fromarray makes one of an "
            "array), the bytes of a file, or its path."
        )
    known = ((b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"BM", "bmp"), (b"RIFF", "webp"))
    kind = next((name for begins, name in known if image.startswith(begins)), "png")
    url = f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def image_bytes(url: str) -> bytes:
    """Return the image in a data URL; raise ValueError for other URLs, which nothing is fetched from."""
    scheme, comma, rest = url.partition(",")
    if not (comma and scheme.startswith("data:") and scheme.endswith(";base64")):
        raise ValueError(
            f"an image is given by {url[:60]!r}, and nothing is fetched or read here; give it as "
            "data:image/png;base64,... (vf.image_part makes one)"
        )
    if len(rest) > MOST_BYTES * 4 // 3 + 4:
        raise ValueError(f"an image of {len(rest) * 3 // 4:,} bytes is larger than {MOST_BYTES:,}; scale it down")
    try:
        return base64.b64decode(rest, validate=True)
    except ValueError as error:
        raise ValueError(
            f"the data URL of an image, {url[:60]!r}, is not base64 ({error}); write it with base64.b64encode, "
            "without spaces and ends of lines"
        ) from None


def image_urls(messages: Iterable[Any]) -> Iterator[str]:
    """Yield the URL of each image in messages, in order."""
    for message in messages:
        content = message_field(message, "content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") == "image_url":
                yield image_url_of(part) or ""


class ImageStore:
    """The images of a run's rows, each once on disk, under the SHA-256 of its bytes.

    Args:
        max_images: most of a prompt.
    """

    def __init__(self, directory: Path, max_images: int) -> None:
        self._directory, self.max_images = directory, max_images

    def keep_all(self, messages: Any) -> list[str]:
        """Store the images of messages, and return their names; raise ValueError as `image_bytes`."""
        return [self.keep(image_bytes(url)) for url in image_urls(() if isinstance(messages, str) else messages)]

    def keep(self, image: bytes) -> str:
        """Store an image where that was not done, and return its name."""
        name = hashlib.sha256(image).hexdigest()
        path = self._directory / name
        if not path.exists():
            self._directory.mkdir(parents=True, exist_ok=True)
            descriptor, written = tempfile.mkstemp(dir=self._directory)
            with os.fdopen(descriptor, "wb") as file:
                file.write(image)
            os.replace(written, path)
        return name

    def adopt(self, directory: Path) -> None:
        """Take over the images of another run, whose blocks in flight this one trains on."""
        if directory.is_dir() and directory != self._directory:
            for path in directory.iterdir():
                self.keep(path.read_bytes())

    def read(self, name: str) -> bytes:
        """Return an image; raise ConfigError where it is gone."""
        try:
            return (self._directory / name).read_bytes()
        except FileNotFoundError:
            raise ConfigError(
                f"the image {name} of a training row is not in {str(self._directory)!r}; put the folder back, or "
                "resume from a checkpoint in its own run's directory."
            ) from None
