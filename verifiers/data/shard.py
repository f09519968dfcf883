"""A part of an evaluation that one of several jobs runs: every N-th prompt, with all of its rollouts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verifiers.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard `number` of `of`, written "3/8", numbered from 1.

    Its prompts are those whose example id leaves the remainder `number - 1` when divided by `of`. Datasets that are
    sorted by difficulty or length so give shards that take about as long.
    """

    number: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.of:
            raise ConfigError(f"there is no shard {self}; shards are numbered from 1, so of 8 they are 1/8 to 8/8.")

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Return the shard that a text such as "3/8" names; refuse one that names none."""
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip())
        if found is None:
            raise ConfigError(f"{text!r} is not a shard: write K/N, such as 3/8.")
        return cls(int(found[1]), int(found[2]))

    @classmethod
    def of_run(cls, metadata: Mapping[str, Any]) -> Shard | None:
        """Return the shard that a run's metadata names; None for a whole run."""
        text = metadata.get("shard")
        return None if text is None else cls.parse(str(text))

    def examples(self, num_examples: int) -> range:
        """Return the example ids of this shard's prompts; refuse fewer prompts than shards."""
        if num_examples < self.of:
            raise ConfigError(
                f"{num_examples} prompts cannot be split into {self.of} shards; give at most {num_examples}."
            )
        return range(self.number - 1, num_examples, self.of)
