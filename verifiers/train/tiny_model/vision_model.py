"""A small chat model that sees images, without a download: a random Qwen3-VL with a tokenizer of characters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from verifiers.train.tiny_model.char_model import CHAT_TEMPLATE, make_tokenizer

IMAGE, VIDEO, BEFORE, BEHIND = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
PATCH = 4
"""Pixels of a patch's side; four patches of a square are one token."""

MOST_PIXELS = 64 * 64


def _template() -> str:
    """Return the template of the model of letters, which shows an image where a message has one."""
    shown = (
        "{%- if message['content'] is string or not message['content'] -%}"
        "{{- message['content'] or '' -}}{%- else -%}"
        "{%- for part in message['content'] -%}{{- '"
        + BEFORE
        + IMAGE
        + BEHIND
        + "' if part.type in ('image', 'image_url') else "
        "part.text -}}{%- endfor -%}{%- endif -%}"
    )
    plain = "{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' -}}"
    assert plain in CHAT_TEMPLATE
    return CHAT_TEMPLATE.strip().replace(
        plain, "{{- '<|im_start|>' + message['role'] + '\\n' -}}" + shown + "{{- '<|im_end|>\\n' -}}"
    )


def make_vision_model(directory: str | Path, *, seed: int = 0) -> None:
    """Write a model of some million parameters, its tokenizer and its processor to `directory`."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(
        {"extra_special_tokens": [*tokenizer.extra_special_tokens, IMAGE, VIDEO, BEFORE, BEHIND]}
    )
    tokenizer.chat_template = _template()
    ids: dict[str, Any] = {
        name: tokenizer.convert_tokens_to_ids(token)
        for name, token in (
            ("image_token_id", IMAGE),
            ("video_token_id", VIDEO),
            ("vision_start_token_id", BEFORE),
            ("vision_end_token_id", BEHIND),
        )
    }
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "mrope_section": [2, 3, 3],
                # always so in transformers, asked for by vLLM
                "mrope_interleaved": True,
            },
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 128,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=False,
        **ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Qwen3VLForConditionalGeneration(config)
    network.generation_config.eos_token_id = tokenizer.eos_token_id
    network.generation_config.pad_token_id = tokenizer.pad_token_id
    network.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        temporal_patch_size=2,
        merge_size=2,
        size={"shortest_edge": (2 * PATCH) ** 2, "longest_edge": MOST_PIXELS},
    ).save_pretrained(directory)


def show_answers(
    directory: str | Path,
    shown: Sequence[tuple[Sequence[dict[str, Any]], str]],
    *,
    seed: int = 0,
    steps: int = 150,
    batch_size: int = 16,
    learning_rate: float = 1e-3,
) -> float:
    """Train the model in a directory on answers to conversations with images, in place; return the last loss.

    Answers that are seldom right teach their form, and a little more, so that there is something to reinforce.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen3VLForConditionalGeneration

    from verifiers.images import image_bytes, image_urls
    from verifiers.train.image_processor import ImageProcessor
    from verifiers.train.tiny_model.warm_start import supervised_steps

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = Qwen3VLForConditionalGeneration.from_pretrained(directory)
    processor = ImageProcessor.load(directory, tokenizer, AutoConfig.from_pretrained(directory))
    rows = []
    for messages, answer in shown:
        text: Any = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        held = [image_bytes(url) for url in image_urls(messages)]
        # before a tool is called there is none
        ids, images = processor.read(text, held) if held else (tokenizer.encode(text), None)
        rows.append((ids, tokenizer.encode(answer + tokenizer.eos_token), images))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)

    def further(ids_RT: torch.Tensor, shown: list[Any]) -> dict[str, torch.Tensor]:
        return processor.inputs(ids_RT, shown, ids_RT.device)

    trained = supervised_steps(model, rows, optimizer, seed=seed, batch_size=batch_size, further=further)
    *_, loss = islice(trained, steps)
    model.save_pretrained(directory)
    return loss
