"""ThinkParser: the answer is what follows the reasoning between think tags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verifiers.parsers.messages import message_text
from verifiers.parsers.parser import Parser

__all__ = ["MaybeThinkParser", "ThinkParser"]

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser(Parser):
    """A parser for policies that always reason between `<think>` and `</think>`, which the server leaves in the text.

    Args:
        extract_fn: applied to the text after the last `</think>`.
    """

    def parse(self, text: str) -> Any:
        """Return what `extract_fn` makes of the text after the last `</think>`; of "" where there is no such tag."""
        return self.extract_fn(text.rpartition(CLOSE)[2].strip() if CLOSE in text else "")

    def get_format_reward_func(self) -> Callable[..., float]:
        """Return a reward function: the share of assistant messages with think tags and an answer after them.

        0.0 for a completion without assistant messages.
        """

        def format_reward_func(completion: Any, **kwargs: Any) -> float:
            messages = self.get_assistant_messages(completion)
            followed = [_follows_format(message_text(message)) for message in messages]
            return sum(followed) / len(followed) if followed else 0.0

        return format_reward_func


class MaybeThinkParser(ThinkParser):
    """A ThinkParser for policies that may answer without reasoning: a text without `</think>` is all answer."""

    def parse(self, text: str) -> Any:
        """Return what `extract_fn` makes of the text after the last `</think>`, or of the whole text without one."""
        return self.extract_fn(text.rpartition(CLOSE)[2].strip())


def _follows_format(text: str) -> bool:
    text = text.strip()
    return (
        text.startswith(OPEN)
        and text.count(OPEN) == 1
        and text.count(CLOSE) == 1
        and bool(text.partition(CLOSE)[2].strip())
    )
