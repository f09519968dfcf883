"""RemoteRLDataset: the rows of a run in the order of TRL's sampler, each with the stage of its optimizer step."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from remote_world import RecordingServer

from verifiers.errors import ConfigError, GradingError, InfraError
from verifiers.integrations.dataserver_trl import RemoteRLDataset, remote_reward

CADENCE = list(itertools.product((1, 2, 4), (1, 2, 4), (1, 2), (1, 4)))
STEPS = 8


def order_of(library: str, dataset: Any, group: int, prompts: int, repeats: int) -> list[int]:
    """Return the order of a sampler as GRPOTrainer makes it with shuffle_dataset=False: TRL's own, or ours."""
    if library == "trl":
        from trl.trainer.utils import RepeatSampler
    else:
        from verifiers.data.sampler import RepeatSampler  # type: ignore[assignment]
    return list(
        RepeatSampler(dataset, mini_repeat_count=group, batch_size=prompts, repeat_count=repeats, shuffle=False)
    )


def trained_rows(
    dataset: Any, order: list[int], rank: int, ranks: int, per_device: int, micro_steps: int, repeats: int
) -> dict[int, list[dict[str, Any]]]:
    """Return the rows that one rank trains on at each micro-step, read as TRL's loader and trainer read them.

    The loader yields a whole generation batch a micro-step, the ranks take turns, and the trainer generates from
    every `repeats`-th of them.
    """
    size = per_device * micro_steps
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    mine = batches[rank::ranks]
    found = {}
    for micro_step, batch in enumerate(mine):
        # read all the same, also where the trainer throws them away
        rows = [dataset[index] for index in batch]
        if micro_step % repeats == 0:
            held = rows
        found[micro_step] = held
    return found


@pytest.mark.slow
@pytest.mark.parametrize("library", ["verifiers", "trl"])
def test_the_stage_at_every_optimizer_step_is_the_files(caplog: pytest.LogCaptureFixture, library: str) -> None:
    """Ranks x accumulation x passes x group size, by the order of TRL's sampler."""
    stages = [
        {"name": "a", "until_step": 2, "datasets": ["easy"]},
        {"name": "b", "until_step": 4, "datasets": ["hard"]},
        {"name": "c", "until_step": 6, "datasets": ["easy"]},
        {"name": "d", "until_step": None, "datasets": ["hard"]},
    ]
    file = {step: ("easy", "easy", "hard", "hard", "easy", "easy", "hard", "hard")[step] for step in range(STEPS)}
    caplog.set_level(logging.ERROR, "verifiers")
    with RecordingServer(stages, {"easy": 4000, "hard": 4000}) as server:
        for ranks, accumulation, passes, group in CADENCE:
            server.requests.clear()
            sizes = {"gradient_accumulation_steps": accumulation, "num_iterations": passes, "num_generations": group}
            per_device, repeats = max(group, 2), accumulation * passes
            by_rank = []
            for rank in range(ranks):
                dataset = RemoteRLDataset(
                    server.url, per_device_train_batch_size=per_device, num_processes=ranks, max_steps=STEPS, **sizes
                )
                order = order_of(library, dataset, group, dataset.prompts_per_block, repeats)
                rows = trained_rows(dataset, order, rank, ranks, per_device, accumulation, repeats)
                assert len(rows) == STEPS * accumulation
                by_rank.append(rows)
                for micro_step, held in rows.items():
                    step = micro_step // accumulation
                    assert {row["dataset_id"] for row in held} == {file[step]}, (ranks, sizes, rank, step)
            _check_groups(by_rank, group)
            calls = [(body["generation_step"], body["batch_size"]) for body in server.calls("/v2/sample")]
            blocks = STEPS // passes
            prompts = per_device * accumulation * ranks // group
            assert calls == [(block, prompts) for block in range(blocks)] * ranks
            assert [body["optimizer_step"] for body in server.calls("/v2/sample")][:blocks] == [
                block * passes for block in range(blocks)
            ]


def _check_groups(by_rank: list[dict[int, list[dict[str, Any]]]], group: int) -> None:
    """Together the ranks hold each prompt of a block as often as a group has completions, whichever rank asked."""
    for micro_step in by_rank[0]:
        together = [row["sample_id"] for rows in by_rank for row in rows[micro_step]]
        assert all(together.count(sample) == group for sample in set(together))


@pytest.mark.parametrize(("micro_steps", "accumulation", "steps"), [(4, 2, [0, 2, 4]), (1, 4, [0, 0, 0, 0, 1, 1])])
def test_blocks_of_other_lengths_than_an_update_keep_the_step(
    recorder: RecordingServer, micro_steps: int, accumulation: int, steps: list[int]
) -> None:
    dataset = RemoteRLDataset(
        recorder.url,
        per_device_train_batch_size=4,
        num_generations=4,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=micro_steps,
        max_steps=8,
    )
    for block in range(len(steps)):
        dataset[block * dataset.prompts_per_block]
    assert [body["optimizer_step"] for body in recorder.calls("/v2/sample")] == steps


def test_sizes_that_do_not_divide_are_refused_with_both_numbers(recorder: RecordingServer) -> None:
    with pytest.raises(ConfigError, match=r"6 completions.*num_generations=4"):
        RemoteRLDataset(recorder.url, per_device_train_batch_size=6, num_generations=4, max_steps=3)


def test_a_stage_that_ends_inside_a_block_holds_to_its_end_and_that_is_logged(
    recorder: RecordingServer, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.stages = [
        {"name": "a", "until_step": 3, "datasets": ["easy"]},
        {"name": "b", "until_step": None, "datasets": ["hard"]},
    ]
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "num_iterations": 2}
    RemoteRLDataset(recorder.url, max_steps=3, **sizes)
    assert caplog.messages == []
    dataset = RemoteRLDataset(recorder.url, max_steps=6, **sizes)
    assert [dataset[index]["dataset_id"] for index in range(3)] == ["easy", "easy", "hard"]
    assert caplog.messages == [
        "stage 'a' of the dataserver ends at optimizer step 3, inside a block: the next stage begins with the next "
        "block, at step 4."
    ]


def test_a_stage_that_ends_after_the_run_takes_no_block_of_it(recorder: RecordingServer) -> None:
    """The server refuses a block whose rows and optimizer step lie in different stages."""
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "steps_per_generation": 4}
    for max_steps in range(1, 10):
        for border in range(max_steps, max_steps + 5):
            recorder.stages = [
                {"name": "a", "until_step": border, "datasets": ["easy"]},
                {"name": "b", "until_step": border + 1, "datasets": ["hard"]},
                {"name": "c", "datasets": ["easy"]},
            ]
            dataset = RemoteRLDataset(recorder.url, max_steps=max_steps, **sizes)
            found = {dataset[index]["dataset_id"] for index in range(len(dataset))}
            assert found == {"easy"}, (max_steps, border)


def test_the_length_of_a_run_is_the_servers_or_must_be_given(recorder: RecordingServer) -> None:
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4}
    with pytest.raises(ConfigError, match="give max_steps"):
        RemoteRLDataset(recorder.url, **sizes)
    recorder.total_steps = 5
    assert len(RemoteRLDataset(recorder.url, **sizes)) == 5


def test_as_a_dataset_it_is_read_lazily_and_refuses_to_be_shuffled(recorder: RecordingServer) -> None:
    import datasets

    remote = RemoteRLDataset(recorder.url, per_device_train_batch_size=64, num_generations=16, max_steps=3)
    dataset = remote.as_dataset()
    assert isinstance(dataset, datasets.Dataset)
    assert (len(dataset), recorder.calls("/v2/sample")) == (12, [])
    assert dataset[4] == remote[4]
    at_once = [slot for slot in (4, 5, 6, 7) for _ in range(16)]
    assert dataset.__getitems__(at_once) == [remote[index] for index in at_once]
    assert len(recorder.calls("/v2/sample")) == 1
    with pytest.raises(ConfigError, match="shuffle_dataset=False"):
        dataset.__getitems__([0, 4] * 32)


def test_a_trainer_of_other_sizes_is_refused_before_it_trains_a_stage_late(recorder: RecordingServer) -> None:
    recorder.stages = [{"name": "a", "until_step": 3, "datasets": ["easy"]}, {"name": "b", "datasets": ["hard"]}]
    remote = RemoteRLDataset(
        recorder.url,
        per_device_train_batch_size=8,
        num_generations=4,
        gradient_accumulation_steps=2,
        steps_per_generation=3,
        max_steps=8,
    )
    with pytest.raises(ConfigError, match=r"4 rows .* a device holds 24 .*=8 x 3 micro-steps"):
        remote.as_dataset().__getitems__([0] * 4)
    # 2 micro-steps an update and 3 a block: TRL generates in steps 0, 1, 3, 4
    row = remote[12]
    assert (row["optimizer_step"], row["generation_step"], row["seed"]) == (3, 2, 0)
    reward = remote_reward(recorder.url)
    for step in (2, 4):
        with pytest.raises(
            ConfigError, match=rf"for optimizer step {step} from rows .* for step 3: .* an eval_dataset of rows with"
        ):
            reward(completions=["a"], trainer_state=SimpleNamespace(global_step=step), **columns(row))
    assert reward(completions=["a"], trainer_state=SimpleNamespace(global_step=3), **columns(row)) == [1.0]


def columns(row: dict[str, Any]) -> dict[str, list[Any]]:
    """Return a row as TRL hands it to reward functions."""
    return {name: [value] for name, value in row.items() if name != "prompt"}


# -- rewards ----------------------------------------------------------------------------------------------------


def test_rewards_are_joined_on_completion_index_and_what_failed_is_none(recorder: RecordingServer) -> None:
    recorder.grade = lambda items: [
        {"completion_index": item["completion_index"], "reward": None if "?" in item["completion"] else 0.5}
        for item in reversed(items)
    ]
    reward = remote_reward(recorder.url)
    found = reward(
        prompts=["p"] * 5,
        completions=["a", "b?", "c", "d", "e"],
        completion_ids=[[1], [1, 2], [1], [1], [1]],
        sample_id=["easy:0", "easy:0", "easy:1", "easy:1", "easy:2"],
        trainer_state=object(),
    )
    assert found == [0.5, None, 0.5, 0.5, 0.5]
    assert recorder.calls("/v2/grade")[0]["items"][1]["completion_tokens"] == 2
    assert reward.__name__ == "remote_reward"


def test_a_grade_is_asked_for_with_all_that_is_known_of_its_rows(
    recorder: RecordingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    remote = RemoteRLDataset(
        recorder.url, per_device_train_batch_size=4, num_generations=4, num_iterations=2, max_steps=8, seed=11
    )
    reward = remote_reward(recorder.url)
    reward(completions=["a"], trainer_state=SimpleNamespace(global_step=4), **columns(remote[2]))
    reward(completions=["a"], sample_id=["easy:0"])
    known, nothing = recorder.calls("/v2/grade")
    assert {name: value for name, value in known.items() if name != "items"} == {
        "optimizer_step": 4,
        "generation_step": 2,
        "seed": 11,
        "rank": 3,
    }
    assert sorted(nothing) == ["items", "rank"]


def test_a_batch_of_which_nothing_is_graded_ends_the_run(recorder: RecordingServer) -> None:
    recorder.grade = lambda items: []
    reward = remote_reward(recorder.url, max_attempts=1)
    with pytest.raises(GradingError, match="none of 2 completions"):
        reward(completions=["a", "b"], sample_id=["easy:0", "easy:0"])
    recorder.faults["/v2/grade"] = [500]
    with pytest.raises(InfraError):
        reward(completions=["a"], sample_id=["easy:0"])
