"""Parts of trl that the trainer relies on are still there: read this first when the pin of trl is moved."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable
from typing import Any

import pytest
import trl
from transformers import Trainer
from trl.trainer.utils import RepeatSampler as TrlRepeatSampler

from verifiers.data.sampler import RepeatSampler
from verifiers.train.loss import updates
from verifiers.train.loss.policy_loss import LOSS_TYPES
from verifiers.train.trainer import GRPOTrainer

PRIVATE_NAMES = {"_compute_loss", "_last_world_entropy", "_logs", "_metrics", "_prepare_inputs", "_step"}
"""Members of `trl.GRPOTrainer` that the trainer and its parts override or use beyond its documented surface."""

PRIVATE_NAMES_OF_TRANSFORMERS = {
    "_determine_best_metric",
    "_evaluate",
    "_get_grad_norm",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_save",
    "_save_checkpoint",
}
"""Members of `transformers.Trainer`, likewise."""


def tree_of(function: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def self_attributes(owner: type, written: bool) -> set[str]:
    """Attributes of `self` that a class's source writes, or reads."""
    kind = ast.Store if written else ast.Load
    return {
        node.attr
        for node in ast.walk(tree_of(owner))
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self" and isinstance(node.ctx, kind)
    }


@pytest.mark.parametrize("name", sorted(PRIVATE_NAMES | PRIVATE_NAMES_OF_TRANSFORMERS))
def test_a_private_name_still_exists(name: str) -> None:
    owner = trl.GRPOTrainer if name in PRIVATE_NAMES else Trainer
    assert hasattr(owner, name) or name in self_attributes(owner, written=True)


def test_no_other_private_name_is_used() -> None:
    classes = [owner for owner in GRPOTrainer.__mro__ if owner.__module__.startswith("verifiers.")]
    assert classes == [GRPOTrainer]
    ours = {*self_attributes(GRPOTrainer, written=True), *vars(GRPOTrainer)}
    foreign = self_attributes(GRPOTrainer, written=False) - ours
    overridden = {name for name in vars(GRPOTrainer) if hasattr(trl.GRPOTrainer, name)}
    private = {name for name in foreign | overridden if name.startswith("_") and not name.startswith("__")}
    assert private <= PRIVATE_NAMES | PRIVATE_NAMES_OF_TRANSFORMERS
    # the parts get the trainer itself in one place more
    assert "self._trainer._last_world_entropy" in inspect.getsource(updates.EntropyBonus)


def test_a_micro_step_is_one_call_of_the_loss_and_one_backward_pass() -> None:
    """Ours runs all micro-batches but the last by itself; transformers' own backward is the last one's."""
    source = inspect.getsource(Trainer.training_step)
    call, backward = source.index("self.compute_loss(model, inputs"), source.index("self.accelerator.backward(loss")
    assert source.index("self._prepare_inputs(inputs)") < call < backward
    assert 'kwargs["scale_wrt_gas"] = False' in source
    assert trl.GRPOTrainer.loss_is_scaled_for_ga is True


def test_there_is_no_loss_type_we_do_not_know() -> None:
    compared: set[str] = set()
    for node in ast.walk(tree_of(trl.GRPOTrainer._compute_loss)):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "self.loss_type":
            value = ast.literal_eval(node.comparators[0])
            compared |= {value} if isinstance(value, str) else set(value)
    assert compared == set(LOSS_TYPES)


def test_the_trainer_still_asks_us_for_its_inputs() -> None:
    assert "self._prepare_inputs(inputs)" in inspect.getsource(Trainer.training_step)
    assert "self._step += 1" in inspect.getsource(trl.GRPOTrainer.training_step)


def test_evaluations_and_saves_still_go_through_what_we_override() -> None:
    source = inspect.getsource(Trainer._maybe_log_save_evaluate)
    order = ["self.log(logs", "self._evaluate(", "self._determine_best_metric(", "self._save_checkpoint("]
    assert sorted(order, key=source.index) == order
    # evaluations beside training begin and end in the last callback, just before
    loop = inspect.getsource(Trainer._run_epoch)
    for event in ("on_step_end", "on_epoch_end"):
        called = f"self.control = self.callback_handler.{event}(self.args, self.state, self.control)"
        assert re.search(rf"{re.escape(called)}\s+self\._maybe_log_save_evaluate\(", loop)
    assert list(inspect.signature(Trainer._evaluate).parameters)[1:] == [
        "trial",
        "ignore_keys_for_eval",
        "skip_scheduler",
    ]
    # how eval_on_start is told from any other evaluation
    assert "self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)" in inspect.getsource(
        Trainer._inner_training_loop
    )
    best = inspect.getsource(Trainer._determine_best_metric)
    assert "self.state.best_global_step = self.state.global_step" in best
    assert "save_total_limit=self.args.save_total_limit" in inspect.getsource(Trainer._save_checkpoint)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "sizes", [(7, 2, 3, 4), (8, 1, 2, 2), (24, 3, 12, 2), (5, 4, 1, 1), (3, 2, 4, 2), (0, 2, 1, 1)]
)
def test_our_sampler_has_the_order_of_trls(sizes: tuple[int, int, int, int]) -> None:
    rows, mini, batch, repeat = sizes

    def renamed(found: Iterable[int]) -> list[int]:
        names: dict[int, int] = {}
        return [names.setdefault(row, len(names)) for row in found]

    theirs = TrlRepeatSampler(range(rows), mini, batch, repeat, shuffle=False)
    assert list(RepeatSampler(rows, mini, batch, repeat, shuffle=False)) == list(theirs)
    # shuffled, where TRL starts a new row, so do we: renaming rows by first appearance makes the two equal
    shuffled = TrlRepeatSampler(range(rows), mini, batch, repeat, shuffle=True, seed=4)
    assert renamed(RepeatSampler(rows, mini, batch, repeat, seed=4)) == renamed(shuffled)
