"""A hash of the rows that a run trains on, so that a checkpoint of other rows is not taken for its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from verifiers.data.plan import BatchPlan
from verifiers.data.staged import StagedRows
from verifiers.envs.dataset_format import row_fields

__all__ = ["MOST_ROWS", "row_fingerprint"]

MOST_ROWS = 1000
"""Rows that are hashed; of more, so many at equal distances."""


def row_fingerprint(rows: Any, plan: BatchPlan, optimizer_step: int) -> str | None:
    """A hash of prompt, answer and task of the rows that may have been drawn before a step.

    Of a curriculum those are the datasets of the stages that have begun; of another row source nothing is known, and
    the hash is None. `info` is left out: it may hold a path or an address that differs from start to start.
    """
    drawn = _drawn_from(plan, optimizer_step)
    if rows is None or not drawn:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for place in range(min(len(drawn), MOST_ROWS)):
        fields = row_fields(rows[drawn[place * len(drawn) // min(len(drawn), MOST_ROWS)]])[:3]
        digest.update(json.dumps(fields, sort_keys=True, default=str).encode(errors="surrogatepass"))
    return digest.hexdigest()


def _drawn_from(plan: BatchPlan, optimizer_step: int) -> Sequence[int]:
    source = plan.source
    if source is None:
        return range(plan.num_prompts)
    datasets: dict[str, Sequence[int]] = getattr(source, "datasets", {})
    names = list(datasets)
    if isinstance(source, StagedRows):
        begun = source.fingerprint(optimizer_step)["stages"]
        names = sorted({name for stage in begun for name in stage["datasets"]})
    return [row for name in names for row in datasets[name]]
