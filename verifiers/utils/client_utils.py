"""Classic import path of what makes an openai client."""

from verifiers.envs.classic.clients import setup_client

setup_openai_client = setup_client

__all__ = ["setup_client", "setup_openai_client"]
