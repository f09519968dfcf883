"""Stop strings: noticing them while tokens arrive, and cutting the text before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens left out."""

_REPLACEMENT = "\ufffd"


class StopMatcher:
    """Notices that the text of a growing completion holds one of the stop strings.

    Tokens are decoded a few at a time, behind a short context of earlier ones, so a completion of T tokens
    costs O(T). Characters that are spread over several tokens are waited for.

    Args:
        decode: token ids to text.
        stop: the strings, none of them empty.
    """

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._overlap = max(len(text) for text in stop) - 1
        self._tail = ""
        self._ids: list[int] = []
        self._context_ids = 0

    def push(self, token: int) -> bool:
        """Takes the next token; True where a stop string is now complete."""
        self._ids.append(token)
        context = self._decode(self._ids[: self._context_ids])
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT):
            # Possibly half a character. Genuine replacement characters are looked at with the token that
            # follows.
            return self._found(self._tail + text[len(context) :].rstrip(_REPLACEMENT))
        self._tail += text[len(context) :]
        if self._found(self._tail):
            return True
        self._tail = self._tail[max(0, len(self._tail) - self._overlap) :]
        self._ids = self._ids[self._context_ids :]
        self._context_ids = len(self._ids)
        return False

    def _found(self, text: str) -> bool:
        return any(stop in text for stop in self._stop)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """`text` up to the first place where one of `stop` begins; all of it where none occurs."""
    places = [place for place in (text.find(item) for item in stop) if place >= 0]
    return text[: min(places)] if places else text
