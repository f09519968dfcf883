"""The adapter kind: what is written, what is asked, and what cannot be an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny_models import random_qwen3, two_role_tokenizer

from verifiers.errors import ConfigError, WeightSyncError
from verifiers.inference import server_pool
from verifiers.testing import FakeOpenAIServer, Fault
from verifiers.train.weight_sync.protocol import WeightSync
from verifiers.train.weight_sync.shared_directory import LoraSync


def model(**options: Any) -> Any:
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    return get_peft_model(random_qwen3(two_role_tokenizer("")), lora)


def push(sync: LoraSync, policy: Any, version: int) -> None:
    sync.push(sync.tensors_of(policy).items(), version)


def test_only_the_adapter_is_written_where_peft_reads_it_again(tmp_path: Path) -> None:
    policy = model()
    with FakeOpenAIServer() as server:
        sync = LoraSync(server.url, str(tmp_path))
        assert isinstance(sync, WeightSync)
        push(sync, policy, 6)
        (call,) = [call for call in server.weight_calls if call.path == "/v1/load_lora_adapter"]
        directory = Path(call.body["lora_path"])
        assert call.body == {"lora_name": "policy-adapter", "lora_path": str(directory)}
        paths = [call.path for call in server.weight_calls]
        assert paths.index("/v1/unload_lora_adapter") < paths.index("/v1/load_lora_adapter")
        # a request that has begun keeps its adapter, so none may be in flight
        assert not sync.keeps_requests
        assert directory.name == "version-6"
        config = json.loads((directory / "adapter_config.json").read_text())
        assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
        assert sorted(config["target_modules"]) == ["q_proj", "v_proj"]
        tensors = load_file(directory / "adapter_model.safetensors")
        assert {tuple(tensor.shape) for tensor in tensors.values()} == {(4, 64), (64, 4), (32, 4)}
        policy.save_pretrained(tmp_path / "by-peft")
        expected = load_file(tmp_path / "by-peft/adapter_model.safetensors")
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
        assert server.weight_version == 6
        push(sync, policy, 7)
        # a path of its own each time: vLLM tells cached prefixes apart by it
        assert not directory.exists()
        assert (directory.parent / "version-7").is_dir()
        sync.close()


def test_a_refused_adapter_is_said_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the server answers at once, on a machine that is not crowded
    monkeypatch.setattr(server_pool, "SHUTDOWN_S", 20.0)
    faults = {
        # nothing is there to be unloaded yet, which is not a failure
        "/v1/unload_lora_adapter": Fault(404, body="not found"),
        "/v1/load_lora_adapter": Fault(400, body="LoRA rank 4 is greater than max_lora_rank 2"),
    }
    with FakeOpenAIServer(route_faults=faults) as server:
        sync = LoraSync(server.url, str(tmp_path))
        with pytest.raises(WeightSyncError, match=r"step 1 did not reach.*greater than max_lora_rank"):
            push(sync, model(), 1)
        assert not server.paused
        assert not list(tmp_path.glob("*/version-*"))
        sync.close()


@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"bias": "all"}], ids=["modules", "bias"])
def test_what_is_more_than_an_adapter_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"whole modules or biases.*weight_sync='directory'"):
        push(LoraSync("http://127.0.0.1:9/v1"), model(**options), 1)


def test_a_model_without_an_adapter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs a model with an adapter"):
        push(LoraSync("http://127.0.0.1:9/v1"), torch.nn.Linear(2, 2), 1)
