"""Running code that nobody has read: sandboxes of several isolation levels, and warm worker processes.

`open_sandbox` opens one, `renewed` gives one to judge its files in, `worker_pool.WorkerPool` calls functions in them.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from verifiers.sandbox.spec import Sandbox, SandboxSpec

# nothing in the directory may keep its owner out, or block who opens it; in a container it is another user's itself
_TIDY = (
    "chmod u+rwx . 2>/dev/null; find . -mindepth 1 -maxdepth 1 ! -type l -exec chmod -R u+rwX {} + "
    "&& find . ! -type d ! -type f ! -type l -delete"
)


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
        from verifiers.sandbox.container import ContainerSandbox

        return await ContainerSandbox.open(spec, spec.isolation)
    from verifiers.sandbox.agent_sandbox import open_agent_sandbox

    return await open_agent_sandbox(spec)


async def renewed(sandbox: Sandbox) -> Sandbox:
    """End all that runs in a sandbox, and return one with the files of its working directory, to judge them in.

    At the bubblewrap level that is a new one, with twice the `disk_bytes`, and the old one is closed: limits,
    priorities and whatever else processes inherit are the spec's, whatever the code did that ran before. Elsewhere it
    is the same one. The files' owner can read and change all of them; pipes and sockets are removed.

    Raises:
        OSError: what is in the directory makes this impossible.
        SandboxError: the sandbox is closed or died, or a new one cannot be opened.
    """
    import dataclasses
    import errno

    from verifiers.errors import SandboxError
    from verifiers.sandbox.agent_sandbox import AgentSandbox

    # a command whose time runs out takes everything along that others have left behind
    if not (await sandbox.run(["sleep", "60"], timeout_s=0.0)).timed_out:
        raise SandboxError("What was left behind in a sandbox could not be ended: there is no command `sleep`.")
    if (await sandbox.run(["sh", "-c", _TIDY])).exit_code != 0:
        raise OSError(errno.EIO, "its files cannot be made readable")
    if not isinstance(sandbox, AgentSandbox) or sandbox.isolation != "bubblewrap":
        return sandbox
    # what the files fill must leave room for what is added to them
    spec = dataclasses.replace(sandbox.spec, isolation="bubblewrap", disk_bytes=2 * sandbox.spec.disk_bytes)
    new = await open_sandbox(spec)
    try:
        assert isinstance(new, AgentSandbox)
        await sandbox.send_files(new)
        await sandbox.close()
    except BaseException:
        await new.close()
        raise
    return new
