"""The batch plan: which prompts are generated and trained when, known in full before the first rollout.

Everything here is a pure function of the plan and of a block id or an optimizer step, so any rank can compute any
block, and a resumed run needs no state but its optimizer step. Sizes always name their unit, *prompts* or
*completions*. The plan holds no data: it numbers the rows of one dataset, or takes them from a curriculum (a
`RowSource`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from dataclasses import dataclass, field
from typing import Any

from verifiers.data.row_source import HasReplacements, PlannedBlock, RowSource
from verifiers.data.sampler import RepeatSampler, check_size
from verifiers.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The sizes of a training run and everything that follows from them; build it with `make_plan`.

    Attributes:
        per_device_train_batch_size: completions per device and micro-step.
        num_processes: devices.
        gradient_accumulation_steps: micro-steps per optimizer step.
        steps_per_generation: K, micro-steps in a block.
        num_generations: G, rollouts of each prompt.
        num_iterations: mu, iterations over each block.
        max_steps: optimizer steps in the run.
        num_prompts: rows of the dataset.
        seed: orders prompts and rows, and seeds rollouts.
        shuffle: visit the dataset in a new order each epoch; otherwise in its own order.
        source: chooses the rows in place of that order, such as a curriculum.
        max_tokens_per_micro_batch: padded tokens by which a micro-step is split; None where it is split by rows.
    """

    per_device_train_batch_size: int
    steps_per_generation: int
    num_generations: int
    max_steps: int
    num_prompts: int
    num_processes: int = 1
    gradient_accumulation_steps: int = 1
    num_iterations: int = 1
    seed: int = 0
    shuffle: bool = True
    source: RowSource | None = field(default=None, compare=False)
    max_tokens_per_micro_batch: int | None = None

    def __post_init__(self) -> None:
        for size in dataclasses.fields(self):
            if size.name not in ("num_generations", "seed", "shuffle", "source", "max_tokens_per_micro_batch"):
                check_size(size.name, getattr(self, size.name), 1)
        if self.num_generations == 1:
            raise ConfigError(
                "num_generations is 1, but an advantage compares rollouts of one prompt: use at least 2."
            )
        check_size("num_generations", self.num_generations, 2)
        self._check_divisions()
        if self.source is None and self.num_prompts < self.prompts_per_block:
            raise ConfigError(
                f"the dataset has {self.num_prompts} prompts, but a block holds {self.prompts_per_block} different "
                f"ones: use at least {self.prompts_per_block} prompts, or blocks of at most "
                f"{self.num_prompts * self.num_generations} completions in place of {self.completions_per_block}."
            )

    @property
    def completions_per_micro_step(self) -> int:
        """Completions that all devices together see in one micro-step."""
        return self.per_device_train_batch_size * self.num_processes

    @property
    def completions_per_block(self) -> int:
        """Completions generated together (TRL's `generation_batch_size`)."""
        return self.completions_per_micro_step * self.steps_per_generation

    @property
    def prompts_per_block(self) -> int:
        """Distinct prompts generated together."""
        return self.completions_per_block // self.num_generations

    @property
    def completions_per_update(self) -> int:
        """Completions behind one optimizer step."""
        return self.completions_per_micro_step * self.gradient_accumulation_steps

    @property
    def prompts_per_update(self) -> float:
        """Prompts' worth of completions behind one optimizer step; not always whole."""
        return self.completions_per_update / self.num_generations

    @property
    def updates_per_block(self) -> int:
        """Optimizer steps that one block serves: mu * K / gradient_accumulation_steps."""
        return self.num_iterations * self.steps_per_generation // self.gradient_accumulation_steps

    @property
    def blocks(self) -> int:
        """Blocks in the run; the last may serve fewer updates than the others."""
        return -(-self.max_steps // self.updates_per_block)

    @property
    def blocks_per_epoch(self) -> int:
        """Whole blocks that one pass over the dataset gives."""
        return self.num_prompts // self.prompts_per_block

    def requests(self, block_id: int) -> list[tuple[int, int]]:
        """Return the rollouts of a block as (example id, generation), all generations of a prompt in a row."""
        rows = self._completion_rows(block_id)
        return [(row, place % self.num_generations) for place, row in enumerate(rows)]

    def example_ids(self, block_id: int) -> list[int]:
        """Return the prompts of a block as dataset rows, each once, in order, by seed, block and source alone."""
        return self._completion_rows(block_id)[:: self.num_generations]

    def replacement_ids(self, block_id: int, count: int) -> list[int]:
        """Return up to `count` other rows that may replace a block's prompts, by seed, block and source alone."""
        if self.source is not None:
            if not isinstance(self.source, HasReplacements):
                return []
            return list(self.source.replacements(self._block(block_id), count))
        planned = set(self.example_ids(block_id))
        others = [example_id for example_id in range(self.num_prompts) if example_id not in planned]
        return random.Random(f"{self.seed}:replacements:{block_id}").sample(others, min(count, len(others)))

    def stage_name(self, optimizer_step: int) -> str:
        """Return the name of the source's stage that trains a step; "" without a source."""
        if self.source is None:
            return ""
        return self.source.stage_name(optimizer_step - optimizer_step % self.updates_per_block)

    def _completion_rows(self, block_id: int) -> list[int]:
        """Return the dataset row of each completion of a block, in the order of TRL's sampler."""
        check_size("block_id", block_id, 0)
        if self.source is None:
            return self._sampler.chunk(*divmod(block_id, self.blocks_per_epoch))
        rows = self.source.example_ids(self._block(block_id))
        return [row for row in rows for _ in range(self.num_generations)]

    @functools.cached_property
    def _sampler(self) -> RepeatSampler:
        return RepeatSampler(
            self.num_prompts, self.num_generations, self.prompts_per_block, shuffle=self.shuffle, seed=self.seed
        )

    def _block(self, block_id: int) -> PlannedBlock:
        return PlannedBlock(block_id, self.prompts_per_block, self.updates_per_block)

    def shuffle_order(self, block_id: int, num_rows: int) -> list[int]:
        """Return the permutation of 0 .. `num_rows` - 1 that cuts a block into updates, by seed and block alone.

        It does not depend on `shuffle`, which is about the dataset. Within an update rows stand by their length.
        """
        check_size("block_id", block_id, 0)
        check_size("num_rows", num_rows, 0)
        order = list(range(num_rows))
        random.Random(f"{self.seed}:rows:{block_id}").shuffle(order)
        return order

    def position(self, optimizer_step: int, micro_step: int = 0) -> tuple[int, int]:
        """Return the block that is trained after `optimizer_step` optimizer steps, and which micro-step of it."""
        block_id, update = divmod(optimizer_step, self.updates_per_block)
        return block_id, (update * self.gradient_accumulation_steps + micro_step) % self.steps_per_generation

    def first_block_after(self, optimizer_step: int) -> int:
        """Return the block that a run resumed at `optimizer_step`, which lies between blocks, begins with."""
        assert optimizer_step % self.updates_per_block == 0, f"step {optimizer_step} lies inside a block"
        return optimizer_step // self.updates_per_block

    def describe(self) -> str:
        """Return the plan as a table for a person, without a trailing newline."""
        sizes = [
            ("per block", self.completions_per_block),
            ("per update", self.completions_per_update),
            ("per micro-step", self.completions_per_micro_step),
            ("per device", self.per_device_train_batch_size),
        ]
        lines = [f"{'batch plan':<18}{'prompts':>12}{'completions':>14}"]
        lines += [f"{name:<18}{size / self.num_generations:>12,.6g}{size:>14,}" for name, size in sizes]
        lines += [f"{name:<17} {text}" for name, text in self._notes()]
        return "\n".join(lines)

    def _notes(self) -> list[tuple[str, str]]:
        iterations = f"{_count(self.num_iterations, 'iteration')} over "
        iterations += _count(self.steps_per_generation, "micro-step")
        run = f"{self.blocks:,} for {_count(self.max_steps, 'optimizer step')}"
        if unused := self.blocks * self.updates_per_block - self.max_steps:
            run += f"; the last serves {self.updates_per_block - unused} of {self.updates_per_block} updates"
        notes = [
            ("block", "what is generated together (TRL: generation batch)"),
            ("group", f"{self.num_generations} completions of each prompt"),
            (
                "updates per block",
                f"{self.updates_per_block:,} ({iterations}, {self.gradient_accumulation_steps:,} per update)",
            ),
            ("blocks in the run", run),
        ]
        if self.source is not None:
            notes += self.source.describe(self.max_steps, self.updates_per_block)
        else:
            epochs = f"{self.blocks / self.blocks_per_epoch:.4g} over {_count(self.num_prompts, 'prompt')}"
            if left_out := self.num_prompts % self.prompts_per_block:
                epochs += f"; {left_out:,} left out of each, too few for a block"
            notes.append(("epochs", epochs))
        notes.append(("devices", f"{self.num_processes:,}"))
        if self.max_tokens_per_micro_batch is not None:
            budget = f"at most {self.max_tokens_per_micro_batch:,} tokens each on a device, padding included"
            notes.append(("micro-batches", budget))
        return notes

    def _check_divisions(self) -> None:
        held, step = self.steps_per_generation, self.gradient_accumulation_steps
        if held % step:
            raise ConfigError(
                f"steps_per_generation={held} is not a multiple of gradient_accumulation_steps={step}, so a block "
                f"would end inside an update: the nearest steps_per_generation are {_nearest_multiples(held, step)}."
            )
        block, group = self.completions_per_block, self.num_generations
        if block % group:
            device = self.per_device_train_batch_size
            step = group // math.gcd(group, block // device)
            raise ConfigError(
                f"a block of {block} completions (per_device_train_batch_size={device} x "
                f"num_processes={self.num_processes} x steps_per_generation={self.steps_per_generation}) does not "
                f"divide into groups of num_generations={group}: the nearest per_device_train_batch_size are "
                f"{_nearest_multiples(device, step)}, the nearest num_generations {_nearest_divisors(block, group)}."
            )


def make_plan(
    *, gradient_accumulation_steps: int = 1, steps_per_generation: int | None = None, **sizes: Any
) -> BatchPlan:
    """Build the plan of a run from the trainer's settings, which keep TRL's names and meanings.

    The arguments are the attributes of `BatchPlan`; `steps_per_generation` None means `gradient_accumulation_steps`,
    which makes one update of each pass over a block.

    Raises:
        ConfigError: sizes that cannot work together; one sentence with both numbers and the nearest that do.
    """
    return BatchPlan(
        gradient_accumulation_steps=gradient_accumulation_steps,
        steps_per_generation=gradient_accumulation_steps if steps_per_generation is None else steps_per_generation,
        **sizes,
    )


def _count(number: int, one: str) -> str:
    return f"{number:,} {one}{'' if number == 1 else 's'}"


def _nearest_multiples(size: int, step: int) -> str:
    below = size - size % step
    return f"{below} and {below + step}" if below else f"{step} and {2 * step}"


def _nearest_divisors(total: int, size: int) -> str:
    divisors = [divisor for divisor in range(2, total + 1) if total % divisor == 0]
    below = [divisor for divisor in divisors if divisor < size][-1:]
    above = [divisor for divisor in divisors if divisor > size][:1]
    return " and ".join(str(divisor) for divisor in below + above) or "none"
