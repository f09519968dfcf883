"""Rollouts that failed, counted by what made them fail: texts that differ in a number only are one cause."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

__all__ = ["OTHER_CAUSES", "CauseCounts", "cause_of"]

OTHER_CAUSES = "other causes"
"""What causes beyond the commonest are counted as."""

_MOST_HELD = 1000
_ONE_OF_A_KIND = re.compile(
    r"0x[0-9a-fA-F]+"
    r"|\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"
    r"|\b(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{8,}\b"
    # a request's or a session's name: a word, then letters and digits mixed
    r"|(?<=[-_])(?=[0-9A-Za-z]*\d)(?=[0-9A-Za-z]*[A-Za-z])[0-9A-Za-z]{8,}\b"
    r"|\b\d{5,}\b"
)


def cause_of(text: str) -> str:
    """The text with addresses, ids and long numbers as "…"."""
    return _ONE_OF_A_KIND.sub("…", text)


class CauseCounts:
    """Counts of causes, of which so many are kept apart that they stay few however long nobody takes them."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, texts: Iterable[str]) -> None:
        """Count the failures that these texts tell of."""
        for text in texts:
            cause = cause_of(text)
            is_known = cause in self._counts or len(self._counts) < _MOST_HELD
            self._counts[cause if is_known else OTHER_CAUSES] += 1

    def take(self, most: int) -> dict[str, int]:
        """The commonest causes, the others as `OTHER_CAUSES`, so that all failures are counted; begins anew."""
        others = self._counts.pop(OTHER_CAUSES, 0)
        kept = dict(self._counts.most_common(most))
        others += self._counts.total() - sum(kept.values())
        self._counts.clear()
        return {**kept, OTHER_CAUSES: others} if others else kept
