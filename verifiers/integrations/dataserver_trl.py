"""A dataserver for TRL's own GRPOTrainer: a map-style dataset of its prompts, and a reward function of its grades.

    url = "http://127.0.0.1:9000"
    dataset = RemoteRLDataset(url, per_device_train_batch_size=64, num_generations=16, max_steps=500)
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=remote_reward(url),
        args=trl.GRPOConfig(..., shuffle_dataset=False),
        train_dataset=dataset.as_dataset(),
    )

Nothing here imports torch or trl.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from verifiers.data.row_source import PlannedBlock
from verifiers.data.sampler import check_size
from verifiers.errors import ConfigError, GradingError
from verifiers.integrations.dataserver import (
    MAX_ATTEMPTS,
    Dataserver,
    RemoteGrader,
    completion_for_wire,
    sample_requests,
)

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger("verifiers.envs")


def remote_reward(
    url: str,
    *,
    token_var: str | None = None,
    timeout_s: float = 90.0,
    max_attempts: int = MAX_ATTEMPTS,
) -> Callable[..., list[float | None]]:
    """Make a reward function for TRL's trainers whose grades are a dataserver's.

    What cannot be graded is None, which TRL leaves out of the group's statistics; it is never 0. Rows of a
    `RemoteRLDataset` hold the optimizer step they were drawn for: where TRL trains them at another, the run ends with
    a ConfigError. Its evaluations come at any step, so they cannot read a `RemoteRLDataset`: give `eval_dataset` rows
    with prompt and sample_id alone. Where no completion could be graded, also after retries, it raises GradingError.

    Each device requests the grades of its own completions: where per_device_train_batch_size times
    steps_per_generation is not a multiple of num_generations, a grader that compares a group sees a part of it.

    Args:
        url, token_var, timeout_s, max_attempts: as in `RemoteEnv`.
    """
    server = Dataserver(url, token_var, timeout_s, max_attempts)

    @functools.cache
    def grader() -> RemoteGrader:
        return RemoteGrader(server, server.meta().limits)

    def remote_reward(
        completions: Sequence[Any], sample_id: Sequence[str], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        _check_step(columns.get("optimizer_step"), columns.get("trainer_state"))
        items = [
            {
                "sample_id": sample,
                "completion": completion_for_wire(completion),
                "completion_tokens": None if completion_ids is None else len(completion_ids[index]),
                "completion_index": index,
            }
            for index, (sample, completion) in enumerate(zip(sample_id, completions, strict=True))
        ]
        grades = grader().grades(items, _about(columns))
        failed = [grade.error for grade in grades if grade.reward is None]
        if failed:
            logger.warning("%d of %d completions have no reward; the first: %s", len(failed), len(grades), failed[0])
        if failed and len(failed) == len(grades):
            raise GradingError(f"none of {len(grades)} completions could be graded; the first: {failed[0]}")
        return [grade.reward for grade in grades]

    return remote_reward


def _about(columns: dict[str, Any]) -> dict[str, int]:
    """Return the columns' values that all rows share."""
    about = {}
    for name in ("optimizer_step", "generation_step", "seed"):
        values = set(columns.get(name) or ())
        if len(values) == 1 and isinstance(value := values.pop(), int):
            about[name] = value
    return about


def _check_step(drawn_for: Sequence[int] | None, trainer_state: Any) -> None:
    """Refuse rows drawn for another step: TRL stores no start of a block, so all rows that follow are wrong too."""
    step = getattr(trainer_state, "global_step", None)
    if not drawn_for or step is None or set(drawn_for) == {step}:
        return
    raise ConfigError(
        f"TRL generates for optimizer step {step} from rows that were drawn for step {min(drawn_for)}: in training, "
        "give RemoteRLDataset the sizes that TRL's GRPOConfig has, and resume from a checkpoint that was saved where "
        "a block ends; for evaluations, give TRL an eval_dataset of rows with prompt and sample_id alone, not a "
        "RemoteRLDataset."
    )


_KEPT_BLOCKS = 4


class Place(NamedTuple):
    """The place in training of a row: its generation step, and its slot among the block's prompts."""

    generation_step: int
    slot: int


class RemoteRLDataset:
    """The prompts of a run, one row a prompt, in the order in which TRL's sampler visits them unshuffled.

    Row `index` belongs to block `index // prompts_per_block`. A block is fetched when its first row is wanted, with
    the optimizer step at which its first pass begins; all ranks get the same rows, whichever they read.

    Args:
        per_device_train_batch_size: completions per device and micro-step.
        steps_per_generation: micro-steps that one block is cut into; None: `gradient_accumulation_steps`.
        num_iterations: iterations over each block.
        num_processes: devices; None reads WORLD_SIZE, 1 where it is not set.
        max_steps: optimizer steps in the run; None takes the server's.
        seed: of the draws, in place of the server's.
        url, token_var, timeout_s, max_attempts: as in `RemoteEnv`.

    Raises:
        ConfigError: sizes that cannot be; no `max_steps`; a stage that gets no block; a dataset with fewer rows than
            a block takes from it.
        InfraError: the server cannot be reached.
    """

    def __init__(
        self,
        url: str,
        *,
        per_device_train_batch_size: int,
        num_generations: int,
        gradient_accumulation_steps: int = 1,
        steps_per_generation: int | None = None,
        num_iterations: int = 1,
        num_processes: int | None = None,
        max_steps: int | None = None,
        seed: int | None = None,
        token_var: str | None = None,
        timeout_s: float = 90.0,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> None:
        micro_steps = gradient_accumulation_steps if steps_per_generation is None else steps_per_generation
        processes = int(os.environ.get("WORLD_SIZE", "1")) if num_processes is None else num_processes
        self.per_device = check_size("per_device_train_batch_size", per_device_train_batch_size, 1)
        self.num_generations = check_size("num_generations", num_generations, 1)
        self.accumulation = check_size("gradient_accumulation_steps", gradient_accumulation_steps, 1)
        self.steps_per_generation = check_size("steps_per_generation", micro_steps, 1)
        self.micro_steps_per_block = self.steps_per_generation * check_size("num_iterations", num_iterations, 1)
        completions = self.per_device * check_size("num_processes", processes, 1) * self.steps_per_generation
        if completions % self.num_generations:
            raise ConfigError(
                f"a block of {completions} completions (per_device_train_batch_size={self.per_device} x {processes} "
                f"devices x {self.steps_per_generation} micro-steps) does not divide into groups of "
                f"num_generations={self.num_generations}, which TRL refuses, too; change one of these sizes."
            )
        self.prompts_per_block = completions // self.num_generations
        self._server = Dataserver(url, token_var, timeout_s, max_attempts)
        meta = self._server.meta()
        steps = meta.total_steps if max_steps is None else max_steps
        if steps is None:
            raise ConfigError("max_steps is not given, and the dataserver's curriculum has no end; give max_steps.")
        self.max_steps = check_size("max_steps", steps, 1)
        self.seed = meta.curriculum.seed if seed is None else seed
        self._max_batch = meta.limits.max_batch
        meta.curriculum.check(meta.sizes, self.max_steps)
        self._updates_per_block = Fraction(self.micro_steps_per_block, self.accumulation)
        self._curriculum = dataclasses.replace(meta.curriculum, seed=self.seed)
        blocks = len(self) // self.prompts_per_block
        meta.curriculum.check_blocks(meta.sizes, blocks, self.prompts_per_block, self._updates_per_block)
        self._warn_of_rounded_stages()
        self._kept: OrderedDict[int, list[dict[str, Any]]] = OrderedDict()

    def __len__(self) -> int:
        micro_steps = self.max_steps * self.accumulation
        return -(-micro_steps // self.micro_steps_per_block) * self.prompts_per_block

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return {"prompt": messages or text, "sample_id", "dataset_id", "metadata"}, and what it was drawn for.

        That is "optimizer_step", at which its block is first trained, "generation_step" and "seed"; TRL hands them to
        reward functions.
        """
        block_id, slot = self.place(index)
        block = self._kept.get(block_id)
        if block is None:
            block = self._kept[block_id] = self._fetch(block_id)
            if len(self._kept) > _KEPT_BLOCKS:
                self._kept.popitem(last=False)
        return dict(block[slot])

    def place(self, index: int) -> Place:
        """Return the place of row `index`. Raises IndexError beyond the run."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} is asked for, but the run has {len(self)}")
        return Place(*divmod(index, self.prompts_per_block))

    def optimizer_step(self, generation_step: int) -> int:
        """Return the optimizer step at which the first iteration over a block begins."""
        return self._block(generation_step).optimizer_step

    def as_dataset(self) -> Dataset:
        """Return the same rows as a `datasets.Dataset`, which TRL requires; each is fetched when it is read.

        TRL reads the completions of one device and block at once. Another number of rows, or rows of two blocks,
        raises ConfigError: shuffled, or with other sizes than these, a run would train stages at wrong steps. It is
        for training: as `eval_dataset` give TRL rows with prompt and sample_id alone.
        """
        import datasets

        table: Dataset = datasets.Dataset.from_dict({"row": range(len(self))})
        return table.with_transform(self._columns)

    def _columns(self, batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        wanted = batch["row"]
        at_once = self.per_device * self.steps_per_generation
        if len(wanted) not in (1, at_once):
            raise ConfigError(
                f"{len(wanted)} rows were asked for at once, but a device holds {at_once} completions of a block "
                f"(per_device_train_batch_size={self.per_device} x {self.steps_per_generation} micro-steps): give "
                "this dataset the sizes that TRL's GRPOConfig has, and TRL's evaluations another dataset."
            )
        blocks = sorted({self.place(index).generation_step for index in wanted})
        if len(blocks) > 1:
            raise ConfigError(
                f"rows of the generation steps {blocks[0]} and {blocks[1]} were asked for at once: set "
                "shuffle_dataset=False in TRL's GRPOConfig, give this dataset the sizes that are set there, and "
                "TRL's evaluations another dataset."
            )
        rows = [self[index] for index in wanted]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def _fetch(self, block_id: int) -> list[dict[str, Any]]:
        block = self._block(block_id)
        drawn_for = {"optimizer_step": block.optimizer_step, "generation_step": block_id, "seed": self.seed}
        rows = []
        for body in sample_requests(block, self._curriculum, self._max_batch):
            for sample in self._server.samples(body):
                messages = sample.get("messages")
                row = {"prompt": sample["prompt"] if messages is None else messages}
                row |= {name: sample[name] for name in ("sample_id", "dataset_id", "metadata")}
                rows.append({**row, **drawn_for})
        return rows

    def _block(self, block_id: int) -> PlannedBlock:
        return PlannedBlock(block_id, self.prompts_per_block, self._updates_per_block)

    def _warn_of_rounded_stages(self) -> None:
        """Log where a stage holds longer than its `until_step`: TRL shuffles a block over its updates."""
        first_blocks = self._curriculum.first_blocks(self._updates_per_block)
        for stage, first_block in zip(self._curriculum.stages, first_blocks, strict=False):
            begins = self._block(first_block).optimizer_step
            if begins != stage.until_step and begins < self.max_steps:
                logger.warning(
                    "stage %r of the dataserver ends at optimizer step %s, inside a block: the next stage begins "
                    "with the next block, at step %d.",
                    stage.name,
                    stage.until_step,
                    begins,
                )
