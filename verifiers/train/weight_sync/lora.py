"""An adapter through vLLM's route for LoRA adapters: a few megabytes a push, and the base weights stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from verifiers.errors import ConfigError
from verifiers.train.weight_sync.directory import push_files
from verifiers.train.weight_sync.files import VersionFiles
from verifiers.train.weight_sync.fleet import Fleet, Held
from verifiers.train.weight_sync.server import RefusedError, ServerControl

__all__ = ["LoraSync", "adapter_tensors"]


class LoraSync:
    """Writes the adapter of each version into a directory of its own and has the servers load it.

    The adapter keeps one name at the server, which is the policy's name in requests; each version has a path and, at
    the server, a number of its own, by which vLLM tells adapters and cached prefixes apart. A request that vLLM has
    begun keeps the adapter it began with, whatever the server's version is called by then, so rollouts in flight end
    before a push (`keeps_requests`). A server that was started again does not know the name, and refuses requests
    until it gets the adapter.

    Args:
        base_url: of the rollout server, or of several; vLLM with --enable-lora.
        name: of the adapter at the server.
        directory, timeout_s: as for `DirectorySync`.

    Attributes:
        policy_name: `name`.
    """

    keeps_requests = False

    def __init__(
        self,
        base_url: str | Sequence[str],
        directory: str | None = None,
        timeout_s: float = 120.0,
        api_key: str = "EMPTY",
        *,
        name: str = "policy-adapter",
    ) -> None:
        urls = [base_url] if isinstance(base_url, str) else list(base_url)
        self.fleet = Fleet(urls, api_key, timeout_s)
        self.policy_name = name
        self._files = VersionFiles(directory)
        self._config: dict[str, Any] = {}

    @property
    def server(self) -> ServerControl:
        """One of the servers that are up."""
        return self.fleet.servers[0]

    def connect(self, deadline_s: float) -> None:
        self.fleet.connect(deadline_s)

    @contextmanager
    def tensors_of(self, model: Any, whole: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """The adapter's tensors, to be pushed; its settings are remembered.

        Args:
            whole: the model's tensors by name, where it is sharded and holds but parts of them.

        Raises:
            ConfigError: the model has no adapter, or trains more than one.
        """
        tensors, self._config = adapter_tensors(model, whole)
        yield tensors

    def push(self, named_parameters: Iterable[tuple[str, Any]], version: int) -> None:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in named_parameters}
        directory = self._files.write(tensors, version, name="adapter_model.safetensors", config=self._config)
        name = {"lora_name": self.policy_name}

        def load(server: ServerControl, timeout_s: float) -> None:
            # not load_inplace: vLLM would read the file again at every step
            try:
                server.request("POST", "/v1/unload_lora_adapter", name, timeout_s=timeout_s)
            except RefusedError as error:
                if error.status != 404:
                    raise
            server.request(
                "POST", "/v1/load_lora_adapter", {**name, "lora_path": str(directory)}, timeout_s=timeout_s
            )

        push_files(self.fleet, Held(version, load), self._files, directory)

    def close(self) -> None:
        try:
            self.fleet.close()
        finally:
            self._files.close()


def adapter_tensors(model: Any, whole: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A PEFT model's LoRA tensors under the names of its checkpoint format, and its adapter_config.json.

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
