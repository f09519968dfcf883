"""Classic import path of `verifiers.envs.calling`."""

from verifiers.envs.calling import maybe_await

__all__ = ["maybe_await"]
