"""Stop strings are noticed at the token that completes them, however the text is cut into tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from verifiers_embedded.engine.stopping import StopMatcher, cut_at_stop


def bytes_decoder(ids: Sequence[int]) -> str:
    """Decode as a tokenizer of one byte a token, as byte-level vocabularies fall back to."""
    return bytes(ids).decode("utf-8", errors="replace")


def ends_at(text: str, stop: list[str]) -> int | None:
    matcher = StopMatcher(bytes_decoder, stop)
    for place, value in enumerate(text.encode()):
        if matcher.push(value):
            return place + 1
    return None


@pytest.mark.parametrize(
    ("text", "stop", "end"),
    [
        ("so</answer> and", ["</answer>"], 11),
        ("aab", ["ab"], 3),
        ("xyz", ["z", "y"], 2),
        ("grün und blau", ["ün"], 5),
        ("a🙂b🙂🙂", ["🙂🙂"], 14),
        ("🙂 END", ["END"], 8),
        ("nothing here", ["END"], None),
        ("EN D", ["END"], None),
        ("a", ["abc", "a"], 1),
    ],
)
def test_a_stop_string_is_noticed_at_its_last_token(text: str, stop: list[str], end: int | None) -> None:
    assert ends_at(text, stop) == end


def test_words_as_tokens_may_hold_a_stop_string_in_their_middle() -> None:
    words = ["the ", "ans", "wer is", " 42. And", " more"]
    matcher = StopMatcher(lambda ids: "".join(words[i] for i in ids), ["swer is 42."])
    assert [matcher.push(i) for i in range(4)] == [False, False, False, True]


def test_text_is_cut_before_the_earliest_stop_string() -> None:
    assert cut_at_stop("one two three", ["three", "two"]) == "one "
    assert cut_at_stop("one", ["two"]) == "one"
    assert cut_at_stop("one", []) == "one"
