"""The cached forward pass gives the plain one's logits, whatever happens to the rows."""

from __future__ import annotations

import functools
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sequences import check, sequence
from verifiers_embedded.engine import attention
from verifiers_embedded.engine import batch as batch_module
from verifiers_embedded.engine.batch import ActiveBatch
from verifiers_embedded.engine.loading import check_cache, load_model, prepared
from verifiers_embedded.errors import StartError
from verifiers_embedded.serving import Service

from verifiers.train.tiny_model.vision_model import make_vision_model

TINY = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


@pytest.mark.parametrize(
    ("dtype", "in_groups"), [(torch.float32, False), (torch.float32, True), (torch.float64, False)]
)
def test_cached_logits_equal_a_plain_forward_while_rows_come_go_and_grow(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, in_groups: bool
) -> None:
    monkeypatch.setattr(batch_module, "PREFILL_TOKENS", 40)
    if in_groups:
        # as many rows of different lengths do
        monkeypatch.setattr(batch_module, "ROWS_APART", 3)
        monkeypatch.setattr(attention, "_WORTH_A_CALL", 4)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
    dice = random.Random(0)
    batch = ActiveBatch(model, slots=8, max_model_len=256)
    with torch.inference_mode():
        for turn in range(30):
            free = 8 - len(batch.sequences)
            prompts = [[dice.randrange(90) for _ in range(dice.choice([1, 2, 9, 30]))] for _ in range(2)]
            batch.add([sequence(prompts[i % 2]) for i in range(dice.randint(0 if batch.sequences else 1, free))])
            check(batch, model)
            for item in batch.sequences:
                item.tokens.append(dice.randrange(90))
            batch.keep_only([dice.random() > 0.15 for _ in batch.sequences])
            if turn % 10 == 9:
                batch.recompute()


HYBRID = {**TINY, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
STATES = [
    transformers.Qwen3_5TextConfig(
        **HYBRID,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    transformers.GraniteMoeHybridConfig(
        **HYBRID, num_local_experts=0, shared_intermediate_size=64, mamba_n_heads=4, mamba_d_head=32, mamba_d_state=8
    ),
    transformers.Lfm2Config(**{**HYBRID, "layer_types": ["conv", "full_attention", "conv"]}),
]


@pytest.mark.slow
@pytest.mark.parametrize("config", STATES, ids=lambda config: config.model_type)
@pytest.mark.parametrize("prefix_bytes", [0, 2**24])
def test_layers_with_a_state_keep_it_by_row_while_rows_come_go_and_grow(
    monkeypatch: pytest.MonkeyPatch, config: Any, prefix_bytes: int
) -> None:
    monkeypatch.setattr(batch_module, "PREFILL_TOKENS", 40)
    # prompts that go on from kept ones take several passes, some of one token
    monkeypatch.setattr(batch_module, "MASK_CELLS", 150)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    dice = random.Random(0)
    batch = ActiveBatch(model, slots=6, max_model_len=256, prefix_bytes=prefix_bytes)
    finished = [[5, 6]]
    with torch.inference_mode():
        for turn in range(25):
            free = 6 - len(batch.sequences)
            prompts = [[dice.randrange(90) for _ in range(dice.choice([1, 2, 20, 30]))] for _ in range(2)]
            # a prompt that goes on from a finished sequence, from a part of it, and nothing of the kind
            held = dice.choice(finished[-2:])
            prompts += [held + [dice.randrange(90) for _ in range(dice.randint(1, 9))], held[: len(held) // 2 + 1]]
            added = [sequence(dice.choice(prompts)) for _ in range(dice.randint(0 if batch.sequences else 1, free))]
            batch.add(added)
            # transformers' own scans differ by so much from its steps of one token
            check(batch, model, single=2e-4)
            for item in batch.sequences:
                item.tokens.append(dice.randrange(90))
            ended = [dice.random() < 0.3 or len(item.tokens) > 90 for item in batch.sequences]
            long = [item.tokens for item, ends in zip(batch.sequences, ended, strict=True) if ends]
            finished += [tokens for tokens in long if len(tokens) > 20]
            batch.remember(ended)
            batch.keep_only([not ends for ends in ended])
            if turn == 12:
                batch.recompute()
    assert (batch.prefixes.hits > 2) == (prefix_bytes > 0)


def test_a_model_with_states_is_not_recorded(model_dir: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(STATES[2])
    loaded = prepared(model, transformers.AutoTokenizer.from_pretrained(model_dir), max_model_len=64)
    assert not loaded.can_be_recorded
    with pytest.raises(StartError, match=r"lfm2.*--cuda-graphs"):
        Service(loaded, cuda_graphs=True)


def test_the_cache_shrinks_after_a_long_sequence_and_is_freed_when_idle(model_dir: Path, reference: Any) -> None:
    model = reference.model(model_dir)
    batch = ActiveBatch(model, slots=4, max_model_len=4096)
    long_one, short_one = sequence([5] * 1500), sequence([6, 7])
    with torch.inference_mode():
        batch.add([long_one, short_one])
        batch.logits()
        assert batch.allocated[1] >= 1500
        short_one.tokens.append(8)
        batch.keep_only([False, True])
        check(batch, model)
        assert batch.allocated[1] < 500
    batch.keep_only([False])
    assert batch.allocated == (0, 0)


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**TINY),
        transformers.MistralConfig(**TINY, sliding_window=4),
        transformers.Qwen3Config(**TINY, head_dim=16, use_sliding_window=True, sliding_window=4, max_window_layers=1),
        transformers.Gemma3TextConfig(**TINY, head_dim=16, sliding_window=4),
        transformers.Qwen3MoeConfig(
            **TINY, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
        ),
        # reads none
        transformers.MoshiConfig(**TINY, head_dim=16, ffn_dim=128, sliding_window=4),
    ],
    ids=lambda config: config.model_type,
)
def test_common_kinds_of_model_are_served_exactly(config: Any) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert check_cache(model, 64) == (2 * 2 * 2 * 16 * 4, 0, True)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.FalconH1Config(), "falcon_h1.*hybrid"),
        (transformers.DeepseekV32Config(), "deepseek_v32.*indexed_attention"),
        (transformers.MambaConfig(), "mamba.*position_ids"),
        (transformers.T5Config(), "t5.*encoder"),
        (transformers.ViTConfig(), "vit.*does not generate text"),
        (transformers.BertConfig(), "bert.*encoder"),
        (transformers.RobertaConfig(is_decoder=True), "roberta.*positions"),
        (transformers.BltConfig(), "blt.*bytes"),
    ],
    ids=lambda value: value.model_type if hasattr(value, "model_type") else "",
)
def test_a_model_that_cannot_be_served_is_refused_by_name_before_its_weights_are_read(
    config: Any, reason: str, model_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    config.save_pretrained(tmp_path)
    with pytest.raises(StartError, match=reason):
        load_model(tmp_path, device="cpu", dtype="auto", max_model_len=64)


def test_a_text_model_whose_head_has_the_name_of_a_decoder_is_served_whole(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    sizes = {**TINY, "bos_token_id": 1, "pad_token_id": 0, "eos_token_id": 2}
    transformers.ModernBertDecoderForCausalLM(transformers.ModernBertDecoderConfig(**sizes)).save_pretrained(tmp_path)
    assert load_model(tmp_path, device="cpu", dtype="auto", max_model_len=64).vocab_size == 100


LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [float(place) for place in range(1, 9)]}


@pytest.mark.parametrize(
    "config",
    [
        transformers.Phi3Config(
            **TINY,
            pad_token_id=0,
            eos_token_id=1,
            original_max_position_embeddings=16,
            rope_parameters={"rope_type": "longrope", "rope_theta": 100.0, **LONGROPE},
        ),
        transformers.GPTNeoConfig(
            **{name: TINY[name] for name in ("vocab_size", "hidden_size", "max_position_embeddings")},
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=16,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_no_sequence_is_so_long_that_it_changes_the_positions_or_the_window_of_others(
    config: Any, model_dir: Path
) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    context = prepared(model, tokenizer, max_model_len=None).max_model_len
    texts = [(5, 6, 7), tuple(range(context))]
    batch = ActiveBatch(model, slots=2, max_model_len=context)
    with torch.inference_mode():
        batch.add([sequence(list(text)) for text in texts])
        check(batch, model)
    with pytest.raises(StartError, match=r"17.*(longrope|window).*at most 16"):
        prepared(model, tokenizer, max_model_len=17)


def test_a_model_whose_config_names_no_end_of_a_text_has_its_tokenizers(tmp_path: Path) -> None:
    make_vision_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["text_config"]["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_model(tmp_path, device="cpu", dtype="auto", max_model_len=64)
    assert loaded.eos_ids == {loaded.tokenizer.eos_token_id}


def test_a_model_without_its_tokenizer_is_refused(model_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model_dir / name, tmp_path)
    with pytest.raises(StartError, match=r"tokenizer .* reads no text; save one"):
        load_model(tmp_path, device="cpu", dtype="auto", max_model_len=64)


def test_a_model_whose_state_goes_on_by_single_tokens_alone_is_not_served() -> None:
    torch.manual_seed(0)
    config = transformers.JambaConfig(**TINY, num_experts=1, attn_layer_period=2, attn_layer_offset=1)
    with pytest.raises(StartError, match="jamba"):
        check_cache(transformers.AutoModelForCausalLM.from_config(config).eval(), 64)


@pytest.mark.parametrize("fault", ["no mask", "a next turn begins anew", "no numbers"])
def test_a_model_whose_cached_logits_differ_is_not_served(fault: str, model_dir: Path, reference: Any) -> None:
    model = reference.model(model_dir)
    plain, body = model.forward, model.base_model.forward

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if fault == "no mask":
            kwargs.pop("attention_mask", None)
            kwargs.pop("position_ids", None)
        found = plain(*args, **kwargs)
        if fault == "no numbers":
            found.logits = found.logits * math.nan
        return found

    # the name of its argument for a cache is looked up
    @functools.wraps(body)
    def forgetful(*args: Any, **kwargs: Any) -> Any:
        places = kwargs.get("position_ids")
        if fault == "a next turn begins anew" and places is not None and places.shape[1] > 1:
            kwargs["position_ids"] = places - places.min()
        return body(*args, **kwargs)

    model.forward, model.base_model.forward = faulty, forgetful
    try:
        with pytest.raises(StartError, match="differ"):
            check_cache(model, 64)
        if fault == "no numbers":
            with pytest.raises(StartError, match="differ"):
                check_cache(model, 2)
    finally:
        del model.forward, model.base_model.forward
