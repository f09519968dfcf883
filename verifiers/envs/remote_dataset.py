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

import logging
import math
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from verifiers.data.plan import check_size
from verifiers.data.source import BlockPart
from verifiers.envs.remote_env import sample_requests
from verifiers.envs.remote_reward import remote_reward
from verifiers.envs.remote_wire import RETRY_WAITS_S, Dataserver
from verifiers.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["Place", "RemoteRLDataset", "remote_reward"]

logger = logging.getLogger("verifiers.envs")

_KEPT_BLOCKS = 4


class Place(NamedTuple):
    """Where a row of the dataset is trained.

    Attributes:
        generation_step: its block.
        accumulation_step: the micro-step of the block, counted on its device, whose slice begins with it, before TRL
            shuffles the block.
        slot: its place among the block's prompts.
    """

    generation_step: int
    accumulation_step: int
    slot: int


class RemoteRLDataset:
    """The prompts of a run, one row a prompt, in the order in which TRL's sampler visits them unshuffled.

    Row `index` belongs to block `index // prompts_per_block`. A block is fetched by one request when its first row is
    wanted, with the optimizer step at which its first pass begins; all ranks get the same rows, whichever they read.

    Args:
        url: of the dataserver, without a path.
        per_device_train_batch_size: completions per device and micro-step.
        num_generations: G, completions of each prompt.
        gradient_accumulation_steps: micro-steps per optimizer step.
        steps_per_generation: K, micro-steps that one block is cut into; None: `gradient_accumulation_steps`.
        num_iterations: mu, passes over each block.
        num_processes: devices; None reads WORLD_SIZE, 1 where it is not set.
        max_steps: optimizer steps in the run; None takes the server's.
        fetch_size: prompts in one request; None: those of a block. A smaller one cuts a block into several requests.
        seed: of the draws, in place of the server's.
        token_var, timeout_s, retry_waits_s: as in `RemoteEnv`.

    Raises:
        ConfigError: sizes that cannot be; no `max_steps`; a stage that would end inside a block, or has fewer rows
            than a block takes from it.
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
        fetch_size: int | None = None,
        seed: int | None = None,
        token_var: str | None = None,
        timeout_s: float = 90.0,
        retry_waits_s: Sequence[float] = RETRY_WAITS_S,
    ) -> None:
        micro_steps = gradient_accumulation_steps if steps_per_generation is None else steps_per_generation
        processes = int(os.environ.get("WORLD_SIZE", "1")) if num_processes is None else num_processes
        self.per_device = check_size("per_device_train_batch_size", per_device_train_batch_size, 1)
        self.num_generations = check_size("num_generations", num_generations, 1)
        self.accumulation = check_size("gradient_accumulation_steps", gradient_accumulation_steps, 1)
        self.steps_per_generation = check_size("steps_per_generation", micro_steps, 1)
        self.micro_steps_per_block = self.steps_per_generation * check_size("num_iterations", num_iterations, 1)
        self.prompts_per_block = self._prompts(check_size("num_processes", processes, 1))
        self._server = Dataserver(url, token_var, timeout_s, tuple(retry_waits_s))
        meta = self._server.meta()
        steps = meta.total_steps if max_steps is None else max_steps
        if steps is None:
            raise ConfigError("max_steps is not given, and the dataserver's curriculum has no end; give max_steps.")
        self.max_steps = check_size("max_steps", steps, 1)
        self.seed = meta.curriculum.seed if seed is None else seed
        self.fetch_size = min(self.prompts_per_block, meta.limits.max_batch) if fetch_size is None else fetch_size
        if not 1 <= self.fetch_size <= self.prompts_per_block:
            raise ConfigError(
                f"fetch_size is {fetch_size!r}, but a block holds {self.prompts_per_block} prompts: give 1 to "
                f"{self.prompts_per_block}."
            )
        meta.curriculum.check(meta.sizes, self.max_steps)
        for step in meta.curriculum.until_steps:
            self._check_border(step)
        # rounded up: a stage that ends after the run may end inside a block, and keeps what begins before that
        self._borders = tuple(
            -(-step * self.accumulation // self.micro_steps_per_block) * self.prompts_per_block
            for step in meta.curriculum.until_steps
        )
        blocks = len(self) // self.prompts_per_block
        meta.curriculum.check_blocks(meta.sizes, blocks, self.prompts_per_block, self._borders)
        self._kept: OrderedDict[int, list[dict[str, Any]]] = OrderedDict()

    def __len__(self) -> int:
        micro_steps = self.max_steps * self.accumulation
        return -(-micro_steps // self.micro_steps_per_block) * self.prompts_per_block

    def __getitem__(self, index: int) -> dict[str, Any]:
        """{"prompt": messages or text, "sample_id", "dataset_id", "metadata"}, and what it was drawn for.

        That is "optimizer_step", at which its block is first trained, "generation_step" and "seed"; TRL hands them to
        reward functions.

        Raises:
            IndexError: beyond the run.
            InfraError: the server gave no answer, also after retries.
        """
        place = self.place(index)
        block = self._kept.get(place.generation_step)
        if block is None:
            block = self._kept[place.generation_step] = self._fetch(place.generation_step)
            if len(self._kept) > _KEPT_BLOCKS:
                self._kept.popitem(last=False)
        return dict(block[place.slot])

    def place(self, index: int) -> Place:
        """Where row `index` is trained.

        Raises:
            IndexError: beyond the run.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} is asked for, but the run has {len(self)}")
        block, slot = divmod(index, self.prompts_per_block)
        on_device = slot * self.num_generations % (self.per_device * self.steps_per_generation)
        return Place(block, on_device // self.per_device, slot)

    def optimizer_step(self, generation_step: int) -> int:
        """The optimizer step at which the first pass over a block begins."""
        return generation_step * self.micro_steps_per_block // self.accumulation

    def as_dataset(self) -> Dataset:
        """The same rows as a `datasets.Dataset`, which TRL insists on; each is fetched when it is read.

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
        part = BlockPart(
            block_id=block_id,
            optimizer_step=self.optimizer_step(block_id),
            start=block_id * self.prompts_per_block,
            prompts=self.prompts_per_block,
            prompts_per_block=self.prompts_per_block,
            updates_per_block=max(1, self.micro_steps_per_block // self.accumulation),
            borders=self._borders,
        )
        drawn_for = {"optimizer_step": part.optimizer_step, "generation_step": block_id, "seed": self.seed}
        rows = []
        for body in sample_requests(part, self.seed, self.fetch_size):
            for sample in self._server.samples(body):
                messages = sample.get("messages")
                row = {"prompt": sample["prompt"] if messages is None else messages}
                row |= {name: sample[name] for name in ("sample_id", "dataset_id", "metadata")}
                rows.append({**row, **drawn_for})
        return rows

    def _prompts(self, processes: int) -> int:
        completions = self.per_device * processes * self.steps_per_generation
        prompts, rest = divmod(completions, self.num_generations)
        if rest:
            logger.warning(
                "a block of %d completions (per_device_train_batch_size=%d x %d devices x %d micro-steps) does not "
                "divide into groups of num_generations=%d: one prompt a generation step is fetched.",
                completions,
                self.per_device,
                processes,
                self.steps_per_generation,
                self.num_generations,
            )
            return 1
        return prompts

    def _check_border(self, step: int) -> None:
        """TRL shuffles a block over its updates, so a stage can only begin with a block."""
        if step >= self.max_steps or step * self.accumulation % self.micro_steps_per_block == 0:
            return
        every = self.micro_steps_per_block // math.gcd(self.micro_steps_per_block, self.accumulation)
        below = step - step % every
        nearest = f"{below} or {below + every}" if below else f"{every}"
        raise ConfigError(
            f"a stage of the dataserver ends at optimizer step {step}, inside a block of {every} optimizer steps: "
            f"end it at step {nearest}."
        )
