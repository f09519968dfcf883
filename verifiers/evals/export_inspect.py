"""A run as inspect_ai's .eval log: a zip of JSON files, in version 2 of that format.

Its layout: `_journal/start.json` (what was run), `_journal/summaries/N.json` and `summaries.json` (short samples),
`samples/<id>_epoch_<n>.json` (whole ones), `header.json` (the log without its samples). A prompt is a sample, a
rollout one of its epochs. See https://inspect.aisi.org.uk/eval-logs.html.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import IO, Any

from verifiers.evals.results import RolloutResults
from verifiers.evals.statistics import mean_and_stderr_clustered
from verifiers.evals.store import StoredRun, json_line, metrics_of, require_whole
from verifiers.types import image_url_of

_VERSION = 2
_ROLES = ("system", "user", "assistant", "tool")
_LONGEST_SUMMARY = 1000


def write_inspect(run: StoredRun, file: IO[bytes]) -> None:
    """Write the log. Rewards and metrics become scores; a failed rollout becomes a sample with an error."""
    header = _header(run)
    samples = [_sample(run, row) for row in run.rows]
    summaries = [_summary(sample) for sample in samples]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:

        def add(name: str, content: Any) -> None:
            text = json_line({"content": content})
            archive.writestr(name, json.dumps(json.loads(text)["content"], indent=2))

        add("_journal/start.json", {name: header[name] for name in ("version", "eval", "plan")})
        for sample in samples:
            add(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", sample)
        add("_journal/summaries/1.json", summaries)
        add("summaries.json", summaries)
        add("header.json", header)


def _header(run: StoredRun) -> dict[str, Any]:
    metadata = run.metadata
    created = _time(metadata.get("started"))
    env, model = str(metadata.get("env") or run.directory.name), str(metadata.get("model") or "none")
    for row in run.rows:
        require_whole(run.directory, row)
    ids = list(dict.fromkeys(row["example_id"] for row in run.rows))
    epochs = max(map(_epoch, run.rows))
    versions = metadata.get("versions")
    results = RolloutResults(run.rows)
    spec = {
        "eval_id": _id(run, "eval"),
        "run_id": _id(run, "run"),
        "created": created,
        "task": env,
        "task_id": _id(run, "task"),
        "task_version": 0,
        "task_attribs": {},
        "task_args": metadata.get("env_args") or {},
        "dataset": {"name": env, "samples": len(ids), "sample_ids": ids, "shuffled": False},
        "model": model if "/" in model else f"openai-api/{model}",
        "model_generate_config": {},
        "model_base_url": metadata.get("base_url"),
        "model_args": {},
        "config": {"epochs": epochs, "epochs_reducer": ["mean"]},
        "packages": {"verifiers": str(versions.get("verifiers") if isinstance(versions, Mapping) else None)},
        "metadata": {"sampling_args": metadata.get("sampling_args") or {}, "seed": metadata.get("seed")},
    }
    failed = sum(row.get("reward") is None for row in run.rows)
    return {
        "version": _VERSION,
        # a run that was stopped or is in progress lacks samples
        "status": "success" if metadata.get("status") in (None, "finished") else "cancelled",
        "eval": spec,
        "plan": {"name": "plan", "steps": [], "config": {}},
        "results": {
            "total_samples": len(run.rows),
            "completed_samples": len(run.rows) - failed,
            "scores": [_score(name, results.values(name)) for name in results.metrics],
        },
        "stats": {"started_at": created, "completed_at": created, "model_usage": {model: _usage(run.rows)}},
    }


def _score(name: str, values: Mapping[Any, Sequence[float]]) -> dict[str, Any]:
    estimate = mean_and_stderr_clustered(list(values.values()))
    return {
        "name": name,
        "scorer": name,
        "params": {},
        "metrics": {
            # JSON has no NaN; inspect shows what is missing as missing
            label: {"name": label, "value": value, "params": {}}
            for label, value in (("mean", estimate.mean), ("stderr", estimate.stderr))
            if value == value
        },
    }


def _scores(row: Mapping[str, Any]) -> dict[str, float]:
    return {} if row.get("reward") is None else {**metrics_of(row), "reward": row["reward"]}


def _sample(run: StoredRun, row: Mapping[str, Any]) -> dict[str, Any]:
    model = str(run.metadata.get("model") or "none")
    prompt, completion = _messages(row.get("prompt"), "user"), _messages(row.get("completion"), "assistant")
    last = next((message for message in reversed(completion) if message["role"] == "assistant"), None)
    usage = _usage([row])
    answer = row.get("answer")
    sample: dict[str, Any] = {
        # inspect counts both from 1 in file names and views; ids keep ours
        "id": row["example_id"],
        "epoch": _epoch(row),
        "input": prompt,
        "target": answer if isinstance(answer, str) else json.dumps(answer, default=str),
        "messages": [*prompt, *completion],
        "output": {
            "model": model,
            "choices": [
                {"message": last, "stop_reason": "max_tokens" if row.get("outcome") == "truncated" else "stop"}
            ]
            if last
            else [],
            "usage": usage,
        },
        "scores": {name: {"value": value} for name, value in _scores(row).items()},
        "metadata": {"task": row.get("task"), "info": row.get("info") or {}, "outcome": row.get("outcome")},
        "store": {},
        "events": [],
        "model_usage": {model: usage},
        "attachments": {},
        "total_time": (row.get("generation_ms") or 0.0) / 1000,
        "uuid": _id(run, f"{row['example_id']}:{row['generation']}"),
    }
    if row.get("error"):
        text = str(row["error"])
        sample["error"] = {"message": text, "traceback": text, "traceback_ansi": text}
    return sample


def _summary(sample: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("id", "epoch", "target", "scores", "model_usage", "total_time", "uuid")
    contents = [message["content"] for message in sample["input"]]
    text = "\n\n".join(one if isinstance(one, str) else json.dumps(one, default=str) for one in contents)
    summary = {name: sample[name] for name in kept}
    summary |= {"input": text[:_LONGEST_SUMMARY], "completed": True, "message_count": len(sample["messages"])}
    summary["metadata"] = {"outcome": sample["metadata"]["outcome"]}
    if "error" in sample:
        summary["error"] = sample["error"]["message"]
    return summary


def _messages(value: Any, role: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return [_message(message) for message in _list(value) if isinstance(message, Mapping)]


def _epoch(row: Mapping[str, Any]) -> int:
    generation = row.get("generation")
    return generation + 1 if isinstance(generation, int) else 1


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    found: dict[str, Any] = {"role": role if role in _ROLES else "user", "content": _content(message)}
    if found["role"] == "assistant" and message.get("tool_calls"):
        found["tool_calls"] = [_tool_call(call) for call in _list(message["tool_calls"]) if isinstance(call, Mapping)]
    if found["role"] == "tool" and message.get("tool_call_id"):
        found["tool_call_id"] = str(message["tool_call_id"])
    return found


def _content(message: Mapping[str, Any]) -> Any:
    content = message.get("content")
    parts: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        parts.append({"type": "reasoning", "reasoning": str(message["reasoning_content"])})
    if not isinstance(content, list):
        text = "" if content is None else str(content)
        return [*parts, {"type": "text", "text": text}] if parts else text
    for part in content:
        if (url := image_url_of(part)) is not None:
            parts.append({"type": "image", "image": url})
        else:
            said = part.get("text") if isinstance(part, Mapping) else part
            parts.append({"type": "text", "text": said if isinstance(said, str) else json.dumps(part, default=str)})
    return parts


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call.get("function"), Mapping) else call
    assert isinstance(function, Mapping)
    arguments = function.get("arguments")
    found = {"id": str(call.get("id") or ""), "function": str(function.get("name") or ""), "type": "function"}
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        parsed = None
    if isinstance(parsed, Mapping):
        return {**found, "arguments": dict(parsed)}
    return {**found, "arguments": {}, "parse_error": f"no JSON object: {arguments!r:.200}"}


def _usage(rows: Any) -> dict[str, int]:
    prompt = sum(row.get("prompt_tokens") or 0 for row in rows)
    completion = sum(row.get("completion_tokens") or 0 for row in rows)
    return {"input_tokens": prompt, "output_tokens": completion, "total_tokens": prompt + completion}


def _time(started: Any) -> str:
    try:
        return datetime.strptime(str(started), "%Y-%m-%dT%H:%M:%S%z").isoformat()
    except ValueError:
        return datetime.fromtimestamp(0, UTC).isoformat()


def _id(run: StoredRun, what: str) -> str:
    """Return an id in the form of inspect's own, 22 letters and digits; the same for each export of a run."""
    name = f"{run.metadata.get('started')}:{run.directory.name}:{what}"
    return hashlib.blake2b(name.encode(errors="replace"), digest_size=11).hexdigest()
