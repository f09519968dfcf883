"""The loss of an update against TRL's own `_compute_loss`, however the update is forked, split and padded.

TRL gets one row a rollout, of its sampled tokens alone. Ours gets what `build_training_block` makes of the same
rollouts: rows that forked, tokens of the environment, failures, padding, ranks, micro-steps and micro-batches.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import copy
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from torch import Tensor

from verifiers.data.batch_plan import make_plan
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock, TokenSequence
from verifiers.train.batching.micro_batches import MicroBatch, MicroSteps, all_micro_batches
from verifiers.train.batching.training_block import build_training_block
from verifiers.train.config import GRPOConfig
from verifiers.train.loss.policy_loss import LOSS_TYPES, UpdateRows, policy_loss, token_weights
from verifiers.train.loss.updates import LossMetrics
from verifiers.types import Outcome, RolloutKey

PROMPTS, GENERATIONS = 6, 8
ONE_RANK: Any = SimpleNamespace(gather=lambda own: [own])
LAYOUTS = list(itertools.product((1, 2, 4), (1, 2, 3, 4)))
"""(ranks, micro-steps) of an update."""

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"vllm_importance_sampling_correction": False},
    "k3": {"beta": 0.3},
    "k3 uncorrected": {"beta": 0.3, "use_bias_correction_kl": False},
    "entropy": {"entropy_coef": 0.1, "beta": 0.1},
    "delta": {"delta": 1.3},
    "rows": {"importance_sampling_level": "sequence", "beta": 0.2},
    "far rows": {"off_policy_mask_threshold": 0.05},
    "uncertain tokens": {"top_entropy_quantile": 0.4},
    **{mode: {"vllm_importance_sampling_mode": mode} for mode in MODES},
    **{f"{mode}, both bounds": {"vllm_importance_sampling_mode": mode, "low": 0.7} for mode in MODES[:2]},
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config(loss_type: str, **settings: Any) -> GRPOConfig:
    if settings.get("vllm_importance_sampling_correction", True):
        settings["vllm_importance_sampling_clip_max"] = 1.4
        settings["vllm_importance_sampling_clip_min"] = settings.pop("low", None)
    if loss_type == "cispo":
        settings["epsilon_high"] = 1.2
    sizes = {"max_completion_length": 9, "skip_zero_advantage_rows": False}
    return GRPOConfig("unused", use_cpu=True, bf16=False, loss_type=loss_type, **{**sizes, **settings})


@dataclass(frozen=True)
class Policies:
    """Log-probs of each token id under four policies that are near one another, and entropies; id 0 is padding."""

    current: Tensor
    old: Tensor
    sampler: Tensor
    reference: Tensor
    entropy: Tensor

    @classmethod
    def of(cls, tokens: int) -> Policies:
        draw = torch.Generator().manual_seed(3)

        def near(values: Tensor, by: float) -> Tensor:
            return values + by * torch.randn(tokens, generator=draw, dtype=torch.float64)

        current = -2 * torch.rand(tokens, generator=draw, dtype=torch.float64)
        old, reference = near(current, 0.3), near(current, 0.3)
        sampler = near(old, 0.2).float().double()
        entropy = torch.rand(tokens, generator=draw, dtype=torch.float64)
        return cls(current.requires_grad_(), old, sampler, reference, entropy.requires_grad_())

    def gradient(self, loss: Tensor) -> Tensor:
        found = torch.autograd.grad(loss, [self.current, self.entropy], allow_unused=True)
        return torch.cat([torch.zeros_like(self.current) if one is None else one for one in found])


class World:
    """Rollouts whose tokens all have ids of their own; some failed, some have an advantage of 0."""

    def __init__(self) -> None:
        draw, self.ids = random.Random(5), itertools.count(1)
        self.sampled: dict[int, list[int]] = {}
        rollouts = []
        for index in range(PROMPTS * GENERATIONS):
            key = RolloutKey(0, index // GENERATIONS, index % GENERATIONS)
            if draw.random() < 0.1:
                rollouts.append((key, None, [], []))
                continue
            mask = [1] + [int(draw.random() < 0.8) for _ in range(draw.choice([0, 1, 2, 9]))]
            ids = [next(self.ids) for _ in mask]
            self.sampled[index] = [one for one, kept in zip(ids, mask, strict=True) if kept]
            rollouts.append((key, float(draw.randint(0, 2)) if index >= GENERATIONS else 1.0, ids, mask))
        self._made, self.policies = rollouts, Policies.of(1000)

    def block(self, forked: bool) -> ScoredBlock:
        groups = []
        for example, group in itertools.groupby(self._made, lambda made: made[0].example_id):
            groups.append(Group(example, [self._rollout(*made, forked=forked) for made in group]))
        return ScoredBlock(0, groups)

    def _rollout(
        self, key: RolloutKey, reward: float | None, ids: list[int], mask: list[int], forked: bool
    ) -> Rollout:
        if reward is None:
            return Rollout(key, Outcome.PROVIDER_ERROR, "p", "")
        cuts = [0, len(ids) // 2, len(ids)] if forked and len(ids) > 1 else [0, len(ids)]
        prompt = [500 + key.generation] * (1 + key.generation % 3)
        sampler = [float(self.policies.sampler[one]) for one in ids]
        rows = [
            TokenSequence(prompt + ids[:start], ids[start:end], mask[start:end], sampler[start:end], mask[start:end])
            for start, end in itertools.pairwise(cuts)
        ]
        return Rollout(key, Outcome.COMPLETED, "p", "c", reward=reward, rows=rows)


WORLD = World()


def packed(args: GRPOConfig, ranks: int, micro_steps: int, forked: bool, skips: bool = False) -> MicroSteps:
    plan = make_plan(
        per_device_train_batch_size=PROMPTS * GENERATIONS // ranks // micro_steps,
        num_processes=ranks,
        num_generations=GENERATIONS,
        gradient_accumulation_steps=micro_steps,
        max_steps=1,
        num_prompts=PROMPTS,
    )
    args = copy.copy(args)
    args.skip_zero_advantage_rows = skips
    return build_training_block(WORLD.block(forked), plan, args).micro_steps


def ours(args: GRPOConfig, micro_steps: MicroSteps) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return loss, gradient and metrics of an update: the sums over its micro-batches."""
    policies, metrics, losses = WORLD.policies, LossMetrics(), []
    uncertain = 1 - args.top_entropy_quantile
    for batch in all_micro_batches(micro_steps):
        ids, mask = batch["input_ids"], batch["loss_mask"].bool()
        batch = {**batch, "old_logps": torch.where(mask, policies.old[ids], 200.0)}
        if args.beta:
            batch["reference_logps"] = torch.where(mask, policies.reference[ids], -200.0)
        entropy = policies.entropy[ids]
        trained = entropy >= entropy[mask].quantile(uncertain) if uncertain else None
        # what nobody sampled may have any log-prob
        current = torch.where(mask, policies.current[ids], policies.current[ids] - 300.0)
        loss, measured = policy_loss(
            current, entropy, batch, args, entropy_coef=args.entropy_coef, trained_RT=trained
        )
        assert measured.is_finite_R.all()
        metrics.add(measured.values)
        losses.append(loss)
    loss = torch.stack(losses).sum()
    return loss.detach(), policies.gradient(loss), metrics.take(ONE_RANK)


def trls_trainer(args: GRPOConfig, current: Tensor, entropy: Tensor) -> Any:
    """Return TRL's trainer without a model: what `_compute_loss` reads, with vLLM said to have sampled."""
    made = object.__new__(trl.GRPOTrainer)
    one_rank = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=lambda value: value,
        reduce=lambda value, reduction="sum": value,
        pad_across_processes=lambda value, **_: value,
    )
    same = ("loss_type", "beta", "importance_sampling_level", "top_entropy_quantile", "off_policy_mask_threshold")
    same = (*same, "entropy_coef", "use_adaptive_entropy", "max_completion_length")
    given = {
        **{name: getattr(args, name) for name in (*same, "vllm_importance_sampling_correction")},
        "epsilon_low": args.epsilon,
        "epsilon_high": args.epsilon if args.epsilon_high is None else args.epsilon_high,
        "use_vllm": True,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": args.entropy_coef != 0.0,
        "current_gradient_accumulation_steps": 1,
        "accelerator": one_rank,
        "model": SimpleNamespace(training=True),
        "_metrics": {"train": defaultdict(list)},
        "args": SimpleNamespace(**{**vars(args), "steps_per_generation": 1, "report_to": []}),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (current, entropy, None),
    }
    vars(made).update(given)
    return made


def trls_ratio(old: Tensor, sampler: Tensor, mask: Tensor, args: GRPOConfig) -> Tensor:
    """Return the factor that TRL makes of vLLM's log-probs when it generates, written down from its documentation."""
    low, high = args.vllm_importance_sampling_clip_min or 0.0, args.vllm_importance_sampling_clip_max
    difference = (old - sampler) * mask
    if args.vllm_importance_sampling_mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    if args.vllm_importance_sampling_mode.endswith("truncate"):
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio > high) | (ratio < low), 0.0)


def theirs(args: GRPOConfig, rows: Sequence[tuple[list[int], float]]) -> tuple[Tensor, dict[str, float]]:
    """Return TRL's loss and metrics of rows of sampled ids with an advantage each."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    mask, policies = (ids > 0).long(), WORLD.policies
    old, sampler = policies.old[ids] * mask, policies.sampler[ids] * mask
    inputs = {
        "prompt_ids": torch.ones(len(rows), 1).long(),
        "prompt_mask": torch.ones(len(rows), 1).long(),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor([advantage for _, advantage in rows], dtype=torch.float64),
        "old_per_token_logps": old,
        "ref_per_token_logps": policies.reference[ids] * mask,
        "sampling_per_token_logps": sampler,
        "num_items_in_batch": mask.sum(),
    }
    if args.vllm_importance_sampling_correction:
        inputs["importance_sampling_ratio"] = trls_ratio(old, sampler, mask, args)
    trainer = trls_trainer(args, policies.current[ids] * mask, policies.entropy[ids])
    loss = trainer._compute_loss(None, inputs)
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


def rows_of(batches: Sequence[MicroBatch]) -> list[tuple[list[int], float]]:
    """Return the sampled ids of each real row, and its advantage."""
    found = []
    for batch in batches:
        for ids, mask, advantages in zip(
            batch["input_ids"], batch["loss_mask"].bool(), batch["advantages"], strict=True
        ):
            if mask.any():
                found.append((ids[mask].tolist(), float(advantages[mask][0])))
    return found


def trls_update(args: GRPOConfig, micro_steps: MicroSteps) -> tuple[Tensor, dict[str, float]]:
    """Return TRL's loss of the update, in one row a rollout; of bnpo the mean of those of each filled micro-step."""
    rows = rows_of(list(all_micro_batches(micro_steps)))
    if args.loss_type != "bnpo":
        advantages = {one: advantage for ids, advantage in rows for one in ids}
        return theirs(args, [(ids, advantages[ids[0]]) for ids in WORLD.sampled.values()])
    cells = [rows_of(held) for by_rank in micro_steps for held in by_rank if rows_of(held)]
    whole, metrics = theirs(args, rows)
    without_bonus = copy.copy(args)
    without_bonus.entropy_coef = 0.0
    bonus = whole - theirs(without_bonus, rows)[0]
    return torch.stack([theirs(without_bonus, cell)[0] for cell in cells]).mean() + bonus, metrics


def is_of_rows(loss_type: str, way: str) -> bool:
    return loss_type == "vespo" or way in ("rows", "far rows") or way.startswith("sequence")


def is_refused(loss_type: str, way: str) -> bool:
    ratios = way == "rows" or way.startswith("sequence")
    clipped = loss_type in ("sapo", "cispo", "vespo")
    return (loss_type == "vespo" and ratios) or (way == "delta" and clipped)


CASES = [(loss, way) for loss in LOSS_TYPES for way in WAYS if not is_refused(loss, way)]


@pytest.mark.parametrize(("loss_type", "way"), CASES)
def test_loss_gradient_and_metrics_of_an_update_are_trls_own_however_it_is_split(loss_type: str, way: str) -> None:
    args = config(loss_type, **WAYS[way])
    # each loss type meets every layout in one of its ways; a quantile is over each micro-step
    layout = LAYOUTS[CASES.index((loss_type, way)) % len(LAYOUTS)]
    ranks, micro_steps = (1, 1) if way == "uncertain tokens" else layout
    for forked in {False, not is_of_rows(loss_type, way)}:
        made = packed(args, ranks, micro_steps, forked)
        wanted, metrics = trls_update(args, made)
        gradient = WORLD.policies.gradient(wanted)
        loss, found, measured = ours(args, made)
        assert gradient.abs().max() > 1e-4, "a gradient of nothing proves nothing"
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(found, gradient, rtol=1e-6, atol=1e-9)
        for name in metrics.keys() & measured.keys():
            of_rows = name.endswith(("min", "max")) or "seq" in name
            if (forked and of_rows) or (way == "rows" and "clip" in name):
                continue
            assert measured[name] == pytest.approx(metrics[name], abs=1e-6), name


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "bnpo"])
def test_rows_that_are_left_out_for_their_advantage_of_zero_change_nothing(loss_type: str) -> None:
    args, forked = config(loss_type), loss_type != "vespo"
    whole, without = (packed(args, 2, 2, forked, skips) for skips in (False, True))
    assert len(rows_of(list(all_micro_batches(without)))) < len(rows_of(list(all_micro_batches(whole))))
    torch.testing.assert_close(ours(args, without)[:2], ours(args, whole)[:2], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_an_update_of_padding_alone_has_loss_and_gradient_zero(loss_type: str) -> None:
    args = config(loss_type, beta=0.1)
    plan = make_plan(per_device_train_batch_size=2, num_generations=2, max_steps=1, num_prompts=1)
    failed = [Rollout(RolloutKey(0, 0, one), Outcome.PROVIDER_ERROR, "p", "") for one in range(2)]
    made = build_training_block(ScoredBlock(0, [Group(0, failed)]), plan, args).micro_steps
    loss, gradient, metrics = ours(args, made)
    assert loss == 0
    assert (gradient == 0).all()
    assert metrics == {}


MEANS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "grpo": lambda rollouts: torch.stack([tokens.mean() for tokens in rollouts]).mean(),
    "dapo": lambda rollouts: torch.cat(rollouts).mean(),
    "dr_grpo": lambda rollouts: torch.stack([tokens.sum() / 9 for tokens in rollouts]).mean(),
    "luspo": lambda rollouts: torch.stack([tokens.sum() for tokens in rollouts]).mean(),
}


@pytest.mark.parametrize("loss_type", MEANS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_named_estimator_is_the_term_that_beta_weighs(estimator: str, loss_type: str) -> None:
    policies, made = WORLD.policies, packed(config(loss_type), 2, 3, forked=True)
    difference, ratio = policies.current - policies.reference, (policies.current - policies.old).exp()
    terms = {
        "k1": ratio * difference,
        "k2": ratio.detach() * difference**2 / 2,
        "k3": ratio * ((-difference).exp() - 1 + difference),
    }[estimator]
    wanted = 0.3 * MEANS[loss_type]([terms[ids] for ids in WORLD.sampled.values()])
    gradient = policies.gradient(wanted)
    without, with_kl = (ours(config(loss_type, **kl), made) for kl in ({}, {"beta": 0.3, "kl_estimator": estimator}))
    torch.testing.assert_close(with_kl[0] - without[0], wanted.detach(), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(with_kl[1] - without[1], gradient, rtol=1e-6, atol=1e-8)


# -- worked numbers --------------------------------------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 1]])
ADVANTAGES = torch.tensor([[1.0], [-0.5]]) * MASK


def one_batch(
    loss_type: str, logps: Tensor, old: Tensor | None, mask: Tensor = MASK, advantages: Tensor = ADVANTAGES
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and metrics of an update that is one micro-batch of a row a rollout."""
    args = config(loss_type, vllm_importance_sampling_correction=False, max_completion_length=8)
    args.epsilon_high = 5.0 if loss_type == "cispo" else 0.2
    tokens_R = mask.sum(1)
    rows = UpdateRows(tokens_R, tokens_R.sum().expand(len(mask)), len(mask), int(mask.sum()))
    batch = {"loss_mask": mask, "advantages": advantages, "token_weights": token_weights(rows, args)}
    batch |= {"sampler_logps": logps.detach(), "update_tokens": mask.sum()} | (
        {} if old is None else {"old_logps": old}
    )
    loss, measured = policy_loss(logps, torch.zeros_like(logps), batch, args)
    return loss, measured.values


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("stored_old", [True, False])
def test_the_first_update_after_generation_is_reinforce_with_baseline(loss_type: str, stored_old: bool) -> None:
    logits = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    logps = logits.log_softmax(-1)[..., 2]
    loss, measured = one_batch(loss_type, logps, logps.detach() if stored_old else None)
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    reinforce = -ADVANTAGES * logps
    expected = {
        "grpo": (reinforce.sum(1) / MASK.sum(1)).mean(),
        "dr_grpo": reinforce.sum() / (2 * 8),
        "luspo": reinforce.sum(1).mean(),
        "bnpo": reinforce.sum() / MASK.sum(),
    }
    name = {"sapo": "grpo", "dapo": "bnpo", "cispo": "bnpo", "vespo": "bnpo"}.get(loss_type, loss_type)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected[name], logits)[0], atol=1e-6, rtol=1e-5)
    assert not any(value.any() for key, value in measured.items() if "clip" in key)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_a_teacher_gives_the_gradient_of_trls_distillation_trainer(direction: str) -> None:
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    draw, places, tokens = torch.Generator().manual_seed(4), 3, 7
    student = torch.randn(1, places, tokens, generator=draw, requires_grad=True)
    teacher, head = torch.randn(1, places, tokens, generator=draw), torch.eye(tokens)
    beta = 1.0 if direction == "reverse" else 0.0
    divergence = _chunked_divergence_loss(student, teacher, head, head, torch.ones(1, places), beta, 1)[0]
    logps, by_teacher, others = student.log_softmax(-1), teacher.log_softmax(-1), None
    if direction == "reverse":
        # in expectation over what the policy samples: each token at each place is a row, as likely as it is
        rows, weights, given = logps.reshape(-1, 1), logps.detach().exp().flatten(), {}
        said = by_teacher.reshape(-1, 1)
    else:
        # over all of the vocabulary, whichever token was sampled
        rows, weights, said = logps[0, :, :1], torch.ones(places), by_teacher[0, :, :1]
        given = {"teacher_ids": torch.arange(tokens).repeat(places, 1, 1)}
        given["teacher_ids_logps"], others = by_teacher.transpose(0, 1), logps.transpose(0, 1)
    batch: dict[str, Tensor] = {"loss_mask": torch.ones_like(rows), "advantages": torch.zeros_like(rows)}
    batch |= {"token_weights": weights, "sampler_logps": rows.detach(), "teacher_logps": said, **given}
    args = config("dapo", teacher_url="u", teacher_coef=0.5)
    loss, _ = policy_loss(rows, torch.zeros_like(rows), batch, args, others_RTK=others)
    found, wanted = (torch.autograd.grad(value, student, retain_graph=True)[0] for value in (loss, 0.5 * divergence))
    torch.testing.assert_close(found, wanted)
    assert found.abs().min() > 0
