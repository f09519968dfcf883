"""Character tokenizers and random Qwen3 policies, made on the spot."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

LETTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
SPECIAL = ["<pad>", "<eos>", "<unk>", "<user>", "<bot>"]


def character_tokenizer(tokens: Sequence[str], *, unknown: str, **options: Any) -> PreTrainedTokenizerFast:
    """Make a tokenizer of one token a character.

    Args:
        tokens: special tokens, then characters; a token's place is its id.
        unknown: the token of all other characters.
        options: of `PreTrainedTokenizerFast`.
    """
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def two_role_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer of the characters of ASCII whose special tokens name two roles."""
    fast = character_tokenizer(
        [*SPECIAL, *LETTERS], unknown="<unk>", pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<bot>"]})
    fast.chat_template = template
    return fast


def random_qwen3(tokenizer: Any, *, seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """Make a random Qwen3 of two layers whose distributions are far from flat.

    Args:
        tokenizer: gives the size of the vocabulary and the special tokens.
        seed: of the weights.
        changes: fields of `Qwen3Config`.
    """
    torch.manual_seed(seed)
    fields = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    return Qwen3ForCausalLM(Qwen3Config(**{**fields, **changes}))


def write_random_qwen3(directory: Path, tokenizer: Any, *, seed: int = 0, **changes: Any) -> Path:
    """Write a model of `random_qwen3` with its tokenizer."""
    random_qwen3(tokenizer, seed=seed, **changes).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
