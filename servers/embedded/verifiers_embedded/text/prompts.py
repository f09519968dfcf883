"""Between text and token ids: rendering chat messages, decoding completions, naming single tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

from verifiers.train.image_processor import ImageError, ImageProcessor, Images
from verifiers_embedded.errors import ApiError, StartError
from verifiers_embedded.text.tool_calls import (
    FORMATS,
    HARMONY,
    MARKS,
    WHOLE,
    Answer,
    format_of_template,
    parameters_of,
)

_SPACE = "\u2581"
"""What SentencePiece writes for a space."""

THINK_TAGS = ("<think>", "</think>")
GEMMA_TAGS = ("<|channel>thought\n", "<channel|>")
"""What reasoning stands between."""

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
        splits_reasoning: whether text between think tags is answered apart from the content; in the format of gpt-oss
            it always is.
        images: reads prompts with images; None where the model takes none.
    """

    def __init__(
        self,
        tokenizer: Any,
        tool_format: str = "auto",
        *,
        splits_reasoning: bool = False,
        images: ImageProcessor | None = None,
    ) -> None:
        if tool_format not in ("auto", "none", *FORMATS):
            raise StartError(
                f"tool format {tool_format!r} is unknown; give auto, none or one of {', '.join(FORMATS)}"
            )
        self._tokenizer, self._images = tokenizer, images
        self.splits_reasoning = splits_reasoning
        self._template = _template_text(tokenizer)
        named = None if tool_format == "none" else tool_format
        self.tool_format = format_of_template(self._template) if named == "auto" else named
        self.think_tags = GEMMA_TAGS if GEMMA_TAGS[1] in self._template else THINK_TAGS
        self._calls_are_unread = named == "auto" and self.tool_format is None
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
        ids = [int(value) for value in self._templated(messages, template_kwargs, tools, tokenize=True)]
        if self._images is not None and self._images.token_id in ids:
            raise ApiError(
                f"the messages hold the mark of an image ({self._images.token}) and no image; leave it out of texts",
                param="messages",
            )
        return ids

    def render_images(
        self,
        messages: list[dict[str, Any]],
        template_kwargs: dict[str, Any],
        tools: list[dict[str, Any]] | None,
        images: Sequence[bytes],
    ) -> tuple[list[int], Images]:
        """Return the ids of a prompt with images, and these as the model reads them; raises as `render`."""
        text = self._templated(messages, template_kwargs, tools, tokenize=False)
        assert self._images is not None
        try:
            return self._images.read(text, images)
        except ImageError as error:
            raise ApiError(str(error), param="messages") from error

    def _templated(
        self,
        messages: list[dict[str, Any]],
        template_kwargs: dict[str, Any],
        tools: list[dict[str, Any]] | None,
        *,
        tokenize: bool,
    ) -> Any:
        if not self._template:
            raise ApiError(
                "the served model's tokenizer has no chat template; save one with the tokenizer",
                param="messages",
            )
        self.check_tools(tools)
        try:
            return self._tokenizer.apply_chat_template(
                [self._for_template(message) for message in messages],
                tools=tools or None,
                add_generation_prompt=True,
                tokenize=tokenize,
                return_dict=False,
                **template_kwargs,
            )
        except Exception as error:
            # A template is a program of the model's author: it may raise anything, and means the messages are
            # unfit.
            raise ApiError(f"the chat template refused the messages: {error}", param="messages") from error

    def check_tools(self, tools: list[dict[str, Any]] | None) -> None:
        """Raise ApiError for tools that the template does not show, or whose calls would not be read."""
        if tools and "tools" not in self._template:
            raise ApiError(
                "the served model's chat template does not mention tools, so the model would not see them; "
                "leave 'tools' out and describe them in a message, or serve a model made for tools",
                param="tools",
            )
        if tools and self._calls_are_unread:
            raise ApiError(
                "the served model's chat template writes calls of tools in a format that is not read here; leave "
                "'tools' out, or serve the model with --tool-call-parser none, which leaves its calls in the text",
                param="tools",
            )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return a text's ids; one that begins with the BOS, as templates render it, gets no second one."""
        ids = [int(value) for value in self._tokenizer.encode(text, add_special_tokens=add_special_tokens)]
        bos = self._tokenizer.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            written = self._tokenizer.encode(text, add_special_tokens=False)
            return ids[1:] if ids[1 : len(written) + 1] == written else ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, special tokens left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def decode_with_marks(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, of special tokens those alone that are marks of the model's calls."""
        hidden = self._hidden_ids
        return self._tokenizer.decode([token for token in ids if token not in hidden]) if hidden else self.decode(ids)

    @cached_property
    def _special(self) -> dict[int, str]:
        added = {token: str(one) for token, one in self._tokenizer.added_tokens_decoder.items() if one.special}
        return {
            **dict(zip(self._tokenizer.all_special_ids, self._tokenizer.all_special_tokens, strict=False)),
            **added,
        }

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    @cached_property
    def _marks(self) -> frozenset[int]:
        """Special tokens that mark calls or reasoning."""
        names = {*MARKS.get(self.tool_format or "", ())}
        if self.splits_reasoning:
            names |= {tag.removesuffix("thought\n") for tag in self.think_tags}
        return frozenset(token for token, name in self._special.items() if name in names)

    @cached_property
    def _hidden_ids(self) -> frozenset[int]:
        """Special tokens but the marks; empty where no mark is a special token."""
        return frozenset(self._special.keys() - self._marks) if self._marks else frozenset()

    @cached_property
    def _think_tags_are_special(self) -> bool:
        return any(self._special[token] == self.think_tags[1] for token in self._marks)

    @property
    def reads_whole(self) -> bool:
        """True where content and reasoning are told apart by special tokens: an answer is read when it is whole."""
        return self.tool_format == HARMONY or (self.splits_reasoning and self._think_tags_are_special)

    def is_byte(self, token: int) -> bool:
        """Return whether a token is a single byte of a vocabulary with byte fallback."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        return isinstance(piece, str) and len(piece) == 6 and piece.startswith("<0x")

    def decode_all(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, special tokens included."""
        return self._tokenizer.decode(list(ids))

    @property
    def call_marks(self) -> tuple[str, ...]:
        """Strings behind which a completion's text must be whole before its calls can be read; "" for all."""
        if self.tool_format in WHOLE:
            return ("",)
        # marks that are special tokens are left out of an answer in which no call can be read
        special = (self._special[token] for token in self._marks)
        return ("<tool_call>", "\n<tool_call>", *special) if self.tool_format else ()

    def read(self, marked: str, said: str, prompt_ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> Answer:
        """Return a completion as content, reasoning, and calls of tools where there are any.

        Args:
            marked: its text with the marks that are special tokens, `said` without.
        """
        if self.tool_format == HARMONY:
            answer = FORMATS[HARMONY](marked, {})
            # a message to a function that there is not is no call
            return answer if tools else replace(answer, calls=())
        reasoning = None
        if self.splits_reasoning:
            begun = self.begins_reasoning(prompt_ids)
            reasoning, marked = split_reasoning(marked, begun, self.think_tags)
            said = marked if self._think_tags_are_special else split_reasoning(said, begun, self.think_tags)[1]
        answer = self.divide(marked, said, tools) if tools else Answer(said)
        return replace(answer, reasoning=reasoning)

    def begins_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether a prompt ends inside an open think tag: some templates write it for the model."""
        return self.decode_all(prompt_ids[-16:]).rstrip().endswith(self.think_tags[0].rstrip())

    def divide(self, marked: str, text: str, tools: Sequence[dict[str, Any]]) -> Answer:
        """Return a completion as content and calls of tools; without a call in the model's format, `text` as it is.

        Args:
            marked: the text with the marks of calls that are special tokens.
        """
        answer = FORMATS[self.tool_format](marked, parameters_of(tools)) if self.tool_format else Answer(text)
        return answer if answer.calls else Answer(text)

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
        if message["role"] == "developer" and "developer" not in self._template:
            # most templates would leave it out without a word
            message = {**message, "role": "system"}
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
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if isinstance(piece, str) and piece.startswith(_SPACE) and not text.startswith(" "):
            # SentencePiece drops a space at the beginning of what is decoded
            text = " " + text
        if "\ufffd" in text and (known := bytes_of_piece(piece)) is not None:
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


def split_reasoning(text: str, begun: bool, tags: tuple[str, str] = THINK_TAGS) -> tuple[str | None, str]:
    """Split a text, perhaps still growing, into reasoning and content, which hold every character but the tags.

    With `begun` the prompt has already opened the tag. (None, text) where there is no reasoning; an unclosed tag
    makes all that follows reasoning.
    """
    opening, closing = tags
    if begun:
        before, rest = "", text.removeprefix(opening)
    else:
        before, opened, rest = text.partition(opening)
        if not opened or before.strip():
            return None, text
    reasoning, _, content = rest.partition(closing)
    return reasoning, content
