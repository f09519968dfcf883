"""Invariant 3: loss on sampled tokens alone, attention on every real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import torch
from tiny_world import loss_and_gradient, loss_inputs
from torch import Tensor


@pytest.fixture(scope="module")
def trainer(
    model_dir: Path, server: tiny_world.EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tiny_world.ObservedTrainer]:
    """Has trained one step on three-turn rollouts; its batches are in `seen`."""
    args = tiny_world.config(tmp_path_factory.mktemp("run"), server.url, max_steps=1, learning_rate=0.0)
    client = tiny_world.RecordingBackend(server.url)
    with tiny_world.closing(
        tiny_world.ObservedTrainer(str(model_dir), tiny_world.Dialogue(), args, client=client)
    ) as trainer:
        trainer.keeps_logps = True
        trainer.train()
        trainer.model.train()
        yield trainer


def environment_tokens(batch: dict[str, Any]) -> Tensor:
    is_completion = batch["loss_mask"].cumsum(1) > 0
    return is_completion & batch["attention_mask"].bool() & ~batch["loss_mask"].bool()


def test_the_masks_cover_what_they_say(trainer: Any) -> None:
    served = {tuple(prompt + ids) for prompt, ids, _ in trainer.client.sampled()}
    for prompt, ids, mask, _, batch, place in trainer.rows():
        assert sum(mask) == int(batch["sampled_tokens"][place])
        ends = [i + 1 for i, sampled in enumerate(mask) if sampled and (i + 1 == len(mask) or not mask[i + 1])]
        assert len(ends) == 3
        # each run of the loss mask ends where one answer of the server ended
        assert all(tuple(prompt + ids[:end]) in served for end in ends)
    assert any(environment_tokens(batch).any() for batch in trainer.seen)


def test_the_policy_sees_what_the_environment_said(trainer: Any) -> None:
    batch, changed = loss_inputs(trainer.seen[0]), loss_inputs(trainer.seen[0])
    said = environment_tokens(batch)
    sampled = batch["loss_mask"].bool()
    logps = trainer.logprobs.of_model(trainer.model, batch)
    for row in range(len(said)):
        place = int(said[row].nonzero()[3])
        changed["input_ids"][row, place] = (batch["input_ids"][row, place] + 1) % 38
    difference = (trainer.logprobs.of_model(trainer.model, changed) - logps).abs()
    for row in range(len(said)):
        place = int(said[row].nonzero()[3])
        assert difference[row, :place].max() < 1e-5
        assert difference[row, place + 1 :][sampled[row, place + 1 :]].max() > 1e-3


def test_nothing_recorded_about_an_environment_token_reaches_loss_or_gradient(trainer: Any) -> None:
    batch = loss_inputs(trainer.seen[0])
    loss, gradient = loss_and_gradient(trainer, batch)
    assert gradient.abs().max() > 0
    said = environment_tokens(batch)
    for name in ("sampler_logps", "old_logps", "advantages"):
        changed = dict(batch)
        old = trainer.logprobs.of_model(trainer.model, batch)
        changed[name] = old if name == "old_logps" else batch[name].clone()
        same = loss_and_gradient(trainer, changed)
        changed[name] = torch.where(said, torch.full_like(changed[name], -3.5), changed[name])
        other = loss_and_gradient(trainer, changed)
        assert other[0] == same[0]
        assert torch.equal(other[1], same[1])
        torch.testing.assert_close(same[0], loss, atol=1e-5, rtol=0)


def test_padding_changes_no_log_prob(trainer: Any) -> None:
    """Rows of unequal length in one batch score as each does alone."""
    for prompt, ids, mask, _, batch, place in trainer.rows():
        alone = torch.tensor(trainer.logprobs.of_tokens(prompt, ids))
        together = batch["current_logps"][place][batch["loss_mask"][place].bool()]
        assert torch.allclose(alone[torch.tensor(mask).bool()], together, atol=1e-5)
        assert sum(mask) > 0
