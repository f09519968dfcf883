"""The interface of a kind of weight sync to the trainer, and the base of those that push to servers over HTTP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from verifiers.inference.endpoint import Backend
from verifiers.inference.server_client import ServerClient
from verifiers.inference.server_pool import ServerPool

__all__ = ["ServerSync", "WeightSync"]


class WeightSync(ABC):
    """Pushes of the policy's weights to rollout servers; each is acknowledged, versioned and bounded in time.

    Subclass it for a kind of your own.

    Attributes:
        kind: name of the kind.
        pool: the servers that get the weights; None before `connect`, or where the kind knows of none.
        policy_name: the policy's name in requests; None for the name of the model that is served.
        keeps_requests: requests in flight continue under the new weights; otherwise they must end before a push.
        can_send_tied: `sends_tied` has an effect.
        sends_tied: tied weights are sent under each of their names, for servers that keep the old head otherwise.
        sends_adapter: an adapter's tensors are sent, not the merged weights.
    """

    kind: str = "other"
    pool: ServerPool | None = None
    policy_name: str | None = None
    keeps_requests: bool = True
    can_send_tied: bool = False
    sends_tied: bool = False
    sends_adapter: bool = False

    @abstractmethod
    def connect(self, deadline_s: float) -> None:
        """Wait for the servers and verify that they can take weights.

        Raises:
            WeightSyncError: one did not answer within `deadline_s`, or lacks a route; the message names it.
        """

    @abstractmethod
    def push(self, named_parameters: Iterable[tuple[str, Any]], version: int) -> None:
        """Send the parameters and return once the servers sample from them, stamped with `version`.

        Requests in flight are paused, not lost; no token after the push comes from keys and values of before.

        Raises:
            WeightSyncError: not acknowledged within the deadline.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what the pushes used. May be called twice."""

    @property
    def own_url(self) -> str | None:
        """Base URL of a server that the kind holds in this process; None without one, or before `connect`."""
        return None

    def route(self, backend: Backend) -> Backend:
        """Return the backend for rollouts, such that none is answered from weights that were not pushed."""
        return self.pool.route(backend) if self.pool is not None else backend

    @contextmanager
    def tensors_of(self, model: Any, whole: dict[str, Any] | None = None) -> Iterator[Mapping[str, Any]]:
        """Give the tensors of a model that are to be pushed, under the names that servers load them by.

        Args:
            model: the trained model, unwrapped.
            whole: tensors that were gathered from all ranks, by name, where the model is sharded.
        """
        from verifiers.train.weight_sync.tensors import policy_tensors, whole_policy

        if whole is not None:
            yield whole_policy(model, whole)
            return
        with policy_tensors(model, tied=self.sends_tied) as tensors:
            yield tensors

    def copy_of(self, version: int) -> Any:
        """Return a frozen copy of the policy with the weights of `version` in this process, or None."""
        return None


class ServerSync(WeightSync):
    """A kind that pushes to servers through a `ServerPool`.

    Args:
        base_url: of the rollout server, or of several.
        timeout_s: deadline for one push, in seconds; a single server may be restarted within it.
        api_key: bearer token of the servers' routes.
    """

    pool: ServerPool

    def __init__(self, base_url: str | Sequence[str], timeout_s: float = 120.0, api_key: str = "EMPTY") -> None:
        urls = [base_url] if isinstance(base_url, str) else list(base_url)
        self.pool = ServerPool([ServerClient(url).url for url in urls], api_key=api_key, timeout_s=timeout_s)

    def connect(self, deadline_s: float) -> None:
        self.pool.connect(deadline_s)

    def close(self) -> None:
        self.pool.stop()
