"""Loading a policy and its tokenizer from a local directory or a hub name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError, Error

__all__ = [
    "check_model_exists",
    "check_model_path",
    "get_model",
    "get_model_and_tokenizer",
    "get_tokenizer",
    "told_what_cannot_be_loaded",
]


def check_model_path(name_or_path: str) -> None:
    """Refuse a path that does not exist before a hub is asked for it.

    A name is taken for a path when it starts with /, . or ~, has more than one slash, or names an existing
    directory; "owner/name" is a hub name.

    Raises:
        ConfigError: the path does not exist, or is no model directory.
    """
    path = Path(name_or_path).expanduser()
    looks_like_path = name_or_path.startswith(("/", ".", "~")) or name_or_path.count("/") > 1 or path.exists()
    if not looks_like_path:
        return
    if not path.is_dir():
        raise ConfigError(
            f"the model path {name_or_path!r} does not exist; give a directory written by save_pretrained, or a "
            "hub name such as 'Qwen/Qwen3-0.6B'."
        )
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"the model path {name_or_path!r} has no config.json; give a directory written by save_pretrained."
        )


@contextlib.contextmanager
def told_what_cannot_be_loaded(
    name_or_path: str, of: tuple[type[Exception], ...] = (OSError, ValueError), *, exact: bool = False
) -> Iterator[None]:
    """While a model or a tokenizer is loaded: what the hub or the files refuse becomes one sentence.

    Args:
        of: what they raise; less where other things are done meanwhile.
        exact: only of these types themselves, where subclasses are raised for other reasons.

    Raises:
        ConfigError: with the first line of what was said.
    """
    try:
        yield
    except of as error:
        if isinstance(error, Error) or (exact and type(error) not in of):
            raise
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"the model {name_or_path!r} cannot be loaded ({said[0].rstrip('. ')}); give a directory written by "
            "save_pretrained, or a hub name such as 'Qwen/Qwen3-0.6B'."
        ) from error


def check_model_exists(name_or_path: str, init_kwargs: Any = None) -> None:
    """Refuse a model that is neither on the disk nor on the hub; fetches no more than its config.json.

    Args:
        init_kwargs: what `from_pretrained` will be given; a revision counts.

    Raises:
        ConfigError: it is not there.
    """
    check_model_path(name_or_path)
    from transformers.utils import cached_file

    revision = init_kwargs.get("revision") if isinstance(init_kwargs, dict) else None
    with told_what_cannot_be_loaded(name_or_path):
        cached_file(os.path.expanduser(name_or_path), "config.json", revision=revision)


def get_model(name_or_path: str, **kwargs: Any) -> Any:
    """A causal language model; `kwargs` go to `from_pretrained`, where the default dtype is the checkpoint's."""
    check_model_path(name_or_path)
    from transformers import AutoModelForCausalLM

    with told_what_cannot_be_loaded(name_or_path):
        return AutoModelForCausalLM.from_pretrained(os.path.expanduser(name_or_path), **{"dtype": "auto", **kwargs})


def get_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """The tokenizer that belongs to a model; it must have a chat template to be trained on chat environments."""
    check_model_path(name_or_path)
    from transformers import AutoTokenizer

    with told_what_cannot_be_loaded(name_or_path):
        return AutoTokenizer.from_pretrained(os.path.expanduser(name_or_path), **kwargs)


def get_model_and_tokenizer(name_or_path: str, **kwargs: Any) -> tuple[Any, Any]:
    """`get_model` and `get_tokenizer` in one call."""
    return get_model(name_or_path, **kwargs), get_tokenizer(name_or_path)
