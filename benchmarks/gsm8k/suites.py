"""The models of the GSM8K benchmark, the published scores that they are compared with, and their run files."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Anchor:
    """A score that others have published; README.md says where, and how it came about."""

    name: str
    score: float


@dataclass(frozen=True)
class Suite:
    """One model of the benchmark.

    Attributes:
        run_file: in this folder.
        anchors: published scores, which are the thresholds.
        parameters: of the model, by its maker; None where MFU says nothing.
        operations: of training for each parameter and token: 2 forward and 4 backward; with LoRA 2 backward, as
            frozen weights get no gradient.
    """

    run_file: str
    anchors: tuple[Anchor, ...]
    parameters: float | None
    operations: int = 6

    def settings(self) -> dict[str, Any]:
        """Return the run file."""
        return tomllib.loads((HERE / self.run_file).read_text())


SUITES = {
    "0.5b": Suite("qwen2.5-0.5b.toml", (Anchor("verl, PPO", 0.567),), 0.494e9),
    "1.5b": Suite(
        "qwen2.5-1.5b.toml", (Anchor("verl, GRPO with LoRA", 0.779), Anchor("AReaL, GRPO", 0.7957)), 1.544e9
    ),
    "1.5b-lora": Suite("qwen2.5-1.5b-lora.toml", (Anchor("verl, GRPO with LoRA", 0.779),), 1.544e9, operations=4),
    "tiny": Suite("tiny.toml", (Anchor("made up", 0.3),), None),
}


def write_run_file(path: Path, settings: Mapping[str, Any]) -> Path:
    """Write a run file: tables of numbers, texts, lists and inline tables."""
    lines = []
    for table, values in settings.items():
        lines += [f"[{table}]", *(f"{name} = {_toml(value)}" for name, value in values.items()), ""]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))
    return path


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + " }"
    # the other values of a run file are written as JSON writes them
    return json.dumps(value)


def make_tiny_start(directory: Path, seed: int = 0) -> None:
    """Make the demo's model, and show it answers of the ten problems until it knows some."""
    import torch
    from gsm8k_env import SYNTHETIC, synthetic_problems

    from verifiers.train.tiny_model.char_model import make_model
    from verifiers.train.tiny_model.warm_start import warm_start

    if (directory / "start").exists():
        return
    torch.set_num_threads(1)
    pairs = [(row["question"], f"#### {row['answer']}") for row in synthetic_problems()[SYNTHETIC:]]
    make_model(directory / "random", seed=seed)
    warm_start(directory / "random", directory / "start", shown=pairs, eval_pairs=pairs, seed=seed, window=(0.2, 0.8))


if __name__ == "__main__":
    make_tiny_start(Path(sys.argv[1]))
