"""The reference of `beta` is the policy's start, in memory or below an adapter; a saved adapter is a model, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_world
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, Qwen3Config

import verifiers as vf
from verifiers.cli import train
from verifiers.errors import ConfigError
from verifiers.train.models import get_model

# peft 0.21 reads a property that transformers 5.23 has renamed
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def run(policy: Any, tmp_path: Path, env: Any = None, tokenizer: Any = None, **settings: Any) -> Any:
    peft_config = settings.pop("peft_config", None)
    args = tiny_world.config(
        tmp_path / "run", "", **{"rollout_device": "cpu", "max_steps": 2, "beta": 0.1} | settings
    )
    env = env or tiny_world.single_turn()
    tokenizer = tokenizer or tiny_world.make_tokenizer()
    trainer = tiny_world.ObservedTrainer(policy, env, args, tokenizer, peft_config=peft_config)
    with tiny_world.closing(trainer):
        trainer.train()
    return trainer


def changed(model: Any, size: float = 0.05) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("named", [True, False], ids=["changed in memory", "made from a config"])
def test_the_reference_of_a_policy_in_memory_is_that_policy(named: bool, model_dir: Path, tmp_path: Path) -> None:
    policy = changed(AutoModelForCausalLM.from_pretrained(model_dir))
    if not named:
        policy.config._name_or_path = ""
    trainer = run(policy, tmp_path, learning_rate=0.0)
    assert trainer.logged("kl") == pytest.approx([0.0, 0.0], abs=1e-6)
    assert policy.config._name_or_path == (str(model_dir) if named else "")


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)


def test_the_reference_below_a_trained_head_is_the_untrained_one(model_dir: Path, tmp_path: Path) -> None:
    trainer = run(str(model_dir), tmp_path, peft_config=lora(modules_to_save=["lm_head"]))
    first, second = trainer.logged("kl")
    assert first == pytest.approx(0.0, abs=1e-6)
    assert second > 1e-5


@pytest.mark.slow
def test_a_run_with_beta_goes_on_from_an_adapter_with_a_trained_head(model_dir: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    saved = tmp_path / "adapter"
    changed(get_peft_model(base, lora(modules_to_save=["lm_head"]))).save_pretrained(saved)
    # as an object, and by the directory, whose tokenizer is that of the model below
    policy = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), saved, is_trainable=True)
    for model in (policy, str(saved)):
        assert run(model, tmp_path, max_steps=1).logged("kl") == pytest.approx([0.0], abs=1e-6)


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
def test_an_adapter_that_trains_one_of_tied_embeddings_is_refused(tmp_path: Path) -> None:
    model = tiny_world.make_model(tmp_path / "tied", tied=True)
    for options in ({"modules_to_save": ["lm_head"]}, {"modules_to_save": ["embed_tokens"]}):
        with pytest.raises(ConfigError, match=r"tied embeddings.*ensure_weight_tying"):
            run(str(model), tmp_path, peft_config=lora(**options))
    run(str(model), tmp_path, peft_config=lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True))


@pytest.mark.filterwarnings("ignore:`lora_bias=True`")
def test_an_adapter_that_cannot_be_merged_is_one_sentence(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adapter cannot be merged"):
        run(str(model_dir), tmp_path, peft_config=lora(lora_bias=True))


@pytest.mark.slow
def test_what_a_lora_table_saves_is_trained_further_under_its_name(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, model, tables in (
        ("first", str(model_dir), "[lora]\nr = 2\n"),
        ("further", "first", ""),
        ("both", "first", "[lora]\nr = 2\n"),
    ):
        tiny_world.write_run(tmp_path, model, tables, file=f"{name}.toml", output_dir=name, max_steps=1)
    assert train.main(["first.toml"]) == 0
    assert train.main(["further.toml"]) == 0
    assert get_model("further").peft_config["default"].base_model_name_or_path == str(model_dir)
    capsys.readouterr()
    assert train.main(["both.toml", "--dry-run"]) == 2
    assert "'first' holds an adapter of" in capsys.readouterr().err


def test_a_text_prompt_that_begins_with_the_bos_is_sampled_and_trained_with_one(
    model_dir: Path, tmp_path: Path
) -> None:
    tokenizer = tiny_world.make_tokenizer()
    bos = tokenizer.bos_token = "z"
    number = tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, number)]
    )
    for begins in ([bos] * 8, ["", bos] * 4):
        rows = [{"prompt": f"{first}user q{n}", "answer": "a"} for n, first in enumerate(begins)]
        rubric = vf.Rubric([lambda completion: float(len(completion))])
        env = vf.SingleTurnEnv(dataset=rows, message_type="completion", rubric=rubric)
        trainer = run(str(model_dir), tmp_path, env, tokenizer, max_steps=1, beta=0.0)
        asked = trainer.sampling_args.get("extra_body", {})
        assert asked == ({"add_special_tokens": False} if "" not in begins else {})
        for rollout in trainer.last_block.rollouts:
            assert list(rollout.rows[0].prompt_ids).count(number) == 1


def test_a_policy_in_memory_without_a_name_asks_for_its_tokenizer(model_dir: Path, tmp_path: Path) -> None:
    policy = AutoModelForCausalLM.from_config(Qwen3Config.from_pretrained(model_dir))
    policy.config._name_or_path = ""
    args = tiny_world.config(tmp_path, "", rollout_device="cpu")
    with pytest.raises(ConfigError, match="give processing_class"):
        vf.GRPOTrainer(policy, tiny_world.single_turn(), args)
