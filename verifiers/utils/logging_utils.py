"""Classic import path of `verifiers.log` and of `verifiers.parsers.printable`."""

from verifiers.log import setup_logging
from verifiers.parsers.printable import print_prompt_completions_sample

__all__ = ["print_prompt_completions_sample", "setup_logging"]
