"""Runs to look at, and a real browser to look with."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from chromium import Page, opened_browser
from training_runs import store

SENTENCE = "the train leaves at noon and arrives after three hours so we add them up and check the sum again"
WORDS = SENTENCE.split()


def make_row(example: int, generation: int, **fields: Any) -> dict[str, Any]:
    """Return a plausible row of results.jsonl; the same for the same numbers."""
    rng = random.Random(example * 1009 + generation)
    right = rng.random() < 1 / (1 + math.exp((example % 20 - 10) / 3))
    asked = random.Random(example)
    length = rng.randint(20, 300) + (100 if not right else 0)
    thought = " ".join(rng.choice(WORDS) for _ in range(length // 3))
    said = " ".join(rng.choice(WORDS) for _ in range(length // 4))
    row = {
        "example_id": example,
        "generation": generation,
        "prompt": [
            {"role": "system", "content": "Answer with a number."},
            {"role": "user", "content": f"Task {example}: " + " ".join(asked.choice(WORDS) for _ in range(30))},
        ],
        "completion": [{"role": "assistant", "content": f"<think>{thought}</think>\n{said} = {example * 3}"}],
        "answer": str(example * 3),
        "task": "sums",
        "info": {},
        "outcome": "truncated" if length > 380 else "completed",
        "reward": 1.0 if right else 0.2 * rng.randint(0, 3),
        "error": None,
        "generation_ms": length * 21.5,
        "scoring_ms": 0.5,
        "prompt_tokens": 60,
        "completion_tokens": length,
    }
    measured = {"right": float(right), "brief": round(1 - length / 500, 4)}
    measured |= {name: value for name, value in fields.items() if name not in row}
    return {**row, "metrics": measured, **fields}


def failed_row(example: int, generation: int) -> dict[str, Any]:
    return make_row(
        example, generation, outcome="provider_error", reward=None, completion=[], completion_tokens=0,
        error="ProviderError: the server answered 503 after 6 attempts",
    )  # fmt: skip


def tool_row(example: int, generation: int, **fields: Any) -> dict[str, Any]:
    """Return a rollout with two calls in a turn, answered in the other order, and an answer that nobody asked for."""
    call = lambda id_, text: {"id": id_, "type": "function", "function": {"name": "add", "arguments": text}}  # noqa: E731
    completion = [
        {
            "role": "assistant",
            "content": "Let me add.",
            "reasoning_content": "Two sums are needed.",
            "tool_calls": [call("c1", '{"a": 1, "b": 2}'), call("c2", '{"a": 3, "b": 4}')],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "seven-result"},
        {"role": "tool", "tool_call_id": "c1", "content": "three-result"},
        {"role": "tool", "tool_call_id": "nobody", "content": "stray"},
        {"role": "assistant", "content": "3 and 7."},
    ]
    return make_row(example, generation, completion=completion, **fields)


def sums_rows(prompts: int = 40, generations: int = 8) -> list[dict[str, Any]]:
    rows = [make_row(example, generation) for example in range(prompts) for generation in range(generations)]
    rows[5] = failed_row(0, 5)
    rows[9] = tool_row(1, 1, reward=1.0)
    return rows


@pytest.fixture
def sums_run(tmp_path: Path) -> Path:
    return store(tmp_path / "sums--small-model" / "aaaa1111", sums_rows(), model="small-model")


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Page]:
    """Return a fresh headless Chromium with an empty profile."""
    async with opened_browser(tmp_path / "profile") as page:
        yield page


@pytest.fixture
def rows() -> Callable[..., dict[str, Any]]:
    return make_row
