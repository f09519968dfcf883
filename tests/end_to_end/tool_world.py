"""A policy that calls a tool in nearly every turn, made by hand, and the environment that it plays in.

The network's embeddings name a token's class and its head maps each class to the one that follows in a call, so it
calls `add` from the first step on; its attention is random and not weak, so what it samples depends on everything
before, and a wrong mask or a wrong token shows in the log-probs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_world
import torch
from tiny_models import random_qwen3
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

import verifiers as vf

CALL = '<tool_call>{"name": "add", "arguments": {"n": '
CLOSE = "}}</tool_call>"
DIGITS = "0123456789"

TEMPLATE = (
    "{% if tools %}s:{{ tools | tojson }}<end>{% endif %}"
    "{% for m in messages %}{{ m.role[0] + ':' + (m.content or '') }}"
    '{% for c in m.tool_calls or [] %}{{ \'<tool_call>{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments }}{{ '}</tool_call>' }}{% endfor %}{{ '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
"""Every rendering is a prefix of the one with more turns."""

FORGETFUL_TEMPLATE = TEMPLATE.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'user' or loop.revindex <= 2 %}",
).replace("{{ '<end>' }}{% endfor %}{% if add", "{{ '<end>' }}{% endif %}{% endfor %}{% if add")
"""Shows the last call and its result alone, as templates do that drop what was thought before."""


def make_tokenizer(template: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_world.make_tokenizer()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (CALL, CLOSE)])
    tokenizer.chat_template = template
    return tokenizer


def make_model(directory: Path, template: str = TEMPLATE) -> Path:
    """Write the policy: generation prompt -> call -> a digit -> close -> end, each with a probability near 1."""
    tokenizer = make_tokenizer(template)
    classes = 5
    model = random_qwen3(tokenizer, max_position_embeddings=4096, initializer_range=0.15, tie_word_embeddings=False)
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in (":", CALL, CLOSE, tiny_world.END, *DIGITS)}
    follows = [(ids[":"], [ids[CALL]]), (ids[CALL], [ids[digit] for digit in DIGITS])]
    with torch.no_grad():
        embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embeddings.normal_(0.0, 0.1)
        embeddings[:, :classes] = 0.0
        head.normal_(0.0, 0.05)
        head[:, :classes] = 0.0
        for index, (token, successors) in enumerate(follows):
            embeddings[token, index] = 3.0
            head[successors, index] = 4.5
        for digit in DIGITS:
            embeddings[ids[digit], 2] = 3.0
        head[ids[CLOSE], 2] = 4.5
        embeddings[ids[CLOSE], 3] = 3.0
        head[ids[tiny_world.END], 3] = 4.5
        for layer in model.model.layers:
            # enough to be seen in every log-prob, too little to break a call off
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def add(n: int) -> str:
    """Add a number.

    Args:
        n: the number to add
    """
    return str(n + 7)


def called_digits(completion: Any, **kwargs: Any) -> float:
    """Return the sum of the numbers in all calls: differs between nearly all rollouts."""
    calls = [call for message in completion for call in message.get("tool_calls") or []]
    return float(sum(int(digit) for call in calls for digit in call["function"]["arguments"] if digit.isdigit()))


def environment(max_turns: int) -> vf.Environment:
    """Return a tool environment whose rollouts last `max_turns` answers as long as the policy calls its tool."""
    return vf.ToolEnv(
        tools=[add], max_turns=max_turns, dataset=tiny_world.rows(8), rubric=vf.Rubric(funcs=[called_digits])
    )
