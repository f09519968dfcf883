"""Sampled rollouts of a training run as data: for each prompt its steps, and its rollouts at each of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.evals.json_lines import RowReader
from verifiers.evals.store import RESULTS, iter_rows
from verifiers.monitoring.run_log import SAMPLES, read_lines, shown_messages

__all__ = ["sample_sections", "stored_evaluations"]

_PROMPTS = 4
_TIMES = 40
_ROLLOUTS = 4
_MOST_CHARACTERS = 6 << 20
_STEP = re.compile(r"step-(\d+)(?:-.*)?")

_Line = dict[str, Any]


def sample_sections(run_dir: Path) -> list[dict[str, Any]]:
    """Return the sections with sampled rollouts, without empty ones.

    A section is `{"title", "note", "scale", "cards"}`: "scale" has the mean rewards of the lightest and the darkest
    colour. A card is one prompt over time, `{"title", "prompt", "answer", "steps"}`, or has prompts of many blocks,
    each with its text beside its rollouts, and then no "title". A step is `{"step", "mean", "groups"}`, and a group a
    line of samples.jsonl.
    """
    followed: dict[str, list[_Line]] = {}
    others: list[_Line] = []
    for line in read_lines(run_dir / SAMPLES):
        if line.get("followed"):
            followed.setdefault(str(line.get("example")), []).append(line)
        else:
            others.append(line)
    once = [name for name, lines in followed.items() if len(lines) == 1]
    others = [line for name in once for line in followed.pop(name)] + others
    sections = [
        _section(
            "The same held-out prompts over time",
            "greedy or sampled, as the evaluations were",
            [_card(name, lines) for name, lines in _evaluated(run_dir).items()],
        ),
        _section(
            "The same training prompts over time",
            "prompts of the first block that came again",
            [_card(name, lines) for name, lines in followed.items()],
        ),
        _section(
            "Prompts of a block, by step",
            "the one whose rewards differ most, and a typical one",
            [{"steps": _steps(others)}] if others else [],
        ),
    ]
    return [section for section in sections if section["cards"]]


def _section(title: str, note: str, cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    means = [step["mean"] for card in cards for step in card["steps"] if step["mean"] is not None]
    # 0 is always on the scale, so that a colour tells a reward also where all rewards are equal
    low, high = min([0.0, *means]), max([0.0, *means])
    return {"title": title, "note": note, "cards": cards, "scale": [low, high if high > low else low + 1.0]}


def _card(name: str, lines: Sequence[_Line]) -> dict[str, Any]:
    steps = _steps([{**line, "prompt": [], "answer": ""} for line in lines])
    first = lines[0]
    return {
        "title": f"prompt {name}",
        "prompt": first.get("prompt") or [],
        "answer": str(first.get("answer") or ""),
        "steps": steps,
    }


def _steps(lines: Iterable[_Line]) -> list[dict[str, Any]]:
    """Return the lines by step; every second step, every fourth and so on where there is too much to show."""
    by_step: dict[int, list[_Line]] = {}
    for line in lines:
        by_step.setdefault(int(line["step"]), []).append(line)
    steps = [{"step": step, "mean": _mean(groups), "groups": groups} for step, groups in sorted(by_step.items())]
    every = max(1, -(-len(steps) // _TIMES))
    sizes = [len(str(step)) for step in steps]
    while sum(sizes[::every]) > _MOST_CHARACTERS and every < len(sizes):
        every *= 2
    chosen = steps[::every]
    if steps and chosen[-1] is not steps[-1]:
        chosen.append(steps[-1])
    return chosen


def _mean(lines: Iterable[_Line]) -> float | None:
    means = [line["mean_reward"] for line in lines if isinstance(line.get("mean_reward"), (int, float))]
    return sum(means) / len(means) if means else None


def stored_evaluations(run_dir: Path) -> dict[str, list[tuple[int, Path]]]:
    """Return the directories of stored evaluations by the name of their set, in order of their steps."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in (run_dir / "evals").glob(f"step-*/**/{RESULTS}"):
        parts = path.parent.relative_to(run_dir / "evals").parts
        number = _STEP.fullmatch(parts[0])
        if number is not None:
            found.setdefault("/".join(parts[1:]), []).append((int(number.group(1)), path.parent))
    return {name: sorted(stored) for name, stored in sorted(found.items())}


def _evaluated(run_dir: Path) -> dict[str, list[_Line]]:
    """Return the rollouts of a few prompts in each stored evaluation, by set and prompt, like samples.jsonl."""
    found: dict[str, list[_Line]] = {}
    for name, stored in stored_evaluations(run_dir).items():
        every = max(1, -(-len(stored) // _TIMES))
        shown = stored[::every] if (len(stored) - 1) % every == 0 else [*stored[::every], stored[-1]]
        chosen: list[Any] = []
        for step, directory in shown:
            try:
                chosen = chosen or _chosen_examples(directory)
                for example, rows in _rows_of(directory, chosen).items():
                    found.setdefault(f"{name} {example}".strip(), []).append(_line(step, example, rows))
            except (ConfigError, OSError, ValueError):
                continue  # one that is being written, or was damaged
    return found


def _chosen_examples(directory: Path) -> list[Any]:
    examples = sorted({row.get("example_id") for row in iter_rows(directory)}, key=_order)
    if len(examples) <= _PROMPTS:
        return examples
    return [examples[at * len(examples) // _PROMPTS] for at in range(_PROMPTS)]


def _rows_of(directory: Path, examples: Sequence[Any]) -> dict[Any, list[dict[str, Any]]]:
    """Return the rollouts of some prompts. Only their lines are parsed, since there may be thousands."""
    beginnings = {f'{{"example_id": {json.dumps(example)},'.encode(): example for example in examples}
    rows: dict[Any, list[dict[str, Any]]] = {example: [] for example in examples}
    reader = RowReader(directory)
    with (directory / RESULTS).open("rb") as file:
        for line in file:
            for beginning, example in beginnings.items():
                if line.startswith(beginning) and line.endswith(b"\n"):
                    rows[example].append(reader.parse(line))
    return {example: found for example, found in rows.items() if found}


def _order(example: Any) -> tuple[int, int, str]:
    return (0, example, "") if isinstance(example, int) else (1, 0, str(example))


def _line(step: int, example: Any, rows: Sequence[Mapping[str, Any]]) -> _Line:
    rewards = [row["reward"] for row in rows if isinstance(row.get("reward"), (int, float))]
    return {
        "step": step,
        "example": example,
        "prompt": shown_messages(rows[0].get("prompt"), "prompt"),
        "answer": str(rows[0].get("answer") or "")[:3000],
        "generations": len(rows),
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "rollouts": [
            {
                "outcome": row.get("outcome"),
                "reward": row.get("reward"),
                "tokens": row.get("completion_tokens"),
                "error": row.get("error"),
                "completion": shown_messages(row.get("completion"), "completion"),
            }
            for row in rows[:_ROLLOUTS]
        ],
    }
