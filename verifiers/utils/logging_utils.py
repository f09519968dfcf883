"""Classic import path of `verifiers.log` and of `verifiers.parsers.messages`."""

from verifiers.log import setup_logging
from verifiers.parsers.messages import print_prompt_completions_sample

__all__ = ["print_prompt_completions_sample", "setup_logging"]
