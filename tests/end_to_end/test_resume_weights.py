"""The first step of a resumed run has the weights that were stopped, also where a checkpoint's names are others.

Experts are fused in memory, and one by one in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback

import verifiers as vf
from verifiers.errors import CheckpointError

pytestmark = [
    # peft 0.21 reads a property that transformers 5.23 has renamed
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    # and looks for fused experts among modules
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
    pytest.mark.parametrize("lora", [False, True], ids=["experts", "an adapter on experts"]),
]

Weights = dict[str, torch.Tensor]
STEPS = 3


class Snapshots(TrainerCallback):
    """Keeps the policy's tensors by step, and takes the first checkpoint for the best."""

    def __init__(self) -> None:
        self.weights: dict[int, Weights] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._keep(state, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._keep(state, model)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.best_model_checkpoint = str(Path(args.output_dir) / "checkpoint-1")

    def _keep(self, state: Any, model: Any) -> None:
        self.weights[state.global_step] = {name: one.detach().clone() for name, one in model.state_dict().items()}


@pytest.fixture(scope="module")
def experts_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("experts")
    tokenizer = tiny_world.make_tokenizer()
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    size |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "moe_intermediate_size": 32}
    size |= {"num_experts": 4, "num_experts_per_tok": 2, "eos_token_id": 0, "pad_token_id": 0}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=len(tokenizer), bos_token_id=None, initializer_range=0.3, **size)
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def train(experts_dir: Path) -> Callable[..., tuple[Any, dict[int, Weights]]]:
    """Train with a frozen copy of the policy in this process; return the trainer and its weights by step."""

    def run(output_dir: Path, steps: int, *, lora: bool, resume: bool = False) -> tuple[Any, dict[int, Weights]]:
        settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": steps, "learning_rate": 1e-2}
        args = tiny_world.config(output_dir, "", rollout_device="cpu", **settings)
        peft = vf.lora_defaults(4, 8) if lora else None
        snapshots = Snapshots()
        trainer = tiny_world.ObservedTrainer(
            str(experts_dir), tiny_world.single_turn(), args, peft_config=peft, callbacks=[snapshots]
        )
        # asked for in the settings, it wants evaluations
        args.load_best_model_at_end = True
        with tiny_world.closing(trainer):
            trainer.train(resume_from_checkpoint=resume)
        return trainer, snapshots.weights

    return run


def changed(one: Weights, other: Weights) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name in one if not torch.equal(one[name], other[name])}


@pytest.mark.slow
def test_a_run_resumes_and_ends_with_the_weights_of_its_checkpoints(
    train: Callable[..., Any], lora: bool, tmp_path: Path
) -> None:
    cut = STEPS - 1
    first, stopped = train(tmp_path, cut, lora=lora)
    trained = {name for name, parameter in first.model.named_parameters() if parameter.requires_grad}
    assert changed(stopped[0], stopped[cut]) == trained
    assert lora or any("experts" in name for name in trained)
    # the best is loaded at the end, of either run
    assert changed(first.model.state_dict(), stopped[1]) == set()
    second, resumed = train(tmp_path, STEPS, lora=lora, resume=True)
    assert min(resumed) == cut
    assert changed(resumed[cut], stopped[cut]) == set()
    assert changed(second.model.state_dict(), stopped[1]) == set()
    # the frozen copy in this process sampled from them
    assert max(second.logged("sampling/probe_difference")) < 1e-4


@pytest.mark.slow
def test_a_checkpoint_that_was_changed_ends_the_run_with_the_tensor(
    train: Callable[..., Any], lora: bool, tmp_path: Path
) -> None:
    train(tmp_path, 2, lora=lora)
    # the newest is read at the start, the best at the end
    for step in (2, 1):
        path = tmp_path / f"checkpoint-{step}" / ("adapter_model.safetensors" if lora else "model.safetensors")
        whole, tensors = path.read_bytes(), load_file(path)
        name = next(name for name in sorted(tensors) if ("lora" if lora else "experts") in name)
        tensors[name][0, 0] += 1e-3
        save_file(tensors, path, {"format": "pt"})
        with pytest.raises(
            CheckpointError, match=rf"checkpoint-{step} does not give back .*(lora|experts).*other numbers"
        ):
            train(tmp_path, STEPS, lora=lora, resume=True)
        path.write_bytes(whole)
