"""The record of a training run: its numbers, some rollouts, and its settings. The report is made of it alone.

    run.json        settings, plan, versions, when it was started and resumed, how it ended
    metrics.jsonl   a line a log: step, optimizer steps since the line before, every metric, failures by error
    samples.jsonl   a line a prompt: some of its rollouts at one step

All lines are appended, and a run that is resumed from a checkpoint removes those after it: the files always have the
lineage of the weights, each step once and in order.

The rollouts are those of some forty steps of a run, evenly spaced: the prompt of the block whose rewards differ most,
a typical one, and those prompts of the first block that come again. The same prompt over time shows best what a
policy learns; evaluations, which are stored whole beside these, always have it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from verifiers.evals.store import finite, is_own_file, json_line, plain, result_row
from verifiers.log import Redactor
from verifiers.notebook import as_text, messages_of, shortened
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock

RUN = "run.json"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"

logger = logging.getLogger("verifiers.train")


def is_training_run(directory: str | Path) -> bool:
    return (Path(directory) / RUN).is_file() and (Path(directory) / METRICS).is_file()


def read_run(directory: str | Path) -> dict[str, Any]:
    """Return the content of run.json; empty where it is missing or damaged."""
    path = Path(directory) / RUN
    try:
        run = json.loads(path.read_text(encoding="utf-8")) if is_own_file(path) else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return run if isinstance(run, dict) else {}


def replace_file(path: Path, text: str) -> None:
    """Write a file in one step: readers see the old text or the new one, also after a power cut."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file; a line that was cut off while it was written is left out."""
    if not is_own_file(path):
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and is_number(row.get("step")):
                yield row


def is_number(value: Any) -> bool:
    return finite(value) is not None


class RunRecord:
    """The writer of a run's record. A file that cannot be written is warned of once, and costs the run nothing else.

    Args:
        resume_step: the optimizer step that the run is resumed from; None for a new run, which removes what an
            earlier run left there.

    Attributes:
        redact: takes secrets out of texts; also of those that are cut or changed before they come here.
    """

    def __init__(self, directory: str | Path, *, resume_step: int | None, redact: Redactor | None = None) -> None:
        self.directory = Path(directory)
        self.redact = redact or Redactor([])
        self._warned = False
        self._run = read_run(directory) if resume_step is not None else {}
        with self._warning():
            self.directory.mkdir(parents=True, exist_ok=True)
            for path in (self.directory / METRICS, self.directory / SAMPLES):
                if path.exists():
                    rows = [] if resume_step is None else [r for r in read_lines(path) if r["step"] <= resume_step]
                    replace_file(path, "".join(json_line(row) + "\n" for row in rows))

    @property
    def run(self) -> Mapping[str, Any]:
        return self._run

    def describe(self, **fields: Any) -> None:
        """Put fields into run.json, beside those that are there."""
        self._run.update(fields)
        with self._warning():
            replace_file(
                self.directory / RUN, self.redact.json(json.dumps(plain(self._run), indent=1), indent=1) + "\n"
            )

    def write_metrics(self, step: int, steps: int, logs: Mapping[str, Any], failures: Mapping[str, int]) -> None:
        """Append the numbers of one log.

        Args:
            steps: optimizer steps since the last one; 0 for an evaluation, and for failures between two logs.
            failures: rollouts that failed meanwhile, by error.
        """
        line: dict[str, Any] = {"step": step, "steps": steps, "at": round(time.time(), 1)}
        for name, value in logs.items():
            if isinstance(value, (int, float)) and name not in line:
                line[name] = float(f"{value:.6g}") if math.isfinite(value) else None
        if failures:
            line["failures"] = dict(failures)
        self._append(METRICS, [line])

    def write_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._append(SAMPLES, rows)

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        with self._warning(), (self.directory / name).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write("".join(self.redact.json(json_line(row)) + "\n" for row in rows))

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._warned:
                self._warned = True
                text = "the record of the run in %s cannot be written, so its report has gaps: %s"
                logger.warning(text, self.directory, error)


OTHER_ERRORS = "other errors"
"""Key under which errors beyond the commonest are counted."""

_ONE_OF_A_KIND = re.compile(
    r"0x[0-9a-fA-F]+"
    r"|\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"
    r"|\b(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{8,}\b"
    # a request's or a session's name: a word, then letters and digits mixed
    r"|(?<=[-_])(?=[0-9A-Za-z]*\d)(?=[0-9A-Za-z]*[A-Za-z])[0-9A-Za-z]{8,}\b"
    r"|\b\d{5,}\b"
)


def error_key(text: str) -> str:
    """Return the text with addresses, ids and long numbers as "…"."""
    return _ONE_OF_A_KIND.sub("…", text)


def commonest_errors(counts: Counter[str], most: int) -> dict[str, int]:
    """Return the commonest of some counted errors, with all others as `OTHER_ERRORS`."""
    kept = dict(counts.most_common(most))
    others = counts.total() - sum(kept.values())
    return {**kept, OTHER_ERRORS: others} if others else kept


# -- rollouts that are kept for reading ----------------------------------------------------------------------------

_TIMES = 40
_FOLLOWED = 3
_ROLLOUTS = 4
_CHARACTERS = 3000
_MESSAGES = 24
_SHOWN = ("generation", "outcome", "reward", "advantage", "metrics", "oldest_version", "error")

_cut = functools.partial(shortened, max_chars=_CHARACTERS)


class SampleChoice:
    """The choice of what is kept of each block; `kept` are lines of the same run before it was resumed."""

    def __init__(self, max_steps: int, kept: Iterable[Mapping[str, Any]] = ()) -> None:
        self._every = max(1, max_steps // _TIMES)
        self._last_step = -self._every
        self._followed: dict[int, int] = {}
        for line in kept:
            self._last_step = int(line["step"])
            if line.get("followed"):
                self._followed[int(line["example"])] = self._last_step

    def of_block(
        self, block: ScoredBlock, advantages: Mapping[Any, float | list[float]], step: int, *, is_last: bool = False
    ) -> list[dict[str, Any]]:
        """Return the lines to keep of a training block.

        Args:
            advantages: by rollout; a list has one a token.
            is_last: no block comes after it; it is looked at in any case.
        """
        groups = [group for group in block.groups if group.rollouts]
        if not groups:
            return []
        if not self._followed:
            self._followed = {group.example_id: -self._every for group in _spread(groups, _FOLLOWED)}
        chosen = {
            group.example_id: group
            for group in groups
            if step - self._followed.get(group.example_id, step) >= self._every
        }
        for example_id in chosen:
            self._followed[example_id] = step
        if is_last or step - self._last_step >= self._every:
            self._last_step = step
            chosen |= {group.example_id: group for group in _telling(groups)}
        return [
            {**_line(step, group, advantages), "followed": group.example_id in self._followed}
            for group in chosen.values()
        ]


def shown_messages(messages: Any, role: str) -> list[dict[str, Any]]:
    """Return messages as `messages_of` does, long ones cut in the middle, of many the first and last."""
    shown = messages_of(messages, role)
    if len(shown) > _MESSAGES:
        left_out = len(shown) - _MESSAGES
        note = {"role": "", "text": f"[... {left_out} messages are left out here ...]"}
        shown = [*shown[: _MESSAGES // 3], note, *shown[-2 * _MESSAGES // 3 :]]
    for message in shown:
        if images := message.pop("images", ()):
            # a page of many steps shows no pictures
            message["text"] = ("[image] " * len(images) + message.get("text", "")).strip()
        for name in ("text", "think"):
            if name in message:
                message[name] = _cut(message[name])
        for call in message.get("calls", ()):
            call["arguments"] = _cut(call["arguments"])
    return shown


def sample_line(
    step: int, example: Any, rows: Sequence[Mapping[str, Any]], shown: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a line of samples: a prompt's rollouts at a step, as rows of results.jsonl; some are `shown`."""
    rewards = [row["reward"] for row in rows if is_number(row.get("reward"))]
    return {
        "step": step,
        "example": example,
        "task": rows[0].get("task"),
        "prompt": shown_messages(rows[0].get("prompt"), "prompt"),
        "answer": _cut(as_text(rows[0].get("answer"))),
        "generations": len(rows),
        "mean_reward": fmean(rewards) if rewards else None,
        "rollouts": [
            {
                **{name: row.get(name) for name in _SHOWN},
                "tokens": row.get("completion_tokens"),
                "completion": shown_messages(row.get("completion"), "completion"),
            }
            for row in shown
        ],
    }


def _line(step: int, group: Group, advantages: Mapping[Any, float | list[float]]) -> dict[str, Any]:
    rows = {rollout.key: _row(rollout, advantages.get(rollout.key)) for rollout in group.rollouts}
    shown = [rows[rollout.key] for rollout in _different(group.rollouts)]
    return sample_line(step, group.example_id, list(rows.values()), shown)


def _row(rollout: Rollout, advantage: float | list[float] | None) -> dict[str, Any]:
    if isinstance(advantage, list):
        advantage = fmean(advantage) if advantage else None
    tokens = sum(row.sampled_tokens for row in rollout.rows) or rollout.usage.completion_tokens
    oldest_version = min((row.oldest_version for row in rollout.rows), default=None)
    known = {"advantage": advantage, "completion_tokens": tokens, "oldest_version": oldest_version}
    return {**result_row(rollout), **known}


def _different(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the best, the worst and some between; of those that failed, at most one."""
    scored = sorted((r for r in rollouts if r.reward is not None), key=lambda r: (-(r.reward or 0.0), r.key))
    failed = [rollout for rollout in rollouts if rollout.reward is None][:1]
    return _spread(scored, _ROLLOUTS - len(failed)) + failed


def _telling(groups: Sequence[Group]) -> list[Group]:
    """Return the group whose rewards differ most, and the one whose mean is in the middle."""
    rewards = {group.example_id: [r.reward for r in group.scored if r.reward is not None] for group in groups}
    scored = [group for group in groups if rewards[group.example_id]]
    if not scored:
        return list(groups[:1])
    widest = max(scored, key=lambda group: pstdev(rewards[group.example_id]))
    by_mean = sorted(scored, key=lambda group: fmean(rewards[group.example_id]))
    return [widest, by_mean[len(by_mean) // 2]]


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` of the items, from the first to the last, evenly."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / max(1, most - 1))] for place in range(most)]
