"""Sampled rollouts over time as HTML: for each prompt a row of steps, and under it what was said at one of them."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.evals.contents import ContentReader
from verifiers.evals.store import RESULTS, iter_rows
from verifiers.train.watching.charts import short
from verifiers.train.watching.record import SAMPLES, read_lines
from verifiers.train.watching.samples import shown_messages

__all__ = ["samples_section"]

_HELD_OUT_PROMPTS = 4
_TIMES = 40
_LEVELS = 6
_ROLLOUTS = 4
_MOST_CHARACTERS = 6 << 20
_STEP = re.compile(r"step-(\d+)(?:-.*)?")
_UNSEEN = re.compile(
    r"[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2028\u2029\u2060-\u2069\ufeff]"
)
Scale = tuple[float, float]
_FAILED = ("environment_error", "provider_error", "grading_error", "timed_out", "cancelled")


def samples_section(run_dir: Path) -> str:
    """The sections with sampled rollouts; "" where there are none."""
    train = list(read_lines(run_dir / SAMPLES))
    followed: dict[str, list[dict[str, Any]]] = {}
    others: dict[float, list[dict[str, Any]]] = {}
    for line in train:
        if line.get("followed"):
            followed.setdefault(str(line.get("example")), []).append(line)
        else:
            others.setdefault(float(line["step"]), []).append(line)
    held_out = _held_out(run_dir)
    seen_again = {name: lines for name, lines in followed.items() if len(lines) > 1}
    once = [line for name, lines in followed.items() if name not in seen_again for line in lines]
    for line in once:
        others.setdefault(float(line["step"]), []).insert(0, line)
    parts = [
        _timelines("The same held-out prompts over time", "greedy or sampled, as the evaluations were", held_out),
        _timelines("The same training prompts over time", "prompts of the first block that came again", seen_again),
    ]
    if others:
        scale = _scale_of(line for lines in others.values() for line in lines)
        card = f'<div class="card prompt">{_panels(sorted(others.items()), scale)}</div>'
        note = "the one whose rewards differ most, and a typical one"
        parts.append(_section("Prompts of a block, by step", note, [card], scale if len(others) > 1 else None))
    return "".join(part for part in parts if part)


def _scale_of(lines: Iterable[Mapping[str, Any]]) -> Scale:
    """The mean rewards that the lightest and the darkest colour stand for; 0 is always between them."""
    means = [line["mean_reward"] for line in lines if isinstance(line.get("mean_reward"), (int, float))]
    lowest, highest = min([0.0, *means]), max([0.0, *means])
    return lowest, highest if highest > lowest else lowest + 1.0


def _timelines(title: str, note: str, by_prompt: Mapping[str, list[dict[str, Any]]]) -> str:
    scale = _scale_of(line for lines in by_prompt.values() for line in lines)
    cards = [_timeline(f"prompt {name}", lines, scale) for name, lines in by_prompt.items()]
    return _section(title, note, cards, scale if any(len(lines) > 1 for lines in by_prompt.values()) else None)


def _section(title: str, note: str, cards: Sequence[str], scale: Scale | None) -> str:
    if not cards:
        return ""
    body = f'<div class="cards">{"".join(cards)}</div>'
    legend = ""
    if scale is not None:
        colours = "".join(f'<i class="l{level}"></i>' for level in range(_LEVELS))
        legend = (
            f'<p class="soft scale">a square is a step, its colour the mean reward: '
            f"<span><b>{short(scale[0])}</b> {colours} <b>{short(scale[1])}</b></span></p>"
        )
    return f'<section><h2>{title} <span class="soft">{note}</span></h2>{legend}{body}</section>'


def _timeline(title: str, lines: list[dict[str, Any]], scale: Scale) -> str:
    """One prompt: what it asks, and its rollouts at each step."""
    first = lines[0]
    answer = (
        f'<p class="soft">answer: <code>{_text(str(first.get("answer")))}</code></p>' if first.get("answer") else ""
    )
    by_step = [(float(line["step"]), [line]) for line in sorted(lines, key=lambda line: line["step"])]
    panels = _panels(by_step, scale, with_prompts=False)
    return (
        f'<div class="card prompt"><details class="fold" open><summary>{_text(title)}</summary>'
        f"{_messages(first.get('prompt'))}{answer}</details>{panels}</div>"
    )


def _panels(by_step: list[tuple[float, list[dict[str, Any]]]], scale: Scale, *, with_prompts: bool = True) -> str:
    """A button for each step, and its rollouts, of which the script shows one step at a time."""
    made: list[tuple[float, float | None, str]] = []
    for step, lines in _fitting(by_step):
        means = [line["mean_reward"] for line in lines if isinstance(line.get("mean_reward"), (int, float))]
        body = "".join(_group(line, with_prompts) for line in lines)
        made.append((step, sum(means) / len(means) if means else None, body))
    buttons, panels = [], []
    for step, mean, body in made:
        level = "none" if mean is None else f"l{_level(mean, scale)}"
        told = f"step {step:,.0f}" + (f", mean reward {short(mean)}" if mean is not None else "")
        buttons.append(f'<button type="button" class="{level}" title="{told}" aria-label="{told}"></button>')
        panels.append(f'<div class="panel"><h3>{told}</h3>{body}</div>')
    strip = f'<div class="strip" role="group" aria-label="steps">{"".join(buttons)}</div>' if len(made) > 1 else ""
    return f'<div class="steps">{strip}{"".join(panels)}</div>'


def _level(mean: float, scale: Scale) -> int:
    return round((_LEVELS - 1) * (mean - scale[0]) / (scale[1] - scale[0]))


def _fitting(by_step: list[tuple[float, list[dict[str, Any]]]]) -> list[tuple[float, list[dict[str, Any]]]]:
    """All steps, or every second and so on of them where there are too many or their texts too long."""
    every = max(1, -(-len(by_step) // _TIMES))
    sizes = [len(str(lines)) for _, lines in by_step]
    while sum(sizes[::every]) > _MOST_CHARACTERS and every < len(sizes):
        every *= 2
    chosen = by_step[::every]
    if by_step and chosen[-1] is not by_step[-1]:
        chosen.append(by_step[-1])
    return chosen


def _group(line: Mapping[str, Any], with_prompt: bool) -> str:
    rollouts = [rollout for rollout in line.get("rollouts") or () if isinstance(rollout, Mapping)]
    shown = "".join(_rollout(rollout) for rollout in rollouts)
    prompt = ""
    if with_prompt:
        answer = f" &middot; answer <code>{_text(str(line.get('answer')))}</code>" if line.get("answer") else ""
        count = f"{len(rollouts)} of {line.get('generations')} rollouts"
        prompt = (
            f'<details class="fold"><summary>prompt {_text(str(line.get("example")))}'
            f"{answer} &middot; {count}</summary>{_messages(line.get('prompt'))}</details>"
        )
    return f'{prompt}<div class="columns">{shown}</div>'


def _rollout(rollout: Mapping[str, Any]) -> str:
    outcome = str(rollout.get("outcome"))
    badges = []
    reward, advantage = rollout.get("reward"), rollout.get("advantage")
    if isinstance(reward, (int, float)):
        badges.append(f'<span class="badge reward">reward {short(reward)}</span>')
    if isinstance(advantage, (int, float)):
        sign = "better" if advantage > 0 else "worse" if advantage < 0 else "soft"
        badges.append(f'<span class="{sign}">advantage {advantage:+.2f}</span>')
    if outcome != "completed":
        kind = "bad" if outcome in _FAILED else "some"
        badges.append(f'<span class="badge {kind}">{_text(outcome.replace("_", " "))}</span>')
    badges.append(f'<span class="soft">{short(rollout.get("tokens"))} tokens</span>')
    error = f'<p class="error">{_text(str(rollout["error"]))}</p>' if rollout.get("error") else ""
    said = _messages(rollout.get("completion")) or ("" if error else '<p class="soft">empty</p>')
    return f'<div class="column"><header>{"".join(badges)}</header>{error}{said}</div>'


def _messages(messages: Any) -> str:
    return "".join(_message(message) for message in messages or () if isinstance(message, Mapping))


def _message(message: Mapping[str, Any]) -> str:
    role = str(message.get("role", "?"))
    kind = role if re.fullmatch("[a-z]+", role) else "other"
    think = f'<pre class="soft">{_text(str(message["think"]))}</pre>' if message.get("think") else ""
    calls = "".join(
        '<div class="call"><div class="call-name"><span class="tag">call</span>'
        f"<code>{_text(str(call.get('name')))}</code></div><pre>{_text(str(call.get('arguments', '')))}</pre></div>"
        for call in message.get("calls") or ()
    )
    text = f"<pre>{_text(str(message['text']))}</pre>" if message.get("text") else ""
    return f'<article class="message role-{kind}"><h4>{_text(role)}</h4>{think}{text}{calls}</article>'


def _text(text: str) -> str:
    """Escaped; control characters and marks that turn the direction of text are spelled out."""
    return html.escape(_UNSEEN.sub(lambda found: f"\u27e8U+{ord(found.group()):04X}\u27e9", text))


# -- held-out prompts ------------------------------------------------------------------------------------------


def _held_out(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """Rollouts of a few prompts in each stored evaluation, by set and prompt, as lines of samples.jsonl."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, stored in _evaluations(run_dir).items():
        every = max(1, -(-len(stored) // _TIMES))
        shown = stored[::every] if (len(stored) - 1) % every == 0 else [*stored[::every], stored[-1]]
        chosen: list[Any] = []
        for step, directory in shown:
            try:
                chosen = chosen or _followed_examples(directory)
                for example, rows in _rows_of(directory, chosen).items():
                    found.setdefault(f"{name} {example}".strip(), []).append(_line(step, example, rows))
            except (ConfigError, OSError, ValueError):
                continue  # one that is being written, or was damaged
    return found


def _followed_examples(directory: Path) -> list[Any]:
    examples = sorted({row.get("example_id") for row in iter_rows(directory, contents=False)}, key=_order)
    if len(examples) <= _HELD_OUT_PROMPTS:
        return examples
    return [examples[at * len(examples) // _HELD_OUT_PROMPTS] for at in range(_HELD_OUT_PROMPTS)]


def _rows_of(directory: Path, examples: Sequence[Any]) -> dict[Any, list[dict[str, Any]]]:
    """The rollouts of some prompts. Only their lines are parsed: an evaluation may hold thousands of others."""
    beginnings = {f'{{"example_id": {json.dumps(example)},'.encode(): example for example in examples}
    reader = ContentReader(directory, strict=False)
    rows: dict[Any, list[dict[str, Any]]] = {example: [] for example in examples}
    with (directory / RESULTS).open("rb") as file:
        for line in file:
            for beginning, example in beginnings.items():
                if line.startswith(beginning) and line.endswith(b"\n"):
                    rows[example].append(reader.restored(json.loads(line)))
    return {example: found for example, found in rows.items() if found}


def _order(example: Any) -> tuple[int, int, str]:
    return (0, example, "") if isinstance(example, int) else (1, 0, str(example))


def _evaluations(run_dir: Path) -> dict[str, list[tuple[int, Path]]]:
    """Directories of stored evaluations by the name of their set, in order of their steps."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in (run_dir / "evals").glob(f"step-*/**/{RESULTS}"):
        parts = path.parent.relative_to(run_dir / "evals").parts
        number = _STEP.fullmatch(parts[0])
        if number is not None:
            found.setdefault("/".join(parts[1:]), []).append((int(number.group(1)), path.parent))
    return {name: sorted(stored) for name, stored in sorted(found.items())}


def _line(step: int, example: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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
