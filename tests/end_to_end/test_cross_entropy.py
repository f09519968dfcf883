"""Demonstrations, and what the environment says, are trained by cross-entropy beside rollouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import torch

from verifiers.errors import ConfigError
from verifiers.train.batching.demonstrations import Demonstrations

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<end>' }}{% endgeneration %}{% else %}{{ m.content + '<end>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def conversation(*said: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[place % 2], "content": text} for place, text in enumerate(said)]}


@pytest.fixture
def shown(tmp_path: Path) -> str:
    path = tmp_path / "shown.jsonl"
    rows = [conversation("hi", "go"), conversation("what", "xyz", "more", "no"), conversation("a", "b")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def tokenizer() -> Any:
    made = tiny_world.make_tokenizer()
    made.chat_template = TEMPLATE
    return made


def text_of(tokenizer: Any, sample: Any) -> tuple[str, str]:
    """Return a demonstration's prompt, and what of the rest is trained."""
    said = [token for token, mask in zip(sample.row.completion_ids, sample.ce_mask, strict=True) if mask]
    return tokenizer.decode(sample.row.prompt_ids), tokenizer.decode(said)


def test_what_the_assistant_says_is_trained_and_every_demonstration_comes_once_an_epoch(
    shown: str, tokenizer: Any
) -> None:
    demonstrations = Demonstrations.load(shown, tokenizer, seed=1)
    drawn = [demonstrations.draw(update, 2) for update in range(6)]
    texts = [text_of(tokenizer, sample) for samples in drawn for sample in samples]
    everything = {("u:hi<end>a:", "go<end>"), ("u:what<end>a:", "xyz<end>no<end>"), ("u:a<end>a:", "b<end>")}
    for epoch in range(4):
        assert set(texts[3 * epoch : 3 * epoch + 3]) == everything
    assert len({tuple(texts[place : place + 3]) for place in range(0, 12, 3)}) > 1
    again = Demonstrations.load(shown, tokenizer, seed=1)
    assert [again.draw(update, 2) for update in range(6)] == drawn


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (None, {}, "cannot be read: .*; give JSON lines"),
        ([conversation("only a question")], {}, "none of the 1 rows of demonstrations="),
        ([conversation("hi", "go")], {"max_seq_len": 4}, "within max_seq_len=4"),
        ([{"messages": [{"role": "user"}]}], {}, "row 0 of the demonstrations cannot be rendered"),
    ],
)
def test_demonstrations_that_cannot_be_are_refused(
    tmp_path: Path, tokenizer: Any, rows: Any, options: dict[str, Any], message: str
) -> None:
    path = tmp_path / "shown.jsonl"
    if rows is not None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=message):
        Demonstrations.load(str(path), tokenizer, seed=0, **options)


def test_a_template_that_does_not_mark_the_assistant_is_refused(shown: str) -> None:
    with pytest.raises(ConfigError, match=r"does not mark what the assistant says.*endgeneration"):
        Demonstrations.load(shown, tiny_world.make_tokenizer(), seed=0)


def mean_cross_entropy(trainer: Any, rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Return the mean over the marked tokens of rows of ids and marks, by the model's own logits."""
    losses = []
    for ids, _ in rows:
        logits = trainer.model(input_ids=torch.tensor([ids])).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none"))
    picked = torch.cat([loss[torch.tensor(marks[1:]).bool()] for loss, (_, marks) in zip(losses, rows, strict=True)])
    return picked.mean()


@pytest.mark.parametrize("kind", ["demonstrations", "environment"])
def test_the_loss_adds_the_mean_cross_entropy_of_each_kind_and_leaves_rollouts_as_they_are(
    make_trainer: Callable[..., Any], shown: str, tokenizer: Any, kind: str
) -> None:
    options: dict[str, Any] = {"env_ce_coef": 0.5}
    if kind == "demonstrations":
        options = {"demonstrations": shown, "demonstrations_share": 0.5, "demonstrations_coef": 0.5}
    options |= {"max_steps": 1, "learning_rate": 0.0, "processing_class": tokenizer}
    trainer = make_trainer(tiny_world.Dialogue(), **options)
    trainer.train()
    batches = [tiny_world.loss_inputs(batch) for batch in trainer.seen]
    without = [{name: value for name, value in batch.items() if not name.startswith("ce_")} for batch in batches]
    whole, others = (
        sum(tiny_world.loss_and_gradient(trainer, one)[1] for one in held) for held in (batches, without)
    )
    rows = []
    for batch in batches:
        for place in range(len(batch["input_ids"])):
            real = batch["attention_mask"][place].bool()
            # a micro-batch may have none
            marks = batch["ce_mask"][place][real].tolist() if "ce_mask" in batch else []
            if any(marks):
                rows.append((batch["input_ids"][place][real].tolist(), marks))
    if kind == "demonstrations":
        assert len(rows) == 4
        said = [tokenizer.decode([one for one, mark in zip(*row, strict=True) if mark]) for row in rows]
        assert set(said) == {"go<end>", "xyz<end>no<end>", "b<end>"}
    else:
        ids, marks = rows[0]
        assert "turn 1" in tokenizer.decode([one for one, mark in zip(ids, marks, strict=True) if mark])
    trainer.model.zero_grad()
    loss = mean_cross_entropy(trainer, rows)
    (0.5 * loss).backward()
    wanted = torch.cat([one.grad.flatten() for one in trainer.model.parameters()])
    torch.testing.assert_close(whole - others, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=1e-4)
    assert trainer.logged(f"ce/{kind}") == pytest.approx([loss.item()], rel=1e-4)
    assert trainer.logged("rows/trained") == [8.0]
    assert trainer.logged("rows/demonstrations") == ([4.0] if kind == "demonstrations" else [])
    assert trainer.logged("rows/padding") == [0.0]


@pytest.mark.slow
def test_demonstrations_are_learned_beside_rollouts_and_the_same_after_a_resume(
    make_trainer: Callable[..., Any], shown: str, tokenizer: Any, tmp_path: Path
) -> None:
    options = {"demonstrations": shown, "save_strategy": "steps", "save_steps": 6, "learning_rate": 3e-3}
    options |= {"processing_class": tokenizer, "max_steps": 12}
    whole = make_trainer(tiny_world.single_turn(), output_dir=tmp_path / "whole", **options)
    whole.train()
    losses = whole.logged("ce/demonstrations")
    assert losses[-1] < 0.7 * losses[0]
    cut = make_trainer(tiny_world.single_turn(), output_dir=tmp_path / "cut", **options)
    tiny_world.stop(cut, 6)
    again = make_trainer(tiny_world.single_turn(), output_dir=tmp_path / "cut", **options)
    again.train(resume_from_checkpoint=True)
    assert again.logged("ce/demonstrations") == pytest.approx(losses, rel=1e-4)
