"""Weights copied into a frozen policy that this process holds on another device: no file, no serialization."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from verifiers.errors import ConfigError, WeightSyncError
from verifiers.train.weight_sync.parameters import policy_tensors
from verifiers.train.weight_sync.server import ServerControl

__all__ = ["HeldSync"]


class HeldSync:
    """Holds the embedded server in the trainer's process, with a frozen copy of the policy on a device of its own.

    The copy is made from the policy's config and tensors at `connect`, and takes new weights parameter by
    parameter; between pushes its logits do not move.

    Args:
        policy: gives the trained model, unwrapped.
        tokenizer: the policy's.
        device: where the copy lives, such as "cuda:1"; best not the trainer's.
        slots: most sequences generated at once.
        timeout_s: deadline for one push, in seconds.
    """

    def __init__(
        self,
        policy: Callable[[], Any],
        tokenizer: Any,
        device: str,
        *,
        slots: int = 64,
        timeout_s: float = 120.0,
    ) -> None:
        self._policy, self._tokenizer = policy, tokenizer
        self._device, self._slots, self._timeout_s = device, slots, timeout_s
        self._held: Any = None
        self.server = ServerControl("http://127.0.0.1:0")

    def connect(self, deadline_s: float) -> None:
        try:
            from verifiers_embedded.errors import EmbeddedError
            from verifiers_embedded.held import HeldServer
        except ImportError as error:
            raise ConfigError(
                f"rollout_device={self._device!r} needs the embedded server, which is not installed; "
                "install it by `pip install ./servers/embedded`."
            ) from error
        policy = self._policy()
        threads = 1 if torch.device(self._device).type == "cpu" else None
        try:
            with policy_tensors(policy) as tensors:
                self._held = HeldServer.of_policy(
                    policy.config,
                    tensors,
                    self._tokenizer,
                    device=self._device,
                    slots=self._slots,
                    threads=threads,
                ).start(deadline_s)
        except (EmbeddedError, RuntimeError) as error:
            raise WeightSyncError(f"no copy of the policy could be made on {self._device}: {error}") from error
        self.server = ServerControl(self._held.url, timeout_s=self._timeout_s)

    def push(self, named_parameters: Iterable[tuple[str, Any]], version: int) -> None:
        try:
            self._held.push(dict(named_parameters), str(version), self._timeout_s)
        except Exception as error:
            raise WeightSyncError(
                f"the weights of step {version} did not reach the copy on {self._device}: {error}"
            ) from error

    def close(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()

    @property
    def url(self) -> str:
        """Base URL of the server, with /v1; empty until connected."""
        return self._held.url if self._held is not None else ""

    def copy_of(self, version: int) -> Any:
        """The frozen copy, where it has the weights of `version`, else None."""
        held = self._held
        return held.model if held is not None and held.version == str(version) else None
