"""Row sources: the prompts of a block, where those are not the dataset in its own or a shuffled order."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol, runtime_checkable

from verifiers.data.curriculum import Curriculum, Stage
from verifiers.data.sampler import interleave


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """A block of the plan, as a row source sees it: its prompts all differ.

    `updates_per_block` is below 1 where several blocks make an optimizer step.
    """

    block_id: int
    prompts: int
    updates_per_block: int | Fraction = 1

    @property
    def optimizer_step(self) -> int:
        """The first step that trains the block."""
        return math.floor(self.block_id * self.updates_per_block)


class RowSource(Protocol):
    """The choice of the dataset's rows that each block trains on. An environment may have one as `row_source`."""

    @property
    def until_steps(self) -> Sequence[int]:
        """Optimizer steps at which what is drawn changes, rising; it changes with the next block that begins."""
        ...

    def example_ids(self, block: PlannedBlock) -> Sequence[int]:
        """Return `block.prompts` different rows of the dataset; the same for the same block, also after a resume."""
        ...

    def stage_name(self, optimizer_step: int) -> str:
        """Return the name of the stage of the block that begins at a step, for the line that a person reads."""
        ...

    def describe(self, max_steps: int, updates_per_block: int) -> Sequence[tuple[str, str]]:
        """Return lines for the table of the plan, of what is drawn when, as (label, text)."""
        ...

    def fingerprint(self, optimizer_step: int) -> Any:
        """Return as JSON what decided the rows before a step: a checkpoint is refused where it differs."""
        ...


@runtime_checkable
class HasReplacements(RowSource, Protocol):
    """A row source with prompts that may take the place of others of the same block."""

    def replacements(self, block: PlannedBlock, count: int) -> Sequence[int]:
        """Return up to `count` further rows for a block, none of them its own; the same for the same block."""
        ...


@runtime_checkable
class ObservesBlocks(RowSource, Protocol):
    """A row source that learns from scored blocks, given in their order; its state is saved in checkpoints."""

    def observe(self, block_id: int, rewards: Mapping[int, Sequence[float]]) -> None:
        """Take the rewards of a block's scored rollouts, by example id; called once for each block, in order."""
        ...

    def state(self) -> dict[str, Any]:
        """Return all that later blocks depend on, as JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the present state as metrics for the log."""
        ...


def rows_by_name(names: Iterable[str | None]) -> dict[str, list[int]]:
    """Return the row numbers of each dataset, from a column such as `task`; rows without a name are of "default"."""
    found: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        found.setdefault(name or "default", []).append(row)
    return found


class StagedRows:
    """The row source of a `Curriculum`: example ids by the names of its datasets, all of which must be there."""

    def __init__(self, curriculum: Curriculum, datasets: Mapping[str, Sequence[int]]) -> None:
        self.curriculum = curriculum
        self.datasets = {name: list(rows) for name, rows in datasets.items()}
        self.sizes = {name: len(rows) for name, rows in self.datasets.items()}
        curriculum.check(self.sizes, None)

    @property
    def until_steps(self) -> tuple[int, ...]:
        return self.curriculum.until_steps

    def example_ids(self, block: PlannedBlock) -> list[int]:
        drawn = self.curriculum.draw(
            self.sizes,
            block.block_id,
            block.optimizer_step,
            block.prompts,
            updates_per_block=block.updates_per_block,
        )
        return [self.datasets[name][row] for name, row in drawn]

    def replacements(self, block: PlannedBlock, count: int) -> list[int]:
        """Return up to `count` other rows of the block's stage, by its weights."""
        stage = self.curriculum.stage_at(block.optimizer_step)
        taken = set(self.example_ids(block))
        chance = random.Random(f"{self.curriculum.seed}:replacements:{block.block_id}")
        left = {
            dataset.id: [row for row in self.datasets[dataset.id] if row not in taken] for dataset in stage.datasets
        }
        found: list[int] = []
        for index in interleave(stage.weights, 0, count):
            rows = left[stage.datasets[index].id]
            if rows:
                place = chance.randrange(len(rows))
                rows[place], rows[-1] = rows[-1], rows[place]
                found.append(rows.pop())
        return found

    def stage_name(self, optimizer_step: int) -> str:
        return self.curriculum.stage_at(optimizer_step).name

    def describe(self, max_steps: int, updates_per_block: int) -> list[tuple[str, str]]:
        """Return a line a stage: its steps, with a note where its end was rounded to a block, and its datasets."""
        lines = []
        first_blocks = self.curriculum.first_blocks(updates_per_block)
        # the last stage holds to the end of the run, whatever step it names
        begins = [min(block * updates_per_block, max_steps) for block in (0, *first_blocks)]
        for stage, (begin, end) in zip(self.curriculum.stages, itertools.pairwise([*begins, max_steps]), strict=True):
            when = f"steps {begin:,} to {end - 1:,}" if begin < end else f"not reached in {max_steps:,} steps"
            if begin < end < max_steps and end != stage.until_step:
                when += f" (until_step {stage.until_step:,} lies inside a block of {updates_per_block:,})"
            lines.append((f"stage {stage.name}", f"{when}: {self._mix(stage)}"))
        return lines

    def fingerprint(self, optimizer_step: int) -> dict[str, Any]:
        begun: list[dict[str, Any]] = []
        for stage in self.curriculum.stages:
            # a stage that has begun may still be given another end
            until = stage.until_step if stage.until_step is not None and stage.until_step < optimizer_step else None
            mix = {dataset.id: [dataset.weight, self.sizes[dataset.id]] for dataset in stage.datasets}
            begun.append({"name": stage.name, "until_step": until, "datasets": mix})
            if until is None:
                break
        return {"seed": self.curriculum.seed, "replacement": self.curriculum.replacement, "stages": begun}

    def _mix(self, stage: Stage) -> str:
        whole = sum(dataset.weight for dataset in stage.datasets)
        parts = [
            f"{dataset.id} {dataset.weight / whole:.4g} of prompts, {self.sizes[dataset.id]:,} rows"
            for dataset in stage.datasets
        ]
        return "; ".join(parts)
