"""Parser, which turns a completion into an answer; ThinkParser, for reasoning before it; extractors of answers."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from verifiers.keywords import set_extra_keywords
from verifiers.types import Messages, message_field, message_text


def _unchanged(text: str) -> str:
    return text


class Parser:
    """A parser that turns a completion into an answer; the base class takes the text as it is.

    Messages may be dicts or objects with attributes, their content a string, None or a list of OpenAI content
    parts; a completion may be a plain string (completion mode), which counts as one assistant message.

    Args:
        extract_fn: applied to the text that the parser has found, e.g. `extract_boxed_answer`.
        **kwargs: every further keyword becomes an attribute, with a warning; a misspelled one is a ConfigError.
    """

    def __init__(self, extract_fn: Callable[[str], Any] = _unchanged, **kwargs: Any) -> None:
        self.logger = logging.getLogger(f"verifiers.parsers.{type(self).__name__}")
        set_extra_keywords(self, kwargs)
        self.extract_fn = extract_fn

    def parse(self, text: str) -> Any:
        """Return what `extract_fn` makes of the text up to a thought that never ends."""
        return self.extract_fn(without_open_thought(text))

    def parse_answer(self, completion: Messages | Sequence[Any]) -> Any:
        """Return the parsed text of the last message; None for a completion without messages."""
        if isinstance(completion, str):
            return self.parse(completion)
        return self.parse(message_text(completion[-1])) if completion else None

    def get_assistant_messages(self, completion: Messages | Sequence[Any]) -> list[Any]:
        """Return the messages of the policy."""
        if isinstance(completion, str):
            return [{"role": "assistant", "content": completion}]
        return _with_role(completion, "assistant")

    def get_system_messages(self, completion: Messages | Sequence[Any]) -> list[Any]:
        """Return the system messages."""
        return _with_role(completion, "system")

    def get_user_messages(self, completion: Messages | Sequence[Any]) -> list[Any]:
        """Return the messages of the user, or of the environment in its place."""
        return _with_role(completion, "user")

    def get_tool_messages(self, completion: Messages | Sequence[Any]) -> list[Any]:
        """Return the results of tool calls."""
        return _with_role(completion, "tool")

    def get_format_reward_func(self) -> Callable[..., float]:
        """Return a reward function for the format; this class has no format, so the reward is always 1.0."""

        def format_reward_func(completion: Any, **kwargs: Any) -> float:
            return 1.0

        return format_reward_func


def _with_role(completion: Messages | Sequence[Any], role: str) -> list[Any]:
    if isinstance(completion, str):
        return []
    return [message for message in completion if message_field(message, "role") == role]


OPEN, CLOSE = "<think>", "</think>"


def without_open_thought(text: str) -> str:
    """Return a text without what follows a `<think>` that is never closed: no answer stands there."""
    start = text.rfind(OPEN)
    return text if start <= text.rfind(CLOSE) else text[:start]


def without_thoughts(text: str) -> str:
    """Return what a text says outside of think tags, of which the chat template may have written the first."""
    *thoughts, rest = text.split(CLOSE)
    said: list[str] = []
    for part in thoughts:
        before, opened, _ = part.partition(OPEN)
        if not opened:
            said.clear()
        said.append(before if opened else "")
    return "".join([*said, rest.partition(OPEN)[0]])


class ThinkParser(Parser):
    """A parser for policies that always reason between `<think>` and `</think>`, which the server leaves in the text.

    Args:
        extract_fn: applied to the text after the last `</think>`.
    """

    def parse(self, text: str) -> Any:
        """Return what `extract_fn` makes of the text after the last `</think>`; of "" where there is no such tag."""
        return self.extract_fn(_after_last_thought(text) if CLOSE in text else "")

    def get_format_reward_func(self) -> Callable[..., float]:
        """Return a reward function: the share of assistant messages with think tags and an answer after them.

        0.0 for a completion without assistant messages.
        """

        def format_reward_func(completion: Any, **kwargs: Any) -> float:
            texts = [message_text(message).strip() for message in self.get_assistant_messages(completion)]
            return sum(map(_has_thought_and_answer, texts)) / len(texts) if texts else 0.0

        return format_reward_func


class MaybeThinkParser(ThinkParser):
    """A ThinkParser for policies that may answer without reasoning: a text without think tags is all answer."""

    def parse(self, text: str) -> Any:
        """Return what `extract_fn` makes of the text after the last `</think>`, or of the whole text without one."""
        return self.extract_fn(_after_last_thought(text))


def after_thought(text: str) -> str:
    """Return what a judge says behind its thoughts, in which it may write of such tags; "" of a thought cut off."""
    return "" if text.lstrip().startswith(OPEN) and CLOSE not in text else text.rpartition(CLOSE)[2]


def _after_last_thought(text: str) -> str:
    return without_open_thought(text).rpartition(CLOSE)[2].strip()


def _has_thought_and_answer(text: str) -> bool:
    has_tags = text.startswith(OPEN) and text.count(OPEN) == 1 and text.count(CLOSE) == 1
    return has_tags and bool(text.partition(CLOSE)[2].strip())


BOXED_SYSTEM_PROMPT = "Solve the problem one step after the other, and write the final answer as \\boxed{answer}."

THINK_BOXED_SYSTEM_PROMPT = (
    "First work through the problem between <think> and </think>. "
    "After the closing tag, write the final answer as \\boxed{answer}."
)

_BOX_TOKEN = re.compile(
    r"(?P<box>\\f?box(?:ed)?(?![A-Za-z])\s*(?:\{|(?P<word>[^\s{}$\\]+)))"
    # what a backslash escapes is text and no brace
    r"|\\\\(?!f?box)|\\[{}]|(?P<brace>[{}])"
)


def extract_boxed_answer(text: str, strict: bool = False) -> str:
    r"""Return the inside of the last whole `\boxed{...}` of a text, with the braces in it.

    `\fbox{4}` and `\boxed 4` count too; a box that is cut off does not.

    Returns:
        The text unchanged, or "" with `strict`, where there is none.
    """
    found, found_at = "" if strict else text, -1
    opened: list[int] = []
    for token in _BOX_TOKEN.finditer(text):
        if token["word"]:
            found, found_at = token["word"].rstrip(".,;"), token.end()
        elif token["box"]:
            opened.append(token.end())
        elif token["brace"] == "{":
            opened.append(-1)
        elif token["brace"] and opened and (start := opened.pop()) > found_at:
            found, found_at = text[start : token.start()], start
    return found


def extract_hash_answer(text: str) -> str:
    """Return the line after the last "####", as GSM8K writes it; the text unchanged where there is no "####"."""
    return text.rpartition("####")[2].strip().partition("\n")[0].strip() if "####" in text else text
