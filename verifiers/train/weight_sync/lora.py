"""An adapter through vLLM's route for LoRA adapters: a few megabytes a push, and the base weights stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.inference.server_client import RefusedError, ServerClient
from verifiers.inference.server_pool import Load
from verifiers.train.weight_sync.capabilities import Capabilities
from verifiers.train.weight_sync.shared_directory import DirectorySync

__all__ = ["LoraSync", "adapter_tensors"]


class LoraSync(DirectorySync):
    """A weight sync that writes the adapter of each version into a directory of its own, which the servers load.

    The adapter keeps one name at the server, which is the policy's name in requests; each version has a path and, at
    the server, a number of its own, by which vLLM tells adapters and cached prefixes apart. A request that vLLM has
    begun keeps the adapter it began with, whatever the server's version is called by then, so rollouts in flight end
    before a push (`keeps_requests`). A server that was restarted does not know the name, and refuses requests until
    it gets the adapter.

    Args:
        base_url: of the rollout server, or of several; vLLM with --enable-lora.
        name: of the adapter at the server; the policy's name in requests.
        directory, timeout_s, api_key: as of `DirectorySync`.
    """

    kind = "lora"
    keeps_requests = False
    can_send_tied = False
    sends_adapter = True

    def __init__(
        self,
        base_url: str | Sequence[str],
        directory: str | None = None,
        timeout_s: float = 120.0,
        api_key: str = "EMPTY",
        *,
        name: str = "policy-adapter",
    ) -> None:
        super().__init__(base_url, directory, timeout_s, api_key)
        self.policy_name = name
        self._config: dict[str, Any] = {}

    def missing_at(self, found: Capabilities, adapter_rank: int) -> list[str]:
        if found.software is None:
            return ["weight_sync='lora' needs vLLM; use 'directory', which sends merged weights"]
        if not found.max_lora_rank:
            return [f"it takes no adapters; start it with --enable-lora --max-lora-rank {adapter_rank or 8}"]
        if adapter_rank > found.max_lora_rank:
            return [
                f"it takes adapters up to rank {found.max_lora_rank}, and the policy's has {adapter_rank}; start it "
                f"with --max-lora-rank {adapter_rank}"
            ]
        if not found.loads_adapters:
            return [
                "it loads no adapters while it runs; start it by vf-vllm, or with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            ]
        return []

    @contextmanager
    def tensors_of(self, model: Any, whole: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """Give the adapter's tensors and remember its settings; as `WeightSync.tensors_of`.

        Raises:
            ConfigError: the model has no adapter, or trains more than one.
        """
        tensors, self._config = adapter_tensors(model, whole)
        yield tensors

    def _write(self, tensors: Mapping[str, Any], version: int) -> Path:
        return self._files.write(tensors, version, name="adapter_model.safetensors", config=self._config)

    def _load_of(self, directory: Path) -> Load:
        name = {"lora_name": self.policy_name}

        async def load(server: ServerClient, timeout_s: float) -> None:
            # not load_inplace: vLLM would read the file again at every step
            try:
                await server.request("POST", "/v1/unload_lora_adapter", name, timeout_s)
            except RefusedError as error:
                if error.status != 404:
                    raise
            await server.request("POST", "/v1/load_lora_adapter", {**name, "lora_path": str(directory)}, timeout_s)

        return load


def adapter_tensors(model: Any, whole: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a PEFT model's LoRA tensors under the names of its checkpoint format, and its adapter_config.json.

    Raises:
        ConfigError: there is no LoRA adapter, or something beside it is trained.
    """
    configs = getattr(model, "peft_config", None) or {}
    if not configs:
        raise ConfigError(
            "weight_sync='lora' needs a model with an adapter; give peft_config (a [lora] table), or weight_sync="
            "'directory'."
        )
    from peft import get_peft_model_state_dict

    adapter = model.active_adapter if isinstance(model.active_adapter, str) else model.active_adapter[0]
    config = configs[adapter].to_dict()
    if config.get("modules_to_save") or config.get("bias", "none") != "none":
        raise ConfigError(
            f"the adapter trains whole modules or biases ({config.get('modules_to_save') or config['bias']!r}), "
            "which no server loads as an adapter; use weight_sync='directory', which sends merged weights."
        )
    plain = {
        key: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        for key, value in config.items()
    }
    plain["inference_mode"] = True
    return get_peft_model_state_dict(model, state_dict=whole, adapter_name=adapter), plain
