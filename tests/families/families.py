"""The model families of the table, each written to disk as a checkpoint with its own tokens and template."""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from configs import CONFIGS
from formats import (
    CODER,
    GEMMA3,
    GEMMA4,
    GLM4,
    GLM45,
    HARMONY,
    HERMES,
    LLAMA3,
    MISTRAL,
    OLMO3,
    PHI4,
    Format,
)
from tiny_models import character_tokenizer

_CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
_PAD = "<pad>"

_FORMATS: dict[str, Format] = {
    "Qwen 3.5": CODER,
    "Qwen 3.5 MoE": CODER,
    "Llama 3": LLAMA3,
    "Phi 4 mini": PHI4,
    "OLMo 3": OLMO3,
    "Gemma 3": GEMMA3,
    "Gemma 3 1B": GEMMA3,
    "Gemma 3n": GEMMA3,
    "Gemma 4": GEMMA4,
    "gpt-oss": HARMONY,
    "GLM 4": GLM4,
    "GLM 4.5 MoE": GLM45,
    "Ministral 3": MISTRAL,
}
"""Formats of conversations; that of the others is ChatML with the calls of Hermes, which many of them have, or their
own, which the embedded server does not read (`_UNREAD`)."""

_UNREAD = frozenset(
    {"DeepSeek V3", "DeepSeek V3.2", "MiniMax M2", "LFM2", "Gemma 3", "Gemma 3 1B", "Gemma 3n", "SmolVLM"}
)
"""Families whose models write calls in a format that is not read here, or were not taught to call tools."""


@dataclass(frozen=True)
class Family:
    name: str

    @property
    def format(self) -> Format:
        return _FORMATS.get(self.name, HERMES)

    @property
    def calls_are_read(self) -> bool:
        return self.name not in _UNREAD

    def tokenizer(self) -> Any:
        """Return a tokenizer of one token a character, with the family's special tokens and chat template."""
        special = self.format.special
        tokenizer = character_tokenizer(
            [_PAD, *special, *_CHARACTERS], unknown="?", pad_token=_PAD, eos_token=special[0], padding_side="left"
        )
        tokenizer.add_special_tokens({"additional_special_tokens": list(special[1:])})
        beginning = next((token for token in special if token in ("<bos>", "<s>", "<|begin_of_text|>")), None)
        if beginning:
            tokenizer.add_special_tokens({"bos_token": beginning})
        tokenizer.chat_template = self.format.template
        return tokenizer

    def config(self) -> Any:
        tokenizer = self.tokenizer()
        ids = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
        return CONFIGS[self.name](ids)

    def write(self, directory: Path, seed: int = 0) -> Path:
        """Write a checkpoint as the family's are: with towers, where it has them, and under its own names."""
        config = self.config()
        torch.manual_seed(seed)
        multimodal = type(config) in hf.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        kind = hf.AutoModelForImageTextToText if multimodal else hf.AutoModelForCausalLM
        model = kind.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    # far from flat distributions
                    parameter.mul_(4)
        tokenizer = self.tokenizer()
        ends = [self.format.special[0], self.format.call_ends]
        model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(token) for token in ends if token]
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return directory


FAMILIES = [Family(name) for name in CONFIGS]
