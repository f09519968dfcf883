"""Parser: what to read out of a completion."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from verifiers.parsers.messages import message_field, message_text
from verifiers.types import Messages

__all__ = ["Parser"]


def _unchanged(text: str) -> str:
    return text


class Parser:
    """Turns a completion into an answer; the base class takes the text as it is.

    Messages may be dicts or objects with attributes, their content a string, None or a list of OpenAI content
    parts; a completion may be a plain string (completion mode), which counts as one assistant message.

    Args:
        extract_fn: applied to the text that the parser has found, e.g. `extract_boxed_answer`.
    """

    def __init__(self, extract_fn: Callable[[str], Any] = _unchanged) -> None:
        self.logger = logging.getLogger(f"verifiers.parsers.{type(self).__name__}")
        self.extract_fn = extract_fn

    def parse(self, text: str) -> Any:
        """What `extract_fn` makes of the text."""
        return self.extract_fn(text)

    def parse_answer(self, completion: Messages | Sequence[Any]) -> Any:
        """The parsed text of the last message; None for a completion without messages."""
        if isinstance(completion, str):
            return self.parse(completion)
        return self.parse(message_text(completion[-1])) if completion else None

    def get_assistant_messages(self, completion: Messages | Sequence[Any]) -> list[Any]:
        """The messages of the policy."""
        if isinstance(completion, str):
            return [{"role": "assistant", "content": completion}]
        return _with_role(completion, "assistant")

    def get_system_messages(self, completion: Messages | Sequence[Any]) -> list[Any]:
        """The system messages."""
        return _with_role(completion, "system")

    def get_user_messages(self, completion: Messages | Sequence[Any]) -> list[Any]:
        """The messages of the user, or of the environment in its place."""
        return _with_role(completion, "user")

    def get_tool_messages(self, completion: Messages | Sequence[Any]) -> list[Any]:
        """The results of tool calls."""
        return _with_role(completion, "tool")

    def get_format_reward_func(self) -> Callable[..., float]:
        """A reward function for the format; this class asks for none, so it is always 1.0."""

        def format_reward_func(completion: Any, **kwargs: Any) -> float:
            return 1.0

        return format_reward_func


def _with_role(completion: Messages | Sequence[Any], role: str) -> list[Any]:
    if isinstance(completion, str):
        return []
    return [message for message in completion if message_field(message, "role") == role]
