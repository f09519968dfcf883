"""The model families of the table, each written to disk as a checkpoint with its own tokens and template."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from dataclasses import dataclass, field
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
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

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
    "Gemma 4 MoE": GEMMA4,
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
class Sight:
    """How a family sees images.

    Attributes:
        marks: tokens by the names of their ids in the config.
        shown: what a chat template prints for an image.
        processor: makes the family's own image processor, for the tower in `configs`.
        settings: of the processor as a whole, and of the tokenizer.
    """

    marks: dict[str, str]
    shown: str
    processor: Callable[[], Any]
    settings: dict[str, Any] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)


_QWEN_SIGHT = Sight(
    {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
    "<|vision_start|><|image_pad|><|vision_end|>",
    lambda: Qwen2VLImageProcessorPil(
        patch_size=4, temporal_patch_size=2, merge_size=2, size={"shortest_edge": 64, "longest_edge": 4096}
    ),
)
_GEMMA3_MARKS = {
    "image_token_id": "<image_soft_token>",
    "boi_token_index": "<start_of_image>",
    "eoi_token_index": "<end_of_image>",
}
_GEMMA3_SIGHT = Sight(
    _GEMMA3_MARKS,
    "<start_of_image>",
    lambda: Gemma3ImageProcessorPil(size={"height": 16, "width": 16}),
    {"image_seq_length": 4},
    dict(zip(("image_token", "boi_token", "eoi_token"), _GEMMA3_MARKS.values(), strict=True)),
)
_GEMMA4_MARKS = {
    "image_token_id": "<|image|>",
    "boi_token_id": "<|image>",
    "eoi_token_id": "<image|>",
    "audio_token_id": "<|audio|>",
    "boa_token_id": "<|audio>",
    "eoa_token_id": "<audio|>",
}
_GEMMA4_SIGHT = Sight(
    _GEMMA4_MARKS,
    "<|image|>",
    lambda: Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=3),
    named={name.removesuffix("_id"): mark for name, mark in _GEMMA4_MARKS.items()},
)
# it writes the times of videos in words, which no test needs a package for
processing_smolvlm.num2words = str
_SMOLVLM_SIGHT = Sight(
    {"image_token_id": "<image>", "around": "<fake_token_around_image>", "whole": "<global-img>"},
    "<image>",
    # an image is read in parts of 16 x 16, and as a whole
    lambda: SmolVLMImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}),
    {"image_seq_len": 4},
)
SIGHTS = {
    "Qwen 3.5": _QWEN_SIGHT,
    "Qwen 3.5 MoE": _QWEN_SIGHT,
    "Qwen2.5-VL": _QWEN_SIGHT,
    "Qwen3-VL": _QWEN_SIGHT,
    "Gemma 3": _GEMMA3_SIGHT,
    "Gemma 4": _GEMMA4_SIGHT,
    "Gemma 4 MoE": _GEMMA4_SIGHT,
    "SmolVLM": _SMOLVLM_SIGHT,
}
"""Families of which images are tried."""

_IMAGES_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ':' }}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ 'SHOWN' if part.type == 'image' else part.text }}{% endfor %}"
    "{% endif %}{{ 'END' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


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

    @property
    def is_multimodal(self) -> bool:
        return type(self.config()) in hf.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    def write_with_images(self, directory: Path) -> Path:
        """Write a checkpoint that sees images, with a plain chat template that shows them."""
        sight, tokenizer = SIGHTS[self.name], self.tokenizer()
        tokenizer.add_tokens(list(sight.marks.values()), special_tokens=True)
        shown = _IMAGES_TEMPLATE.replace("SHOWN", sight.shown).replace("END", self.format.special[0])
        tokenizer.chat_template = shown
        ids = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
        config = CONFIGS[self.name](ids)
        for name, mark in sight.marks.items():
            setattr(config, name, tokenizer.convert_tokens_to_ids(mark))
        self._write(config, tokenizer, directory)
        for name, mark in sight.named.items():
            tokenizer.init_kwargs[name] = mark
        tokenizer.save_pretrained(directory)
        sight.processor().save_pretrained(directory)
        (directory / "processor_config.json").write_text(json.dumps(sight.settings))
        return directory

    def write(self, directory: Path, seed: int = 0) -> Path:
        """Write a checkpoint as the family's are: with towers, where it has them, and under its own names."""
        return self._write(self.config(), self.tokenizer(), directory, seed)

    def _write(self, config: Any, tokenizer: Any, directory: Path, seed: int = 0) -> Path:
        torch.manual_seed(seed)
        multimodal = type(config) in hf.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        kind = hf.AutoModelForImageTextToText if multimodal else hf.AutoModelForCausalLM
        model = kind.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    # far from flat distributions
                    parameter.mul_(4)
        ends = [self.format.special[0], self.format.call_ends]
        model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(token) for token in ends if token]
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return directory


FAMILIES = [Family(name) for name in CONFIGS]
