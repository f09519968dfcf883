"""The README leads to files that are there, and its pictures load fast."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_links_and_pictures_of_the_readme_are_there() -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", README)
    local = [link or picture for link, picture in targets if "://" not in link]
    assert len(local) >= 10
    assert [target for target in local if not (ROOT / target).exists()] == []
    pictures = [ROOT / target for target in local if target.startswith("docs/assets/")]
    assert len(pictures) == 2, "one on a light page, one on a dark"
    assert all(picture.stat().st_size < 150_000 for picture in pictures)
