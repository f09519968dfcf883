"""XMLParser: completions made of fields between XML-like tags."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from verifiers.errors import ConfigError
from verifiers.parsers.parser import Parser, _unchanged, without_thoughts
from verifiers.types import Messages, message_text


class XMLParser(Parser):
    """A parser and writer of texts such as `<reasoning> ... </reasoning><answer> ... </answer>`.

    Args:
        fields: names of the tags in their order. A tuple gives alternatives, e.g. ("code", "answer"); its first
            name is the canonical one, used for writing.
        answer_field: the tag that holds the answer.
        extract_fn: kept for the signature that parsers share; fields are taken as they are.

    Raises:
        ConfigError (a ValueError): two fields of one name, or an empty tuple.
        TypeError: a field that is neither a string nor a tuple of strings.
    """

    def __init__(
        self,
        fields: Sequence[str | tuple[str, ...]],
        answer_field: str = "answer",
        extract_fn: Callable[[str], Any] = _unchanged,
        **kwargs: Any,
    ) -> None:
        super().__init__(extract_fn=extract_fn, **kwargs)
        if isinstance(fields, str):
            raise ConfigError(f"XMLParser takes a list of fields; give [{fields!r}].")
        self.answer_field = answer_field
        self._fields: list[tuple[str, tuple[str, ...]]] = []
        for field in fields:
            names = _names_of(field)
            if names[0] in self.get_fields():
                raise ConfigError(f"Duplicate field name: {names[0]!r} stands twice in {list(fields)!r}.")
            self._fields.append((names[0], names))
        every_name = dict.fromkeys(name for _, names in self._fields for name in names)
        # from the last opening tag before a closing one: a text may speak of the tag first, or begin again
        self._patterns = {
            name: re.compile(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", re.DOTALL)
            for name, tag in ((name, re.escape(name)) for name in every_name)
        }
        either = "|".join(re.escape(name) for name in every_name)
        self._spaced_tag = re.compile(rf"<(?:\s+(?:/\s*)?|/\s+)(?:{either})\s*>|</?(?:{either})\s+>")

    def parse(self, text: str, strip: bool = True, last: bool = False) -> Any:
        """Return the fields of a text: a namespace with every name, alternatives too; None for what is absent.

        Between think tags, and behind an open one, no field is looked for but `think` itself.

        Args:
            strip: kept for the classic signature; white space around a field's text never belongs to it.
            last: take the last occurrence of each tag, not the first.
        """
        said = without_thoughts(text)
        found = {name: pattern.findall(text if name == "think" else said) for name, pattern in self._patterns.items()}
        place = -1 if last else 0
        return SimpleNamespace(**{name: texts[place].strip() if texts else None for name, texts in found.items()})

    def parse_answer(self, completion: Messages | Sequence[Any]) -> str | None:
        """Return the answer field's last text in the last assistant message that has it; None where none has."""
        for message in reversed(self.get_assistant_messages(completion)):
            answer = getattr(self.parse(message_text(message), last=True), self.answer_field, None)
            if answer is not None:
                return str(answer)
        return None

    def get_fields(self) -> list[str]:
        """Return the canonical names, in order."""
        return [canonical for canonical, _ in self._fields]

    def get_format_str(self) -> str:
        """Return the format as a system prompt would show it to the policy."""
        tags = [canonical if len(names) == 1 else f"[ {' | '.join(names)} ]" for canonical, names in self._fields]
        return "\n".join(f"<{tag}>\n...\n</{tag}>" for tag in tags)

    def format(self, **kwargs: Any) -> str:
        """Return a text with the given fields under their canonical tags; values may be given by any alternative.

        Raises:
            ConfigError (a ValueError): a field without a value.
        """
        parts = []
        for canonical, names in self._fields:
            value = next((kwargs[name] for name in names if kwargs.get(name) is not None), None)
            if value is None:
                raise ConfigError(f"Missing value for field {canonical!r}; give one of {list(names)!r}.")
            parts.append(f"<{canonical}>\n{value}\n</{canonical}>")
        return "\n".join(parts)

    def get_format_reward_func(self) -> Callable[..., float]:
        """Return a reward function for the format, from 0 to 1: the mean over the assistant messages.

        A message earns 0.4 x the share of fields present (nothing unless one is complete), 0.2 when no tag has
        stray spacing inside its brackets, 0.2 when it starts with the first field, 0.2 when it ends with the
        last. The weights are those of the classic `verifiers`; a message without tags scores 0.2.
        """

        def format_reward_func(completion: Any, **kwargs: Any) -> float:
            messages = self.get_assistant_messages(completion)
            scores = [self._format_score(message_text(message)) for message in messages]
            return sum(scores) / len(scores) if scores else 0.0

        format_reward_func.reward_bounds = (0.0, 1.0)  # type: ignore[attr-defined]
        return format_reward_func

    def _format_score(self, text: str) -> float:
        if not self._fields:
            return 1.0
        text = text.strip()
        parsed = vars(self.parse(text))
        score = 0.0
        if any(value is not None for value in parsed.values()):
            present = sum(
                any(f"<{name}>" in text or f"</{name}>" in text for name in names) for _, names in self._fields
            )
            score += 0.4 * present / len(self._fields)
        if not self._spaced_tag.search(text):
            score += 0.2
        if text.startswith(tuple(f"<{name}>" for name in self._fields[0][1])):
            score += 0.2
        if text.endswith(tuple(f"</{name}>" for name in self._fields[-1][1])):
            score += 0.2
        return score


def _names_of(field: Any) -> tuple[str, ...]:
    names = (field,) if isinstance(field, str) else field
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"A field of an XMLParser is a string or a tuple of strings, not {field!r}.")
    if not names:
        raise ConfigError("A field of an XMLParser is an empty tuple; name at least one tag.")
    return names
