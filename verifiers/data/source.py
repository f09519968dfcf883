"""Where a block's prompts come from, when that is not the dataset in its own or a shuffled order.

A plan asks its source for rows by part of a block: a stage of a curriculum may end between two updates of a block,
and the source must know at which optimizer step the rows it gives are first trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

__all__ = ["BlockPart", "GivesSpares", "ObservesBlocks", "RowSource"]


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Prompts of one block that are trained in one stage; nearly always the whole block.

    Attributes:
        block_id: the block, from 0.
        optimizer_step: the first step that trains them.
        start: prompts that the run's blocks hold before them.
        prompts: how many there are.
        prompts_per_block: prompts of a whole block, which all differ.
        updates_per_block: optimizer steps that a block serves.
        borders: prompts that the run's blocks hold before each step of the source's `until_steps`.
    """

    block_id: int
    optimizer_step: int
    start: int
    prompts: int
    prompts_per_block: int
    updates_per_block: int
    borders: tuple[int, ...] = ()


class RowSource(Protocol):
    """Says which rows of the environment's dataset a block trains on. An environment may have one as `row_source`."""

    @property
    def until_steps(self) -> Sequence[int]:
        """Optimizer steps at which what is drawn changes, rising; a plan lets no block's rows stand on both sides."""
        ...

    def example_ids(self, part: BlockPart) -> Sequence[int]:
        """`part.prompts` different rows of the dataset; the same for the same part, also after a resume."""
        ...

    def stage_name(self, optimizer_step: int) -> str:
        """What is in force at a step, in a word, for the line that a person reads."""
        ...

    def describe(self, max_steps: int) -> Sequence[tuple[str, str]]:
        """Lines for the table of the plan: what comes when, as (label, text)."""
        ...

    def fingerprint(self, optimizer_step: int) -> Any:
        """What decided the rows before a step, as JSON: a checkpoint is refused where it differs."""
        ...


@runtime_checkable
class GivesSpares(RowSource, Protocol):
    """A row source with prompts that may take the place of others of the same part."""

    def spares(self, part: BlockPart, count: int) -> Sequence[int]:
        """Up to `count` further rows for a part, none of them the part's own; the same for the same part."""
        ...


@runtime_checkable
class ObservesBlocks(RowSource, Protocol):
    """A row source that learns from scored blocks, told in their order; its state stands in checkpoints."""

    def observe(self, block_id: int, rewards: Mapping[int, Sequence[float]]) -> None:
        """Take the rewards of a block's scored rollouts, by example id; called once for each block, in order."""
        ...

    def state(self) -> dict[str, Any]:
        """All that later blocks depend on, as JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        ...

    def metrics(self) -> dict[str, float]:
        """Where it stands, for the log."""
        ...
