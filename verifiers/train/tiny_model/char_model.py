"""A small chat model without a download: a character tokenizer and a Qwen3 with random weights.

`warm_start.py` trains it until reinforcement learning can begin.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
"""Every character that is a token of its own: printable ASCII and newline."""

PAD, START, END = "<pad>", "<|im_start|>", "<|im_end|>"

CONTEXT = 2048
"""Tokens of a prompt with its completion; a tool takes some hundred."""

CHAT_TEMPLATE = r"""
{%- set system = messages[0]['content'] or '' if messages[0]['role'] == 'system' else none -%}
{%- if tools or system is not none -%}
    {{- '<|im_start|>system\n' + (system or '') + ('\n' if tools and system else '') -}}
    {%- for tool in tools or [] -%}
        {{- ('Tools:' if loop.first else '') + '\n' + tool.function.name + '(' -}}
        {%- for name, value in ((tool.function.parameters or {}).properties or {}).items() -%}
            {{- ('' if loop.first else ', ') + name + ': ' + (value.type or 'any') | string -}}
        {%- endfor -%}
        {{- '): ' + (tool.function.description or '') -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] == 'assistant' -%}
        {{- '<|im_start|>assistant\n' -}}
        {%- generation -%}
        {{- message['content'] or '' -}}
        {%- for call in message['tool_calls'] or [] -%}
            {%- set arguments = call.function.arguments -%}
            {{- '<tool_call>{"name": ' + call.function.name | tojson + ', "arguments": ' -}}
            {{- (arguments if arguments is string else arguments | tojson) + '}</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>' -}}
        {%- endgeneration -%}
        {{- '\n' -}}
    {%- elif not (loop.first and system is not none) -%}
        {{- '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
"""ChatML with tools: each is a line of the system message, and calls are written as Hermes and Qwen 3 write them.

Rendering one more turn extends the rendering before it, so held tokens stay a prefix.
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a fast tokenizer with one token per character; decoding gives back the exact text.

    A character outside `CHARACTERS` becomes "?".
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([PAD, START, END, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (PAD, START, END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE.strip(),
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
        padding_side="left",
    )


def make_model(directory: str | Path, *, seed: int, head_dim: int = 16) -> None:
    """Write tokenizer and model to `directory`, in the layout that `from_pretrained` and rollout servers read.

    The model is a Qwen3 of some 0.3 million parameters with seeded random weights, in float32.

    Args:
        head_dim: width of an attention head; vLLM on the CPU takes no less than 32.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=96 // head_dim,
        num_key_value_heads=96 // head_dim,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT,
        # Prompts have some hundred characters: the usual base of 10,000 would leave most frequencies unused.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        # Some rollout servers keep a tied head when weights are reloaded.
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Qwen3ForCausalLM(config)
    network.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
