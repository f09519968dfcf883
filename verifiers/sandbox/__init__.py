"""Running code that nobody has read: sandboxes of several isolation levels, and warm worker processes.

`open_sandbox` opens one, `worker_pool.WorkerPool` calls functions in them.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from verifiers.sandbox.spec import Sandbox, SandboxSpec

__all__ = ["open_sandbox"]


async def open_sandbox(spec: SandboxSpec | None = None) -> Sandbox:
    """Open a sandbox; use it in this event loop, and close it, or let `async with` do so.

    The isolation level that is in use is logged once a process, by the logger "verifiers.sandbox".

    Args:
        spec: isolation level and limits; None takes the defaults.

    Raises:
        SandboxError: the level is not available here; the message says why and what to do.
    """
    # a sandbox's own first process imports this package too, and has no use for the rest
    from verifiers.sandbox.spec import SandboxSpec

    spec = spec or SandboxSpec()
    if spec.isolation in ("docker", "podman"):
        from verifiers.sandbox.container import open_container

        return await open_container(spec, spec.isolation)
    from verifiers.sandbox.opening import open_agent_sandbox

    return await open_agent_sandbox(spec)
