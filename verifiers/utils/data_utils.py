"""Classic import path of `verifiers.parsers.parser` and `verifiers.envs.classic.example_datasets`."""

from verifiers.envs.classic.example_datasets import load_example_dataset
from verifiers.parsers.parser import (
    BOXED_SYSTEM_PROMPT,
    THINK_BOXED_SYSTEM_PROMPT,
    extract_boxed_answer,
    extract_hash_answer,
)

__all__ = [
    "BOXED_SYSTEM_PROMPT",
    "THINK_BOXED_SYSTEM_PROMPT",
    "extract_boxed_answer",
    "extract_hash_answer",
    "load_example_dataset",
]
