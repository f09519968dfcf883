"""The table's column of vLLM: log-probs of what it samples, against transformers' own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch
from checks import trained_class
from families import FAMILIES, Family

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("VERIFIERS_VLLM_PYTHON") or str(ROOT / ".venv-vllm/bin/python")
LARGEST, MEAN_OF_HALF = 1e-3, 0.05
"""Nats by which log-probs may differ: each in float32, and their mean in bfloat16, whose rounding alone is near."""


def sample_all(directory: Path) -> Path:
    """Write two checkpoints of each family, let vLLM sample from them, and return the directory."""
    for family in FAMILIES:
        for seed, name in enumerate("ab"):
            family.write(directory / family.name / name, seed)
    subprocess.run([PYTHON, str(Path(__file__).with_name("vllm_side.py")), str(directory)], check=True, timeout=1500)
    return directory


def cell_of(family: Family, directory: Path) -> tuple[str, str]:
    """Return the family's cell and what it is by.

    "yes", "bfloat16" (where float32 is refused), "no" (a push does not agree), "differs" (nor do the
    first weights), or "refused".
    """
    told = json.loads((directory / family.name / "answers.json").read_text())
    if "error" in told:
        return "refused", told["error"]
    is_half = told["dtype"] == "bfloat16"
    gaps = {}
    for stage, name in (("first", "a"), ("pushed", "b"), ("pushed back", "a")):
        checkpoint = directory / family.name / name
        model = trained_class(checkpoint).from_pretrained(checkpoint, dtype=getattr(torch, told["dtype"])).eval()
        found = torch.cat([differences(model, **answer) for answer in told[stage]])
        gaps[stage] = (found.mean() if is_half else found.max()).item()
    bound = MEAN_OF_HALF if is_half else LARGEST
    agrees = all(gap < bound for gap in gaps.values())
    if not gaps["first"] < bound:
        return "differs", json.dumps(gaps)
    return ("bfloat16" if is_half else "yes") if agrees else "no", json.dumps(gaps)


def differences(model: Any, prompt: list[int], token_ids: list[int], log_probs: list[float]) -> torch.Tensor:
    """Return how far log-probs are from those of a plain forward pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1].float()
    plain = logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    return (plain - torch.tensor(log_probs)).abs()
