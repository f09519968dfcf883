"""A micro-step of several micro-batches trains what it trains in one: loss, gradient, weights and what is logged."""

from __future__ import annotations

import functools
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from verifiers.data.batch_plan import make_plan
from verifiers.keywords import warn_once
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock, TokenSequence
from verifiers.testing import FakeOpenAIServer
from verifiers.train.batching.micro_batches import MicroSteps, all_micro_batches, computed_tokens
from verifiers.train.batching.training_block import build_training_block
from verifiers.types import Outcome, RolloutKey

BUDGET = 40
PROMPTS, GENERATIONS = 4, 6


@pytest.fixture(scope="module")
def trainer(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a trainer that is given its micro-batches; it has no server."""
    sizes: dict[str, Any] = {"per_device_train_batch_size": 12, "num_generations": GENERATIONS}
    args = tiny_world.config(tmp_path_factory.mktemp("run"), "http://127.0.0.1:9/v1", **sizes)
    made = tiny_world.GRPOTrainer(
        str(model_dir), tiny_world.single_turn(), args, client=tiny_world.Endpoint("http://127.0.0.1:9/v1")
    )
    yield made
    made.close()


def a_block(forked: bool = True) -> ScoredBlock:
    """Rollouts of very unequal length, some of two rows, some failed, one group without variance."""
    draw = random.Random(3)

    def a_row(most: int) -> TokenSequence:
        count = draw.choice([1, 2, 3, most])
        ids = [draw.randrange(1, 38) for _ in range(count)]
        mask = [1 if place in (0, count - 1) or draw.random() < 0.8 else 0 for place in range(count)]
        logps = [-draw.uniform(0.5, 4.0) if sampled else 0.0 for sampled in mask]
        prompt = [draw.randrange(1, 38) for _ in range(draw.choice([2, 3, 9]))]
        return TokenSequence(prompt, ids, mask, logps, [0 if sampled else -1 for sampled in mask])

    groups = []
    for example in range(PROMPTS):
        rollouts = []
        for generation in range(GENERATIONS):
            key = RolloutKey(0, example, generation)
            rows = [a_row(25) for _ in range(draw.choice([1, 1, 3]) if forked else 1)]
            rollout = Rollout(key, Outcome.COMPLETED, "p", "c", reward=float(example and generation), rows=rows)
            if draw.random() < 0.1:
                rollout = Rollout(key, Outcome.PROVIDER_ERROR, "p", "")
            rollouts.append(rollout)
        groups.append(Group(example, rollouts))
    return ScoredBlock(0, groups)


PLAN = make_plan(
    per_device_train_batch_size=12,
    num_generations=GENERATIONS,
    gradient_accumulation_steps=2,
    max_steps=1,
    num_prompts=PROMPTS,
)


def use(trainer: Any, patch: pytest.MonkeyPatch, **values: Any) -> None:
    """Change settings of the loss, in the config and where the trainer keeps them."""
    patch.setattr(trainer.entropy_bonus, "is_on", "entropy_coef" in values)
    for name, value in values.items():
        if hasattr(trainer.args, name):
            patch.setattr(trainer.args, name, value)
        if hasattr(trainer, name):
            patch.setattr(trainer, name, value)


def noisy(trainer: Any, batches: MicroSteps, names: tuple[str, ...]) -> None:
    """Store log-probs near the policy's own, by the token alone."""
    for batch in all_micro_batches(batches):
        logps = trainer.logprobs.of_model(trainer.model, batch)
        for salt, name in enumerate(names):
            noise = (batch["input_ids"] * 37 + salt) % 11 / 10 - 0.5
            # what nobody sampled may have any value
            batch[name] = torch.where(batch["loss_mask"].bool(), logps + noise, 200.0)


def update(trainer: Any, batches: MicroSteps) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Return loss, gradient and logged values of an update."""
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = len(batches)
    trainer.model.zero_grad()
    trainer.model.train()
    total = 0.0
    for number, (of_rank,) in enumerate(batches):
        trainer.accelerator.gradient_state._set_sync_gradients(number == len(batches) - 1)
        loss = trainer.compute_loss(trainer.model, {"micro_batches": of_rank})
        loss.backward()
        total += float(loss.detach())
    assert trainer.accelerator.sync_gradients
    trainer.entropy_bonus.end_update()
    gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    assert gradient.abs().max() > 1e-4, "a gradient of nothing proves nothing"
    return total, gradient.clone(), trainer.loss_metrics.take(trainer.ranks)


def cut(trainer: Any, block: ScoredBlock, budget: int | None) -> MicroSteps:
    trainer.args.max_tokens_per_micro_batch = budget
    try:
        batches = build_training_block(block, PLAN, trainer.args).micro_steps
    finally:
        trainer.args.max_tokens_per_micro_batch = None
    if budget is not None:
        assert all(len(b["input_ids"]) == 1 or computed_tokens(b) <= budget for b in all_micro_batches(batches))
    return batches


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kl": {"beta": 0.2},
    "no correction": {"vllm_importance_sampling_correction": False},
    "sequence ratios": {"importance_sampling_level": "sequence", "vllm_importance_sampling_correction": False},
    "entropy bonus": {"entropy_coef": 0.3},
}


CASES = [("grpo", name) for name in VARIANTS] + [("dapo", "plain"), ("bnpo", "plain")]


@pytest.mark.parametrize(("loss_type", "variant"), CASES)
def test_a_budget_changes_neither_loss_nor_gradient_nor_what_is_logged(
    trainer: Any, loss_type: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(trainer, monkeypatch, loss_type=loss_type, **VARIANTS[variant])
    names: tuple[str, ...] = ("old_logps",)
    if "beta" in VARIANTS[variant]:
        names = (*names, "reference_logps")
    forked = variant != "sequence ratios"
    results = []
    for budget in (None, BUDGET):
        batches = cut(trainer, a_block(forked), budget)
        noisy(trainer, batches, names)
        results.append(update(trainer, batches))
    one, other = results
    assert other[0] == pytest.approx(one[0], abs=1e-5)
    torch.testing.assert_close(other[1], one[1], atol=2e-5, rtol=2e-3)
    assert other[2] == pytest.approx(one[2], abs=1e-4)
    assert any(name.startswith(("clip_ratio", "entropy")) for name in results[0][2])


def test_the_router_loss_of_experts_counts_once_an_update_however_many_micro_batches_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    size |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2}
    size |= {"moe_intermediate_size": 16, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=39, pad_token_id=0, eos_token_id=0, **size))
    sizes: dict[str, Any] = {"per_device_train_batch_size": 12, "num_generations": GENERATIONS}
    args = tiny_world.config(tmp_path, "http://127.0.0.1:9/v1", loss_type="grpo", **sizes)
    client = tiny_world.Endpoint("http://127.0.0.1:9/v1")
    trainer = tiny_world.GRPOTrainer(
        model, tiny_world.single_turn(), args, tiny_world.make_tokenizer(), client=client
    )
    with tiny_world.closing(trainer):
        assert trainer.aux_loss_enabled
        for budget in (None, BUDGET):
            batches = cut(trainer, a_block(), budget)
            whole, _, logged = update(trainer, batches)
            monkeypatch.setattr(trainer, "router_aux_loss_coef", 0.0)
            without, _, _ = update(trainer, batches)
            monkeypatch.setattr(trainer, "router_aux_loss_coef", 0.5)
            assert logged["aux_loss"] > 0.5
            assert whole - without == pytest.approx(0.5 * logged["aux_loss"], abs=1e-5)


def test_micro_batches_before_the_last_free_their_activations_and_put_off_the_end_of_the_update(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = cut(trainer, a_block(), BUDGET)
    graphs, synced = [], []
    inner = trainer._compute_loss

    def watched(model: Any, batch: Any) -> Any:
        alive = [graph for graph in graphs if graph() is not None]
        assert not alive, "the graph of a micro-batch outlived it"
        synced.append(trainer.accelerator.sync_gradients)
        loss = inner(model, batch)
        graphs.append(weakref.ref(loss))
        return loss

    monkeypatch.setattr(trainer, "_compute_loss", watched)
    update(trainer, batches)
    micro_batches = [len(by_rank[0]) for by_rank in batches]
    assert max(micro_batches) > 1
    assert synced == [False] * (sum(micro_batches) - 1) + [True]


answer = functools.partial(tiny_world.letters, fails=0.1, lengths=[1, 2, 3, 9])


@pytest.mark.slow
def test_a_run_with_a_budget_or_shared_prompts_reaches_the_weights_and_logs_of_one_without(
    make_fake_trainer: Callable[..., Any],
) -> None:
    """Each block has two updates, two passes and a reference."""
    options = {"steps_per_generation": 4, "num_iterations": 2, "beta": 0.1, "max_steps": 4}
    # Adam would blow rounding of gradients near 0 up to whole steps
    options |= {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 1.0}
    trained = []
    for budget, shares in ((None, False), (60, False), (None, True)):
        with FakeOpenAIServer(answer) as fake:
            env = tiny_world.Rewriting()
            sizes = {"max_tokens_per_micro_batch": budget, "share_prefixes": shares}
            trained.append(make_fake_trainer(env, fake.url, **sizes, **options))
            start = tiny_world.weights(trained[-1])
            trained[-1].train()
    without, within, shared = trained
    assert len(within.seen) > len(without.seen)
    assert max(without.logged("rows/shared_share")) == 0 < min(shared.logged("rows/shared_share"))
    for batch in within.seen:
        assert len(batch["input_ids"]) == 1 or batch["computed_tokens"] <= within.args.max_tokens_per_micro_batch
    before = tiny_world.weights(without)
    assert max(float((before[key] - tensor).abs().max()) for key, tensor in start.items()) > 1e-3
    for other in (within, shared):
        for key, tensor in tiny_world.weights(other).items():
            torch.testing.assert_close(tensor, before[key], atol=1e-5, rtol=1e-4)
    same = ("loss", "grad_norm", "entropy", "mismatch_kl", "clip_ratio/region_mean", "clip_ratio/high_max", "kl")
    for key in (*same, "reward", "rows/trained"):
        for other in (within, shared):
            assert other.logged(key) == pytest.approx(without.logged(key), rel=1e-3, abs=1e-4), key
    assert max(within.logged("rows/padding_share")) < 0.5 * min(without.logged("rows/padding_share"))


def test_a_model_that_cannot_share_prompts_computes_each_row_and_says_so(
    make_fake_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    options = {"share_prefixes": True, "model_init_kwargs": {"attn_implementation": "eager"}}
    with FakeOpenAIServer(answer) as fake, caplog.at_level("WARNING", logger="verifiers.train"):
        trainer = make_fake_trainer(tiny_world.single_turn(), fake.url, max_steps=1, **options)
        trainer.train()
    assert trainer.args.share_prefixes is False
    assert "each row is computed on its own" in caplog.text
    assert trainer.logged("rows/shared_share") == [0.0]


def test_a_row_over_the_budget_is_trained_alone_and_said_once(
    make_fake_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    with FakeOpenAIServer(answer) as fake:
        trainer = make_fake_trainer(tiny_world.single_turn(), fake.url, max_tokens_per_micro_batch=12)
        with caplog.at_level("WARNING", logger="verifiers.train"):
            trainer.train()
    said = [
        record.getMessage() for record in caplog.records if "max_tokens_per_micro_batch=12" in record.getMessage()
    ]
    assert len(said) == 1
    assert "has a micro-batch of its own" in said[0]
    assert all(len(batch["input_ids"]) == 1 for batch in trainer.seen if batch["computed_tokens"] > 12)
    assert max(trainer.logged("rows/largest_micro_batch_tokens")) > 12
