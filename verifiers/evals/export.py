"""A run in other forms: a table, a datasets directory, training data made from its rollouts, inspect_ai's log.

    csv          a line a rollout; conversations as JSON in a cell
    jsonl        a line a rollout, as in results.jsonl, with its large texts in place
    hf           a directory for `datasets.load_from_disk`, or a dataset on the Hugging Face Hub
    sft          JSONL, the best rollout of each prompt: {"messages": [...]}
    preference   JSONL, best against worst of a prompt: {"prompt", "chosen", "rejected"}
    inspect      inspect_ai's .eval, which `inspect view` opens

Failed rollouts are in the first three, which show a run, and in inspect's log as errors; training data has none.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from verifiers.envs.datasets import without_bars
from verifiers.errors import ConfigError, Error, HubError
from verifiers.evals.export_inspect import write_inspect
from verifiers.evals.store import RESULTS, StoredRun, json_line, metrics_of, read_run, require_whole

if TYPE_CHECKING:
    from datasets import Dataset

_PLAIN = ("example_id", "generation", "task", "outcome", "reward", "error")
_COUNTS = ("generation_ms", "scoring_ms", "prompt_tokens", "completion_tokens", "turns", "attempts")


def export_run(
    run: StoredRun,
    target: str | Path,
    kind: str,
    *,
    threshold: float | None = None,
) -> tuple[Path, int]:
    """Write a run in one of the forms above; return the path written to, and how many rows.

    `target` is a file, for "hf" a directory, and must not be there yet. `threshold` is for "sft" the reward that the
    best rollout must have at least (default 1), for "preference" the least difference between best and worst.
    """
    path = Path(target)
    if path.exists():
        raise ConfigError(f"{str(path)!r} is there already; give another file.")
    if not run.rows:
        raise ConfigError(f"{str(run.directory)!r} holds no rollouts, so there is nothing to export.")
    rows = run.rows
    if kind == "hf":
        with _writing(path):
            _save(to_dataset(run), path)
    elif kind == "csv":
        _write(path, lambda file: _write_csv(run, file))
    elif kind == "inspect":
        _write(path, lambda file: write_inspect(run, file))
    else:
        if kind == "sft":
            least = 1.0 if threshold is None else threshold
            rows = list(sft_rows(run, least))
            why = f"no completed rollout has a reward of {least:g}; set --threshold"
        elif kind == "preference":
            rows = list(preference_rows(run, threshold or 0.0))
            why = "no prompt has two completed rollouts whose rewards differ enough"
        if not rows:
            raise ConfigError(f"no prompt of {str(run.directory)!r} gives a row: {why}.")
        _write(path, lambda file: file.writelines(f"{json_line(row)}\n".encode() for row in rows))
    return path, len(rows)


def to_dataset(run: StoredRun) -> Dataset:
    """Return the run as a `datasets.Dataset`: messages as lists, `info` and other loose columns as JSON text."""
    import datasets

    return datasets.Dataset.from_list(_flat_rows(run, _message_list))


def save_dataset(directory: str | Path, target: str | Path) -> Path:
    """Save the run in `directory` as a datasets directory, in the place of an older one."""
    path = Path(target)
    _save(to_dataset(read_run(directory)), path)
    return path


def _save(dataset: Dataset, path: Path) -> None:
    """Write a directory in one step, as `_write` does a file."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as temporary:
        fresh = Path(temporary) / "new"
        with without_bars():
            dataset.save_to_disk(str(fresh))
        if path.exists():
            os.replace(path, Path(temporary) / "old")
        os.replace(fresh, path)


def push_dataset(directory: str | Path, name: str) -> None:
    """Push the run in `directory` to the Hugging Face Hub, with the login that is set up on this machine."""
    dataset = to_dataset(read_run(directory))
    with raises_hub_error(
        f"{name!r}", f"the results are in {str(directory)!r}, and the same command pushes them again"
    ):
        dataset.push_to_hub(name)


def check_hub(name: str, setting: str, token: str | None = None) -> None:
    """Refuse a push to the Hugging Face Hub that cannot succeed, before the work: by name, network and login."""
    from huggingface_hub import HfApi, utils

    try:
        utils.validate_repo_id(name)
        HfApi().whoami(token=token)
    except Exception as error:
        raise ConfigError(
            f"{setting}: nothing can be pushed to {name!r} on the Hugging Face Hub ({_reason(error)}); log in by "
            "`hf auth login`, give another name, or leave it out."
        ) from error


@contextlib.contextmanager
def raises_hub_error(pushed: str, kept: str) -> Iterator[None]:
    """Raise HubError for whatever a push raises; `kept` says where what was to be pushed is."""
    try:
        yield
    except Error:
        raise
    except Exception as error:
        raise HubError(f"the Hugging Face Hub did not take {pushed} ({_reason(error)}); {kept}.") from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0].rstrip('. ')}"


def sft_rows(run: StoredRun, threshold: float = 1.0) -> Iterator[dict[str, Any]]:
    """Return the best rollout of each prompt whose reward is at least `threshold`; of several the first.

    Conversations are whole: {"messages"}; for completion mode {"prompt", "completion"} as text.
    """
    for rows in _scored_by_prompt(run):
        best = max(rows, key=lambda row: row["reward"])
        if best["reward"] < threshold:
            continue
        beside = {"example_id": best["example_id"], "reward": best["reward"]}
        if isinstance(best["prompt"], str):
            yield {"prompt": best["prompt"], "completion": best["completion"], **beside}
        else:
            yield {"messages": [*best["prompt"], *best["completion"]], **beside}


def preference_rows(run: StoredRun, least_difference: float = 0.0) -> Iterator[dict[str, Any]]:
    """Yield the best and the worst rollout of each prompt whose rewards differ by more than `least_difference`.

    Rollouts whose environment changed the prompt are only compared with those that had the same one.
    """
    for rows in _scored_by_prompt(run):
        best = max(rows, key=lambda row: row["reward"])
        same = [row for row in rows if row["prompt"] == best["prompt"]]
        worst = min(same, key=lambda row: row["reward"])
        if best["reward"] - worst["reward"] > least_difference:
            yield {
                "prompt": best["prompt"],
                "chosen": best["completion"],
                "rejected": worst["completion"],
                "example_id": best["example_id"],
                "chosen_reward": best["reward"],
                "rejected_reward": worst["reward"],
            }


def _scored_by_prompt(run: StoredRun) -> Iterator[list[dict[str, Any]]]:
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in run.rows:
        require_whole(run.directory, row)
        # a truncated answer is scored, and no example to learn from
        if row.get("reward") is not None and row.get("outcome") == "completed":
            for name in ("prompt", "completion"):
                if not isinstance(row.get(name), str | list):
                    place = f"a row of {str(run.directory / RESULTS)!r}"
                    raise ConfigError(f"{place} has {row.get(name)!r:.80} as its {name}; give it a text or messages.")
            groups.setdefault(row["example_id"], []).append(row)
    yield from groups.values()


def _flat_rows(run: StoredRun, conversation: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Return rows of the same columns: messages as `conversation` makes them, other nested values as text."""
    names = sorted({name for row in run.rows for name in metrics_of(row)})
    rows = []
    for row in run.rows:
        found = metrics_of(row)
        flat = {name: row.get(name) for name in _PLAIN}
        flat |= {name: conversation(row.get(name)) for name in ("prompt", "completion")}
        flat |= {name: _text(row.get(name)) for name in ("answer", "info")}
        flat |= {name: row.get(name) for name in _COUNTS}
        # a reward function may have the name of one of our columns
        rows.append(flat | {(f"metric_{name}" if name in flat else name): found.get(name) for name in names})
    return rows


def _message_list(value: Any) -> list[dict[str, Any]]:
    messages = value if isinstance(value, list) else [{"role": "text", "content": "" if value is None else value}]
    return [
        {
            "role": str(message.get("role", "")),
            **{name: _text(message.get(name)) for name in ("content", "tool_calls", "tool_call_id")},
        }
        for message in messages
        if isinstance(message, Mapping)
    ]


def _text(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    # halves of surrogate pairs, which models do write, become question marks: tables take none
    return text.encode("utf-8", "replace").decode()


def _write_csv(run: StoredRun, file: IO[bytes]) -> None:
    rows = _flat_rows(run, _text)
    text = io.TextIOWrapper(cast("io.BufferedWriter", file), encoding="utf-8", errors="replace", newline="")
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _harmless(value) for name, value in row.items()})
    text.flush()
    text.detach()


def _harmless(value: Any) -> Any:
    """Return a cell that no spreadsheet runs as a formula, since transcripts are untrusted; numbers stay."""
    if not isinstance(value, str) or value[:1] not in ("=", "+", "-", "@", "\t", "\r"):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def _write(path: Path, write: Callable[[Any], Any]) -> None:
    """Write a file in one step, so that a run of the disk's space leaves none that is half there."""
    with _writing(path):
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                write(file)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error}.") from error
