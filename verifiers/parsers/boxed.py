"""Answers written in the conventions of maths datasets."""

from __future__ import annotations

import re

__all__ = ["BOXED_SYSTEM_PROMPT", "THINK_BOXED_SYSTEM_PROMPT", "extract_boxed_answer", "extract_hash_answer"]

BOXED_SYSTEM_PROMPT = "Solve the problem one step after the other, and write the final answer as \\boxed{answer}."

THINK_BOXED_SYSTEM_PROMPT = (
    "First work through the problem between <think> and </think>. "
    "After the closing tag, write the final answer as \\boxed{answer}."
)

_BOXED = re.compile(r"\\boxed\s*\{")


def extract_boxed_answer(text: str) -> str:
    r"""What the last `\boxed{...}` of a text holds, braces inside it included.

    Returns:
        The text unchanged where there is no `\boxed`, or the last one is never closed.
    """
    starts = [opening.end() for opening in _BOXED.finditer(text)]
    if not starts:
        return text
    depth, position = 1, starts[-1]
    while position < len(text):
        character = text[position]
        if character == "\\":
            # what a backslash escapes, \{ for one, is text and no bracket
            position += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[starts[-1] : position]
        position += 1
    return text


def extract_hash_answer(text: str) -> str | None:
    """The answer after "####", as GSM8K writes it; None where there is none."""
    return text.split("####")[1].strip() if "####" in text else None
