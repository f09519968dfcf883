"""Invariant 8: a run that was cut at a block boundary resumes as if it had not been."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import torch
from forks import Forked, Forks
from transformers import TrainerCallback

from verifiers.errors import CheckpointError
from verifiers.testing import FakeOpenAIServer
from verifiers.train.checkpoint.block_log import read_block_log
from verifiers.train.checkpoint.checkpoint import load_pending_blocks
from verifiers.train.checkpoint.run_directory import newest_complete


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[tiny_world.EmbeddedServer]:
    """One slot, so that every batch has one row and equal requests get equal answers to the last bit."""
    with tiny_world.EmbeddedServer(model_dir, slots=1) as running:
        yield running


def trainer_for(
    model_dir: Path, server: Any, output_dir: Path, *, prompts: int = 16, **overrides: Any
) -> tiny_world.ObservedTrainer:
    values = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "num_iterations": 1, **overrides}
    args = tiny_world.config(output_dir, server.url, **values)
    return tiny_world.ObservedTrainer(str(model_dir), tiny_world.single_turn(prompts), args)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=0, atol=1e-6) for name in one)


@pytest.mark.slow
def test_a_run_continues_in_the_epoch_in_which_it_was_cut(model_dir: Path, server: Any, tmp_path: Path) -> None:
    """Two blocks an epoch: 3 is in the middle of one."""
    cut = 3
    sizes = {"prompts": 4, "save_steps": cut, "max_steps": 5}
    whole = trainer_for(model_dir, server, tmp_path / "whole", **sizes)
    whole.train()
    trainer_for(model_dir, server, tmp_path / "cut", **{**sizes, "max_steps": cut}).train()
    second = trainer_for(model_dir, server, tmp_path / "cut", **sizes)
    second.train(resume_from_checkpoint=True)
    assert second.seen[0]["step"] == cut
    assert whole.logged("epoch") == second.logged("epoch") == [0.5, 1.0, 1.5, 2.0, 2.5, 2.5]
    assert same(tiny_world.weights(whole), tiny_world.weights(second))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"num_batches_ahead": 2, "num_iterations": 2},
        {"num_batches_ahead": 1, "streaming": True, "dynamic_sampling": True},
    ],
    ids=str,
)
def test_a_resumed_run_trains_on_the_blocks_that_were_in_flight(
    model_dir: Path, server: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Drained pushes, so that a block is sampled from one version: the runs are equal to the last bit of rounding."""
    settings = {"drain_before_sync": True, "max_steps": 8, **settings}
    whole = trainer_for(model_dir, server, tmp_path / "whole", **settings)
    whole.train()
    parts = [trainer_for(model_dir, server, tmp_path / "cut", **settings) for _ in range(3)]
    tiny_world.stop(parts[0], 3)
    tiny_world.stop(parts[1], 7, resume=True)
    parts[2].train(resume_from_checkpoint=True)
    assert [part.seen[0]["step"] for part in parts] == [0, 2, 6]
    lineage = [*parts[0].seen[:4], *parts[1].seen[:8], *parts[2].seen]
    for one, other in zip(whole.seen, lineage, strict=True):
        assert one.keys() == other.keys()
        for name in ("step", "input_ids", "loss_mask", "policy_versions"):
            assert torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])), name
        assert torch.allclose(one["sampler_logps"], other["sampler_logps"], atol=1e-6)
        assert torch.allclose(one["advantages"], other["advantages"], atol=1e-6)
    assert max(whole.logged("staleness")) == settings["num_batches_ahead"] * settings.get("num_iterations", 1)
    assert same(tiny_world.weights(whole), tiny_world.weights(parts[2]))
    assert without_clocks(read_block_log(tmp_path / "whole")) == without_clocks(read_block_log(tmp_path / "cut"))


@pytest.mark.slow
def test_a_reference_model_that_follows_the_policy_goes_on_as_it_was(
    model_dir: Path, server: Any, tmp_path: Path
) -> None:
    synced = {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 1, "drain_before_sync": True}
    whole = trainer_for(model_dir, server, tmp_path / "whole", **synced)
    whole.train()
    tiny_world.stop(trainer_for(model_dir, server, tmp_path / "cut", **synced), 3)
    resumed = trainer_for(model_dir, server, tmp_path / "cut", **synced)
    resumed.train(resume_from_checkpoint=True)
    assert whole.logged("kl") == pytest.approx(resumed.logged("kl"), abs=1e-6)
    assert whole.logged("kl")[-1] > 1e-5
    assert same(whole.ref_model.state_dict(), resumed.ref_model.state_dict())
    assert same(tiny_world.weights(whole), tiny_world.weights(resumed))
    trainer_for(model_dir, server, tmp_path / "fixed", beta=0.5, max_steps=2).train()
    with pytest.raises(CheckpointError, match=r"checkpoint-2 has no reference/, .*; set sync_ref_model=False"):
        trainer_for(model_dir, server, tmp_path / "fixed", **synced).train(resume_from_checkpoint=True)


def without_clocks(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**record, "dropped": [{**item, "seconds": 0.0} for item in record["dropped"]]} for record in records]


@pytest.mark.slow
def test_a_run_without_drained_pushes_keeps_what_is_finished_and_generates_the_rest_again(
    make_fake_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    held, let_go, asked = set[str](), threading.Event(), list[str]()

    async def answer(body: dict[str, Any]) -> str:
        asked.append(body["messages"][-1]["content"])
        if asked[-1] in held:
            await asyncio.to_thread(let_go.wait, 120)
        return "".join(random.Random(body["seed"]).choice("aeiou") for _ in range(4))

    class UntilBlock2IsFinished(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                first.session.generator.groups(2, 99)

    with FakeOpenAIServer(answer) as fake:
        settings = {"num_batches_ahead": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 5}
        first = make_fake_trainer(tiny_world.single_turn(), fake.url, output_dir=tmp_path, **settings)
        texts = [row["prompt"][-1]["content"] for row in first.env.get_dataset()]
        of_block = [{texts[example] for example in first.plan.example_ids(block)} for block in range(5)]
        held |= of_block[3]
        first.add_callback(UntilBlock2IsFinished())
        try:
            tiny_world.stop(first, 3)
        finally:
            let_go.set()
        assert [block.block_id for block in load_pending_blocks(tmp_path / "checkpoint-2")] == [2]
        asked.clear()
        second = make_fake_trainer(tiny_world.single_turn(), fake.url, output_dir=tmp_path, **settings)
        second.train(resume_from_checkpoint=True)
    assert [text for text in asked if text in of_block[2]] == []
    assert all(asked.count(text) == 4 for block in (3, 4) for text in of_block[block])
    tiny_world.assert_block_log_is_whole(tmp_path, second.plan)


def test_a_run_that_ends_inside_a_block_ends_well(model_dir: Path, server: Any, tmp_path: Path) -> None:
    trainer = trainer_for(model_dir, server, tmp_path, num_iterations=2, max_steps=3)
    trainer.train()
    assert trainer.state.global_step == 3
    # the weights are there, but only a block boundary can be resumed
    assert (tmp_path / "checkpoint-3" / "model.safetensors").is_file()
    assert newest_complete(tmp_path) == tmp_path / "checkpoint-2"


def lineage(directory: Path) -> list[dict[str, Any]]:
    """Return what the final weights were trained on: a later process overrides the steps that it trained again."""
    steps: dict[int, dict[str, Any]] = {}
    for line in (directory / "trained.jsonl").read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            # cut off by the kill: no checkpoint can have followed
            continue
        steps = {step: kept for step, kept in steps.items() if step < record["step"]}
        steps[record["step"]] = record
    return [steps[step] for step in sorted(steps)]


class Killed:
    """One run, in as many processes as it takes."""

    def __init__(self, forks: Forks, given: dict[str, Any], directory: Path) -> None:
        self._forks, self.directory = forks, directory
        self._given = {"env": "single", **given, "output_dir": str(directory), "resume": True}
        self.log = directory.with_suffix(".log")
        self.started_at = 0.0

    def start(self) -> Forked:
        self.started_at = time.monotonic()
        return self._forks.start("run_training:run", self._given, self.log)

    def trained(self) -> int:
        path = self.directory / "trained.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def until_trained(self, lines: int, process: Forked) -> float:
        """Seconds from the start until so many steps are written down."""
        while self.trained() < lines:
            assert process.code is None, self.log.read_text()
            time.sleep(0.002)
        return time.monotonic() - self.started_at

    def steps_left(self, steps: int) -> int:
        newest = newest_complete(self.directory)
        return steps - (int(newest.name.removeprefix("checkpoint-")) if newest is not None else 0)

    def finish(self, process: Forked) -> None:
        assert self._forks.wait(process, 300) == 0, self.log.read_text()

    def weights(self) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = torch.load(self.directory / "final-0.pt")["weights"]
        return weights

    def kill(self, process: Forked) -> bool:
        """Kill a process; return False where it had ended before."""
        process.kill()
        code = self._forks.wait(process, 60)
        assert code in (0, -signal.SIGKILL), self.log.read_text()
        return code != 0


STEPS = 20
SHORT = {
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 3,
    "save_total_limit": 1,
    "max_completion_length": 6,
}


def kill_at_random_moments(whole: Killed, killed: Killed) -> list[int]:
    """Finish both runs, the second one after five kills, or as many as VERIFIERS_TEST_KILLS says; return its pids."""
    kills, steps = int(os.environ.get("VERIFIERS_TEST_KILLS", "5")), STEPS
    chance = random.Random(os.environ.get("VERIFIERS_TEST_SEED", "0"))
    process = whole.start()
    until_first_s = whole.until_trained(1, process)
    step_s = (whole.until_trained(steps, process) - until_first_s) / steps
    whole.finish(process)
    ended = []
    while len(ended) < kills:
        process, left = killed.start(), killed.steps_left(steps)
        if left > 6 and chance.random() < 0.8:
            # anywhere in a step, a save or a push
            killed.until_trained(killed.trained() + chance.randint(1, min(7, left - 5)), process)
            time.sleep(chance.random() * 2 * step_s)
        else:
            time.sleep(chance.random() * until_first_s / 3)
        if not killed.kill(process):
            # all was done before its moment came
            break
        ended.append(process.pid)
    print(f"killed {len(ended)} times")
    assert 2 * len(ended) > kills
    killed.finish(killed.start())
    return ended


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ahead", "drains"), [(1, True), (2, False)], ids=["one ahead, drained", "two ahead, not drained"]
)
def test_a_run_killed_at_random_moments_trains_every_planned_row_once_and_in_order(
    model_dir: Path, server: Any, forks: Forks, tmp_path: Path, ahead: int, drains: bool
) -> None:
    settings = {**SHORT, "num_batches_ahead": ahead, "drain_before_sync": drains}
    given = {"model": str(model_dir), "url": server.url, "settings": settings}
    whole, killed = (Killed(forks, given, tmp_path / name) for name in ("whole", "killed"))
    ended = kill_at_random_moments(whole, killed)
    one, other = lineage(whole.directory), lineage(killed.directory)
    assert [record["step"] for record in other] == list(range(STEPS))
    for expected, record in zip(one, other, strict=True):
        if drains:
            assert record["rows"] == expected["rows"]
        else:
            # other samples of the same prompts; within an update rows stand by their length
            assert sorted(row[0] for row in record["rows"]) == sorted(row[0] for row in expected["rows"])
    plan = trainer_for(model_dir, server, tmp_path / "plan", **settings).plan
    tiny_world.assert_block_log_is_whole(killed.directory, plan)
    # what a killed process could not remove, the next one did
    assert not [path for pid in ended for path in Path("/dev/shm").glob(f"verifiers-weights-{pid}-*")]
    if drains:
        assert same(whole.weights(), killed.weights())


LEVELS = {"datasets": ["d0", "d1", "d2"], "window": 2, "raise_at": 0.55, "lower_at": 0.25, "passes_at": 2.0}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_drained_run_with_an_adaptive_curriculum_that_is_killed_samples_the_same_tokens(
    model_dir: Path, forks: Forks, tmp_path: Path
) -> None:
    """A server that batches rounds otherwise with each crowd, and the curriculum follows each token."""
    settings = {**SHORT, "num_batches_ahead": 2, "drain_before_sync": True}
    with tiny_world.EmbeddedServer(model_dir) as crowded:
        given = {"model": str(model_dir), "url": crowded.url, "settings": settings, "env": "leveled"}
        given["curriculum"] = {"levels": LEVELS}
        whole, killed = (Killed(forks, given, tmp_path / name) for name in ("whole", "killed"))
        kill_at_random_moments(whole, killed)
    one, other = lineage(whole.directory), lineage(killed.directory)
    assert [record["rows"] for record in other] == [record["rows"] for record in one]
    assert len(one) == STEPS
    log = torch.load(whole.directory / "final-0.pt")["log"]
    # the curriculum had something to decide
    assert len({entry["curriculum/level"] for entry in log if "curriculum/level" in entry}) > 2
