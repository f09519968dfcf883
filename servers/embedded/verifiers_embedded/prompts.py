"""Between text and token ids: rendering chat messages, decoding completions, naming single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from verifiers_embedded.errors import ApiError

RESERVED_TEMPLATE_ARGUMENTS = frozenset(
    {
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "processor_kwargs",
    }
)
"""Names that chat_template_kwargs may not carry, because they are arguments of the call, not of the template.
"""


class ChatText:
    """A tokenizer as this server uses it.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._byte_of = _bytes_of_byte_level_characters()
        self._names: dict[int, tuple[str, list[int]]] = {}

    def render(self, messages: list[dict[str, Any]], template_kwargs: dict[str, Any]) -> list[int]:
        """The prompt's token ids: the tokenizer's chat template with the generation prompt.

        Raises:
            ApiError: the tokenizer has no chat template, or the template refuses the messages.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise ApiError(
                "the served model's tokenizer has no chat template; save one with the tokenizer",
                param="messages",
            )
        try:
            ids = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False, **template_kwargs
            )
        except Exception as error:
            # A template is a program of the model's author: it may raise anything, and means the messages are
            # unfit.
            raise ApiError(f"the chat template refused the messages: {error}", param="messages") from error
        return [int(value) for value in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def token(self, token_id: int) -> tuple[str, list[int]]:
        """A token's text and its UTF-8 bytes; where the token is part of a character, its true bytes."""
        known = self._names.get(token_id)
        if known is None:
            known = self._names[token_id] = self._name(token_id)
        return known

    def _name(self, token_id: int) -> tuple[str, list[int]]:
        text = self._tokenizer.decode([token_id])
        if "\ufffd" in text:
            piece = self._tokenizer.convert_ids_to_tokens(token_id)
            if isinstance(piece, str) and all(letter in self._byte_of for letter in piece):
                return text, [self._byte_of[letter] for letter in piece]
            if isinstance(piece, str) and len(piece) == 6 and piece.startswith("<0x"):
                return text, [int(piece[3:5], 16)]
        return text, list(text.encode("utf-8"))


@lru_cache(maxsize=1)
def _bytes_of_byte_level_characters() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE (GPT-2) uses for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = {chr(value): value for value in printable}
    others = (value for value in range(256) if value not in printable)
    stand_ins.update({chr(0x100 + place): value for place, value in enumerate(others)})
    return stand_ins
