"""The trainer's pushes: which servers it trains against, what they must be able to do, and new weights to them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from verifiers.envs.dataset_format import row_fields
from verifiers.errors import ConfigError, WeightSyncError
from verifiers.rollouts.balancing import BalancedBackend
from verifiers.rollouts.endpoint import Backend, HttpBackend
from verifiers.rollouts.sync import WeightSync
from verifiers.train.capabilities import check_capabilities, old_server, read_capabilities
from verifiers.train.loss import CorrectedLoss
from verifiers.train.old_log_probs import log_probs_of_copy
from verifiers.train.ranks import on_all_ranks
from verifiers.train.servers import each_server
from verifiers.train.weight_sync import (
    Fleet,
    HeldSync,
    LoraSync,
    NcclSync,
    ServerControl,
    choose_sync,
    policy_tensors,
)
from verifiers.train.weight_sync.guard import ConnectionGuard
from verifiers.train.weight_sync.parameters import gathered_tensors, is_sharded, whole_policy

__all__ = ["PushingTrainer"]

logger = logging.getLogger("verifiers.train")

_PROMPTS_MEASURED = 256


class PushingTrainer(CorrectedLoss):
    """The part of the trainer that owns the weights on the rollout servers."""

    weight_sync: WeightSync
    _client: Any
    _servers: Backend
    _rows: Any
    _server_is_half: bool = False

    # -- before the first push ------------------------------------------------------------------------------------

    def _default_client(self) -> Any:
        """The servers of `server_urls`, or the one of `server_url`."""
        return [url.rstrip("/") for url in self.args.server_urls or [self.args.server_url]]

    def _default_sync(self, backends: Sequence[Backend]) -> WeightSync:
        args = self.args
        if args.rollout_device is not None:
            return HeldSync(
                lambda: self.accelerator.unwrap_model(self.model),
                self.processing_class,
                args.rollout_device,
                slots=args.rollout_chunk_size,
                timeout_s=args.weight_sync_timeout,
            )
        keys = {backend.api_key for backend in backends}
        if len(keys) > 1:
            raise ConfigError(
                f"the client's {len(backends)} servers have {len(keys)} different API keys, and weights are pushed "
                "under one; start them with the same, or give a weight_sync of your own."
            )
        return choose_sync(
            args.weight_sync,
            [backend.base_url or str(args.server_url) for backend in backends],
            directory=args.weight_sync_dir,
            timeout_s=args.weight_sync_timeout,
            api_key=keys.pop() or "EMPTY",
        )

    def _connect_servers(self) -> None:
        """Wait for the servers, check what they can do, and let no rollout reach weights that were not pushed."""
        try:
            self.weight_sync.connect(self.args.server_wait)
        except WeightSyncError as error:
            # a vLLM that lacks the routes is most often one from before them
            old = old_server(self._server())
            raise WeightSyncError(f"{error} The server is too old: {old}." if old else str(error)) from error
        fleet = getattr(self.weight_sync, "fleet", None)
        if not isinstance(fleet, Fleet):
            return
        fleet.restart_timeout_s = self.args.server_restart_timeout
        needed = self._needed_tokens()
        for server in fleet.servers:
            found = read_capabilities(server)
            self._server_is_half = self._server_is_half or found.dtype in ("bfloat16", "float16")
            check_capabilities(
                found,
                weight_sync=_kind_of(self.weight_sync),
                model=self.args.server_model,
                encode=lambda text: self._tokenizer.encode(text, add_special_tokens=False),
                needed_tokens=needed,
                adapter_rank=_adapter_rank(self.accelerator.unwrap_model(self.model)),
            )
        if isinstance(self._servers, BalancedBackend) and self._servers.managed:
            fleet.route_through(self._servers)
        fleet.on_version = self._note_version
        for backend in each_server(self._servers):
            if not isinstance(backend, HttpBackend):
                continue
            guard = ConnectionGuard(backend.base_url, _question(fleet, backend.base_url))
            backend.new_connector = guard.connector

    def _policy_name(self) -> str:
        """The policy's name in requests."""
        name = getattr(self.weight_sync, "policy_name", None) or self.args.server_model
        return str(name or self._server().model_name())

    def _note_version(self, version: int) -> None:
        """Requests that go on after a push know at once which weights they go on under."""
        generator = getattr(self, "generator", None)
        if generator is not None:
            generator.policy_version = version

    def _needed_tokens(self) -> int | None:
        """The longest of the first prompts and `max_completion_length` together; later turns add to it."""
        longest = 0
        for index in range(min(_PROMPTS_MEASURED, len(self._rows))):
            prompt = row_fields(self._rows[index])[0]
            if isinstance(prompt, str):
                longest = max(longest, len(self._tokenizer.encode(prompt)))
            elif getattr(self._tokenizer, "chat_template", None):
                rendered = self._tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
                longest = max(longest, len(self._tokenizer.encode(rendered, add_special_tokens=False)))
        return longest + (self.args.max_completion_length or 0) if longest else None

    def _server(self) -> ServerControl:
        server = getattr(self.weight_sync, "server", None)
        if isinstance(server, ServerControl):
            return server
        return ServerControl(str(self._servers.base_url or self.args.server_url))

    # -- pushing --------------------------------------------------------------------------------------------------

    def _push_once(self, version: int) -> None:
        with self._pushed_tensors() as tensors:
            self.weight_sync.push(tensors.items(), version)

    @contextlib.contextmanager
    def _pushed_tensors(self) -> Iterator[Mapping[str, Any]]:
        model = self.accelerator.unwrap_model(self.model)
        tied = bool(getattr(self.weight_sync, "sends_tied", False))
        if isinstance(self.weight_sync, LoraSync):
            whole = self._together("gather", tied, True) if is_sharded(model) else None
            with self.weight_sync.tensors_of(model, whole) as adapter:
                yield adapter
        elif is_sharded(model):
            yield whole_policy(model, self._together("gather", tied, False))
        else:
            with policy_tensors(model, tied=tied) as tensors:
                yield tensors

    # -- what a sharded model needs all ranks for -----------------------------------------------------------------

    def _joint_work(self) -> dict[str, Callable[..., Any]]:
        """What rank 0 may have all ranks do at once, by name."""
        return {"gather": self._gather, "score": self._score_on_all}

    def _together(self, name: str, *args: Any) -> Any:
        return on_all_ranks(self.accelerator, name, self._joint_work()[name], *args)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As transformers'; a sharded policy is saved whole, in whichever form its checkpoints are."""
        if _internal_call or not is_sharded(self.model):
            super().save_model(output_dir, _internal_call)
            return
        self._save(output_dir or self.args.output_dir, state_dict=self._gather(tied=True, adapter_only=False))
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _gather(self, tied: bool, adapter_only: bool) -> dict[str, Tensor]:
        return gathered_tensors(
            self.accelerator.unwrap_model(self.model),
            keep=self.accelerator.is_main_process,
            tied=tied,
            only=(lambda name: "lora_" in name) if adapter_only else None,
        )

    def _score_on_all(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self._logps(self.model, batch)

    def _old_logps(self, batch: Mapping[str, Tensor], optimizer_step: int) -> Tensor:
        """Old log-probs (R, C) of a micro-batch: by the held copy where that is asked for and has these weights."""
        copy = None
        if self.args.old_logprobs_on_rollout_device and isinstance(self.weight_sync, HeldSync):
            copy = self.weight_sync.copy_of(optimizer_step)
        if copy is None:
            return self._logps(self.model, batch)
        size = self.args.old_logprobs_batch_size or len(batch["completion_ids"])
        return log_probs_of_copy(copy, batch, self.temperature, size).to(self.accelerator.device)


def _kind_of(sync: WeightSync) -> str:
    if isinstance(sync, LoraSync):
        return "lora"
    return "nccl" if isinstance(sync, NcclSync) else "directory"


def _adapter_rank(model: Any) -> int:
    configs = getattr(model, "peft_config", None) or {}
    return max((int(getattr(config, "r", 0) or 0) for config in configs.values()), default=0)


def _question(fleet: Fleet, url: str) -> Any:
    return lambda: fleet.holds_pushed_weights(url)
