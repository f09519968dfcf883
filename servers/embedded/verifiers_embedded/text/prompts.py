"""Between text and token ids: rendering chat messages, decoding completions, naming single tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from verifiers_embedded.errors import ApiError, StartError
from verifiers_embedded.text.tool_calls import FORMATS, KEEPS_SPECIAL_TOKENS, Answer, format_of_template

OPENING, CLOSING = "<think>", "</think>"

_OF_THE_CALL = """
    conversation tools documents chat_template add_generation_prompt continue_final_message tokenize padding
    truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs processor_kwargs
"""
RESERVED_TEMPLATE_ARGUMENTS = frozenset(_OF_THE_CALL.split())
"""Names that chat_template_kwargs may not carry, as they are arguments of the call, not of the template."""


class ChatText:
    """A tokenizer as this server uses it.

    Args:
        tool_format: in which format the model calls tools, a key of `tool_calls.FORMATS`; "auto" reads it
            off the chat template, "none" leaves calls in the text.
        splits_reasoning: whether text between think tags is answered apart from the content.
    """

    def __init__(self, tokenizer: Any, tool_format: str = "auto", *, splits_reasoning: bool = False) -> None:
        if tool_format not in ("auto", "none", *FORMATS):
            raise StartError(
                f"tool format {tool_format!r} is unknown; give auto, none or one of {', '.join(FORMATS)}"
            )
        self._tokenizer = tokenizer
        self.splits_reasoning = splits_reasoning
        self._template = _template_text(tokenizer)
        named = None if tool_format == "none" else tool_format
        self.tool_format = format_of_template(self._template) if named == "auto" else named
        self._names: dict[int, tuple[str, list[int]]] = {}

    def render(
        self,
        messages: list[dict[str, Any]],
        template_kwargs: dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Return the prompt's token ids: the tokenizer's chat template with the generation prompt.

        Raises ApiError where there is no template, or it knows no tools that are given or refuses the messages.
        """
        if not self._template:
            raise ApiError(
                "the served model's tokenizer has no chat template; save one with the tokenizer",
                param="messages",
            )
        if tools and "tools" not in self._template:
            raise ApiError(
                "the served model's chat template does not mention tools, so the model would not see them; "
                "leave 'tools' out and describe them in a message, or serve a model made for tools",
                param="tools",
            )
        try:
            ids = self._tokenizer.apply_chat_template(
                [self._for_template(message) for message in messages],
                tools=tools or None,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **template_kwargs,
            )
        except Exception as error:
            # A template is a program of the model's author: it may raise anything, and means the messages are
            # unfit.
            raise ApiError(f"the chat template refused the messages: {error}", param="messages") from error
        return [int(value) for value in ids]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [int(value) for value in self._tokenizer.encode(text, add_special_tokens=add_special_tokens)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, special tokens left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, special tokens included."""
        return self._tokenizer.decode(list(ids))

    @property
    def call_marks(self) -> tuple[str, ...]:
        """Strings behind which a completion's text must be whole before its calls can be read; "" for all."""
        if self.tool_format in KEEPS_SPECIAL_TOKENS:
            return ("",)
        return ("<tool_call>", "\n<tool_call>") if self.tool_format else ()

    def divide(self, ids: Sequence[int], text: str) -> Answer:
        """Return a completion as content and tool calls; without a call in the model's format, its text as it is."""
        if self.tool_format is None:
            return Answer(text)
        if self.tool_format in KEEPS_SPECIAL_TOKENS:
            marked = self._tokenizer.decode([token for token in ids if token != self._tokenizer.eos_token_id])
            answer = FORMATS[self.tool_format](marked)
            return answer if answer.calls else Answer(text)
        return FORMATS[self.tool_format](text)

    @cached_property
    def _arguments_stay_text(self) -> bool:
        """True where the template prints a call's arguments as they are if they are text.

        Then they can be printed as the model wrote them. Other templates expect an object, and print it their
        own way.
        """
        arguments = '{"a":   1}'
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            return arguments in self._tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception:  # a template may raise anything on what it does not expect
            return False

    def _for_template(self, message: dict[str, Any]) -> dict[str, Any]:
        calls = message.get("tool_calls")
        if not calls or self._arguments_stay_text:
            return message
        return {**message, "tool_calls": [_with_arguments_read(call) for call in calls]}

    def token(self, token_id: int) -> tuple[str, list[int]]:
        """Return a token's text and its UTF-8 bytes; where the token is part of a character, its true bytes."""
        known = self._names.get(token_id)
        if known is None:
            known = self._names[token_id] = self._name(token_id)
        return known

    def _name(self, token_id: int) -> tuple[str, list[int]]:
        text = self._tokenizer.decode([token_id])
        if "\ufffd" in text:
            piece = self._tokenizer.convert_ids_to_tokens(token_id)
            if (known := bytes_of_piece(piece)) is not None:
                return text, list(known)
        return text, list(text.encode("utf-8"))


def bytes_of_piece(piece: Any) -> bytes | None:
    """Return the bytes of a token that is part of a character, from its name in the vocabulary; None for others."""
    # first: its characters are stand-ins of bytes, too
    if isinstance(piece, str) and len(piece) == 6 and piece.startswith("<0x"):
        return bytes([int(piece[3:5], 16)])
    byte_of = _bytes_of_byte_level_characters()
    if isinstance(piece, str) and all(letter in byte_of for letter in piece):
        return bytes(byte_of[letter] for letter in piece)
    return None


def _template_text(tokenizer: Any) -> str:
    """Return every chat template of a tokenizer as one text; some have one of their own for tools."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else template


def _with_arguments_read(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        # the model's own words, which were not JSON
        return call
    return {**call, "function": {**function, "arguments": arguments}}


@lru_cache(maxsize=1)
def _bytes_of_byte_level_characters() -> dict[str, int]:
    """Return the printable stand-ins that byte-level BPE (GPT-2) uses for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = {chr(value): value for value in printable}
    others = (value for value in range(256) if value not in printable)
    stand_ins.update({chr(0x100 + place): value for place, value in enumerate(others)})
    return stand_ins


# -- reasoning between think tags -----------------------------------------------------------------------------------


def begun_by(prompt_text: str) -> bool:
    """Return whether a prompt ends inside an open think tag: some templates write it for the model."""
    return prompt_text.rstrip().endswith(OPENING)


def split_reasoning(text: str, begun: bool) -> tuple[str | None, str]:
    """Split a text, perhaps still growing, into reasoning and content, which hold every character but the tags.

    With `begun` the prompt has already opened the tag. (None, text) where there is no reasoning; an unclosed tag
    makes all that follows reasoning.
    """
    if begun:
        before, rest = "", text.removeprefix(OPENING)
    else:
        before, opened, rest = text.partition(OPENING)
        if not opened or before.strip():
            return None, text
    reasoning, _, content = rest.partition(CLOSING)
    return reasoning, content
