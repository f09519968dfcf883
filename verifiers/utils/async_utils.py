"""Classic import path of `verifiers.envs.lifecycle`."""

from verifiers.envs.lifecycle import maybe_await

__all__ = ["maybe_await"]
