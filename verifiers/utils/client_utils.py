"""Classic import path of what makes an openai client."""

from verifiers.envs.clients import setup_client

__all__ = ["setup_client"]
