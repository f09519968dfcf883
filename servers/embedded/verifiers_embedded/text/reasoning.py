"""Reasoning between think tags, apart from what is said."""

from __future__ import annotations

OPENING, CLOSING = "<think>", "</think>"
TAGS = (OPENING, CLOSING)


def begun_by(prompt_text: str) -> bool:
    """Return whether a prompt ends inside an open think tag: some templates write it for the model."""
    return prompt_text.rstrip().endswith(OPENING)


def split_reasoning(text: str, begun: bool) -> tuple[str | None, str]:
    """Split a completion's text into reasoning and content; every character but the tags is in one of them.

    Args:
        text: the text, perhaps still growing.
        begun: the prompt has already opened the tag.

    Returns:
        (None, text) where there is no reasoning; an unclosed tag makes all that follows reasoning.
    """
    if begun:
        before, rest = "", text.removeprefix(OPENING)
    else:
        before, opened, rest = text.partition(OPENING)
        if not opened or before.strip():
            return None, text
    reasoning, _, content = rest.partition(CLOSING)
    return reasoning, content
