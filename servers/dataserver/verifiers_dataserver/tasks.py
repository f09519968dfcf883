"""Task rows and completions, as graders see them. The standard library alone: workers import this too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verifiers.parsers.parser import extract_boxed_answer

_PLACES = ("text", "after_think", "boxed")


@dataclass(frozen=True, slots=True)
class Row:
    """One task. Only `prompt`, `system_prompt` and `shown` ever leave the server.

    Attributes:
        sample_id: "<dataset>:<row>".
        prompt: the whole conversation that the policy continues, or a text in completion mode.
        info: further data for graders.
        shown: the part of the row's metadata that the configuration makes public.
    """

    sample_id: str
    prompt: list[dict[str, Any]] | str
    answer: Any = ""
    task: str = "default"
    info: Mapping[str, Any] = field(default_factory=dict)
    shown: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Completion:
    """A policy's answer: the text of all its messages, and the tokens that the client says were sampled."""

    text: str
    tokens: int | None = None
    messages: list[dict[str, Any]] | None = None

    def as_messages(self) -> list[dict[str, Any]]:
        return self.messages if self.messages is not None else [{"role": "assistant", "content": self.text}]


def is_answer_from(how: str) -> bool:
    return how in _PLACES or (how.startswith("xml:") and how[4:].isidentifier())


def answer_part(text: str, how: str) -> str:
    r"""Return the part of a completion that is its answer, without white space around it; "" where there is none.

    "after_think" takes what follows the last `</think>`, or the whole text without one; "boxed" what the last
    \\boxed{} holds; "xml:TAG" what stands between the last <TAG> and its end.
    """
    if how == "text":
        return text.strip()
    if how == "boxed":
        boxed = extract_boxed_answer(text)
        return "" if boxed is text else boxed.strip()
    if how == "after_think":
        return text.rpartition("</think>")[2].strip()
    # not by a pattern: this is linear in the text, whatever it holds
    opening, closing = f"<{how[4:]}>", f"</{how[4:]}>"
    start = text.rfind(opening)
    end = text.find(closing, start) if start >= 0 else -1
    return text[start + len(opening) : end].strip() if end >= 0 else ""
