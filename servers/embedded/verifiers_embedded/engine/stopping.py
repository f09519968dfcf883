"""Text while its tokens arrive: complete characters, stop strings, and what can be sent at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens left out."""

_REPLACEMENT = "\ufffd"


IsByte = Callable[[int], bool]
"""Whether a token is a single byte, which is read together with the bytes beside it."""


def no_byte(token: int) -> bool:
    """Return False: a vocabulary without such tokens."""
    return False


class GrowingText:
    """The text of a completion, token by token.

    Tokens are decoded a few at a time, behind a short context of earlier ones, so a completion of T tokens
    costs O(T). Characters that are spread over several tokens are waited for, and the end of a run of bytes, of which
    one that is no character spoils the others.
    """

    def __init__(self, decode: Decode, is_byte: IsByte = no_byte) -> None:
        self._decode, self._is_byte = decode, is_byte
        self._ids: list[int] = []
        self._context_ids, self._context = 0, ""

    def push(self, token: int) -> tuple[str, str]:
        """Take the next token; return the text that is now certain.

        Where a character may be incomplete, the text before it follows, which will be part of a later certain text.
        """
        self._ids.append(token)
        text = self._decode(self._ids)[len(self._context) :]
        if text.endswith(_REPLACEMENT) or self._is_byte(token):
            # Genuine replacement characters are given out with the token that follows.
            return "", text.rstrip(_REPLACEMENT)
        newest = self._ids[self._context_ids :]
        if alone := self._decode(newest):
            self._ids, self._context = newest, alone
        elif text:
            # A space that a text does not begin with: it is one only behind the token before it.
            self._ids = self._ids[-2:]
            self._context = self._decode(self._ids)
        elif self._context or token in self._ids[:-1]:
            # A special token, left out of texts: as the context, it would make the next word lose its space.
            self._ids.pop()
        self._context_ids = len(self._ids)
        return text, ""


class StopMatcher:
    def __init__(self, decode: Decode, stop: Sequence[str], is_byte: IsByte = no_byte) -> None:
        self._text = GrowingText(decode, is_byte)
        self._stop = tuple(stop)
        self._overlap = max(len(text) for text in stop) - 1
        self._tail = ""

    def push(self, token: int) -> bool:
        """Take the next token; True where a stop string is now complete."""
        certain, perhaps = self._text.push(token)
        self._tail += certain
        if any(stop in self._tail + perhaps for stop in self._stop):
            return True
        self._tail = self._tail[max(0, len(self._tail) - self._overlap) :]
        return False


class SendableText:
    """The text of a growing completion as far as nothing that follows can change it.

    Args:
        ends: strings that end what is sent: stop strings, and marks behind which the text is read as a whole.
        held: strings that are given out whole, so that a reader of the text can act on them.
    """

    def __init__(
        self, decode: Decode, ends: Sequence[str], held: Sequence[str] = (), is_byte: IsByte = no_byte
    ) -> None:
        self.text = ""
        self._growing = GrowingText(decode, is_byte)
        self._ends = tuple(ends)
        self._held = (*ends, *held)
        self._pending = ""
        self._ended = False

    def push(self, token: int) -> None:
        """Take the next token; `text` grows by what is certain now."""
        self._pending += self._growing.push(token)[0]
        if self._ended:
            return
        places = [place for place in (self._pending.find(mark) for mark in self._ends) if place >= 0]
        self._ended = bool(places)
        size = min(places) if places else len(self._pending) - self._unsure()
        self.text += self._pending[:size]
        self._pending = self._pending[size:]

    def _unsure(self) -> int:
        """Return the length of the longest end of the pending text with which one of the held strings may begin."""
        longest = 0
        for mark in self._held:
            for size in range(min(len(mark) - 1, len(self._pending)), longest, -1):
                if self._pending.endswith(mark[:size]):
                    longest = size
                    break
        return longest


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return `text` up to the first place where one of `stop` begins; all of it where none occurs."""
    found = first_stop(text, stop)
    return text if found is None else text[: text.index(found)]


def first_stop(text: str, stop: Sequence[str]) -> str | None:
    """Return the one of `stop` that begins first in `text`; None where none occurs."""
    return min((item for item in stop if item in text), key=text.index, default=None)
