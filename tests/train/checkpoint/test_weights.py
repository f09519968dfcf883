"""A checkpoint gives a policy of any family back to the last bit, or the run ends with the names of tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from configs import CONFIGS
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from verifiers.data.batch_plan import make_plan
from verifiers.errors import CheckpointError
from verifiers.train.checkpoint.checkpoint import TENSORS, mark_complete
from verifiers.train.checkpoint.weights import CheckpointWeights, checksum
from verifiers.train.processes.distributed import Ranks

PLAN = make_plan(per_device_train_batch_size=4, num_generations=4, max_steps=10, num_prompts=12)
IDS: dict[str, Any] = {"vocab_size": 40, "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": None}
SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 3}

FAMILIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    # in memory, Qwen 3 MoE and DeepSeek V3 have fused experts, Gemma 3 and Ministral 3 other prefixes
    **{name: CONFIGS[name] for name in ("Qwen 3", "Llama 3", "gpt-oss", "Qwen 3 MoE", "DeepSeek V3")},
    **{name: CONFIGS[name] for name in ("Gemma 3", "Ministral 3")},
    # these are trained, though the embedded server does not know them
    "RecurrentGemma": lambda ids: hf.RecurrentGemmaConfig(
        **SMALL, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2, lru_width=16, **ids
    ),
    "Mamba": lambda ids: hf.MambaConfig(**SMALL, **ids),
    "GPT-2": lambda ids: hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, **ids),
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "a head of its own": {"modules_to_save": ["lm_head"]},
    "experts": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
}


def scatter(tensors: Any, seed: int) -> None:
    """Give every tensor other numbers."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=draw))


def make_model(family: str, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    config = FAMILIES[family](IDS)
    auto = hf.AutoModelForImageTextToText if hasattr(config, "vision_config") else hf.AutoModelForCausalLM
    model: Any = auto.from_config(config, dtype=dtype)
    scatter(model.state_dict().values(), seed)
    return model


def make_adapter(kind: str, seed: int, *, r: int = 2, alpha: int = 8, **options: Any) -> Any:
    targets = ["q_proj", "v_proj"]
    lora = LoraConfig(r=r, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM", **ADAPTERS[kind])
    dtype = torch.float32 if options.get("autocast_adapter_dtype", True) else torch.bfloat16
    model: Any = get_peft_model(make_model("Qwen 3 MoE", 0, dtype), lora, **options)
    scatter((parameter for parameter in model.parameters() if parameter.requires_grad), seed)
    return model


def weights_of(model: Any, *, in_shards: bool = False) -> CheckpointWeights:
    ranks = Ranks(SimpleNamespace(num_processes=1, process_index=0, is_main_process=True))
    return CheckpointWeights(ranks, model, in_shards=in_shards)


def test_a_checkpoint_that_was_not_sharded_is_refused_by_a_sharded_run(tmp_path: Path) -> None:
    model = hf.AutoModelForCausalLM.from_config(FAMILIES["Llama 3"](IDS))
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="written without FSDP"):
        weights_of(model, in_shards=True).load(str(tmp_path), lambda: pytest.fail("it was loaded"))


def save(model: Any, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    mark_complete(directory, PLAN, 2, {TENSORS: weights_of(model).checksums()})
    return directory


def load(model: Any, directory: Path) -> None:
    weights_of(model).load(str(directory), lambda: model.load_adapter(directory, "default", is_trainable=True))


def assert_same(one: Any, other: Any) -> None:
    ours, wanted = one.state_dict(), other.state_dict()
    assert ours.keys() == wanted.keys()
    # to the last bit, and of the same dtype
    assert [name for name in wanted if ours[name].dtype != wanted[name].dtype] == []
    assert [name for name in wanted if not torch.equal(ours[name], wanted[name])] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_every_family_gives_the_same_weights_back(family: str, tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        stopped, resumed = make_model(family, 1, dtype), make_model(family, 2, dtype)
        load(resumed, save(stopped, tmp_path / str(dtype)))
        assert_same(resumed, stopped)


def test_a_model_of_several_dtypes_in_several_files_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    stopped, resumed = (make_model("Qwen 3 MoE", seed, torch.bfloat16) for seed in (1, 2))
    for model in (stopped, resumed):
        model.lm_head.float()
    scatter([stopped.lm_head.weight], 3)
    directory = save(stopped, tmp_path, max_shard_size="20KB")
    assert len(list(directory.glob("model-*.safetensors"))) > 1
    load(resumed, directory)
    assert_same(resumed, stopped)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_comes_back_in_its_own_dtype_on_a_base_that_is_compared_too(kind: str, tmp_path: Path) -> None:
    for options in ({}, {"autocast_adapter_dtype": False}):
        stopped, resumed = (make_adapter(kind, seed, **options) for seed in (1, 2))
        directory = save(stopped, tmp_path / str(len(options)))
        load(resumed, directory)
        assert_same(resumed, stopped)
        assert any(parameter.requires_grad for parameter in resumed.parameters())
        moved = make_adapter(kind, 2, **options)
        with torch.no_grad():
            moved.get_base_model().model.norm.weight[0] += 1
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight \(other numbers\)"):
            load(moved, directory)


def test_an_adapter_of_another_rank_or_scale_is_refused_with_both(tmp_path: Path) -> None:
    directory = save(make_adapter("LoRA", 1), tmp_path)
    for other, words in (
        (make_adapter("LoRA", 2, alpha=16), "lora_alpha=8, and this run has 16"),
        (make_adapter("LoRA", 2, r=4), "r=2, and this run has 4"),
        (make_model("Qwen 3 MoE", 2), "r=2, and this run has no adapter"),
    ):
        with pytest.raises(CheckpointError, match=rf"{directory} is of an adapter with {words}.*use the same"):
            load(other, directory)
    named = save(make_adapter("LoRA", 1, adapter_name="mine"), tmp_path / "named")
    with pytest.raises(CheckpointError, match="lora_alpha=8, and this run has 16"):
        load(make_adapter("LoRA", 2, alpha=16, adapter_name="mine"), named)


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.pop(name)


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an expert is gone": (without("model.layers.1.mlp.experts.3.down_proj.weight"), "experts"),
    "a layer is gone": (
        without("model.layers.1.self_attn.q_proj.weight"),
        r"layers\.1\.self_attn\.q_proj.*not in it",
    ),
    "nothing takes it": (
        lambda tensors: tensors.update({"model.more.weight": torch.ones(2)}),
        r"model\.more\.weight \(of no use",
    ),
    "another shape": (
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}),
        r"model\.norm\.weight \(\(7,\) in it, \(128,\) here",
    ),
    "another number": (
        lambda tensors: tensors["model.layers.0.mlp.experts.2.up_proj.weight"][3, 4].add_(1e-6),
        r"layers\.0\.mlp\.experts\.gate_up_proj \(other numbers\)",
    ),
    "experts in another order": (
        lambda tensors: tensors.update(
            {
                "model.layers.0.mlp.experts.0.down_proj.weight": tensors[
                    "model.layers.0.mlp.experts.1.down_proj.weight"
                ].clone(),
                "model.layers.0.mlp.experts.1.down_proj.weight": tensors[
                    "model.layers.0.mlp.experts.0.down_proj.weight"
                ].clone(),
            }
        ),
        r"layers\.0\.mlp\.experts\.down_proj \(other numbers\)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_does_not_give_the_model_back_is_refused_with_names(fault: str, tmp_path: Path) -> None:
    change, words = FAULTS[fault]
    directory = save(make_model("Qwen 3 MoE", 1), tmp_path)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{directory} .*{words}.*earlier checkpoint"):
        load(make_model("Qwen 3 MoE", 2), directory)


FILES: dict[str, Callable[[Path], Any]] = {
    "no file": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-8]),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", FILES)
def test_weights_that_cannot_be_read_are_one_sentence(damage: str, tmp_path: Path) -> None:
    directory = save(make_model("Llama 3", 1), tmp_path)
    FILES[damage](directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"the weights in {directory} cannot be loaded \(.*earlier checkpoint"):
        load(make_model("Llama 3", 2), directory)


def test_a_model_of_another_dtype_is_refused(tmp_path: Path) -> None:
    directory = save(make_model("Llama 3", 1), tmp_path)
    with pytest.raises(CheckpointError, match=r"other numbers.* and 17 more\..*dtype"):
        load(make_model("Llama 3", 2, torch.bfloat16), directory)


def test_a_checkpoint_without_checksums_is_loaded_all_the_same(tmp_path: Path) -> None:
    stopped, resumed = make_model("Qwen 3 MoE", 1), make_model("Qwen 3 MoE", 2)
    stopped.save_pretrained(tmp_path)
    load(resumed, tmp_path)
    assert_same(resumed, stopped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_a_checksum_follows_each_number(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 5).to(dtype)
    places = [checksum(tensor)]
    for row in range(3):
        for column in range(5):
            changed = tensor.clone()
            changed[row, column] = 1
            places.append(checksum(changed))
            # laid out otherwise, it is the same tensor
            assert checksum(changed.T.contiguous().T) == places[-1]
    assert len(set(places)) == 16
    assert checksum(torch.tensor(0.0)) != checksum(torch.tensor(-0.0))
    assert checksum(torch.zeros(0)) == checksum(torch.zeros(0, 4))
