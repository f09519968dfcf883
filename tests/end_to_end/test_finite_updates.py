"""Updates and weights that are not finite: nothing of them is applied, saved, pushed or called finished."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import torch
from transformers import TrainerCallback

import verifiers as vf
from verifiers.errors import NotFiniteError
from verifiers.train.checkpoint.block_log import read_block_log

LARGEST = 3.4e38


class After(TrainerCallback):
    """Keeps weights, optimizer state and learning rate after each step, and may spoil a weight."""

    def __init__(self, spoils_at: int | None = None, value: float = math.nan) -> None:
        self.kept: list[Any] = []
        self._spoils_at, self._value = spoils_at, value

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        weights = [parameter.detach().clone() for parameter in given["model"].parameters()]
        moments = given["optimizer"].state_dict()["state"].values()
        of_optimizer = [(float(each["step"]), each["exp_avg"].clone()) for each in moments]
        self.kept.append((weights, of_optimizer, given["lr_scheduler"].get_last_lr()))
        if state.global_step == self._spoils_at:
            with torch.no_grad():
                list(given["model"].parameters())[-1].view(-1)[0] = self._value

    def is_as_before(self, step: int) -> bool:
        (old, moments, rate), (new, later, last) = self.kept[step - 2], self.kept[step - 1]
        same = all(map(torch.equal, old, new)) and rate == last and len(moments) == len(later)
        return same and all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(moments, later, strict=True))


class Overflowing(vf.SingleTurnEnv):
    """Gives an advantage by which the loss overflows to the answers to some prompts."""

    texts: frozenset[str] = frozenset()
    advantage = LARGEST

    async def rollout(self, *args: Any, **options: Any) -> Any:
        completion, state = await super().rollout(*args, **options)
        if state["prompt"][-1]["content"] in self.texts:
            state["advantage"] = self.advantage
        return completion, state


def overflowing(trainer: Any, blocks: set[int], advantage: float = LARGEST) -> dict[int, int]:
    """Have the first prompt of some blocks overflow; return these prompts by block."""
    examples = {block: trainer.plan.example_ids(block)[0] for block in blocks}
    trainer.env.texts = {tiny_world.rows(40)[example]["question"] for example in examples.values()}
    trainer.env.advantage = advantage
    return examples


@pytest.fixture
def make(
    new_trainer: Callable[..., Any], model_dir: Path, server: tiny_world.EmbeddedServer
) -> Callable[..., tuple[Any, After]]:
    def make_one(*, spoils_at: int | None = None, value: float = math.nan, **settings: Any) -> tuple[Any, After]:
        after = After(spoils_at, value)
        # a mean of finite advantages is finite; the sum over a rollout's tokens overflows
        by_sums = {"loss_type": "luspo", "max_completion_length": 20}
        settings = {"lr_scheduler_type": "linear", "max_steps": 4, **by_sums, **settings}
        env = Overflowing(dataset=tiny_world.rows(40), rubric=vf.Rubric(funcs=[tiny_world.vowels]))
        trainer = new_trainer(model_dir, env, server.url, **settings)
        trainer.add_callback(after)
        return trainer, after

    return make_one


def ends(trainer: Any) -> dict[int, dict[str, int]]:
    """Return how many rollouts ended how, by block; each planned one ends once."""
    found: dict[int, dict[str, int]] = {}
    for record in read_block_log(trainer.args.output_dir):
        assert tiny_world.ended(record) == sorted(trainer.plan.requests(record["block_id"]))
        reasons = [item["reason"] for item in record["dropped"]]
        counts = {reason: reasons.count(reason) for reason in set(reasons)}
        found[record["block_id"]] = {**counts, "trained": len(record["trained"])}
    return found


@pytest.mark.parametrize(
    ("settings", "steps", "dropped"),
    [
        ({}, [2], {"not_finite": 8, "trained": 0}),
        ({"max_tokens_per_micro_batch": 40, "max_grad_norm": 0.0}, [2], {"not_finite": 8, "trained": 0}),
        (
            {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "streaming": True},
            [3],
            {"not_finite": 4, "trained": 4},
        ),
        ({"num_iterations": 2, "max_steps": 6}, [3, 4], {"not_finite": 8, "trained": 0}),
    ],
    ids=["micro-steps", "micro-batches, unclipped", "streamed updates", "passes"],
)
def test_an_update_that_is_not_finite_is_not_applied_and_its_rollouts_are_recorded(
    make: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    steps: list[int],
    dropped: dict[str, int],
) -> None:
    trainer, after = make(**settings)
    example = overflowing(trainer, {1})[1]
    trainer.train()
    assert [step for step in range(2, trainer.args.max_steps + 1) if after.is_as_before(step)] == steps
    losses = trainer.logged("loss")
    assert [step for step, loss in enumerate(losses, start=1) if not math.isfinite(loss)] == steps
    assert trainer.logged("updates/not_finite") == [
        float(step in steps) for step in range(1, trainer.args.max_steps + 1)
    ]
    by_block = ends(trainer)
    assert by_block.pop(1) == dropped
    assert all("not_finite" not in counts for counts in by_block.values())
    lines = [line for line in caplog.messages if "is not finite" in line]
    assert len(lines) == len(steps)
    # no rollout of the other prompt
    assert all(f"by rollouts of block 1: example {example} (generations" in line for line in lines)
    assert all(line.count("example") == 1 for line in lines)
    assert all(torch.isfinite(tensor).all() for tensor in tiny_world.weights(trainer).values())
    metrics = (Path(trainer.args.output_dir) / "metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(line).get("updates/not_finite") or 0 for line in metrics) == len(steps)


def test_a_gradient_that_overflows_alone_is_not_applied_and_its_loss_is_logged(make: Callable[..., Any]) -> None:
    trainer, after = make()
    overflowing(trainer, {1}, advantage=1e25)
    trainer.train()
    assert after.is_as_before(2)
    assert not after.is_as_before(3)
    assert all(math.isfinite(loss) for loss in trainer.logged("loss"))
    assert trainer.logged("grad_norm")[1] == math.inf
    assert ends(trainer)[1] == {"not_finite": 8, "trained": 0}


def test_rollouts_that_another_pass_trains_are_trained(make: Callable[..., Any]) -> None:
    trainer, after = make(num_iterations=2)
    compute = trainer.compute_loss

    def spoiled(*args: Any, **options: Any) -> Any:
        loss = compute(*args, **options)
        return loss * math.nan if trainer.state.global_step == 2 else loss

    trainer.compute_loss = spoiled
    trainer.train()
    assert after.is_as_before(3)
    assert not after.is_as_before(4)
    assert ends(trainer) == {0: {"trained": 8}, 1: {"trained": 8}}


def test_three_in_a_row_end_the_run_and_fewer_do_not(make: Callable[..., Any]) -> None:
    trainer, _ = make(max_steps=9, save_strategy="steps", save_steps=3)
    overflowing(trainer, {1, 2, 4, 5, 6})
    with pytest.raises(
        NotFiniteError, match=r"update of step 7 .*block 6: example .* 3 such updates in a row.*lower"
    ):
        trainer.train()
    run = json.loads((Path(trainer.args.output_dir) / "run.json").read_text())
    assert run["status"] == "stopped"
    assert "NotFiniteError" in run["stopped_by"]


@pytest.mark.parametrize(
    ("value", "spoils_at", "settings", "purpose"),
    [
        (math.nan, 2, {}, "pushed to the rollout servers"),
        (math.inf, 2, {"save_strategy": "steps", "save_steps": 1}, "saved"),
        (math.nan, 4, {}, "those of a finished run"),
    ],
)
def test_weights_that_are_not_finite_are_never_saved_pushed_or_called_finished(
    make: Callable[..., Any], value: float, spoils_at: int, settings: dict[str, Any], purpose: str
) -> None:
    trainer, _ = make(spoils_at=spoils_at, value=value, **settings)
    with pytest.raises(NotFiniteError, match=rf"infinite or not a number, so the weights are not {purpose}; "):
        trainer.train()
    root = Path(trainer.args.output_dir)
    assert json.loads((root / "run.json").read_text())["status"] == "stopped"
    assert [path.parent.name for path in root.rglob("model.safetensors")] == (["checkpoint-1"] if settings else [])
    with pytest.raises(NotFiniteError, match="not saved"):
        trainer.save_model()
