"""From the plan to the micro-batches: every planned rollout ends once, in order, whatever arrives when.

Plan, prefetcher, generator, block building, streaming, block log and a checkpoint's blocks, as the trainer puts
them together; only the policy is a script, and nothing is computed on what arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.data.batch_plan import BatchPlan, make_plan
from verifiers.envs.environment import Environment
from verifiers.errors import NothingScoredError
from verifiers.rollouts.block import GroupPolicy
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import Group, ScoredBlock
from verifiers.rubrics.rubric import Rubric
from verifiers.testing import FakeClient
from verifiers.testing.script import END_ID
from verifiers.train.batching.advantages import has_zero_variance
from verifiers.train.batching.rollout_session import RolloutPrefetcher
from verifiers.train.batching.training_block import BlockStream, TrainingBlock, build_training_block
from verifiers.train.checkpoint.block_log import block_record
from verifiers.train.checkpoint.checkpoint import load_pending_blocks, save_pending_blocks
from verifiers.train.config import GRPOConfig
from verifiers.types import RolloutKey, State

PROMPTS = 24
ROWS = [{"prompt": [{"role": "user", "content": f"q{index}"}], "answer": ""} for index in range(PROMPTS)]


@dataclass(frozen=True)
class Sizes:
    per_device: int
    ranks: int
    accumulated: int
    updates: int
    generations: int
    passes: int
    ahead: int
    blocks: int
    streaming: bool
    extra: int
    retries: int

    def plan(self) -> BatchPlan:
        updates_per_block = self.updates * self.passes
        return make_plan(
            per_device_train_batch_size=self.per_device * self.generations,
            num_processes=self.ranks,
            gradient_accumulation_steps=self.accumulated,
            steps_per_generation=self.accumulated * self.updates,
            num_generations=self.generations,
            num_iterations=self.passes,
            max_steps=self.blocks * updates_per_block,
            num_prompts=PROMPTS,
            seed=3,
        )


SIZES = st.builds(
    Sizes,
    per_device=st.integers(1, 2),
    ranks=st.sampled_from([1, 2, 4]),
    accumulated=st.integers(1, 2),
    updates=st.integers(1, 2),
    generations=st.integers(2, 4),
    passes=st.integers(1, 2),
    ahead=st.integers(0, 3),
    blocks=st.integers(1, 3),
    streaming=st.booleans(),
    extra=st.sampled_from([0, 0, 3]),
    retries=st.integers(0, 2),
).filter(lambda sizes: sizes.per_device * sizes.ranks * sizes.accumulated * sizes.updates <= PROMPTS // 2)


@functools.cache
def args() -> GRPOConfig:
    sizes = {"max_completion_length": 7, "skip_zero_advantage_rows": False}
    return GRPOConfig("unused", use_cpu=True, bf16=False, loss_type="dapo", **sizes)


class Fated(Environment):
    """Asks the policy once; what becomes of a rollout is drawn from its identity."""

    def __init__(self, fates: int) -> None:
        self.fates = fates
        self.rubric = Rubric([self.reward])
        self.sampling_args: dict[str, Any] = {}

    async def rollout(self, client: Any, model: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        answer = await client.chat.completions.create(model=model, messages=prompt)
        said = answer.choices[0].message.content
        if random.Random(f"{self.fates}:fails:{said}").random() < 0.15:
            raise LookupError("failed")
        return [{"role": "assistant", "content": said}], State()

    def reward(self, prompt: Any, completion: Any) -> float:
        draw = random.Random(f"{self.fates}:scores:{completion[-1]['content']}")
        if draw.random() < 0.1:
            raise ZeroDivisionError("no score")
        zero_variance = random.Random(f"{self.fates}:flat:{prompt[-1]['content']}").random() < 0.3
        return 1.0 if zero_variance else draw.random()


def policy(arrival: int) -> FakeClient:
    """Answers with the request's seed, which names the rollout, after a wait drawn by `arrival`."""
    latency = random.Random(arrival)

    async def answer(body: dict[str, Any]) -> str:
        for _ in range(latency.randrange(25)):
            await asyncio.sleep(0)
        return str(body["seed"])

    return FakeClient(answer)


@dataclass
class Trained:
    """The record of one run.

    Attributes:
        rows: block and sampled texts of each micro-batch that was trained, in order of training.
        texts: what each rollout of a block sampled.
        records: the block log.
    """

    rows: list[tuple[int, list[str]]] = field(default_factory=list)
    texts: dict[RolloutKey, str] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)


def is_zero_variance(group: Group) -> bool:
    return has_zero_variance(group, zero_truncated_completions=False)


class Loop:
    """The trainer's own loop, from block `first` on."""

    def __init__(self, sizes: Sizes, fates: int, arrival: int, limit: int) -> None:
        self.sizes, self.plan = sizes, sizes.plan()
        client = policy(arrival)
        self.generator = AsyncBatchGenerator(
            Fated(fates),
            client,
            "fake",
            num_batches_ahead=sizes.ahead,
            max_concurrent=limit,
            generation_timeout_s=15.0,
            generation="messages",
            group_policy=GroupPolicy(sizes.retries, is_zero_variance if sizes.extra else None),
        )

        def push(step: int) -> None:
            client.weight_version = step

        self.prefetcher = RolloutPrefetcher(ROWS, self.plan, self.generator, push, replacement_groups=sizes.extra)
        self.done = Trained()

    def run(self, first: int, stop: int) -> None:
        plan = self.plan
        for block in range(first, stop):
            batches: list[Any] = []
            stream: BlockStream | None = None
            for step in range(block * plan.updates_per_block, (block + 1) * plan.updates_per_block):
                for micro in range(plan.gradient_accumulation_steps):
                    block_id, in_block = plan.position(step, micro)
                    assert block_id == block
                    if stream is None and not batches:
                        self.prefetcher.begin(block, step)
                        if self.sizes.streaming:
                            stream = BlockStream(self.prefetcher, plan, args(), block, step)
                        else:
                            taken = self.prefetcher.take(block, step)
                            batches = self._finish(taken, build_training_block(taken, plan, args()), step)
                    if stream is not None and in_block == len(batches):
                        batches.append(stream.next()[0])
                        if len(batches) == plan.steps_per_generation:
                            self._finish(*stream.finish(), block * plan.updates_per_block)
                    self.done.rows.append((block, texts_in(batches[in_block], plan.num_processes)))

    def _finish(self, block: ScoredBlock, trained: TrainingBlock, step: int) -> list[Any]:
        self.done.records.append(block_record(block, step, trained.dropped))
        for rollout in block.launched:
            for row in rollout.rows:
                self.done.texts[rollout.key] = text_of(row.completion_ids)
        return trained.micro_steps


def texts_in(cells: Any, ranks: int) -> list[str]:
    """Return what was sampled in the rows of a micro-step, over its ranks and micro-batches."""
    assert len(cells) == ranks
    found = []
    for batch in (batch for of_rank in cells for batch in of_rank):
        for row in range(len(batch["input_ids"])):
            if batch["sampled_tokens"][row]:
                ids = batch["input_ids"][row][batch["loss_mask"][row].bool()].tolist()
                found.append(text_of(ids))
    return found


def text_of(ids: list[int]) -> str:
    assert ids[-1] == END_ID
    return "".join(map(chr, ids[:-1]))


def a_run(sizes: Sizes, fates: int, arrival: int, limit: int, cut: int) -> Trained | None:
    """Return a run that is stopped after `cut` blocks and resumes from what its checkpoint keeps.

    None where nothing of a block was scored, which ends a run.
    """
    with contextlib.suppress(NothingScoredError):
        return whole_run(sizes, fates, arrival, limit, cut)
    return None


def whole_run(sizes: Sizes, fates: int, arrival: int, limit: int, cut: int) -> Trained:
    first = Loop(sizes, fates, arrival, limit)
    with first.generator, TemporaryDirectory() as scratch:
        first.run(0, cut)
        save_pending_blocks(Path(scratch), first.prefetcher.finished_blocks() if cut else [])
        kept = load_pending_blocks(scratch)
    second = Loop(sizes, fates, arrival + 1, limit)
    with second.generator:
        second.prefetcher.restore(kept)
        second.run(cut, sizes.blocks)
    one, other = first.done, second.done
    return Trained(one.rows + other.rows, {**one.texts, **other.texts}, one.records + other.records)


@settings(max_examples=40, deadline=None)
@given(
    sizes=SIZES,
    fates=st.integers(0, 10**6),
    arrivals=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
    limits=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    cuts=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_every_planned_rollout_is_trained_or_dropped_with_a_reason_once_and_in_order(
    sizes: Sizes, fates: int, arrivals: Any, limits: Any, cuts: Any
) -> None:
    """Two arrival orders, two limits and two interruptions of one run: what is trained is the same."""
    plan = sizes.plan()
    runs = [
        a_run(sizes, fates, arrival, limit, min(cut, sizes.blocks))
        for arrival, limit, cut in zip(arrivals, limits, cuts, strict=True)
    ]
    one, other = runs
    if one is None or other is None:
        assert one is other
        return
    for run in (one, other):
        assert [record["block_id"] for record in run.records] == list(range(plan.blocks))
        assert len(set(run.texts.values())) == len(run.texts)
        for record in run.records:
            check_block(record, run, plan, replacements=sizes.extra)
    assert [without_clock(record) for record in one.records] == [without_clock(record) for record in other.records]
    assert one.rows == other.rows
    assert one.texts == other.texts


def check_block(record: dict[str, Any], run: Trained, plan: BatchPlan, replacements: int) -> None:
    block = record["block_id"]
    trained = [tuple(pair) for pair in record["trained"]]
    dropped = [(item["example_id"], item["generation"]) for item in record["dropped"]]
    assert all(item["reason"] for item in record["dropped"])
    ended = trained + dropped
    assert len(set(ended)) == len(ended)
    planned = plan.requests(block)
    assert set(planned) <= set(ended)
    assert replacements or len(ended) == len(planned)
    # each row as often as the block is passed over, and nothing else, in blocks that follow one another
    texts = Counter(text for of_block, texts in run.rows if of_block == block for text in texts)
    assert texts == {run.texts[RolloutKey(block, *pair)]: plan.num_iterations for pair in trained}
    assert [of_block for of_block, _ in run.rows] == sorted(of_block for of_block, _ in run.rows)


def without_clock(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "dropped": [{**item, "seconds": 0.0} for item in record["dropped"]]}
