"""Choosing a sandbox's tier and opening it."""

from __future__ import annotations

import asyncio
import logging
import os
import selectors
import subprocess
import threading

from verifiers.sandbox.child import system
from verifiers.sandbox.child.wire import Frames
from verifiers.sandbox.launching import START_S, launch
from verifiers.sandbox.native import NativeSandbox, open_native
from verifiers.sandbox.spec import Sandbox, SandboxSpec

__all__ = ["default_tier", "open_sandbox"]

logger = logging.getLogger("verifiers.sandbox")

_STOPS = {
    "namespaces": "no network, no host files but the system's and Python's (read-only), no host processes; the "
    "kernel itself is shared",
    "process": "time, memory, output and environment are held, but neither reading the host's files nor the network",
    "docker": "a container without network, capabilities and host files; the kernel itself is shared",
    "podman": "a container without network, capabilities and host files; the kernel itself is shared",
}

_lock = threading.Lock()
_default: dict[int, tuple[str, str]] = {}
_announced: set[str] = set()


async def open_sandbox(spec: SandboxSpec = SandboxSpec()) -> Sandbox:  # noqa: B008 - a frozen value
    """Open a sandbox; use it in this event loop, and close it, or let `async with` do so.

    The tier that is in use is said once a process, by the logger "verifiers.sandbox".

    Raises:
        SandboxError: the tier is not available here; the message says why and what to do.
    """
    tier: str = spec.tier
    if tier == "auto":
        known = _default.get(os.getpid())
        # once it is known no thread is needed, and the loop's threads may all be taken
        tier = known[0] if known else await asyncio.to_thread(default_tier)
    sandbox: Sandbox
    if tier in ("docker", "podman"):
        from verifiers.sandbox.container import open_container

        sandbox = await open_container(spec, tier)
        announce(tier)
    else:
        native: NativeSandbox = await open_native(spec, tier)
        announce(tier, native.note)
        sandbox = native
    return sandbox


def default_tier() -> str:
    """The tier that "auto" means here: "namespaces" where one could be opened, else "process". Tried once."""
    with _lock:
        # a forked child may live under other rules
        known = _default.get(os.getpid())
        if known is None:
            problem = _try_namespaces()
            known = _default[os.getpid()] = ("process" if problem else "namespaces", problem)
        return known[0]


def _try_namespaces() -> str:
    """Open a sandbox in namespaces and close it; "" when that worked, else why not."""
    if not system.LINUX:
        return "only Linux has namespaces"
    try:
        launched = launch(SandboxSpec(), "namespaces")
    except OSError as error:
        return str(error)
    frames = Frames()
    problem = f"it did not start within {START_S:g} s"
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(launched.control, selectors.EVENT_READ)
            while selector.select(START_S):
                if not frames.receive(launched.control):
                    problem = "its first process ended before it was ready"
                    break
                answers = [message for message, _ in frames.messages()]
                if answers:
                    problem = answers[0].get("failed", "")
                    break
    except OSError as error:
        problem = str(error)
    finally:
        launched.control.close()
        try:
            launched.process.wait(START_S)
        except subprocess.TimeoutExpired:
            launched.kill()
            launched.process.wait()
    return problem


def announce(tier: str, note: str = "") -> None:
    """Say once a process which tier is in use and what it does not stop."""
    if tier in _announced:
        return
    _announced.add(tier)
    if tier != "process":
        logger.info("Sandbox tier %s: %s.", tier, _STOPS[tier])
        return
    known = _default.get(os.getpid(), ("", ""))
    why = f" (namespaces do not work here: {known[1]})" if known[1] else ""
    user = "its own user" if note == "another user" else "the caller's own user, whose processes it can reach"
    logger.warning("Sandbox tier process%s: %s; it runs as %s.", why, _STOPS["process"], user)
