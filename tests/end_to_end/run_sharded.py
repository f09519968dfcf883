"""A training run as a process whose policy may be sharded over the ranks: what the tests of FSDP and DeepSpeed start.

    python run_sharded.py '[{"model": DIR, "url": URL, "output_dir": DIR, "settings": {}, "lora": false}]'

One run after another. FSDP and DeepSpeed are turned on by the environment, as `accelerate launch` does. Each rank
writes final-RANK.pt with the whole weights, what it sent with each push, and the log.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import tiny_world
import torch
import torch.distributed
from accelerate import state

from verifiers.train.config import lora_defaults
from verifiers.train.weight_sync.protocol import gathered_tensors, is_sharded
from verifiers.train.weight_sync.shared_directory import LoraSync


def shard_on_the_cpu() -> None:
    """Have accelerate take this CPU for a GPU: it shards on nothing else."""
    original = state.AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, deepspeed_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, deepspeed_plugin=deepspeed_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type = state.DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
        elif deepspeed_plugin is not None:
            self.distributed_type = state.DistributedType.DEEPSPEED
            plugin = next(iter(deepspeed_plugin.values())) if isinstance(deepspeed_plugin, dict) else deepspeed_plugin
            plugin.set_mixed_precision("no")
            plugin.select(_from_accelerator_state=True)
            self.deepspeed_plugins = deepspeed_plugin
        state.PartialState._shared_state["distributed_type"] = self.distributed_type

    state.AcceleratorState.__init__ = init


class Recording(tiny_world.ObservedTrainer):
    """Keeps what each push sends, beside the weights that all ranks hold together at that moment."""

    sent: list[dict[str, torch.Tensor]]

    def keep_pushes(self) -> None:
        """Keep what is sent from now on."""
        self.sent, push = [], self.publisher.sync.push

        def recording(tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
            sent = dict(tensors)
            self.sent.append({name: tensor.detach().clone() for name, tensor in sent.items()})
            push(sent.items(), version)

        self.publisher.sync.push = recording


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """All tensors of the policy, whole, on every rank."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if is_sharded(model):
        return gathered_tensors(model, keep=True, tied=True)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def adapter_of(trainer: Recording) -> dict[str, torch.Tensor]:
    """Return what a push of the adapter alone would send."""
    tensors = trainer.weights.tensors(LoraSync("http://127.0.0.1:9/v1"))
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def train(given: dict[str, Any]) -> dict[str, Any]:
    """Train as `given` says; what became of it, the same on every rank but for what only rank 0 sends."""
    output_dir = Path(given["output_dir"])
    output_dir.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    args = tiny_world.config(output_dir, given["url"], **given.get("settings", {}))
    peft_config = lora_defaults() if given.get("lora") else None
    trainer = Recording(given["model"], tiny_world.single_turn(), args, peft_config=peft_config)
    trainer.keep_pushes()
    trainer.train(resume_from_checkpoint=given.get("resume"))
    if given.get("save"):
        trainer.save_model(given["save"])
    adapter = trainer.ranks.on_rank_0(lambda: adapter_of(trainer)) if given.get("lora") else None
    return {
        "adapter": adapter,
        "kind": str(trainer.accelerator.distributed_type),
        "sharded": is_sharded(trainer.model),
        "weights": whole_weights(trainer),
        "sent": trainer.sent,
        "log": trainer.state.log_history,
    }


def main() -> None:
    shard_on_the_cpu()
    for number, given in enumerate(json.loads(sys.argv[1])):
        if number:
            state.AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.update(given.get("environment", {}))
        torch.save(train(given), Path(given["output_dir"]) / f"final-{os.environ['RANK']}.pt")
    torch.distributed.barrier()
    sys.stdout.flush()
    # models outlive the process group here, and some hang when they are freed
    os._exit(0)


if __name__ == "__main__":
    main()
