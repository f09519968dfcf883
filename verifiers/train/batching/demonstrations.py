"""Demonstrations: conversations that are trained on by cross-entropy, in the same updates as rollouts."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from trl.chat_template_utils import get_training_chat_template

from verifiers.errors import ConfigError
from verifiers.images import image_urls
from verifiers.rollouts.rollout import TokenSequence
from verifiers.train.batching.micro_batches import DEMONSTRATION, TrainingSample

logger = logging.getLogger("verifiers.train")


class Demonstrations:
    """Tokenized demonstrations, drawn for each update by its number.

    Args:
        samples: at least one.
    """

    def __init__(self, samples: Sequence[TrainingSample], seed: int) -> None:
        self._samples, self._seed = samples, seed

    @classmethod
    def load(cls, dataset: str, tokenizer: Any, *, seed: int, max_seq_len: int | None = None) -> Demonstrations:
        """Tokenize the rows of a dataset by the chat template; only assistant tokens are trained on.

        Args:
            dataset: JSON lines, a Parquet file, a directory of `save_to_disk`, or a hub name; rows have `messages`,
                or messages in `prompt` and `completion`, and may have `tools`.
            max_seq_len: longer rows are left out, and counted in a warning.

        Raises:
            ConfigError: it cannot be read, no row can be trained on, or the template does not tell assistant tokens.
        """
        template = _template(tokenizer)
        rows = [_sample(row, tokenizer, template, place) for place, row in enumerate(_rows(dataset))]
        kept = [
            row
            for row in rows
            if row is not None
            and (max_seq_len is None or len(row.row.prompt_ids) + len(row.row.completion_ids) <= max_seq_len)
        ]
        if not kept:
            raise ConfigError(
                f"none of the {len(rows)} rows of demonstrations={dataset!r} has an assistant's answer after a "
                f"prompt, within max_seq_len={max_seq_len}; give some that have."
            )
        if len(kept) < len(rows):
            logger.warning(
                "%d of %d demonstrations are left out: no assistant's answer after a prompt, or over max_seq_len=%s.",
                len(rows) - len(kept),
                len(rows),
                max_seq_len,
            )
        return cls(kept, seed)

    def draw(self, update: int, count: int) -> list[TrainingSample]:
        """Return those of one update: all of them in a drawn order, then all again in another."""
        found = []
        for place in range(update * count, (update + 1) * count):
            epoch, index = divmod(place, len(self._samples))
            found.append(self._samples[_order(self._seed, epoch, len(self._samples))[index]])
        return found


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> list[int]:
    return random.Random(f"{seed}:{epoch}").sample(range(count), count)


def _rows(dataset: str) -> Iterable[Mapping[str, Any]]:
    path = Path(dataset).expanduser()
    try:
        if path.is_dir():
            found: Any = datasets.load_from_disk(str(path))
            return found["train"] if isinstance(found, datasets.DatasetDict) else found
        if path.is_file():
            kind = "parquet" if path.suffix == ".parquet" else "json"
            return datasets.load_dataset(kind, data_files=str(path), split="train")
        return datasets.load_dataset(dataset, split="train")
    except Exception as error:
        raise ConfigError(
            f"demonstrations={dataset!r} cannot be read: {type(error).__name__}: {error}; give JSON lines, a Parquet "
            "file, a directory of save_to_disk, or a hub name."
        ) from error


def _template(tokenizer: Any) -> str:
    """Return a chat template that marks what the assistant says: the tokenizer's own, or TRL's version of it."""
    template = getattr(tokenizer, "chat_template", None) or ""
    if "{% generation %}" in template or "{%- generation" in template:
        return str(template)
    try:
        return get_training_chat_template(tokenizer) or str(template)
    except ValueError as error:
        raise ConfigError(
            "the chat template does not mark what the assistant says, so demonstrations cannot be masked to it, and "
            "TRL has no version of it that does; put {% generation %} and {% endgeneration %} around that in it."
        ) from error


def _sample(row: Mapping[str, Any], tokenizer: Any, template: str, place: int) -> TrainingSample | None:
    messages = row.get("messages") or [*(row.get("prompt") or ()), *(row.get("completion") or ())]
    if next(image_urls(messages), None) is not None:
        raise ConfigError(f"row {place} of the demonstrations shows an image; they are text alone, so leave it out.")
    try:
        found = tokenizer.apply_chat_template(
            messages,
            tools=row.get("tools") or None,
            chat_template=template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
    except Exception as error:
        raise ConfigError(
            f"row {place} of the demonstrations cannot be rendered by the chat template: {error}; rows have "
            "messages, or messages in prompt and completion."
        ) from error
    ids, mask = list(found["input_ids"]), list(found["assistant_masks"])
    first = mask.index(1) if 1 in mask else 0
    if first == 0:
        return None
    said = len(ids) - first
    tokens = TokenSequence(ids[:first], ids[first:], [0] * said, [0.0] * said, [-1] * said)
    return TrainingSample(tokens, 0.0, DEMONSTRATION, 0, mask[first:])
