"""Log-probs and entropies without whole logits are those of the model's own logits, and so are their gradients.

Old log-probs that are given stand where their tokens are, or nothing is assembled.
"""

from __future__ import annotations

import itertools
import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from verifiers.errors import ConfigError
from verifiers.train.loss import logprobs
from verifiers.train.loss.logprobs import fuse_head

WORDS = 40
TEMPERATURE = 0.7
SIZE: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
SIZE |= {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "eos_token_id": 0,
    "bos_token_id": None,
}
SIZE |= {"initializer_range": 0.5, "use_cache": False}

FULL = "full_attention"

CONFIGS: dict[str, Any] = {
    "plain": lambda: hf.Qwen3Config(**SIZE, head_dim=8),
    "tied": lambda: hf.Qwen3Config(**SIZE, head_dim=8, tie_word_embeddings=True),
    "soft cap": lambda: hf.Gemma2Config(**SIZE, head_dim=8, final_logit_softcapping=3.0),
    "soft cap of RecurrentGemma": lambda: hf.RecurrentGemmaConfig(
        **{**SIZE, "num_hidden_layers": 3}, lru_width=16, logits_soft_cap=3.0
    ),
    "logit_scale": lambda: hf.CohereConfig(**SIZE, logit_scale=0.25),
    "logits_scaling": lambda: hf.GraniteConfig(**SIZE, logits_scaling=4.0),
    "bias": lambda: hf.PhiConfig(**SIZE),
    "layers behind the body": lambda: hf.BertConfig(**SIZE, is_decoder=True),
    "a head of two layers": lambda: hf.ModernBertDecoderConfig(**{**SIZE, "bos_token_id": 1}, layer_types=[FULL]),
    "a factor that the forward leaves out": lambda: hf.MptConfig(
        vocab_size=WORDS, d_model=16, n_layers=1, n_heads=2, max_seq_len=32, logit_scale=0.25
    ),
    "experts": lambda: hf.Qwen3MoeConfig(
        **SIZE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, router_aux_loss_coef=0.1
    ),
}


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
    if kind == "bias":
        torch.nn.init.normal_(model.lm_head.bias)
    return model


def make_batch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(1, WORDS, (5, 10), generator=draw)
    mask = torch.ones_like(ids)
    mask[0, :2] = mask[1, 8:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :4] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def from_whole_logits(
    model: Any, batch: dict[str, Tensor], kept: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probs and entropies (5, 9) of labels, 0 where there is none, by plain autograd; and the router's loss."""
    given: dict[str, Any] = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if hasattr(model.config, "num_experts"):
        given["output_router_logits"] = True
    found = model(**given)
    labels = batch["labels"][:, 1:]
    logits = found.logits[:, :-1].float() / TEMPERATURE
    if kept is not None:
        logits = torch.where(kept, logits, -torch.inf)
    logps = logits.log_softmax(dim=-1)
    chosen = logps.gather(2, labels.clamp(min=0)[..., None]).squeeze(2)
    entropies = -(logps.exp() * logps.masked_fill(logps == -torch.inf, 0.0)).sum(dim=-1)
    return *(one.masked_fill(labels == -100, 0.0) for one in (chosen, entropies)), found.get("aux_loss")


def objective(logps: Tensor, entropies: Tensor, router: Tensor | None) -> Tensor:
    weights = torch.linspace(-1.0, 1.0, logps.numel()).view_as(logps)
    total = (weights * logps).sum() + 0.3 * entropies.sum()
    return total if router is None else total + 0.1 * router


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return found


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 7 words for the 28 labels: the vocabulary takes six of them, the last one partly filled."""
    monkeypatch.setattr(logprobs, "_CPU_TILE", 7 * 28)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kind", CONFIGS)
def test_values_and_gradients_are_those_of_whole_logits(kind: str) -> None:
    model, batch = make_model(kind), make_batch()
    logps, entropies, router = from_whole_logits(model, batch)
    objective(logps, entropies, router).backward()
    expected = gradients(model)
    fuse_head(model, TEMPERATURE, outputs=("log_probs", "entropy"))
    asked = {"output_router_logits": True} if kind == "experts" else {}
    found = model(**batch, **asked, fused_lm_head=True)
    torch.testing.assert_close(found.log_probs, logps, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.entropy, entropies, atol=1e-5, rtol=1e-5)
    assert (found.aux_loss is None) == (router is None)
    objective(found.log_probs, found.entropy, found.aux_loss).backward()
    actual = gradients(model)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            actual[name], gradient, atol=1e-4, rtol=1e-4, msg=lambda text, of=name: f"{of}: {text}"
        )
    # any other call of the model is its own
    assert model(input_ids=batch["input_ids"]).logits.shape == (5, 10, WORDS)


# peft 0.21 reads a property that transformers 5.23 has renamed
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.usefixtures("small_tiles")
def test_an_adapter_gets_the_gradient_of_whole_logits() -> None:
    base, batch = make_model("tied"), make_batch()
    model: Any = get_peft_model(base, LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    model.eval()
    objective(*from_whole_logits(model, batch)).backward()
    expected = gradients(model)
    fuse_head(base, TEMPERATURE, outputs=("log_probs", "entropy"))
    found = model(**batch, fused_lm_head=True)
    objective(found.log_probs, found.entropy, None).backward()
    actual = gradients(model)
    assert expected
    assert all(torch.allclose(actual[name], one, atol=1e-5) for name, one in expected.items())


def test_in_bfloat16_the_softmax_is_in_float32() -> None:
    model, batch = make_model("plain").bfloat16(), make_batch()
    logps = from_whole_logits(model, batch)[0]
    fuse_head(model, TEMPERATURE, outputs=("log_probs",))
    found = model(**batch, fused_lm_head=True)
    assert found.log_probs.dtype == torch.float32
    assert found.entropy is None
    # the logits are rounded to bfloat16 on both sides, and nothing after them is
    torch.testing.assert_close(found.log_probs, logps, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("in_float32", [False, True])
def test_under_autocast_the_head_has_the_precision_that_is_asked_for(in_float32: bool) -> None:
    model, batch = make_model("plain"), make_batch()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        states = model.base_model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])[0]
        with torch.autocast("cpu", enabled=not in_float32, dtype=torch.bfloat16):
            logits = model.lm_head(states.float() if in_float32 else states)
    assert logits.dtype == (torch.float32 if in_float32 else torch.bfloat16)
    labels = batch["labels"][:, 1:]
    whole = (logits[:, :-1].float() / TEMPERATURE).log_softmax(dim=-1)
    expected = whole.gather(2, labels.clamp(min=0)[..., None]).squeeze(2).masked_fill(labels == -100, 0.0)
    fuse_head(model, TEMPERATURE, outputs=("log_probs",), in_float32=in_float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(**batch, fused_lm_head=True).log_probs
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    found.sum().backward()
    assert all(gradient.dtype == torch.float32 for gradient in gradients(model).values())


def test_a_micro_batch_without_labels_has_a_gradient_of_zero() -> None:
    model, batch = make_model("plain"), make_batch()
    fuse_head(model, TEMPERATURE, outputs=("log_probs", "entropy"))
    model(
        **{**batch, "labels": torch.full_like(batch["labels"], -100)}, fused_lm_head=True
    ).log_probs.sum().backward()
    assert all(not gradient.any() for gradient in gradients(model).values())


def test_a_router_loss_that_the_models_own_forward_leaves_out_is_trained() -> None:
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 0}
    torch.manual_seed(0)
    model: Any = hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(**SIZE, **sizes, head_dim=8))
    batch = make_batch()
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    routed = model.base_model(**given, output_router_logits=True).router_logits
    expected = load_balancing_loss_func(routed, 4, 2, batch["attention_mask"])
    fuse_head(model, TEMPERATURE, outputs=("log_probs",))
    found = model(**batch, output_router_logits=True, fused_lm_head=True)
    torch.testing.assert_close(found.aux_loss, expected)
    found.aux_loss.backward()
    assert gradients(model)["model.layers.0.mlp.gate.weight"].any()


def test_a_dense_model_whose_config_asks_for_router_logits_has_log_probs() -> None:
    sizes: dict[str, Any] = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 32}
    sizes |= {"layer_types": ["attention"], "mamba_n_heads": 2, "mamba_d_head": 16, "output_router_logits": True}
    model: Any = hf.GraniteMoeHybridForCausalLM(hf.GraniteMoeHybridConfig(**SIZE, **sizes))
    fuse_head(model, TEMPERATURE, outputs=("log_probs",))
    found = model(**make_batch(), fused_lm_head=True)
    assert found.log_probs.isfinite().all()
    assert found.aux_loss is None


def test_a_model_whose_logits_are_not_its_heads_is_refused_by_name() -> None:
    config = hf.ProphetNetConfig(
        vocab_size=WORDS, hidden_size=16, num_decoder_layers=1, num_decoder_attention_heads=2
    )
    model: Any = hf.ProphetNetForCausalLM(config)
    fuse_head(model, TEMPERATURE, outputs=("log_probs",))
    with pytest.raises(ConfigError, match="prophetnet"):
        model(**make_batch(), fused_lm_head=True)


def kept_tokens(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return 1 to 6 tokens around each label, of some labels none: their numbers (5, 10), their ids, and masks."""
    draw, counts, ids = torch.Generator().manual_seed(2), torch.zeros(5, 10, dtype=torch.int32), []
    mask = torch.ones(5, 10, WORDS, dtype=torch.bool)
    for row, place in itertools.product(range(5), range(10)):
        label = int(batch["labels"][row, place])
        if label == -100 or (row + place) % 4 == 0:
            continue
        others = [one for one in torch.randperm(WORDS, generator=draw).tolist() if one != label]
        kept = sorted([label, *others[: (row + place) % 6]])
        counts[row, place] = len(kept)
        ids += kept
        mask[row, place] = torch.isin(torch.arange(WORDS), torch.tensor(kept))
    return counts, torch.tensor(ids, dtype=torch.int32), mask[:, 1:]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kind", ["plain", "tied", "soft cap", "logit_scale", "bias", "layers behind the body"])
def test_over_the_tokens_that_were_kept_values_and_gradients_are_those_of_the_cut_logits(kind: str) -> None:
    model, batch = make_model(kind), make_batch()
    counts, ids, mask = kept_tokens(batch)
    logps, entropies, _ = from_whole_logits(model, batch, mask)
    objective(logps, entropies, None).backward()
    expected = gradients(model)
    fuse_head(model, TEMPERATURE, outputs=("log_probs", "entropy"))
    found = model(**batch, kept_counts=counts, kept_ids=ids, fused_lm_head=True)
    torch.testing.assert_close(found.log_probs, logps, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.entropy, entropies, atol=1e-5, rtol=1e-5)
    objective(found.log_probs, found.entropy, None).backward()
    actual = gradients(model)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_vocabulary_of_150k_takes_at_most_035_of_trls_memory() -> None:
    """By the largest single allocation of a training pass over 512 tokens; the gradient of the head is 5 MiB."""
    from trl.trainer.utils import add_fused_lm_head

    ids = torch.randint(151_936, (2, 257))
    largest = []
    for fuse in (add_fused_lm_head, fuse_head):
        config = hf.Qwen3Config(**{**SIZE, "vocab_size": 151_936, "hidden_size": 8}, head_dim=8)
        model: Any = hf.Qwen3ForCausalLM(config)
        fuse(model, 1.0, outputs=("log_probs", "entropy"))
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
            found = model(input_ids=ids, labels=ids, fused_lm_head=True)
            (found.log_probs + found.entropy).sum().backward()
        largest.append(max(event.self_cpu_memory_usage for event in measured.events()))
    assert largest[0] >= 512 * 32_768 * 4
    assert largest[1] <= 0.35 * largest[0]
