"""How new weights reach a rollout server. The kinds that need torch are in `verifiers.train.weight_sync`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

__all__ = ["WeightSync"]


@runtime_checkable
class WeightSync(Protocol):
    """Pushes the policy's weights to a rollout server; every push is acknowledged, versioned, bounded in time."""

    def connect(self, deadline_s: float) -> None:
        """Wait for the server and check that it can take weights.

        Raises:
            WeightSyncError: it did not answer within `deadline_s`, or lacks a route; the message names it.
        """
        ...

    def push(self, named_parameters: Iterable[tuple[str, Any]], version: int) -> None:
        """Send the parameters and return once the server samples from them, stamped with `version`.

        Requests in flight are paused, not lost; no token after the push comes from keys and values of before.

        Raises:
            WeightSyncError: not acknowledged within the deadline.
        """
        ...

    def close(self) -> None:
        """Give back what the pushes used. May be called twice."""
        ...
