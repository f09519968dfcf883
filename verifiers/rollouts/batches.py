"""What goes into a generator and what comes out: batch requests from columns, and a training loop's items."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verifiers.errors import ConfigError
from verifiers.rollouts.rollout import Rollout, RolloutRequest, ScoredBlock
from verifiers.types import RolloutKey

__all__ = ["BatchRequest", "EndOfBlock", "EndOfData", "GeneratesBlocks", "Item", "MicroBatch", "training_items"]


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One block to generate.

    Attributes:
        batch_id: the block id; blocks are taken by it.
        env_inputs: columns `prompt`, and where there are any `answer`, `task`, `info`, `example_id`, `seed`;
            each prompt appears `num_generations` times in a row.
        num_generations: size of a group.
        policy_version: version on the server when the block is submitted.
    """

    batch_id: int
    env_inputs: Mapping[str, Sequence[Any]]
    num_generations: int = 1
    policy_version: int = 0

    def requests(self) -> list[RolloutRequest]:
        """The rollouts asked for, in order.

        Raises:
            ConfigError: no prompts, columns of unequal length, an incomplete last group, or a prompt in two places.
        """
        columns = {name: values for name, values in self.env_inputs.items() if values is not None}
        prompts = columns.get("prompt", ())
        if not len(prompts):
            raise ConfigError(f"batch {self.batch_id} has no prompts; give env_inputs a column 'prompt'.")
        for name, values in columns.items():
            if len(values) != len(prompts):
                raise ConfigError(
                    f"batch {self.batch_id}: column {name!r} has {len(values)} values, 'prompt' has {len(prompts)}."
                )
        size = self.num_generations
        if size < 1:
            raise ConfigError(f"batch {self.batch_id}: num_generations is {size}; give 1 or more.")
        if len(prompts) % size:
            raise ConfigError(
                f"batch {self.batch_id} has {len(prompts)} prompts, which num_generations={size} does not divide."
            )
        requests = [self._request(row, size) for row in range(len(prompts))]
        repeated = [key for key, count in Counter(request.key for request in requests).items() if count > 1]
        if repeated:
            raise ConfigError(
                f"batch {self.batch_id}: the rows of example_id {repeated[0].example_id} do not stand together; give "
                f"each prompt num_generations={size} times in a row, under one example_id."
            )
        return requests

    def _request(self, row: int, size: int) -> RolloutRequest:
        def cell(name: str, default: Any) -> Any:
            values = self.env_inputs.get(name)
            return default if values is None or values[row] is None else values[row]

        example_id = int(cell("example_id", row // size))
        return RolloutRequest(
            RolloutKey(self.batch_id, example_id, row % size),
            prompt=cell("prompt", ""),
            answer=cell("answer", ""),
            task=cell("task", "default"),
            info=cell("info", {}),
            seed=cell("seed", None),
        )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Item: train on micro-batch `index` of the block, in pass `iteration` over it."""

    block: ScoredBlock = field(repr=False)
    iteration: int
    index: int
    rollouts: Sequence[Rollout] = field(repr=False)


@dataclass(frozen=True, slots=True)
class EndOfBlock:
    """Item: all passes over the block have been handed out; weights may be pushed now."""

    block_id: int


@dataclass(frozen=True, slots=True)
class EndOfData:
    """Item: every planned block has been handed out."""


Item = MicroBatch | EndOfBlock | EndOfData


class GeneratesBlocks(Protocol):
    """The part of AsyncBatchGenerator that `training_items` uses."""

    num_batches_ahead: int

    def submit_batch(self, request: BatchRequest) -> None: ...

    def get(self, block_id: int, timeout_s: float | None = None) -> ScoredBlock: ...

    def check(self) -> None: ...


def training_items(
    generator: GeneratesBlocks,
    blocks: Iterable[BatchRequest],
    *,
    micro_batches: int,
    iterations: int = 1,
    before_submit: Callable[[BatchRequest], None] | None = None,
) -> Iterator[Item]:
    """Everything a training loop of one's own needs, in order.

    Yields each block's `micro_batches` MicroBatch items, `iterations` times over, then EndOfBlock; after the last
    block EndOfData. Keeps the generator's `num_batches_ahead` blocks in flight. Errors are raised, never yielded.

    Args:
        before_submit: called just before each block is submitted: the place to push weights.

    Raises:
        ConfigError: a block's rollouts cannot be cut into `micro_batches` equal parts.
        Error: whatever generation failed with.
    """
    waiting: list[int] = []
    source = iter(blocks)

    def submit_next() -> None:
        request = next(source, None)
        if request is not None:
            if before_submit is not None:
                before_submit(request)
            generator.submit_batch(request)
            waiting.append(request.batch_id)

    for _ in range(generator.num_batches_ahead + 1):
        submit_next()
    while waiting:
        block = generator.get(waiting.pop(0))
        size, rest = divmod(len(block.rollouts), micro_batches)
        if rest:
            raise ConfigError(
                f"block {block.block_id} has {len(block.rollouts)} rollouts, which {micro_batches} micro-batches "
                "do not divide."
            )
        for iteration in range(iterations):
            for index in range(micro_batches):
                generator.check()
                yield MicroBatch(block, iteration, index, block.rollouts[index * size : (index + 1) * size])
        yield EndOfBlock(block.block_id)
        # not before: a block submitted while this one trains would be staler than num_batches_ahead promises
        submit_next()
    yield EndOfData()
