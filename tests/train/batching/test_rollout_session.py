"""Order in which blocks are submitted, pushed for and taken."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.data.batch_plan import BatchPlan, make_plan
from verifiers.data.sampler import rollout_seed
from verifiers.rollouts.block import BatchRequest
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock, TokenSequence
from verifiers.train.batching.rollout_session import RolloutPrefetcher
from verifiers.types import Outcome, RolloutKey

ROWS = [{"question": f"q{index}", "prompt": [{"role": "user", "content": f"q{index}"}]} for index in range(40)]


class Stub:
    """A generator that is done at once, and writes down what it is asked."""

    def __init__(self, num_batches_ahead: int, calls: list[tuple[Any, ...]]) -> None:
        self.num_batches_ahead = num_batches_ahead
        self.policy_version = 0
        self.calls = calls
        self.held: dict[int, ScoredBlock] = {}
        self.most_held = 0

    def submit_batch(self, request: BatchRequest) -> None:
        block_id, policy_version = request.batch_id, request.policy_version
        assert policy_version is not None
        self.calls.append(("submit", block_id, policy_version))
        assert block_id not in self.held
        self.held[block_id] = a_block(block_id, policy_version)
        self.most_held = max(self.most_held, len(self.held))

    def get_batch(self, block_id: int) -> ScoredBlock:
        self.calls.append(("get", block_id))
        return self.held.pop(block_id)

    def drain(self) -> None:
        self.calls.append(("drain",))

    def restore(self, block: ScoredBlock) -> None:
        self.held[block.block_id] = block

    def finished_blocks(self) -> list[ScoredBlock]:
        return list(self.held.values())


def a_block(block_id: int, version: int) -> ScoredBlock:
    row = TokenSequence([1], [2], [1], [-1.0], [version])
    rollout = Rollout(RolloutKey(block_id, 0, 0), Outcome.COMPLETED, "p", "", reward=1.0, rows=[row])
    return ScoredBlock(block_id, [Group(0, [rollout])], version)


def a_plan(updates: int = 1, max_steps: int = 6) -> BatchPlan:
    return make_plan(
        per_device_train_batch_size=4,
        num_generations=2,
        num_iterations=updates,
        max_steps=max_steps,
        num_prompts=len(ROWS),
    )


def a_prefetcher(ahead: int, plan: BatchPlan, **options: Any) -> tuple[RolloutPrefetcher, Stub]:
    calls: list[tuple[Any, ...]] = []
    stub = Stub(ahead, calls)
    generator: Any = stub
    return RolloutPrefetcher(ROWS, plan, generator, lambda step: calls.append(("push", step)), **options), stub


def run(prefetcher: RolloutPrefetcher, plan: BatchPlan, first: int = 0) -> list[ScoredBlock]:
    blocks = []
    for block_id in range(first, plan.blocks):
        step = block_id * plan.updates_per_block
        prefetcher.begin(block_id, step)
        blocks.append(prefetcher.take(block_id, step))
    return blocks


def test_weights_are_pushed_and_the_next_block_is_begun_before_a_block_is_waited_for() -> None:
    plan = a_plan(max_steps=3)
    prefetcher, stub = a_prefetcher(1, plan)
    run(prefetcher, plan)
    assert stub.calls == [
        ("push", 0),
        ("submit", 0, 0),
        ("submit", 1, 0),
        ("get", 0),
        ("push", 1),
        ("submit", 2, 1),
        ("get", 1),
        ("push", 2),
        ("get", 2),
    ]


def test_drained_pushes_wait_for_what_is_in_flight() -> None:
    plan = a_plan(max_steps=2)
    prefetcher, stub = a_prefetcher(1, plan, drains=True)
    run(prefetcher, plan)
    pushes = [index for index, call in enumerate(stub.calls) if call[0] == "push"]
    assert [stub.calls[index - 1] for index in pushes] == [("drain",)] * 2


@settings(max_examples=60, deadline=None)
@given(
    ahead=st.integers(0, 4),
    updates=st.integers(1, 3),
    max_steps=st.integers(1, 20),
    max_staleness=st.none() | st.integers(0, 8),
    cut=st.integers(0, 20),
    new_ahead=st.integers(0, 4),
)
def test_every_block_is_generated_once_and_none_is_staler_than_allowed_also_after_a_resume(
    ahead: int, updates: int, max_steps: int, max_staleness: int | None, cut: int, new_ahead: int
) -> None:
    plan = a_plan(updates, max_steps)
    cut = min(cut, plan.blocks)
    prefetcher, stub = a_prefetcher(ahead, plan, max_staleness=max_staleness)
    taken = run(prefetcher, make_part(plan, cut))
    kept = prefetcher.finished_blocks()
    resumed, again = a_prefetcher(new_ahead, plan, max_staleness=max_staleness)
    held = resumed.restore(kept)
    taken += run(resumed, plan, cut)
    assert [block.block_id for block in taken] == list(range(plan.blocks))
    assert stub.most_held <= ahead + 1
    generated_again = {call[1] for call in again.calls if call[0] == "submit"}
    assert not generated_again & set(held)
    if new_ahead == ahead:
        assert held == [block.block_id for block in kept]
    for block in taken:
        allowed = (ahead if block.block_id < cut else new_ahead) * updates
        if max_staleness is not None:
            allowed = min(allowed, max_staleness)
        staleness = block.block_id * updates - block.policy_version
        assert 0 <= staleness <= allowed


def make_part(plan: BatchPlan, blocks: int) -> Any:
    """Return the first blocks of a plan, as `run` reads it: what is submitted ahead is still the plan's."""

    class Part:
        updates_per_block = plan.updates_per_block

    Part.blocks = blocks  # type: ignore[attr-defined]
    return Part


def replacements(prefetcher: RolloutPrefetcher, block_id: int) -> list[RolloutKey]:
    return [request.key for request in prefetcher.batch_request(block_id, 0).replacements]


def test_a_block_is_asked_for_in_the_plans_order_each_rollout_with_a_seed_of_its_own() -> None:
    plan = a_plan()
    prefetcher, _ = a_prefetcher(1, plan)
    request = prefetcher.batch_request(2, optimizer_step=7)
    asked = request.requests
    assert [(rollout.key.example_id, rollout.key.generation) for rollout in asked] == plan.requests(2)
    assert [rollout.prompt for rollout in asked] == [ROWS[rollout.key.example_id]["prompt"] for rollout in asked]
    assert [rollout.seed for rollout in asked] == [rollout_seed(plan.seed, rollout.key) for rollout in asked]
    assert len({rollout.seed for rollout in asked}) == len(asked)
    assert (request.batch_id, request.policy_version) == (2, 7)


def test_replacements_are_none_of_the_blocks_own_prompts_and_follow_from_seed_and_block() -> None:
    plan = a_plan()
    prefetcher, _ = a_prefetcher(1, plan, replacement_groups=5)
    again, _ = a_prefetcher(0, plan, replacement_groups=5)
    others = replacements(prefetcher, 3)
    assert others == replacements(again, 3)
    assert len({key.example_id for key in others}) == 5
    assert not {key.example_id for key in others} & set(plan.example_ids(3))
    assert [key.generation for key in others] == [0, 1] * 5
    assert {key.example_id for key in others} != {key.example_id for key in replacements(prefetcher, 4)}
    none, _ = a_prefetcher(1, plan)
    assert replacements(none, 3) == []
