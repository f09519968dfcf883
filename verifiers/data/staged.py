"""A curriculum over the rows of one dataset, told apart by a column: what a plan asks for the rows of a block."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verifiers.data.curriculum import Curriculum, Stage
from verifiers.data.draws import turns
from verifiers.data.source import BlockPart

__all__ = ["StagedRows", "rows_by_name"]


def rows_by_name(names: Iterable[str | None], default: str = "default") -> dict[str, list[int]]:
    """The row numbers of each dataset, from a column that names the dataset of each row.

    Args:
        names: the column, such as `task`.
        default: name of rows that have none.
    """
    found: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        found.setdefault(name or default, []).append(row)
    return found


class StagedRows:
    """The row source of a `Curriculum`.

    Args:
        curriculum: the stages.
        datasets: example ids of each dataset, by its name in the curriculum.

    Raises:
        ConfigError: the curriculum names a dataset that is not there.
    """

    def __init__(self, curriculum: Curriculum, datasets: Mapping[str, Sequence[int]]) -> None:
        self.curriculum = curriculum
        self.datasets = {name: list(rows) for name, rows in datasets.items()}
        self.sizes = {name: len(rows) for name, rows in self.datasets.items()}
        curriculum.check(self.sizes, None)

    @property
    def until_steps(self) -> tuple[int, ...]:
        return self.curriculum.until_steps

    def example_ids(self, part: BlockPart) -> list[int]:
        drawn = self.curriculum.rows(self.sizes, part.borders, part.start, part.prompts, part.prompts_per_block)
        return [self.datasets[name][row] for name, row in drawn]

    def spares(self, part: BlockPart, count: int) -> list[int]:
        stage = self.curriculum.stage_at(part.optimizer_step)
        taken = set(self.example_ids(part))
        chance = random.Random(f"{self.curriculum.seed}:spares:{part.block_id}")
        left = {
            dataset.id: [row for row in self.datasets[dataset.id] if row not in taken] for dataset in stage.datasets
        }
        found: list[int] = []
        for turn in turns(stage.weights, 0, count):
            rows = left[stage.datasets[turn].id]
            if rows:
                place = chance.randrange(len(rows))
                rows[place], rows[-1] = rows[-1], rows[place]
                found.append(rows.pop())
        return found

    def check_blocks(self, blocks: int, prompts_per_block: int, borders: Sequence[int]) -> None:
        """As `Curriculum.check_blocks`, of these datasets."""
        self.curriculum.check_blocks(self.sizes, blocks, prompts_per_block, borders)

    def stage_name(self, optimizer_step: int) -> str:
        return self.curriculum.stage_at(optimizer_step).name

    def describe(self, max_steps: int) -> list[tuple[str, str]]:
        lines, begin = [], 0
        for stage in self.curriculum.stages:
            # the last stage holds to the end of the run, whatever step it names
            end = max_steps if stage is self.curriculum.stages[-1] else min(stage.until_step or 0, max_steps)
            when = f"steps {begin:,} to {end - 1:,}" if begin < end else f"not reached in {max_steps:,} steps"
            lines.append((f"stage {stage.name}", f"{when}: {self._mix(stage)}"))
            begin = max(begin, end)
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
