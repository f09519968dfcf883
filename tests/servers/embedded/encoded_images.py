"""Files of images: whole in every format with the pixels that they hold, broken, and too large."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

from PIL import Image


def noise(seed: int = 0, width: int = 16, height: int = 24, mode: str = "RGB") -> Image.Image:
    return Image.frombytes(mode, (width, height), random.Random(seed).randbytes(width * height * len(mode)))


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, rows: bytes = b"", more: bytes = b"", *, depth: int = 8, color: int = 2) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + more + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


GOOD, JPEG = saved(noise()), saved(noise(), "JPEG")
PALETTE, ALPHA = noise(2).quantize(16), noise(4, mode="RGBA")
DEEP = [random.Random(row).randbytes(96) for row in range(24)]
TURN = b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"
READ: dict[str, tuple[bytes, Image.Image]] = {
    "png": (GOOD, noise()),
    "webp": (saved(noise(), "WEBP", lossless=True), noise()),
    "bmp": (saved(noise(), "BMP"), noise()),
    "gif": (saved(PALETTE, "GIF"), PALETTE.convert("RGB")),
    "animated-gif": (saved(PALETTE, "GIF", save_all=True, append_images=[noise(5)]), PALETTE.convert("RGB")),
    "palette": (saved(PALETTE), PALETTE.convert("RGB")),
    "alpha": (saved(ALPHA), Image.composite(ALPHA, Image.new("RGBA", ALPHA.size, "white"), ALPHA).convert("RGB")),
    "turned-by-exif": (saved(noise(), exif=TURN), noise().transpose(Image.Transpose.ROTATE_270)),
    "gray": (saved(noise(6, mode="L")), noise(6, mode="L").convert("RGB")),
    "16-bit": (
        png(16, 24, b"".join(b"\0" + row for row in DEEP), depth=16),
        Image.frombytes("RGB", (16, 24), b"".join(row[::2] for row in DEEP)),
    ),
    "1x1": (saved(noise(7, 1, 1)), noise(7, 1, 1)),
    **{
        name: (file, Image.open(io.BytesIO(file)).convert("RGB"))
        for name, file in {
            "jpeg": JPEG,
            "cmyk-jpeg": saved(noise(1, mode="CMYK"), "JPEG"),
            "16-bit-gray": saved(Image.frombytes("I;16", (16, 24), b"".join(DEEP)[:768])),
        }.items()
    },
}
"""Encoded images, and the pixels that a model is to see."""

WHOLE = {
    "png": GOOD,
    "jpeg": JPEG,
    "progressive": saved(noise(), "JPEG", progressive=True),
    "webp": saved(noise(), "WEBP"),
    **{name: READ[name][0] for name in ("gif", "bmp")},
}
BMP_HEADER = struct.Struct("<2sIHHIIIIHHIIIIII")
GIF_HEADER = struct.Struct("<6sHHBBBcHHHHBB")
NO_IMAGES: dict[str, bytes] = {
    **{f"{name}-{cut:.0%}": file[: int(len(file) * cut)] for name, file in WHOLE.items() for cut in (0.02, 0.8)},
    "nothing": b"",
    **{kind: saved(noise(), kind) for kind in ("TIFF", "ICO", "EPS", "PDF")},
    "PSD": b"8BPS\0\1" + bytes(40),
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
    "HTML": b"<!doctype html><img src='http://127.0.0.1/'>",
    "text": b"/etc/passwd",
    "zero-width": png(0, 5),
    "zero-height": png(5, 0),
    "zero-gif": GIF_HEADER.pack(b"GIF89a", 0, 0, 0, 0, 0, b",", 0, 0, 0, 0, 0, 8),
    "zero-bmp": BMP_HEADER.pack(b"BM", 54, 0, 0, 54, 40, 0, 0, 1, 24, 0, 0, 0, 0, 0, 0),
    "crc-of-header": GOOD[:29] + bytes(4) + GOOD[33:],
    "packed-text-of-8-MiB": png(8, 8, bytes(200), chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**23)))),
}
LARGE: dict[str, bytes] = {
    "png-header": png(20000, 20000),
    "bmp-header": BMP_HEADER.pack(b"BM", 54, 0, 0, 54, 40, 20000, 20000, 1, 24, 0, 0, 0, 0, 0, 0),
    "gif-header": GIF_HEADER.pack(b"GIF89a", 20000, 20000, 0, 0, 0, b",", 0, 0, 9, 9, 0, 8),
    "gif-frame": GIF_HEADER.pack(b"GIF89a", 9, 9, 0, 0, 0, b",", 0, 0, 20000, 20000, 0, 8),
    "webp-header": b"RIFF\x16\0\0\0WEBPVP8X\n" + bytes(7) + 2 * (19999).to_bytes(3, "little"),
    "png-5000": png(5000, 5000),
    "bomb": png(5000, 5000, bytes(5000 * 626), depth=1, color=0),
}
