"""The end of an environment: methods marked `@vf.teardown`, run once."""

from __future__ import annotations

import asyncio
import atexit
import logging
import weakref
from typing import Any

from verifiers.envs.calling import maybe_await
from verifiers.envs.decorators import marked_methods

__all__ = ["run_teardown", "teardown_at_exit"]

logger = logging.getLogger("verifiers.envs")

_ended: weakref.WeakSet[Any] = weakref.WeakSet()
_awaiting_exit: weakref.WeakSet[Any] = weakref.WeakSet()


async def run_teardown(env: Any) -> None:
    """Run an environment's methods marked `@vf.teardown`, sync or async, unless that was done before.

    Those of a group's environments come first. Every one runs, whatever the others raise; what they raise is
    logged, since the results that the environment was used for are already there. Cancellation passes.
    """
    if env in _ended:
        return
    _ended.add(env)
    for member in getattr(env, "envs", None) or ():
        await run_teardown(member)
    for method in marked_methods(env, "teardown"):
        try:
            await maybe_await(method)
        except Exception as error:
            name = f"{type(env).__name__}.{method.__name__}"
            logger.error("The teardown method %s failed: %s: %s", name, type(error).__name__, error, exc_info=error)


def teardown_at_exit(env: Any) -> None:
    """See to it that the environment's teardown has run when the interpreter ends.

    For the classic calls, which nobody tells when they were the last. It does nothing for an environment without
    marked methods.
    """
    for member in getattr(env, "envs", None) or ():
        teardown_at_exit(member)
    if not marked_methods(env, "teardown") or env in _awaiting_exit:
        return
    if not _awaiting_exit:
        atexit.register(_teardown_all)
    _awaiting_exit.add(env)


def _teardown_all() -> None:
    async def all_of_them() -> None:
        for env in list(_awaiting_exit):
            await env.teardown()

    asyncio.run(all_of_them())
