"""Classic import path of `verifiers.log`."""

from verifiers.log import setup_logging

__all__ = ["setup_logging"]
