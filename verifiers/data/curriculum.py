"""The curriculum: stages of datasets with weights, in force from one optimizer step to another.

A block's rows are a pure function of (seed, block id, stage): any process can compute any block, and a run that is
resumed draws what it would have drawn. A block has one stage: the one in force at its first optimizer step.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from verifiers.data.sampler import (
    check_size,
    interleave,
    row_without_replacement,
    rows_at_random,
    shares,
    whole_weights,
)
from verifiers.errors import ConfigError

logger = logging.getLogger("verifiers.data")

Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class WeightedDataset:
    """A dataset of a stage: its part of the prompts is its weight over the sum of the stage's weights."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    id: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight) or self.weight < 0:
            raise ConfigError(f"dataset {self.id!r} has the weight {self.weight!r}; give a number of at least 0.")


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the run with one mix of datasets.

    Attributes:
        until_step: the optimizer step at which the next stage begins, or with the next block where that step lies
            inside one; None for the end of the run.
        datasets: what prompts are drawn from; in a file, in place of {"id": NAME} a plain NAME will do.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    name: str
    until_step: int | None = None
    datasets: tuple[
        Annotated[WeightedDataset, BeforeValidator(lambda given: {"id": given} if isinstance(given, str) else given)],
        ...,
    ] = ()

    def __post_init__(self) -> None:
        if self.until_step is not None:
            check_size(f"until_step of stage {self.name!r}", self.until_step, 1)
        if not self.datasets:
            raise ConfigError(f"stage {self.name!r} has no datasets; give it at least one.")
        if twice := _repeated([dataset.id for dataset in self.datasets]):
            raise ConfigError(f"stage {self.name!r} names dataset {twice!r} twice; give it once, with one weight.")
        if not any(dataset.weight for dataset in self.datasets):
            raise ConfigError(f"the weights of stage {self.name!r} sum to 0; give one dataset a weight above 0.")

    @property
    def weights(self) -> tuple[int, ...]:
        """Whole numbers in the proportions of the datasets' weights."""
        return whole_weights(tuple(dataset.weight for dataset in self.datasets))


@dataclass(frozen=True, slots=True)
class Curriculum:
    """Stages in the order in which they are trained.

    Attributes:
        stages: each but the last has an `until_step`, and they rise.
        seed: of the order of each dataset's rows.
        replacement: draw each row from the whole dataset, whether or not an earlier block had it. Otherwise every row
            of a dataset is drawn once before any is drawn twice, over all stages. In both, a block's prompts differ.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    stages: tuple[Stage, ...]
    seed: int = 0
    replacement: bool = False

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("a curriculum has no stages; give it at least one.")
        if twice := _repeated([stage.name for stage in self.stages]):
            raise ConfigError(f"two stages of the curriculum are called {twice!r}; give each a name of its own.")
        for before, after in itertools.pairwise(self.stages):
            if before.until_step is None:
                raise ConfigError(
                    f"stage {before.name!r} has no until_step, so stage {after.name!r} cannot begin; give it one."
                )
            if after.until_step is not None and after.until_step <= before.until_step:
                raise ConfigError(
                    f"stage {after.name!r} ends at step {after.until_step}, and stage {before.name!r} before it at "
                    f"{before.until_step}; put stages in the order in which they are trained."
                )

    @property
    def until_steps(self) -> tuple[int, ...]:
        """The optimizer steps at which a new stage begins."""
        return tuple(stage.until_step for stage in self.stages[:-1] if stage.until_step is not None)

    def stage_at(self, optimizer_step: int) -> Stage:
        """Return the stage in force at an optimizer step, from 0; the last one holds for every later step."""
        check_size("optimizer_step", optimizer_step, 0)
        return self.stages[sum(step <= optimizer_step for step in self.until_steps)]

    def first_blocks(self, updates_per_block: int | Fraction) -> list[int]:
        """Return the block with which each stage but the first begins, where a block serves so many optimizer steps.

        A stage whose `until_step` lies inside a block holds to the end of that block. `updates_per_block` is below 1
        where several blocks make an update.
        """
        return [math.ceil(Fraction(step) / updates_per_block) for step in self.until_steps]

    def draw(
        self,
        sizes: Mapping[str, int],
        block_id: int,
        optimizer_step: int,
        count: int,
        *,
        updates_per_block: int | Fraction = 1,
        first_blocks: Sequence[int] | None = None,
    ) -> list[tuple[str, int]]:
        """Return the prompts of a block as (dataset id, row), for a caller whose blocks all hold `count` prompts.

        Args:
            optimizer_step: the first step that trains the block's rows; it alone chooses the stage.
            updates_per_block: optimizer steps that a block serves; tells how much earlier stages drew. Where it does
                not fit the two numbers above, the stage is right all the same, but coverage starts with that stage.
            first_blocks: the block with which each stage but the first begins, in place of `updates_per_block`.
        """
        check_size("block_id", block_id, 0)
        check_size("count", count, 1)
        stage = self.stage_at(optimizer_step)
        begins = [0, *(self.first_blocks(updates_per_block) if first_blocks is None else first_blocks)]
        index = sum(begin <= block_id for begin in begins[1:])
        if self.stages[index] != stage:
            return Curriculum((stage,), self.seed, self.replacement).draw(sizes, block_id, optimizer_step, count)
        start = (block_id - begins[index]) * count
        names = [stage.datasets[place].id for place in interleave(stage.weights, start, start + count)]
        drawn = self._drawn_before(block_id, begins, count)
        waiting: dict[str, list[int]] = {}
        for name, wanted in Counter(names).items():
            if name not in sizes:
                raise ConfigError(
                    f"the curriculum names dataset {name!r}, which is not there; there are: {', '.join(sizes)}."
                )
            _check_rows(block_id, name, wanted, sizes[name], count)
            if self.replacement:
                rows = rows_at_random(sizes[name], f"{self.seed}:{block_id}:{name}", wanted)
            else:
                places = range(drawn[name], drawn[name] + wanted)
                rows = [row_without_replacement(sizes[name], f"{self.seed}:{name}", place, count) for place in places]
            waiting[name] = rows[::-1]
        return [(name, waiting[name].pop()) for name in names]

    def check(self, sizes: Mapping[str, int], max_steps: int | None) -> None:
        """Refuse datasets that are not there or have no rows, and warn where the run is longer than the stages."""
        for stage in self.stages:
            for dataset in stage.datasets:
                if dataset.id not in sizes:
                    raise ConfigError(
                        f"stage {stage.name!r} names dataset {dataset.id!r}, which is not there; there are: "
                        f"{', '.join(sorted(sizes)) or 'none'}."
                    )
                if dataset.weight and sizes[dataset.id] < 1:
                    raise ConfigError(f"dataset {dataset.id!r} of stage {stage.name!r} has no rows.")
        last = self.stages[-1]
        if max_steps is not None and last.until_step is not None and last.until_step < max_steps:
            logger.warning(
                "the curriculum ends at step %d, the run at step %d: stage %r holds for the steps between.",
                last.until_step,
                max_steps,
                last.name,
            )

    def check_blocks(
        self, sizes: Mapping[str, int], blocks: int, count: int, updates_per_block: int | Fraction
    ) -> None:
        """Refuse stages without a block, and blocks that would take more rows of a dataset than it has."""
        begins = [0, *self.first_blocks(updates_per_block)]
        for index, (first, end) in enumerate(itertools.pairwise(begins)):
            if first == end < blocks:
                earlier, stage = self.stages[index - 1 : index + 1]
                raise ConfigError(
                    f"stage {stage.name!r} of the curriculum ends at optimizer step {stage.until_step}, inside the "
                    f"block in which stage {earlier.name!r} ends, so no block would be drawn from it: end it at step "
                    f"{math.floor((end + 1) * updates_per_block)}."
                )
        used = {dataset.id for stage in self.stages for dataset in stage.datasets}
        if all(sizes[name] >= count for name in used):
            return
        before = self._drawn_before(0, begins, count)
        for block_id in range(blocks):
            after = self._drawn_before(block_id + 1, begins, count)
            for name in used:
                _check_rows(block_id, name, after[name] - before[name], sizes[name], count)
            before = after

    def _drawn_before(self, block_id: int, begins: Sequence[int], count: int) -> Counter[str]:
        """Return how often each dataset was drawn from before a block; `begins` has the first block of each stage."""
        drawn: Counter[str] = Counter()
        for stage, first, end in zip(self.stages, begins, [*begins[1:], block_id], strict=True):
            blocks = min(end, block_id) - first
            if blocks > 0:
                for dataset, share in zip(stage.datasets, shares(stage.weights, blocks * count), strict=True):
                    drawn[dataset.id] += share
        return drawn


def _check_rows(block_id: int, name: str, wanted: int, size: int, prompts_per_block: int) -> None:
    if wanted > size:
        raise ConfigError(
            f"block {block_id} takes {wanted} different rows of dataset {name!r}, which has {size}; "
            f"make blocks smaller than {prompts_per_block} prompts, or give that dataset less weight."
        )


def _repeated(names: Sequence[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


def staged_curriculum_from(mapping: Any) -> Curriculum:
    """Return the curriculum that a table of a file describes, by the fields of `Curriculum` and what is inside."""
    return from_table(Curriculum, mapping, "the curriculum")


def from_table(kind: type[Kind], mapping: Any, where: str) -> Kind:
    try:
        return TypeAdapter(kind).validate_python(mapping)
    except ValidationError as error:
        first = error.errors()[0]
        if isinstance(cause := first.get("ctx", {}).get("error"), ConfigError):
            raise cause from None
        place = ".".join([where, *map(str, first["loc"])])
        if first["type"] == "unexpected_keyword_argument":
            raise ConfigError(f"{place} is an unknown key; docs/guides/curriculum.md has those there are.") from None
        raise ConfigError(f"{place}: {first['msg']} (given: {first['input']!r}).") from None
