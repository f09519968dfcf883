"""Where the sampler leaves tokens out, the trainer normalises over the same ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_world
import torch

CUTS: dict[str, dict[str, Any]] = {"top_p": {"top_p": 0.7}, "top_k": {"top_k": 5}, "min_p": {"min_p": 0.2}}
CUTS["all, at a temperature"] = {"top_p": 0.7, "top_k": 5, "min_p": 0.2, "temperature": 1.4}


@pytest.mark.parametrize("cut", CUTS)
def test_ratios_are_1_on_policy_over_the_tokens_that_were_kept_and_biased_over_all(
    make_trainer: Callable[..., Any], cut: str
) -> None:
    trainer = make_trainer(tiny_world.Dialogue(), **CUTS[cut], beta=0.01, max_steps=2)
    trainer.train()
    for name in ("mean", "min", "max"):
        ratios = trainer.logged(f"sampling/importance_sampling_ratio/{name}")
        assert ratios == pytest.approx([1.0] * 2, abs=1e-3)
    assert min(trainer.logged("entropy")) > 0
    batch = tiny_world.loss_inputs(trainer.seen[-1])
    sampled = batch["loss_mask"].bool()
    is_cut = batch["kept_counts"] > 0
    assert is_cut[sampled].any()
    assert not is_cut[~sampled].any()
    kept = trainer.logprobs.of_policy(batch)
    everything = trainer.logprobs.of_policy({name: value for name, value in batch.items() if name != "kept_ids"})
    # by as much as was left out
    mass = (everything - kept).exp()[is_cut]
    assert mass.max() < 1 + 1e-5
    assert mass.mean() < 0.95
    torch.testing.assert_close(everything[sampled & ~is_cut], kept[sampled & ~is_cut])


def test_a_rows_reference_and_old_log_probs_are_over_the_kept_tokens_too(make_trainer: Callable[..., Any]) -> None:
    options = {"top_k": 4, "beta": 0.1, "num_iterations": 2, "steps_per_generation": 2, "max_steps": 2}
    # in parts
    options["old_logprobs_batch_size"] = 3
    trainer = make_trainer(tiny_world.single_turn(), **options)
    trainer.train()
    first = trainer.seen[0]
    sampled = first["loss_mask"].bool()
    # nothing is trained yet
    for name in ("reference_logps", "old_logps"):
        torch.testing.assert_close(first[name][sampled], first["sampler_logps"][sampled], atol=1e-4, rtol=0)
    assert trainer.logged("kl")[0] == pytest.approx(0.0, abs=1e-5)
