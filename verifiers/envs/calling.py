"""One call for functions that may be sync or async."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["maybe_await"]


async def maybe_await(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `func` and await the result where it can be awaited. Errors pass through as they are."""
    result = func(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result
