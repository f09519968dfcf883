"""Parts of trl that the trainer relies on are still there: read this first when the pin of trl is moved."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable
from importlib.metadata import requires, version
from typing import Any

import pytest
import trl
from packaging.requirements import Requirement
from trl.trainer.utils import RepeatSampler as TrlRepeatSampler

from verifiers.data.sampler import RepeatSampler
from verifiers.train.trainer import GRPOTrainer
from verifiers.train.validation.loss_settings import LOSS_TYPES

PINNED = ">=1.16,<1.17"

PRIVATE_NAMES = {
    "_compute_loss",
    "_determine_best_metric",
    "_evaluate",
    "_get_grad_norm",
    "_get_per_token_logps_and_entropies",
    "_load_best_model",
    "_load_from_checkpoint",
    "_logs",
    "_metrics",
    "_prepare_inputs",
    "_save",
    "_save_checkpoint",
    "_step",
    "_tokenizer",
}
"""Members of `trl.GRPOTrainer` that the trainer overrides or reads beyond its documented surface."""


def tree_of(function: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def inputs_read(function: Any) -> set[str]:
    """Return the keys that a function reads of its argument `inputs`."""
    found = set()
    for node in ast.walk(tree_of(function)):
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "inputs":
            found.add(ast.literal_eval(node.slice))
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get"
        if called and getattr(node.func.value, "id", "") == "inputs":
            found.add(ast.literal_eval(node.args[0]))
    return found


def self_attributes(owner: type, written: bool) -> set[str]:
    """Attributes of `self` that a class's source writes, or reads."""
    kind = ast.Store if written else ast.Load
    return {
        node.attr
        for node in ast.walk(tree_of(owner))
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self" and isinstance(node.ctx, kind)
    }


def test_trl_is_the_one_that_was_read() -> None:
    pins = [Requirement(line) for line in requires("verifiers") or [] if Requirement(line).name == "trl"]
    assert [set(str(pin.specifier).split(",")) for pin in pins] == [set(PINNED.split(","))]
    assert pins[0].specifier.contains(version("trl"))


@pytest.mark.parametrize("name", sorted(PRIVATE_NAMES))
def test_a_private_name_still_exists(name: str) -> None:
    classes = [owner for owner in trl.GRPOTrainer.__mro__ if owner is not object]
    assert hasattr(trl.GRPOTrainer, name) or any(
        name in self_attributes(owner, written=True) for owner in classes if owner.__module__.startswith("trl")
    )


def test_no_other_private_name_of_trl_is_used() -> None:
    classes = [owner for owner in GRPOTrainer.__mro__ if owner.__module__.startswith("verifiers.")]
    assert classes == [GRPOTrainer]
    ours = {name for owner in classes for name in {*self_attributes(owner, written=True), *vars(owner)}}
    read = {name for owner in classes for name in self_attributes(owner, written=False)}
    foreign = {name for name in read if name.startswith("_") and not name.startswith("__")} - ours
    overridden = {name for name in vars(GRPOTrainer) if name.startswith("_") and hasattr(trl.GRPOTrainer, name)}
    assert foreign <= PRIVATE_NAMES
    assert {name for name in overridden if not name.startswith("__")} <= PRIVATE_NAMES


def test_the_loss_still_reads_what_we_pass() -> None:
    read = inputs_read(trl.GRPOTrainer._compute_loss)
    passed = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages"}
    passed |= {"sampling_per_token_logps", "old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio"}
    passed |= {"num_items_in_batch"}
    assert passed <= read
    # further inputs are those of image models; a new one would mean a new term in the loss
    images = {
        "pixel_values",
        "image_grid_thw",
        "num_images",
        "pixel_attention_mask",
        "spatial_shapes",
        "num_tiles",
        "image_sizes",
        "token_type_ids",
        "mm_token_type_ids",
        "image_position_ids",
    }
    assert read - passed <= images


def test_the_loss_still_has_the_terms_that_our_weights_assume() -> None:
    source = inspect.getsource(trl.GRPOTrainer._compute_loss)
    for term in (
        'mask = completion_mask if "tool_mask" not in inputs else completion_mask * inputs["tool_mask"]',
        "per_token_loss = per_token_loss + self.beta * per_token_kl",
        "loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()",
        "loss = (per_token_loss * mask).sum() / mask.sum().clamp(min=1.0)",
        "loss = (per_token_loss * mask).sum() / (per_token_loss.size(0) * self.max_completion_length)",
        'normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes',
        "normalizer = normalizer * self.current_gradient_accumulation_steps / self.args.steps_per_generation",
        "if self.use_vllm and self.vllm_importance_sampling_correction",
        "loss = loss - apply_coef * entropy_loss",
        "loss = loss + self.router_aux_loss_coef * aux_loss / normalizer",
        "if self.accelerator.sync_gradients:",
    ):
        assert term in source, term


def test_log_probs_come_before_advantages_are_read() -> None:
    """The correction is put into the advantages while log-probs are computed."""
    source = inspect.getsource(trl.GRPOTrainer._compute_loss)
    assert source.index("self._get_per_token_logps_and_entropies(") < source.index('inputs["advantages"]')


def test_a_micro_step_is_one_call_of_the_loss_and_one_backward_pass() -> None:
    """Ours runs all micro-batches but the last by itself; transformers' own backward is the last one's."""
    from transformers import Trainer

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
    from transformers import Trainer

    assert "self._prepare_inputs(inputs)" in inspect.getsource(Trainer.training_step)
    assert "self._step += 1" in inspect.getsource(trl.GRPOTrainer.training_step)
    assert list(inspect.signature(trl.GRPOTrainer._get_per_token_logps_and_entropies).parameters)[:6] == [
        "self",
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
    ]


def test_evaluations_and_saves_still_go_through_what_we_override() -> None:
    from transformers import Trainer

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
