"""The batch plan: which prompts are generated and trained when, known in full before the first rollout.

Everything here is a pure function of the plan and of a block id or an optimizer step, so any rank can compute
any block, and a resumed run needs no state but its optimizer step. Sizes always say their unit, *prompts* or
*completions*. The plan holds no data: it numbers the rows of one dataset, or asks a curriculum (a `RowSource`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from dataclasses import dataclass, field

from verifiers.data.order import epoch_order, epoch_rows, micro_batch_order, rollout_seed
from verifiers.data.plan_table import plan_table
from verifiers.data.sizes import check_size
from verifiers.data.source import BlockPart, GivesSpares, RowSource
from verifiers.errors import ConfigError

__all__ = [
    "BatchPlan",
    "Position",
    "check_size",
    "epoch_order",
    "make_plan",
    "micro_batch_order",
    "rollout_seed",
]


@dataclass(frozen=True, slots=True)
class Position:
    """Where training stands.

    Attributes:
        block_id: the block being trained, from 0.
        iteration: the pass over that block, 0 .. num_iterations - 1.
        micro_batch: the micro-batch of the block, 0 .. steps_per_generation - 1.
        update_in_block: optimizer steps this block has served before, 0 .. updates_per_block - 1.
    """

    block_id: int
    iteration: int
    micro_batch: int
    update_in_block: int


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The sizes of a training run and everything that follows from them; build it with `make_plan`.

    Attributes:
        per_device_train_batch_size: completions per device and micro-step.
        num_processes: devices.
        gradient_accumulation_steps: micro-steps per optimizer step.
        steps_per_generation: K, micro-batches in a block.
        num_generations: G, rollouts of each prompt.
        num_iterations: mu, passes over each block.
        max_steps: optimizer steps in the run.
        num_prompts: rows of the dataset.
        seed: orders prompts and rows, and seeds rollouts.
        shuffle: visit the dataset in a new order each epoch; otherwise in its own order.
        source: chooses the rows in place of that order, such as a curriculum.
        max_tokens_per_pass: what passes over a micro-batch are cut by; None where they are cut by rows.

    Raises:
        ConfigError: sizes that do not divide, a stage that would end inside a pass that is made again; the message
            names both numbers and the nearest that do.
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
    max_tokens_per_pass: int | None = None

    def __post_init__(self) -> None:
        for size in dataclasses.fields(self):
            if size.name not in ("num_generations", "seed", "shuffle", "source", "max_tokens_per_pass"):
                check_size(size.name, getattr(self, size.name), 1)
        if self.num_generations == 1:
            raise ConfigError(
                "num_generations is 1, but an advantage compares rollouts of one prompt: use at least 2."
            )
        check_size("num_generations", self.num_generations, 2)
        self._check_updates()
        self._check_groups()
        if self.source is None:
            self._check_dataset()
        else:
            for step in self.source.until_steps:
                self._check_border(step)

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

    @property
    def prompts_left_out_per_epoch(self) -> int:
        """Prompts at the end of each epoch that make no full block."""
        return self.num_prompts % self.prompts_per_block

    @property
    def epochs(self) -> float:
        """Passes over the dataset that the run makes."""
        return self.blocks / self.blocks_per_epoch

    def example_ids(self, block_id: int) -> list[int]:
        """The prompts of a block as dataset rows, each once, in order, by seed, block and source alone."""
        check_size("block_id", block_id, 0)
        if self.source is not None:
            return [row for part in self.parts(block_id) for row in self.source.example_ids(part)]
        epoch, block_in_epoch = divmod(block_id, self.blocks_per_epoch)
        start = block_in_epoch * self.prompts_per_block
        stop = start + self.prompts_per_block
        if not self.shuffle:
            return list(range(start, stop))
        return list(epoch_rows(self.num_prompts, self.seed, epoch)[start:stop])

    def parts(self, block_id: int) -> list[BlockPart]:
        """The parts of a block that are trained in different stages of the source; one part without a source."""
        until = self.source.until_steps if self.source is not None else ()
        borders = tuple(self.prompts_before(step) for step in until)
        first, step = block_id * self.prompts_per_block, block_id * self.updates_per_block
        last = first + self.prompts_per_block
        # of stages that begin with the same prompt, as they may after the run's last step, the latest
        cuts = [
            (at, border)
            for at, border, after in zip(until, borders, (*borders[1:], last), strict=False)
            if first < border < last and border != after
        ]
        begins = [(step, first), *cuts]
        ends = [border for _, border in cuts] + [last]
        return [
            BlockPart(block_id, at, start, end - start, self.prompts_per_block, self.updates_per_block, borders)
            for (at, start), end in zip(begins, ends, strict=True)
        ]

    def prompts_before(self, optimizer_step: int) -> int:
        """Prompts of the run of which a completion is first trained before an optimizer step.

        Where a block is passed over several times, those of the whole block that the step lies in, if it is not the
        block's first.
        """
        blocks, inside = divmod(optimizer_step, self.updates_per_block)
        if self.num_iterations > 1:
            return (blocks + bool(inside)) * self.prompts_per_block
        # rounded up: a stage that ends after the run may cut a group, and keeps what is trained before that
        return blocks * self.prompts_per_block - (-inside * self.completions_per_update // self.num_generations)

    def requests(self, block_id: int) -> list[tuple[int, int]]:
        """The rollouts of a block as (example id, generation), all generations of a prompt in a row."""
        return [
            (example_id, generation)
            for example_id in self.example_ids(block_id)
            for generation in range(self.num_generations)
        ]

    def spare_ids(self, block_id: int, count: int) -> list[int]:
        """Up to `count` other rows that may take the place of a block's prompts, by seed, block and source alone.

        They are of the block's stage; a block in which a stage ends has none.
        """
        if self.source is not None:
            parts = self.parts(block_id)
            if len(parts) > 1 or not isinstance(self.source, GivesSpares):
                return []
            return list(self.source.spares(parts[0], count))
        planned = set(self.example_ids(block_id))
        others = [example_id for example_id in range(self.num_prompts) if example_id not in planned]
        return random.Random(f"{self.seed}:spares:{block_id}").sample(others, min(count, len(others)))

    def micro_step_rows(self, block_id: int) -> list[list[list[int]]]:
        """Example ids of a block's completions before rows are shuffled, as [micro-step][device][row].

        A micro-step takes the next `completions_per_micro_step` completions, and the devices share those in
        order of rank; together the ranks hold each completion once.
        """
        rows = [example_id for example_id, _ in self.requests(block_id)]
        size = self.per_device_train_batch_size
        slices = [rows[start : start + size] for start in range(0, len(rows), size)]
        devices = self.num_processes
        return [slices[start : start + devices] for start in range(0, len(slices), devices)]

    def shuffle_order(self, block_id: int, num_rows: int) -> list[int]:
        """The permutation of 0 .. `num_rows` - 1 by which a block is cut into updates, by (seed, block_id) alone.

        Within an update the trainer deals rows by length. The permutation is independent of `shuffle`, which is about
        the dataset, and of any other random state. Where a stage ends inside the block, rows stay on their side of
        that border.
        """
        check_size("block_id", block_id, 0)
        check_size("num_rows", num_rows, 0)
        chance = random.Random(f"{self.seed}:rows:{block_id}")
        sizes = [part.prompts * self.num_generations for part in self.parts(block_id)][:-1]
        edges = [min(edge, num_rows) for edge in itertools.accumulate(sizes, initial=0)] + [num_rows]
        order: list[int] = []
        for start, stop in itertools.pairwise(edges):
            rows = list(range(start, stop))
            chance.shuffle(rows)
            order += rows
        return order

    def position(self, optimizer_step: int, micro_step: int = 0) -> Position:
        """Where training stands at a micro-step of an optimizer step.

        Args:
            optimizer_step: optimizer steps done so far.
            micro_step: 0 .. gradient_accumulation_steps - 1 within the step, default 0.

        Raises:
            ConfigError: `micro_step` is outside its step, or a number is negative.
        """
        check_size("optimizer_step", optimizer_step, 0)
        check_size("micro_step", micro_step, 0)
        if micro_step >= self.gradient_accumulation_steps:
            raise ConfigError(
                f"micro_step is {micro_step}, but an optimizer step has only "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} micro-steps, counted from 0."
            )
        block_id, update_in_block = divmod(optimizer_step, self.updates_per_block)
        micro_step_in_block = update_in_block * self.gradient_accumulation_steps + micro_step
        iteration, micro_batch = divmod(micro_step_in_block, self.steps_per_generation)
        return Position(block_id, iteration, micro_batch, update_in_block)

    def first_block_after(self, optimizer_step: int) -> int:
        """The block that a run resumed at `optimizer_step` begins with.

        Raises:
            ConfigError: the step lies inside a block; checkpoints stand at block boundaries only.
        """
        check_size("optimizer_step", optimizer_step, 0)
        block_id, inside = divmod(optimizer_step, self.updates_per_block)
        if inside:
            before = block_id * self.updates_per_block
            raise ConfigError(
                f"optimizer step {optimizer_step} lies inside block {block_id}, whose updates_per_block is "
                f"{self.updates_per_block}: resume at step {before} or {before + self.updates_per_block}."
            )
        return block_id

    def describe(self) -> str:
        """The plan as a table for a person, without a trailing newline."""
        return plan_table(self)

    def _check_updates(self) -> None:
        held, step = self.steps_per_generation, self.gradient_accumulation_steps
        if held % step:
            raise ConfigError(
                f"steps_per_generation={held} is not a multiple of gradient_accumulation_steps={step}, so a block "
                f"would end inside an update: the nearest steps_per_generation are {_nearest_multiples(held, step)}."
            )

    def _check_groups(self) -> None:
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

    def _check_border(self, step: int) -> None:
        """A new stage may begin with a block, and between two updates of its only pass where no group is cut."""
        inside = step % self.updates_per_block
        if step >= self.max_steps or not inside:
            return
        if self.num_iterations > 1:
            every, why = self.updates_per_block, f"num_iterations={self.num_iterations} trains a block's rows again"
        elif cut := inside * self.completions_per_update % self.num_generations:
            every = self.num_generations // math.gcd(self.num_generations, self.completions_per_update)
            why = f"it would cut a group of num_generations={self.num_generations} after {cut} completions"
        else:
            return
        raise ConfigError(
            f"a stage of the curriculum ends at optimizer step {step}, inside block {step // self.updates_per_block} "
            f"of {self.updates_per_block} updates, and {why}: end it at step {_nearest_multiples(step, every)}."
        )

    def _check_dataset(self) -> None:
        if self.num_prompts < self.prompts_per_block:
            raise ConfigError(
                f"the dataset has {self.num_prompts} prompts, but a block holds {self.prompts_per_block} different "
                f"ones: use at least {self.prompts_per_block} prompts, or blocks of at most "
                f"{self.num_prompts * self.num_generations} completions in place of {self.completions_per_block}."
            )


def make_plan(
    *,
    per_device_train_batch_size: int,
    num_generations: int,
    max_steps: int,
    num_prompts: int,
    num_processes: int = 1,
    gradient_accumulation_steps: int = 1,
    steps_per_generation: int | None = None,
    num_iterations: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    source: RowSource | None = None,
    max_tokens_per_pass: int | None = None,
) -> BatchPlan:
    """Build the plan of a run from the trainer's settings, which keep TRL's names and meanings.

    Args: the attributes of `BatchPlan`, with their units and defaults; `steps_per_generation` None means
        `gradient_accumulation_steps`, which makes one update of each pass over a block.

    Raises:
        ConfigError: sizes that cannot work together; one sentence with both numbers and the nearest that do.
    """
    if steps_per_generation is None:
        steps_per_generation = gradient_accumulation_steps
    return BatchPlan(
        per_device_train_batch_size=per_device_train_batch_size,
        steps_per_generation=steps_per_generation,
        num_generations=num_generations,
        max_steps=max_steps,
        num_prompts=num_prompts,
        num_processes=num_processes,
        gradient_accumulation_steps=gradient_accumulation_steps,
        num_iterations=num_iterations,
        seed=seed,
        shuffle=shuffle,
        source=source,
        max_tokens_per_pass=max_tokens_per_pass,
    )


def _nearest_multiples(size: int, step: int) -> str:
    below = size - size % step
    return f"{below} and {below + step}" if below else f"{step} and {2 * step}"


def _nearest_divisors(total: int, size: int) -> str:
    divisors = [divisor for divisor in range(2, total + 1) if total % divisor == 0]
    below = [divisor for divisor in divisors if divisor < size][-1:]
    above = [divisor for divisor in divisors if divisor > size][:1]
    return " and ".join(str(divisor) for divisor in below + above) or "none"
