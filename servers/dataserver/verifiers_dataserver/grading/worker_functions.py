"""The functions that run in worker processes: graders of the user, and built-in ones that may never end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import os
from collections.abc import Awaitable
from typing import Any

from verifiers.errors import GradingError
from verifiers_dataserver.scores import BUILTIN, Scorer
from verifiers_dataserver.tasks import Completion, Row, answer_part

_NICENESS = 10


def lower_priority() -> None:
    """Leave scarce cores to the server: a grader that computes without end must not slow its answers.

    For a process in a session of its own: the rest of its session has the lower priority too. Linux with autogroups
    weighs whole sessions against each other, and niceness only within one; the kernel lets a user's processes change
    that ten times a second, all together, so some calls keep the priority that they have.
    """
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
        group.write(str(_NICENESS))


def check_grader(target: str) -> str | None:
    """Look a user's grader up; None, or the sentence that says why it cannot be called."""
    try:
        found = _found(target)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if callable(found) else f"{target!r} is not a function"


def call_grader(target: str, given: dict[str, Any], options: dict[str, Any]) -> float | None:
    """Call "module:function" by name, and return its number; None where it gives none.

    It may name prompt, completion (messages), text, completion_tokens, answer, info, task, parsed (the answer
    part of the text), and its options; a parameter **kwargs gets all of them. It may be a coroutine function.
    """
    lower_priority()
    function = _found(target)
    how = given.pop("answer_from")
    values = {**given, "parsed": answer_part(given["text"], how), **options}
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        values = {parameter.name: values[parameter.name] for parameter in parameters if parameter.name in values}
    result = function(**values)
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    try:
        return float(result)
    except (TypeError, ValueError, OverflowError):
        return None


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def score_in_worker(
    name: str, options: dict[str, Any], completion: dict[str, Any], row: dict[str, Any]
) -> dict[str, Any]:
    """Score by a built-in grader: {"score"}, or {"missing": why it cannot be told}."""
    lower_priority()
    scorer: Scorer = BUILTIN[name](**options)
    try:
        return {"score": scorer.score(Completion(**completion), Row(**row))}
    except GradingError as error:
        return {"missing": str(error)}


def _found(target: str) -> Any:
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found
