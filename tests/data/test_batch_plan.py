from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from verifiers.data.batch_plan import BatchPlan, make_plan
from verifiers.data.sampler import rollout_seed
from verifiers.errors import ConfigError
from verifiers.types import RolloutKey

PINNED_SEED = 7683706982656891818


def plan_with(**settings: Any) -> BatchPlan:
    base: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_steps": 10,
        "num_prompts": 1000,
    }
    return make_plan(**{**base, **settings})


def micro_step_rows(plan: BatchPlan, block_id: int) -> list[list[list[int]]]:
    """Return the example ids of a block's completions in TRL's order, as [micro-step][device][row]."""
    rows = [example_id for example_id, _ in plan.requests(block_id)]
    size, devices = plan.per_device_train_batch_size, plan.num_processes
    slices = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [slices[start : start + devices] for start in range(0, len(slices), devices)]


def test_two_devices_share_the_micro_steps_of_a_block_in_prompt_order() -> None:
    plan = plan_with(
        per_device_train_batch_size=3,
        num_processes=2,
        steps_per_generation=4,
        gradient_accumulation_steps=4,
        num_generations=2,
        shuffle=False,
    )
    assert (plan.completions_per_block, plan.prompts_per_block) == (24, 12)
    assert micro_step_rows(plan, 0) == [
        [[0, 0, 1], [1, 2, 2]],
        [[3, 3, 4], [4, 5, 5]],
        [[6, 6, 7], [7, 8, 8]],
        [[9, 9, 10], [10, 11, 11]],
    ]
    assert micro_step_rows(plan, 1)[0] == [[12, 12, 13], [13, 14, 14]]


def test_the_table_tells_the_whole_run() -> None:
    plan = plan_with(steps_per_generation=4, gradient_accumulation_steps=2, num_iterations=2, num_prompts=30)
    assert plan.describe().splitlines() == [
        "batch plan             prompts   completions",
        "per block                    8            16",
        "per update                   4             8",
        "per micro-step               2             4",
        "per device                   2             4",
        "block             what is generated together (TRL: generation batch)",
        "group             2 completions of each prompt",
        "updates per block 4 (2 iterations over 4 micro-steps, 2 per update)",
        "blocks in the run 3 for 10 optimizer steps; the last serves 2 of 4 updates",
        "epochs            1 over 30 prompts; 6 left out of each, too few for a block",
        "devices           1",
    ]


def test_block_k_holds_prompts_4k_to_4k_plus_3_sixteen_times_each() -> None:
    plan = plan_with(per_device_train_batch_size=64, num_generations=16, num_prompts=4 * 33, shuffle=False)
    for block_id in (0, 1, 15, 16, 31, 32):
        assert plan.example_ids(block_id) == [4 * block_id + row for row in range(4)]
        rows = [example_id for example_id, _ in plan.requests(block_id)]
        assert rows == [4 * block_id + row for row in range(4) for _ in range(16)]
    assert [generation for _, generation in plan.requests(0)] == list(range(16)) * 4


def test_positions_visit_every_micro_step_of_a_block_once_a_pass() -> None:
    plan = plan_with(steps_per_generation=6, gradient_accumulation_steps=3, num_iterations=2, num_generations=4)
    positions = [plan.position(step, micro) for step in range(4) for micro in range(3)]
    assert positions == [(0, micro_step) for _ in range(2) for micro_step in range(6)]
    assert plan.position(4, 2) == (1, 2)


def test_resuming_after_three_blocks_skips_exactly_three() -> None:
    plan = plan_with(num_iterations=2, seed=5)
    assert plan.first_block_after(6) == 3
    uninterrupted = [plan.requests(plan.position(step)[0]) for step in range(10)]
    resumed = plan_with(num_iterations=2, seed=5)
    first = resumed.first_block_after(6)
    assert [resumed.requests(first + step // 2) for step in range(4)] == uninterrupted[6:]


def test_a_full_batch_of_32_prompts_in_mini_batches_of_8_makes_four_updates() -> None:
    settings: dict[str, Any] = {"per_device_train_batch_size": 2 * 4, "num_generations": 4}
    plan = plan_with(**settings, gradient_accumulation_steps=4, steps_per_generation=16)
    assert (plan.prompts_per_block, plan.prompts_per_update, plan.updates_per_block) == (32, 8, 4)
    message = (
        "steps_per_generation=15 is not a multiple of gradient_accumulation_steps=4, "
        ".* nearest steps_per_generation are 12 and 16."
    )
    with pytest.raises(ConfigError, match=message):
        plan_with(**settings, gradient_accumulation_steps=4, steps_per_generation=15)


def test_one_rank_and_four_ranks_have_the_same_plan() -> None:
    sizes: dict[str, Any] = {
        "gradient_accumulation_steps": 3,
        "num_generations": 6,
        "num_prompts": 50,
        "seed": 2,
    }
    one = plan_with(per_device_train_batch_size=8, num_processes=1, **sizes)
    four = plan_with(per_device_train_batch_size=2, num_processes=4, **sizes)
    for block_id in range(30):
        assert one.requests(block_id) == four.requests(block_id)
        assert one.shuffle_order(block_id, 24) == four.shuffle_order(block_id, 24)
        for alone, together in zip(micro_step_rows(one, block_id), micro_step_rows(four, block_id), strict=True):
            assert alone[0] == [row for device in together for row in device]


def test_no_prompt_comes_twice_in_a_block_or_in_an_epoch() -> None:
    plan = plan_with(per_device_train_batch_size=8, num_prompts=22, seed=1)
    assert plan.blocks_per_epoch == 5
    epochs = [[row for block in range(e * 5, e * 5 + 5) for row in plan.example_ids(block)] for e in range(4)]
    for epoch in epochs:
        assert max(Counter(epoch).values()) == 1
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_block_depends_on_seed_and_block_id_alone() -> None:
    forwards, backwards = plan_with(seed=7, num_prompts=40), plan_with(seed=7, num_prompts=40, max_steps=99)
    blocks = list(range(60))
    assert [forwards.example_ids(b) for b in blocks] == [backwards.example_ids(b) for b in blocks[::-1]][::-1]
    assert forwards.example_ids(0) != plan_with(seed=8, num_prompts=40).example_ids(0)


def test_rows_are_shuffled_differently_in_each_block_and_alike_in_each_run() -> None:
    plan = plan_with(seed=3)
    orders = [plan.shuffle_order(block_id, 16) for block_id in range(20)]
    assert orders == [plan_with(seed=3).shuffle_order(block_id, 16) for block_id in range(20)]
    assert all(sorted(order) == list(range(16)) for order in orders)
    assert len({tuple(order) for order in orders}) == 20


def test_no_two_rollouts_share_a_sampling_seed() -> None:
    keys = [RolloutKey(b, e, g) for b in range(10) for e in range(10) for g in range(16)]
    seeds = [rollout_seed(seed, key) for seed in (0, 1) for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert all(0 < seed < 2**63 for seed in seeds)
    # The value is part of what makes a resumed run repeat itself, so it must not move between releases.
    assert rollout_seed(0, RolloutKey(0, 0, 0)) == PINNED_SEED


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_generations": 1}, "num_generations is 1, .* at least 2"),
        ({"num_generations": 0}, "num_generations is 0"),
        (
            {
                "per_device_train_batch_size": 3,
                "num_processes": 2,
                "steps_per_generation": 4,
                "num_generations": 5,
            },
            "block of 24 completions .* num_generations=5: the nearest per_device_train_batch_size are 5 and 10, "
            "the nearest num_generations 4 and 6.",
        ),
        (
            {"steps_per_generation": 1, "gradient_accumulation_steps": 2},
            "nearest steps_per_generation are 2 and 4",
        ),
        (
            {"num_prompts": 1},
            "dataset has 1 prompts, but a block holds 2 .* at most 2 completions in place of 4",
        ),
        ({"num_prompts": 0}, "num_prompts is 0"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"num_processes": 2.0}, "num_processes is 2.0"),
        ({"num_iterations": True}, "num_iterations is True"),
    ],
)
def test_sizes_that_cannot_work_are_one_sentence_with_both_numbers(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plan_with(**settings)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)
