"""The rollout servers as requests reach them: none gets one while it may hold weights that were not pushed."""

from __future__ import annotations

import logging
from typing import Any

from verifiers.rollouts.balancing import BalancedBackend
from verifiers.rollouts.endpoint import Backend, HttpBackend, backend_for
from verifiers.rollouts.sync import WeightSync
from verifiers.train.weight_sync import Fleet

__all__ = ["credentials", "each_server", "watched_servers"]

logger = logging.getLogger("verifiers.train")


def each_server(backend: Backend) -> list[Backend]:
    """The backend of each server, where it routes to several."""
    return list(backend.backends) if isinstance(backend, BalancedBackend) else [backend]


def credentials(backend: Backend) -> tuple[str, dict[str, str]]:
    """The API key and the headers that its servers are sent; records of a run must not hold them."""
    headers: dict[str, str] = {}
    for place, one in enumerate(each_server(backend)):
        given = one.endpoint.headers if isinstance(one, HttpBackend) else {}
        headers |= {f"{place}:{name}": value for name, value in given.items()}
    return backend.api_key, headers


def watched_servers(client: Any, sync: WeightSync, up_timeout_s: float) -> Backend:
    """What `client` names, such that a server which was started again gets no request before it has its weights.

    That needs connections that are ours, to servers that `sync` watches: base URLs, Endpoints and plain openai
    clients. A client object that has to be called as it is (a subclass, a wrapper, one with an HTTP client of its
    own) is used so, with a warning.

    Args:
        client: anything that `backend_for` takes.
        up_timeout_s: how long requests wait while no server is up, in seconds.
    """
    backend = backend_for(client)
    fleet = getattr(sync, "fleet", None)
    if not isinstance(fleet, Fleet) or (isinstance(backend, BalancedBackend) and backend.managed):
        return backend
    parts = each_server(backend)
    pushed_to = set(fleet.urls)
    unwatched = [
        one.base_url or type(one).__name__
        for one in parts
        if not isinstance(one, HttpBackend) or one.base_url not in pushed_to
    ]
    if unwatched:
        logger.warning(
            "rollouts go to %s by a client that has to be called as it is, or past the servers that get the weights "
            "(%s): should a server start again, it may answer some before it has the pushed weights.",
            ", ".join(unwatched),
            ", ".join(sorted(pushed_to)),
        )
        return backend
    return BalancedBackend(parts, managed=True, up_timeout_s=up_timeout_s)
