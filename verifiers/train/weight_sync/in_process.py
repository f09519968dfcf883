"""Weights copied into a frozen policy in this process: no file, no serialization."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from verifiers.errors import ConfigError, WeightSyncError
from verifiers.inference.server_pool import ServerPool
from verifiers.installation import install_hint
from verifiers.train.image_processor import RowImages
from verifiers.train.weight_sync.protocol import WeightSync, policy_tensors


class InProcessSync(WeightSync):
    """The embedded server in the trainer's process, with a frozen copy of the policy.

    The copy is made from the policy's config and tensors at `connect`, and takes new weights parameter by
    parameter; between pushes its logits do not move.

    Args:
        device: where the copy lives, such as "cuda:1" or "cpu".
        threads: CPU threads of torch that generate; None leaves torch's choice.
        cuda_graphs: replay passes of one token a sequence as CUDA graphs; None where that can be done.
        dtype: of the copy; None for the policy's own.
        images: how prompts with images are read; None for text alone.
    """

    probe_every = 8

    def __init__(
        self,
        policy: Any,
        tokenizer: Any,
        device: str,
        *,
        slots: int | None = None,
        threads: int | None = None,
        timeout_s: float = 120.0,
        cuda_graphs: bool | None = None,
        dtype: Any = None,
        images: RowImages | None = None,
    ) -> None:
        self._policy, self._tokenizer = policy, tokenizer
        self._device, self._slots, self._timeout_s = device, slots, timeout_s
        self._threads, self._cuda_graphs, self._images = threads, cuda_graphs, images
        self._dtype = dtype
        self._running: Any = None

    def connect(self, deadline_s: float) -> None:
        try:
            from verifiers_embedded.errors import EmbeddedError
            from verifiers_embedded.in_process_server import InProcessServer
        except ImportError as error:
            raise ConfigError(
                f"rollout_device={self._device!r} needs the embedded server, which is not installed; "
                f"{install_hint('embedded')}."
            ) from error
        policy = self._policy
        try:
            self._running = InProcessServer.of_policy(
                policy.config,
                policy_tensors(policy),
                self._tokenizer,
                device=self._device,
                slots=self._slots,
                threads=self._threads,
                dtype=self._dtype,
                cuda_graphs=self._cuda_graphs,
                **self._image_options(),
            ).start(deadline_s)
        # torch without CUDA raises an AssertionError
        except (EmbeddedError, RuntimeError, AssertionError) as error:
            raise WeightSyncError(f"no copy of the policy could be made on {self._device}: {error}") from error
        self.pool = ServerPool([self._running.url], timeout_s=self._timeout_s)

    def _image_options(self) -> dict[str, Any]:
        images = self._images
        return {} if images is None else {"images": images.processor, "max_images": images.store.max_images}

    def push(self, named_parameters: Iterable[tuple[str, Any]], version: int) -> None:
        try:
            self._running.push(dict(named_parameters), str(version), self._timeout_s)
        except Exception as error:
            raise WeightSyncError(
                f"the weights of step {version} did not reach the copy on {self._device}: {error}"
            ) from error

    def close(self) -> None:
        running, self._running = self._running, None
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.stop()
        if running is not None:
            running.close()

    @property
    def own_url(self) -> str | None:
        """Base URL of the server, with /v1; None until connected."""
        return str(self._running.url) if self._running is not None else None

    def copy_of(self, version: int) -> Any:
        """Return the frozen copy, where it has the weights of `version`, else None."""
        running = self._running
        return running.model if running is not None and running.version == str(version) else None
