"""Weights through a directory that trainer and servers share: any vLLM or embedded server on the same host.

An adapter goes the same way, through vLLM's route for LoRA adapters: a few megabytes a push, and base weights stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError, WeightSyncError
from verifiers.inference.server_client import RefusedError, ServerClient
from verifiers.inference.server_pool import Load, WeightUpdate
from verifiers.train.weight_sync.protocol import ServerSync
from verifiers.train.weight_sync.verification import Capabilities

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "verifiers-weights-"


class VersionFiles:
    """A directory with one file of tensors a version, each whole or absent; the newest is kept.

    A process that is killed cannot remove its versions, which in /dev/shm are memory. So each directory is locked for
    as long as its process lives, and those that no process holds are removed when the next run makes its own.

    Args:
        parent: where the directory of versions is made; /dev/shm, or the temporary directory where there is no
            /dev/shm, when left out.
    """

    def __init__(self, parent: str | None = None) -> None:
        # the server has a working directory of its own
        self._parent = None if parent is None else Path(parent).absolute()
        self._made: Path | None = None
        self._lock: int | None = None

    def write(
        self, tensors: Mapping[str, Any], version: int, *, name: str, config: Mapping[str, Any] | None = None
    ) -> Path:
        """Write a new version of tensors in host memory, with an adapter's config beside it; return its directory.

        Raises:
            WeightSyncError: there is no room, or no directory that can be written; nothing was written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        try:
            parent = self.directory()
            free = shutil.disk_usage(parent).free
        except OSError as error:
            raise WeightSyncError(
                f"the weights of step {version} cannot be written ({error}); set weight_sync_dir to a directory that "
                "can be written, and that nobody removes while the run lasts."
            ) from error
        if needed > free:
            raise WeightSyncError(
                f"{parent} has {free / 1e6:,.0f} MB free, and a push needs {needed / 1e6:,.0f} MB beside the version "
                "before it; set weight_sync_dir to a place with more room."
            )
        directory = parent / f"version-{version}"
        partial = parent / f".version-{version}.partial"
        for old in (directory, partial):
            shutil.rmtree(old, ignore_errors=True)
        try:
            partial.mkdir()
            save_file(dict(tensors), partial / name, metadata={"format": "pt", "version": str(version)})
            if config is not None:
                (partial / "adapter_config.json").write_text(json.dumps(config))
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise WeightSyncError(
                f"the weights of step {version} could not be written to {parent}: {error}"
            ) from error
        # a server must never see half a version
        return partial.rename(directory)

    def keep_only(self, directory: Path) -> None:
        for other in self.directory().iterdir():
            if other != directory:
                shutil.rmtree(other, ignore_errors=True)

    def close(self) -> None:
        """Remove all of it. May be called twice."""
        (made, self._made), (lock, self._lock) = (self._made, None), (self._lock, None)
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        if lock is not None:
            os.close(lock)

    def directory(self) -> Path:
        """Return the directory of the versions, made at the first call."""
        if self._made is None:
            parent = self._parent or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
            if self._parent is not None:
                self._parent.mkdir(parents=True, exist_ok=True)
            else:
                # not where file systems of other hosts may be: their locks cannot be relied on
                _remove_abandoned(Path(parent or tempfile.gettempdir()))
            self._made, self._lock = _make_locked(parent)
            # the server may run as another user
            self._made.chmod(0o755)
        return self._made


def _make_locked(parent: Path | None) -> tuple[Path, int]:
    """Make a directory and return it with the descriptor that locks it; it gets its name when it is locked."""
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}{os.getpid()}-", dir=parent))
    descriptor = os.open(made, os.O_RDONLY)
    # a file system without locks is one where nothing is removed
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return made.rename(made.with_name(made.name.removeprefix("."))), descriptor


def _remove_abandoned(parent: Path) -> None:
    for directory in parent.glob(f"{_PREFIX}[0-9]*-*"):
        try:
            descriptor = os.open(directory, os.O_RDONLY)
        except OSError:
            # gone, or another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        except OSError:
            # its process lives
            continue
        finally:
            os.close(descriptor)


class DirectorySync(ServerSync):
    """A weight sync that writes each version once and tells the servers to load it.

    The newest version is kept until the next one is loaded, so that a server that was restarted gets it by HTTP
    alone; older ones are removed. So there must be room for two.

    Args:
        directory: where versions are written; a new one under /dev/shm, or the temporary directory where there
            is no /dev/shm, when left out.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        directory: str | None = None,
        timeout_s: float = 120.0,
        api_key: str = "EMPTY",
    ) -> None:
        super().__init__(base_url, timeout_s, api_key)
        self._files = VersionFiles(directory)

    def push(self, named_parameters: Iterable[tuple[str, Any]], version: int) -> None:
        tensors: dict[str, Any] = {}
        seen = set()
        for name, tensor in named_parameters:
            one = tensor.detach().cpu().contiguous()
            # a file of tensors cannot hold ties
            tensors[name] = one.clone() if one.data_ptr() in seen else one
            seen.add(one.data_ptr())
        directory = self._write(tensors, version)
        try:
            self.pool.run(self.pool.push(WeightUpdate(version, self._load_of(directory))))
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._files.keep_only(directory)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._files.close()

    def _write(self, tensors: Mapping[str, Any], version: int) -> Path:
        return self._files.write(tensors, version, name="model.safetensors")

    def _load_of(self, directory: Path) -> Load:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        return functools.partial(ServerClient.request, method="POST", path="/collective_rpc", body=body)


class LoraSync(DirectorySync):
    """A weight sync that writes the adapter of each version into a directory of its own, which the servers load.

    The adapter keeps one name at the server, which is the policy's name in requests; each version has a path and, at
    the server, a number of its own, by which vLLM tells adapters and cached prefixes apart. A request that vLLM has
    begun keeps the adapter it began with, whatever the server's version is called by then, so rollouts in flight end
    before a push (`keeps_requests`). A server that was restarted does not know the name, and refuses requests until
    it gets the adapter.

    Args:
        base_url: of the rollout server, or of several; vLLM with --enable-lora.
    """

    policy_name = "policy-adapter"
    keeps_requests = False
    sends_adapter = True

    _config: dict[str, Any]

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

    def tensors_of(self, model: Any, whole: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the adapter's tensors and remember its settings; refuse a model that trains anything beside it."""
        tensors, self._config = adapter_tensors(model, whole)
        return tensors

    def _write(self, tensors: Mapping[str, Any], version: int) -> Path:
        return self._files.write(tensors, version, name="adapter_model.safetensors", config=self._config)

    def _load_of(self, directory: Path) -> Load:
        name = {"lora_name": self.policy_name}

        async def load(server: ServerClient, /, *, timeout_s: float) -> None:
            # not load_inplace: vLLM would read the file again at every step
            try:
                await server.request("POST", "/v1/unload_lora_adapter", name, timeout_s)
            except RefusedError as error:
                if error.status != 404:
                    raise
            await server.request("POST", "/v1/load_lora_adapter", {**name, "lora_path": str(directory)}, timeout_s)

        return load


def adapter_tensors(model: Any, whole: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a PEFT model's LoRA tensors under the names of its checkpoint format, and its adapter_config.json."""
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
