"""One call of a function, in a process that was forked for it and ends with it."""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

__all__ = ["MAX_RESULT_BYTES", "answer_call", "import_module"]

MAX_RESULT_BYTES = 16 << 20


def import_module(name: str) -> str | None:
    """Import a module; None, or the sentence that says why it could not be."""
    try:
        importlib.import_module(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _resolve(function: str) -> Any:
    module, _, path = function.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _answer(request: dict[str, Any]) -> bytes:
    try:
        found = _resolve(request["function"])
    except Exception as error:
        return json.dumps({"missing": f"{type(error).__name__}: {error}"}).encode()
    try:
        value = found(*request["args"], **request["kwargs"])
        data = json.dumps({"value": value}).encode()
    # also SystemExit and KeyboardInterrupt: the process ends here, and its caller has to hear why
    except BaseException as error:
        return json.dumps({"kind": type(error).__name__, "message": str(error)[:2000]}).encode()
    if len(data) > MAX_RESULT_BYTES:
        message = f"its result is {len(data)} bytes of JSON, over the limit of {MAX_RESULT_BYTES}"
        return json.dumps({"kind": "OverflowError", "message": message}).encode()
    return data


def answer_call(request: dict[str, Any], out: int) -> None:
    """Call the function and write what came of it, as JSON, to a descriptor."""
    data = memoryview(_answer(request))
    while data:
        data = data[os.write(out, data) :]
