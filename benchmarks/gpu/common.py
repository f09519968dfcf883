"""The parts that the stages share: what they are asked, how they report, and the model whose speed they measure."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

QWEN3_600M = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
QWEN3_600M |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@dataclass(frozen=True)
class Asked:
    """Settings of a stage.

    Attributes:
        device: "cuda" or "cpu".
        tiny: small models and few rounds, to see that the code runs.
        scratch: an empty directory.
        memory: an empty directory in memory, where the machine has one.
    """

    device: str
    tiny: bool
    scratch: str
    memory: str

    @property
    def dtype(self) -> Any:
        """The kind of number in which speed is measured."""
        import torch

        return torch.bfloat16 if self.device == "cuda" else torch.float32


class Report:
    """A printer of results as they come, one line of JSON each."""

    def __init__(self, stage: str) -> None:
        self._stage = stage

    def result(self, name: str, value: Any, **more: Any) -> None:
        """Report something measured; None where it was not run, with the reason in `why`."""
        rounded = float(f"{value:.4g}") if isinstance(value, float) else value
        print(json.dumps({"stage": self._stage, "name": name, "value": rounded, **more}), flush=True)

    def check(self, name: str, passed: bool, **more: Any) -> None:
        """Report a promise that was kept or broken."""
        self.result(name, bool(passed), check=True, **more)


def run_stage(work: Callable[[Asked, Report], None]) -> None:
    """Run a stage as the driver asks for it: settings as JSON in the first argument, results on standard output."""
    given = json.loads(sys.argv[1])
    stage = given.pop("stage")
    work(Asked(**given), Report(stage))


def make_model(asked: Asked, dtype: Any, seed: int = 0) -> Any:
    """Return random weights in the shape of Qwen3-0.6B, or of a tiny Qwen3; no token ends a completion."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        **(TINY if asked.tiny else QWEN3_600M),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(asked.device):
        model: Any = Qwen3ForCausalLM(config)
    return model.to(dtype).eval()


def make_tokenizer(words: int = 512) -> Any:
    """Return a tokenizer that names token 5 "w5"; only its special tokens and its template are ever used."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{index}": index for index in range(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", eos_token="w0", chat_template=template, padding_side="left"
    )


def make_block(sizes: Sequence[tuple[int, int]], generations: int, vocabulary: int) -> Any:
    """Return a scored block of rollouts with so many (prompt, completion) tokens each; a group has one prompt."""
    from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock, TokenSequence
    from verifiers.types import Outcome, RolloutKey

    draw, found = random.Random(1), []
    prompt_ids: list[int] = []
    for index, (prompt, tokens) in enumerate(sizes):
        if index % generations == 0:
            prompt_ids = [draw.randrange(1, vocabulary) for _ in range(prompt)]
        ids = [draw.randrange(1, vocabulary) for _ in range(tokens)]
        row = TokenSequence(prompt_ids, ids, [1] * tokens, [-6.0] * tokens, [0] * tokens)
        key = RolloutKey(0, *divmod(index, generations))
        found.append(Rollout(key, Outcome.COMPLETED, "p", "c", reward=draw.random(), rows=[row]))
    starts = range(0, len(found), generations)
    return ScoredBlock(0, [Group(start // generations, found[start : start + generations]) for start in starts])


def synchronize(asked: Asked) -> float:
    """Wait for the device and return the time."""
    if asked.device == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak_memory(asked: Asked) -> None:
    """Forget the peak of what ran before, so that each side reports its own."""
    if asked.device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()


def peak_memory_mib(asked: Asked) -> float | None:
    """Return the most memory held on the GPU since the last reset, or the process's start.

    None on the CPU, where a process's peak says too little.
    """
    if asked.device != "cuda":
        return None
    import torch

    return torch.cuda.max_memory_allocated() / 2**20
