"""The trainer's side of weight sync: rollout servers get the trained weights, and are checked to sample from them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verifiers.envs.datasets import row_fields
from verifiers.errors import ConfigError, WeightSyncError
from verifiers.inference.endpoint import Backend
from verifiers.inference.server_pool import ServerPool, backend_for, each_server
from verifiers.inference.wire import MaskSource, mask_fields
from verifiers.server_process import is_loopback
from verifiers.train.cpu_linear import multiplies_bfloat16
from verifiers.train.image_processor import RowImages
from verifiers.train.processes.distributed import Ranks
from verifiers.train.weight_sync.in_process import InProcessSync
from verifiers.train.weight_sync.nccl import NcclSync
from verifiers.train.weight_sync.protocol import WeightSync, gathered_tensors, is_sharded, require_finite
from verifiers.train.weight_sync.shared_directory import DirectorySync, LoraSync
from verifiers.train.weight_sync.verification import (
    LogprobCheck,
    check_capabilities,
    old_server,
    read_capabilities,
    vocab_size_of,
)

if TYPE_CHECKING:
    from verifiers.train.config import GRPOConfig

logger = logging.getLogger("verifiers.train")

_PROMPTS_MEASURED = 64
_DESCRIBE_S = 600.0


def default_weight_sync(
    args: GRPOConfig, servers: Sequence[Backend], policy: Any, tokenizer: Any, images: RowImages | None = None
) -> WeightSync:
    """Return the weight sync that a run's settings name; `policy` is the trained model, unwrapped.

    `weight_sync` "auto" is a shared directory where every server is on this host, or `weight_sync_dir` is given (a
    file system that both sides mount); else NCCL.
    """
    if args.rollout_device is not None:
        return InProcessSync(
            policy,
            tokenizer,
            args.rollout_device,
            slots=args.rollout_chunk_size,
            # beside a trainer that computes at the same time one thread; in turns with it all cores
            threads=1 if args.shared_device == "cores" and args.num_batches_ahead else None,
            timeout_s=args.weight_sync_timeout,
            cuda_graphs=args.rollout_cuda_graphs,
            dtype=dtype_of_copy(args),
            images=images,
        )
    keys = {backend.api_key for backend in servers}
    if len(keys) > 1:
        raise ConfigError(
            f"the client's {len(servers)} servers have {len(keys)} different API keys, and weights are pushed "
            "under one; start them with the same, or give a weight_sync of your own."
        )
    urls = [backend.base_url or str(args.server_url) for backend in servers]
    kind, directory = args.weight_sync, args.weight_sync_dir
    timeout_s, api_key = args.weight_sync_timeout, keys.pop() or "EMPTY"
    if kind == "lora":
        return LoraSync(urls, directory, timeout_s, api_key)
    if kind == "nccl" or (kind == "auto" and directory is None and not all(map(is_loopback, urls))):
        return NcclSync(urls, timeout_s, api_key)
    return DirectorySync(urls, directory, timeout_s, api_key)


def dtype_of_copy(args: GRPOConfig) -> torch.dtype | None:
    """Return the half precision that the trainer computes in, for a copy in this process; None for the policy's own.

    A copy on which the trainer computes old log-probs, and one with a head in float32, keep the policy's numbers; so
    does a copy on a processor that has no products of the others.
    """
    if args.old_logprobs_on_rollout_device or args.cast_lm_head_to_fp32:
        return None
    if str(args.rollout_device).startswith("cuda"):
        return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    return torch.bfloat16 if args.bf16 and multiplies_bfloat16() else None


class PolicyWeights:
    """The trained model's tensors, on one rank or sharded over them; `model` is unwrapped."""

    def __init__(self, ranks: Ranks, model: Any) -> None:
        self._ranks, self.model = ranks, model
        ranks.register("gather", self.gather)

    @property
    def is_sharded(self) -> bool:
        return is_sharded(self.model)

    def gather(self, tied: bool, adapter_only: bool) -> dict[str, Tensor]:
        """Return the tensors of a sharded model, whole, on rank 0; every rank must call it."""
        only = (lambda name: "lora_" in name) if adapter_only else None
        return gathered_tensors(self.model, keep=self._ranks.is_main, tied=tied, only=only)

    def tensors(self, sync: WeightSync) -> Mapping[str, Any]:
        """Return the tensors that a weight sync pushes, by name; on rank 0, from inside `Ranks.on_rank_0`."""
        whole = self._ranks.together("gather", False, sync.sends_adapter) if self.is_sharded else None
        tensors = sync.tensors_of(self.model, whole)
        require_finite(tensors, "pushed to the rollout servers")
        return tensors

    def require_finite(self, purpose: str) -> None:
        """Refuse weights that are not finite, as `protocol.require_finite` does; every rank must call it."""
        gather = self._ranks.gather if self.is_sharded else None
        require_finite(dict(self.model.named_parameters()), purpose, gather)


class WeightPublisher:
    """The pushes of weights to the rollout servers, from connecting to the check by log-probs; on rank 0.

    Args:
        client: anything that `backend_for` takes; None for the servers of the settings.
        sync: how weights reach the servers; the kind that the settings name when left out.
        images: how prompts with images are read; None for text alone.
    """

    def __init__(
        self,
        args: GRPOConfig,
        client: Any,
        sync: WeightSync | None,
        weights: PolicyWeights,
        tokenizer: Any,
        rows: Any,
        check: LogprobCheck,
        images: RowImages | None = None,
    ) -> None:
        self._args, self._weights, self._tokenizer, self._rows = args, weights, tokenizer, rows
        backend = backend_for(client if client is not None else list(args.server_urls or [args.server_url]))
        self.sync = sync or default_weight_sync(args, each_server(backend), weights.model, tokenizer, images)
        self.servers: Backend = self.sync.route(backend)
        self._client_given = client is not None
        self._check, self._images = check, images
        self._pool: ServerPool | None = None
        # see `RolloutClient`; known once the servers are connected, as is how many log-probs they tell
        self.mask_source: MaskSource = "sampling_mask"
        self._max_logprobs = -1
        self._pushes = 0
        self._repeated_loads = 0
        if args.drain_before_sync is False:
            self.drains()

    @property
    def vocab_size(self) -> int | None:
        return vocab_size_of(self._weights.model)

    # -- before the first push ------------------------------------------------------------------------------------

    def connect(self, on_version: Callable[[int], None]) -> None:
        """Wait for the servers, check what they can do, and let no rollout reach weights that were not pushed.

        `on_version` is called with the version of a push that all servers hold, before requests in flight continue.

        Raises:
            WeightSyncError: a server did not answer in time, or cannot be trained against.
        """
        try:
            self.sync.connect(self._args.server_wait)
        except WeightSyncError as error:
            # a vLLM that lacks the routes is most often one from before them
            old = self.pool.run(old_server(self.pool.servers[0]), _DESCRIBE_S)
            raise WeightSyncError(f"{error} The server is too old: {old}." if old else str(error)) from error
        # the first pushes to servers that were just connected are always checked
        self._pushes = 0
        if self.sync.own_url is not None and not self._client_given:
            self.servers = backend_for(self.sync.own_url)
        pool = self.pool
        pool.configure(
            restart_timeout_s=self._args.server_restart_timeout,
            stall_timeout_s=min(self._args.grading_timeout, self._args.async_generation_timeout),
            on_version=on_version,
        )
        if self.sync.pool is not None:
            self._check_capabilities(pool)

    @property
    def pool(self) -> ServerPool:
        """The servers that hold the weights, or one of them where the kind of weight sync has none."""
        if self.sync.pool is not None:
            return self.sync.pool
        if self._pool is None:
            self._pool = ServerPool([self.servers.base_url or self._args.server_url])
        return self._pool

    def _check_capabilities(self, pool: ServerPool) -> None:
        longest, needed = self._longest_row()
        for server in pool.servers:
            found = pool.run(read_capabilities(server), _DESCRIBE_S)
            self._check.note_dtype(found.dtype)
            if found.software == "vLLM":
                self.mask_source = "logprobs"
                self._max_logprobs = -1 if found.max_logprobs is None else found.max_logprobs
            check_capabilities(
                found,
                missing=self.sync.missing_at(found, _adapter_rank(self._weights.model)),
                # an adapter has a name of its own there
                model=None if self.sync.sends_adapter else self._args.server_model,
                encode=lambda text: self._tokenizer.encode(text, add_special_tokens=False),
                needed_tokens=needed,
                longest_row=longest,
                image_reader=None if self._images is None else self._images.processor.reader,
            )

    def require_masks(self, sampled: Sequence[Mapping[str, Any]]) -> None:
        """Refuse sampling whose tokens that are left to draw from the servers cannot tell.

        Args:
            sampled: the fields of the sampling arguments, one for each environment.

        Raises:
            ConfigError: tokens are cut, and what is missing for that.
        """
        needed = max(mask_fields(one, self.mask_source, self.vocab_size).get("top_logprobs", 0) for one in sampled)
        if -1 < self._max_logprobs < needed:
            raise ConfigError(
                f"the rollout server returns at most {self._max_logprobs} log-probs a token, and it takes {needed} "
                f"to know which tokens top_k leaves; start it with --max-logprobs {needed}."
            )

    def _longest_row(self) -> tuple[int | None, int | None]:
        """Return the training row of the longest prompt, and its tokens with `max_completion_length`.

        Tokens are counted where there are most characters; later turns add to a prompt.
        """
        sizes = [len(str(prompt)) for prompt in self._rows["prompt"]] if len(self._rows) else []
        counted = {}
        for row in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)[:_PROMPTS_MEASURED]:
            prompt = row_fields(self._rows[row])[0]
            if isinstance(prompt, str):
                counted[row] = len(self._tokenizer.encode(prompt))
            elif getattr(self._tokenizer, "chat_template", None):
                rendered = self._tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
                counted[row] = len(self._tokenizer.encode(rendered, add_special_tokens=False))
        longest = max(counted, key=counted.__getitem__, default=None)
        if longest is None or not counted[longest]:
            return None, None
        return longest, counted[longest] + (self._args.max_completion_length or 0)

    def policy_name(self) -> str:
        """Return the policy's name in requests; the server is asked where nothing else says it."""
        name = self.sync.policy_name or self._args.server_model
        return str(name or self.pool.run(self.pool.servers[0].model_name(), _DESCRIBE_S))

    def drains(self) -> bool:
        """Return whether rollouts in flight end before a push: as asked for, or because they would be lost."""
        asked, name = self._args.drain_before_sync, type(self.sync).__name__
        if self.sync.keeps_requests:
            return bool(asked)
        if asked is False:
            raise ConfigError(
                f"drain_before_sync is False, but with {name} a request keeps the weights that it began with, "
                "whatever the server calls them by then: its tokens would be stale unmarked; leave it out."
            )
        if asked is None and self._args.num_batches_ahead:
            logger.warning(
                "%s cannot keep requests in flight while it loads weights, so every push waits for the rollouts in "
                "flight to end; stragglers then leave the server idle (drain_before_sync).",
                name,
            )
        return True

    # -- pushing --------------------------------------------------------------------------------------------------

    def push(self, version: int, *, may_check_meanwhile: bool = False) -> None:
        """Push the present weights and check by log-probs that the servers sample from them, where that is due.

        Args:
            may_check_meanwhile: answers to a check may come while the trainer computes; `finish_check` judges them.

        Raises:
            WeightSyncError: a server did not take the weights.
            WeightProbeError: a server took them and samples from others.
        """
        self.sync.push(self._weights.tensors(self.sync).items(), version)
        # the first push sends what the server has; only the second can reveal a stale head
        repeated_before, self._repeated_loads = self._repeated_loads, self.pool.repeated_loads
        # a server that was restarted, or refused a load and was asked again, may hold half of it
        is_doubtful = self._repeated_loads > repeated_before or self._pushes < 2
        every = self.sync.probe_every if self._args.probe_every is None else self._args.probe_every
        due = is_doubtful or (every > 0 and self._pushes % every == 0)
        self._pushes += 1
        self._check.forget()
        if due and (is_doubtful or not may_check_meanwhile or self._weights.is_sharded):
            self._check.run(version, self.pool)
        elif due:
            self._check.begin(version, self.pool)

    def finish_check(self) -> None:
        """Judge the check that is on its way; the weights must still be those that were pushed."""
        version = self._check.finish()
        if version is not None:
            # check again and wait for the answers: only a difference that stays is an error
            self._check.run(version, self.pool)

    def copy_of(self, version: int) -> Any:
        """Return the frozen copy of the policy for old log-probs, where one is asked for and has these weights."""
        return self.sync.copy_of(version) if self._args.old_logprobs_on_rollout_device else None

    def close(self) -> None:
        """End the check that is on its way, and free what pushes used. May be called twice."""
        # whatever one of them raises, the rest is freed
        with contextlib.ExitStack() as stack:
            if self._pool is not None:
                stack.callback(self._pool.stop)
            stack.callback(self.sync.close)
            stack.callback(self._check.forget)


def _adapter_rank(model: Any) -> int:
    configs = getattr(model, "peft_config", None) or {}
    return max((int(getattr(config, "r", 0) or 0) for config in configs.values()), default=0)
