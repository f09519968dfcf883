"""The state that a rollout begins with, with the keys of both generations of the classic API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifiers.parsers.messages import as_messages
from verifiers.types import Info, SamplingArgs, State

__all__ = ["new_state"]


def new_state(
    row: Mapping[str, Any],
    client: Any,
    model: str,
    sampling_args: SamplingArgs | None,
    oai_tools: list[dict[str, Any]] | None,
) -> State:
    """The state of a rollout that begins.

    Args:
        row: `prompt`, and where given `answer`, `task`, `info`, `example_id`.
        oai_tools: offered unless the row's info has its own.
    """
    prompt = as_messages(row["prompt"])
    info: Info = row.get("info") or {}
    example_id = row.get("example_id", 0)
    fields = {
        "prompt": prompt,
        "answer": row.get("answer", ""),
        "task": row.get("task") or "default",
        "info": info,
    }
    return State(
        id=example_id,
        **fields,
        input={**fields, "example_id": example_id},
        example_id=example_id,
        completion="" if isinstance(prompt, str) else [],
        responses=[],
        trajectory=[],
        turn=0,
        timing={"generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0},
        is_completed=False,
        is_truncated=False,
        stop_condition=None,
        final_env_response=None,
        reward=None,
        metrics=None,
        error=None,
        client=client,
        model=model,
        sampling_args=dict(sampling_args or {}),
        oai_tools=info.get("oai_tools") or oai_tools,
    )
