"""Weights of rows against TRL's real `_compute_loss` on a real (tiny) model: loss and gradient of whole updates."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from verifiers.errors import ConfigError
from verifiers.rollouts.recording_client import rows_from_turns
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock, TokenSequence, Turn
from verifiers.train.batching.advantages import rollout_advantages
from verifiers.train.batching.collate import TrainingSample, append_padding, block_samples, pad_rows, row_tensors
from verifiers.train.batching.weighting import (
    WeightedBeta,
    num_items_in_batch,
    row_weights,
    weight_advantages,
)
from verifiers.train.validation.loss_settings import LOSS_TYPES
from verifiers.types import Outcome, RolloutKey

VOCABULARY = 40
PAD = 0
MAX_LENGTH = 8
EPSILON_LOW, EPSILON_HIGH = 0.2, 0.3
CISPO_EPSILON_HIGH = 1.2


def no_reward(completions: list[Any], **_: Any) -> list[float | None]:
    return [0.0] * len(completions)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """TRL's own trainer, around a model of one layer."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    size |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.5, "vocab_size": VOCABULARY}
    model = Qwen3ForCausalLM(Qwen3Config(**size, pad_token_id=0, eos_token_id=1, bos_token_id=None))
    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, VOCABULARY)}}
    letters = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>")
    args = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        use_cpu=True,
        bf16=False,
        report_to=[],
        activation_checkpointing=False,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=MAX_LENGTH,
        epsilon=EPSILON_LOW,
        epsilon_high=EPSILON_HIGH,
        temperature=0.9,
    )
    yield GRPOTrainer(
        model=model,
        reward_funcs=no_reward,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "w2"}] * 8),
        processing_class=tokenizer,
    )
    torch.set_num_threads(threads)


@dataclass
class Update:
    """One optimizer step: rows with their place on ranks and in micro-batches, and what the loss reads."""

    rows: list[TrainingSample]
    """The real rows; numbers in `cells` from there on are padding rows."""
    cells: list[list[int]]
    """Rows of each (rank, micro-batch), ranks first."""
    ranks: int
    micro_batches: int
    noise: float = 0.0
    """Distance of old and reference log-probs lie from the policy's, in nats."""
    tensors: dict[str, Tensor] = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        count = sum(map(len, self.cells)) - len(self.rows)
        self.tensors = pad_rows(append_padding(row_tensors(self.rows), count, PAD), PAD)
        self.size = len(self.rows) + count

    def weights(self, loss_type: str) -> Tensor:
        micro_batch, rank = torch.zeros(self.size).long(), torch.zeros(self.size).long()
        for number, cell in enumerate(self.cells):
            rank[cell], micro_batch[cell] = divmod(number, self.micro_batches)
        return row_weights(
            loss_type,
            rollout_index_R=self.tensors["rollout_index"],
            sampled_tokens_R=self.tensors["sampled_tokens"],
            rollout_sampled_tokens_R=self.tensors["rollout_sampled_tokens"],
            micro_step_R=micro_batch,
            rank_R=rank,
            num_micro_steps=self.micro_batches,
            num_ranks=self.ranks,
        )


def rollout(generation: int, turns: Sequence[tuple[list[int], list[int]]], reward: float | None) -> Rollout:
    made = [Turn(prompt, ids, [-1.0] * len(ids), [0] * len(ids)) for prompt, ids in turns]
    rows, forks = rows_from_turns(made)
    outcome = Outcome.PROVIDER_ERROR if reward is None else Outcome.COMPLETED
    return Rollout(RolloutKey(0, 0, generation), outcome, "p", "c", reward=reward, rows=rows, forks=forks)


def five_rollouts(forked: bool = True) -> list[Rollout]:
    """Rollouts of 5, 2, 4 and 1 sampled tokens and one that failed; the first is one row, or the same as two."""
    first, second = ([5, 6], [7, 8, 9]), ([5, 6, 7, 8, 9, 20, 21], [10, 11])
    made = [
        rollout(0, [first, second], 1.0),
        rollout(1, [([5, 6], [12, 13])], 0.2),
        rollout(2, [([5, 6], [14, 15, 16]), ([5, 6, 14, 15, 16, 22], [17])], 0.0),
        rollout(3, [([5, 6], [18])], 0.5),
        rollout(4, [], None),
    ]
    if forked:
        made[0].rows = [rollout(0, [turn], 1.0).rows[0] for turn in (first, second)]
    return made


def training_rows(rollouts: list[Rollout]) -> list[TrainingSample]:
    block = ScoredBlock(0, [Group(0, rollouts)])
    return block_samples(block, rollout_advantages(block))[0]


def token_noise(row: TokenSequence, salt: int, scale: float) -> Tensor:
    """Noise that depends on the token alone, so that forked and unforked rows have the same."""
    return scale * ((torch.tensor(row.completion_ids) * 37 + salt) % 11 / 5 - 1)


def policy_logps(trainer: Any, row: TokenSequence) -> Tensor:
    """Log-probs of a row's completion tokens by plain softmax over the unpadded sequence."""
    ids = torch.tensor([row.prompt_ids + row.completion_ids])
    logits = trainer.model(input_ids=ids).logits[0] / trainer.args.temperature
    logps = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return logps[len(row.prompt_ids) - 1 :]


def with_other_policies(trainer: Any, update: Update) -> None:
    """Give the update old and reference log-probs near the policy's own."""
    width = update.tensors["completion_ids"].shape[1]
    with torch.no_grad():
        logps = [policy_logps(trainer, item.row) for item in update.rows]
    for name, salt, scale in (("old", 1, update.noise), ("ref", 5, update.noise + 0.3)):
        shifted = torch.zeros(update.size, width)
        for index, (row, item) in enumerate(zip(logps, update.rows, strict=True)):
            # prompt tokens past the shortest prompt stand before the completion
            end = int(update.tensors["completion_mask"][index].sum())
            shifted[index, end - len(row) : end] = row + token_noise(item.row, salt, scale)
        update.tensors[f"{name}_per_token_logps"] = shifted


def gradient_of(trainer: Any, loss: Tensor) -> Tensor:
    parameters = list(trainer.model.parameters())
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, parameters)])


def configure(trainer: Any, loss_type: str, beta: float) -> None:
    trainer.loss_type, trainer.beta = loss_type, beta
    trainer.epsilon_high = CISPO_EPSILON_HIGH if loss_type == "cispo" else EPSILON_HIGH
    trainer.model.train()


def trl_update(
    trainer: Any, update: Update, loss_type: str, beta: float = 0.0, weighted: bool = True
) -> tuple[Tensor, Tensor]:
    """Loss and gradient of an update as the trainer makes them: mean over ranks of sums over micro-batches."""
    configure(trainer, loss_type, beta)
    # Two updates a block, so that TRL's scaling of num_items_in_batch is not trivial.
    trainer.args.steps_per_generation = 2 * update.micro_batches
    trainer.current_gradient_accumulation_steps = update.micro_batches
    weights = update.weights(loss_type) if weighted else torch.ones(update.size)
    items = num_items_in_batch(
        update.tensors["sampled_tokens"],
        num_micro_steps=update.micro_batches,
        steps_per_generation=2 * update.micro_batches,
    )
    losses: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(trainer.accelerator), "num_processes", property(lambda self: update.ranks))
        for cell in update.cells:
            inputs = {name: value[cell] for name, value in update.tensors.items()}
            inputs["advantages"] = weight_advantages(inputs["advantages"], weights[cell])
            inputs["num_items_in_batch"] = items
            patch.setattr(trainer, "beta", WeightedBeta(beta, weights[cell]) if weighted else beta)
            losses.append(trainer._compute_loss(trainer.model, inputs))
    loss = torch.stack(losses).sum() / update.ranks
    return loss.detach(), gradient_of(trainer, loss)


def token_losses(trainer: Any, item: TrainingSample, loss_type: str, beta: float, old: Tensor, ref: Tensor) -> Tensor:
    """Loss of each sampled token of a row, straight from the papers."""
    sampled = torch.tensor(item.row.loss_mask).bool()
    logps, old, ref = policy_logps(trainer, item.row)[sampled], old[sampled], ref[sampled]
    ratio, advantage = (logps - old).exp(), torch.as_tensor(item.advantage)
    if loss_type == "cispo":
        losses = -ratio.detach().clamp(max=CISPO_EPSILON_HIGH) * advantage * logps
    elif loss_type == "sapo":
        temperature = trainer.args.sapo_temperature_pos if advantage > 0 else trainer.args.sapo_temperature_neg
        losses = -(temperature * (ratio - 1)).sigmoid() * 4 / temperature * advantage
    elif loss_type == "vespo":
        k, rate = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        log_weight = (logps - old).sum().detach()
        losses = -(rate + k * log_weight - rate * log_weight.exp()).exp() * advantage * logps
    else:
        losses = -torch.min(ratio * advantage, ratio.clamp(1 - EPSILON_LOW, 1 + EPSILON_HIGH) * advantage)
    kl = (ref - logps).exp() - (ref - logps) - 1
    return losses + beta * (ratio * kl if trainer.args.use_bias_correction_kl else kl)


def ideal_update(trainer: Any, update: Update, loss_type: str, beta: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the loss in which each rollout counts once, computed over rollouts without padding or TRL."""
    configure(trainer, loss_type, beta)
    by_rollout: dict[int, list[Tensor]] = {}
    by_cell: dict[int, list[Tensor]] = {}
    for number, cell in enumerate(update.cells):
        for index in cell:
            if index >= len(update.rows):
                continue
            item = update.rows[index]
            # what stands before the completion are prompt tokens past the shortest prompt
            real = update.tensors["completion_mask"][index].bool()
            old, ref = (update.tensors[f"{name}_per_token_logps"][index][real] for name in ("old", "ref"))
            old, ref = (values[-len(item.row.completion_ids) :] for values in (old, ref))
            losses = token_losses(trainer, item, loss_type, beta, old, ref)
            by_rollout.setdefault(item.rollout_index, []).append(losses)
            by_cell.setdefault(number, []).append(losses)
    rollouts = [torch.cat(losses) for losses in by_rollout.values()]
    aggregate: dict[str, Callable[[], Tensor]] = {
        "grpo": lambda: torch.stack([losses.mean() for losses in rollouts]).mean(),
        "dr_grpo": lambda: torch.stack([losses.sum() / MAX_LENGTH for losses in rollouts]).mean(),
        "luspo": lambda: torch.stack([losses.sum() for losses in rollouts]).mean(),
        "bnpo": lambda: torch.stack([torch.cat(losses).mean() for losses in by_cell.values()]).mean(),
        "dapo": lambda: torch.cat(rollouts).mean(),
    }
    name = {"sapo": "grpo", "cispo": "dapo", "vespo": "dapo"}.get(loss_type, loss_type)
    loss = aggregate[name]()
    return loss.detach(), gradient_of(trainer, loss)


def assert_same(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> None:
    assert two[1].abs().max() > 1e-3, "a gradient of nothing proves nothing"
    torch.testing.assert_close(one[0], two[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(one[1], two[1], atol=1e-5, rtol=1e-3)


# The rows of five_rollouts are 0 and 1 (rollout 0), 2, 3, 4; those from 5 on are padding.
LAYOUTS = {
    "one micro-batch with padding": (1, 1, [[0, 1, 2, 3, 4, 5, 6]]),
    "micro-batches of different fill": (1, 3, [[0, 2, 3, 4], [1, 5, 6, 7], [8, 9, 10, 11]]),
    "micro-batches of different size": (1, 2, [[3, 0, 2, 5], [4, 1]]),
    "two ranks": (2, 2, [[5, 4, 2], [6, 7, 8], [1, 9, 3], [0, 10, 11]]),
}


def make_update(layout: str, noise: float = 0.4) -> Update:
    ranks, micro_batches, cells = LAYOUTS[layout]
    return Update(training_rows(five_rollouts()), cells, ranks, micro_batches, noise)


@pytest.mark.parametrize(("layout", "beta"), list(zip(LAYOUTS, (0.0, 0.1, 0.0, 0.1), strict=True)))
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_trls_loss_counts_every_rollout_once(trainer: Any, loss_type: str, layout: str, beta: float) -> None:
    update = make_update(layout)
    with_other_policies(trainer, update)
    assert_same(trl_update(trainer, update, loss_type, beta), ideal_update(trainer, update, loss_type, beta))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_kl_term_without_bias_correction_counts_every_rollout_once(
    trainer: Any, loss_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.args, "use_bias_correction_kl", False)
    update = make_update("two ranks")
    with_other_policies(trainer, update)
    assert_same(trl_update(trainer, update, loss_type, 0.5), ideal_update(trainer, update, loss_type, 0.5))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_forked_padded_batch_trains_like_the_unforked_one_without_weights(trainer: Any, loss_type: str) -> None:
    beta = 0.1
    # vespo's gamma weight belongs to a whole sequence, so there the equality is defined on policy alone.
    noise = 0.0 if loss_type == "vespo" else 0.4
    forked = make_update("one micro-batch with padding", noise)
    plain = Update(training_rows(five_rollouts(forked=False)), [[0, 1, 2, 3]], 1, 1, noise)
    for update in (forked, plain):
        with_other_policies(trainer, update)
    assert (forked.size, plain.size) == (7, 4)
    assert_same(
        trl_update(trainer, forked, loss_type, beta), trl_update(trainer, plain, loss_type, beta, weighted=False)
    )


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name not in ("dapo", "cispo", "vespo")])
def test_without_weights_padding_and_forks_change_the_gradient(trainer: Any, loss_type: str) -> None:
    update = make_update("micro-batches of different fill")
    with_other_policies(trainer, update)
    _, bare = trl_update(trainer, update, loss_type, weighted=False)
    _, ideal = ideal_update(trainer, update, loss_type)
    assert (bare - ideal).norm() > 0.1 * ideal.norm()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_an_update_of_padding_alone_has_loss_and_gradient_zero(trainer: Any, loss_type: str) -> None:
    update = Update([], [[0, 1]], 1, 1)
    with_other_policies(trainer, update)
    loss, gradient = trl_update(trainer, update, loss_type, 0.1)
    assert loss == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_batch_that_needs_no_weights_gets_ones(loss_type: str) -> None:
    update = Update(training_rows(five_rollouts(forked=False)), [[0, 1], [2, 3]], 1, 2)
    assert update.weights(loss_type).tolist() == [1.0] * 4


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_padding_rows_weigh_nothing_even_alone(loss_type: str) -> None:
    update = Update([], [[0, 1], [2, 3]], 2, 1)
    assert update.weights(loss_type).tolist() == [0.0] * 4


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_micro_batches_of_a_micro_step_weigh_together_what_one_weighs(loss_type: str) -> None:
    """TRL divides a micro-batch by its rows, or its tokens; its rows' weights make up for that."""
    update = make_update("micro-batches of different fill")
    rows = update.size
    places = [torch.zeros(rows).long() for _ in range(3)]
    for number, cell in enumerate(update.cells):
        places[0][cell] = number
        places[2][cell] = torch.arange(len(cell)) % 2
    sampled = update.tensors["sampled_tokens"]
    weights = row_weights(
        loss_type,
        rollout_index_R=update.tensors["rollout_index"],
        sampled_tokens_R=sampled,
        rollout_sampled_tokens_R=update.tensors["rollout_sampled_tokens"],
        micro_step_R=places[0],
        rank_R=places[1],
        micro_batch_R=places[2],
        num_micro_steps=3,
        num_ranks=1,
    )
    whole = update.weights(loss_type)
    for number, cell in enumerate(update.cells):
        for half in (0, 1):
            held = [row for row in cell if places[2][row] == half]
            size = {"bnpo": (sampled[held].sum(), sampled[cell].sum())}.get(loss_type, (len(held), len(cell)))
            share = 1.0 if loss_type in ("dapo", "cispo", "vespo") else float(size[0] / max(1, size[1]))
            torch.testing.assert_close(weights[held], whole[held] * share, msg=f"micro-batch {number}")


def test_an_unknown_loss_type_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="loss_type is 'ppo'"):
        make_update("two ranks").weights("ppo")


def test_a_rollout_spread_over_two_updates_is_refused() -> None:
    rows = training_rows(five_rollouts())[1:]
    with pytest.raises(ConfigError, match=r"rollout 0 has 5 sampled tokens, .* hold 2; keep all rows"):
        Update(rows, [[0, 1, 2, 3]], 1, 1).weights("grpo")
