"""Grades of a dataserver: completions in requests that it takes, and a grade for each of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.envs.generation import run_to_completion
from verifiers.envs.remote_wire import Dataserver, Limits, encoded, rank_of_process
from verifiers.errors import InfraError
from verifiers.parsers.messages import message_text

__all__ = ["Grade", "RemoteGrader", "completion_for_wire"]

logger = logging.getLogger("verifiers.envs")

_SPARE_S = 10.0


@dataclass(frozen=True, slots=True)
class Grade:
    """The answer for one completion: a reward, or the reason why there is none."""

    reward: float | None
    metrics: Mapping[str, float]
    error: str | None


@dataclass(frozen=True, slots=True)
class RemoteGrader:
    """Has completions graded by a dataserver.

    Attributes:
        server: the dataserver.
        limits: what it takes in one request.
        max_items: completions in one request, where that is less than the server takes.
    """

    server: Dataserver
    limits: Limits
    max_items: int | None = None

    def grades(self, items: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> list[Grade]:
        """The grade of each item, in order; joined on `completion_index`.

        Args:
            items: as /v2/grade takes them, each with a `completion_index` of its own.
            about: what is known of all of them: `optimizer_step`, `generation_step`, `seed`.

        Raises:
            ConfigError, InfraError: as `Dataserver.request`.
        """
        return run_to_completion(lambda: self.grades_async(items, about))

    async def grades_async(self, items: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> list[Grade]:
        """As `grades`, on an event loop."""
        about = {"rank": rank_of_process(), **about}
        frame = _body(about, [])
        found: dict[int, Grade] = {}
        # an encoded item, and the comma after it
        sizes = [(item, data := encoded(item), len(data) + 1) for item in items]
        room = self.limits.max_body_bytes - len(frame)
        fitting = [entry for entry in sizes if entry[2] <= room]
        for item, _, size in sizes:
            if size > room:
                found[item["completion_index"]] = Grade(
                    None, {}, f"the completion is {size} bytes long, over the dataserver's max_body_mib"
                )
        timeout_s = max(self.server.timeout_s, self.limits.grade_timeout_s + _SPARE_S)
        most = min(self.limits.max_batch, self.max_items or self.limits.max_batch)
        for part in _whole_groups(fitting, most, room):
            body = _body(about, [data for _, data, _ in part])
            answer = await self.server.request_async("/v2/grade", body, timeout_s)
            found |= _joined([item for item, _, _ in part], answer)
        return [found[item["completion_index"]] for item in items]


_Sized = tuple[Mapping[str, Any], bytes, int]


def _body(about: Mapping[str, Any], items: Sequence[bytes]) -> bytes:
    return encoded(about)[:-1] + b', "items": [' + b",".join(items) + b"]}"


def _whole_groups(items: Sequence[_Sized], most: int, room: int) -> list[list[_Sized]]:
    """Items in parts of at most `most` and `room` bytes; completions of one sample stay together where they can."""
    parts: list[list[_Sized]] = []
    left, free = 0, 0
    for group in _groups(items):
        size = sum(entry[2] for entry in group)
        if len(group) > left or size > free:
            left, free = 0, 0
        if len(group) > most or size > room:
            logger.warning(
                "the %d completions of sample %s (%d bytes) are more than a request to the dataserver holds and are "
                "graded in parts: a grader that compares them sees each part by itself.",
                len(group),
                group[0][0]["sample_id"],
                size,
            )
        for entry in group:
            if not left or entry[2] > free:
                parts.append([])
                left, free = most, room
            parts[-1].append(entry)
            left, free = left - 1, free - entry[2]
    return parts


def _groups(items: Sequence[_Sized]) -> list[list[_Sized]]:
    groups: list[list[_Sized]] = []
    for entry in items:
        if not groups or groups[-1][0][0]["sample_id"] != entry[0]["sample_id"]:
            groups.append([])
        groups[-1].append(entry)
    return groups


def _joined(items: Sequence[Mapping[str, Any]], answer: Any) -> dict[int, Grade]:
    """Grades by index; an item that the answer lacks is a failed grade, for nothing is known of its reward."""
    try:
        found = {result["completion_index"]: _grade(result) for result in answer["results"]}
    except (TypeError, KeyError, AttributeError) as error:
        raise InfraError(f"the dataserver's answer to /v2/grade cannot be read: {answer!r:.300}.") from error
    missing = Grade(None, {}, "the answer has no result for it")
    return {item["completion_index"]: found.get(item["completion_index"], missing) for item in items}


def _grade(result: Mapping[str, Any]) -> Grade:
    reward, metrics = result.get("reward"), result.get("metrics") or {}
    if reward is None:
        return Grade(None, {}, str(result.get("error") or "no reward was given"))
    if not _is_finite(reward):
        return Grade(None, {}, f"no finite reward was given, but {reward!r:.40}")
    return Grade(float(reward), {name: float(value) for name, value in metrics.items() if _is_finite(value)}, None)


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:
        # a whole number that no float holds
        return False


def completion_for_wire(completion: Any) -> str | list[dict[str, Any]]:
    """A completion as /v2/grade takes it: a text, or messages with what graders may read of them."""
    if isinstance(completion, str):
        return _encodable(completion)
    messages = []
    for message in completion:
        fields = dict(message) if isinstance(message, Mapping) else {"role": "assistant"}
        kept = {name: fields[name] for name in ("role", "name", "tool_call_id") if fields.get(name)}
        messages.append({**kept, "content": _encodable(message_text(message))})
    return messages


def _encodable(text: str) -> str:
    """The text without halves of surrogate pairs, which a tokenizer may give and no JSON reader takes."""
    return text.encode("utf-8", "replace").decode()
