"""Schemas, tools, tokenizers and models for the tests of constrained answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import write_random_qwen3
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tool_templates import PRINTS_TEXT
from transformers import PreTrainedTokenizerFast

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog", 7, None]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "home": {"$ref": "#/$defs/home"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
    },
    "required": ["name", "kind", "age", "home"],
    "additionalProperties": False,
    "$defs": {
        "tag": {"enum": ["red", "green"]},
        "home": {
            "type": "object",
            "properties": {"street": {"type": "string", "pattern": "^[A-Z][a-z]{1,4}$"}, "at": {"type": "boolean"}},
            "required": ["street"],
            "additionalProperties": False,
        },
    },
}
LETTERS = 40
LETTERS_SCHEMA = {"type": "string", "pattern": f"^[abc]{{{LETTERS}}}$"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"$ref": "#/$defs/n"}},
            "required": ["a"],
            "additionalProperties": False,
            "$defs": {"n": {"enum": [1, 2]}},
        },
    },
}
NOW = {"type": "function", "function": {"name": 'n"o\\w', "description": "no parameters"}}
ARGUMENTS = {"add": ADD["function"]["parameters"], 'n"o\\w': {"type": "object", "maxProperties": 0}}


def fits(schema: Any, **fields: Any) -> dict[str, Any]:
    """Return the field that asks for a schema."""
    inner = {"name": "x", "strict": True, "schema": schema, **fields}
    return {"response_format": {"type": "json_schema", "json_schema": inner}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges that reach over the borders of JSON's parts, and a tag that is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = ['{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool', "[true, false, null]", "zoë 🙂"] * 3
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<bot>"]})
    fast.add_tokens([AddedToken(tag, special=False) for tag in ("<tool_call>", "</tool_call>")])
    fast.chat_template = PRINTS_TEXT
    return fast


def save_model(directory: Path, tokenizer: Any) -> Path:
    """Save a random model with a longer context than the other tests', and some rows that the tokenizer lacks."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return write_random_qwen3(
        directory,
        tokenizer,
        vocab_size=len(tokenizer) + 13,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.2,
        **sizes,
    )
