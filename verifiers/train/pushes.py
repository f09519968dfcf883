"""The trainer's pushes: new weights to the rollout servers, and the proof that they sample from them."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from verifiers.envs.dataset_format import row_fields
from verifiers.errors import Error, WeightProbeError
from verifiers.rollouts.balancing import BalancedBackend, server_pool
from verifiers.rollouts.endpoint import HttpBackend
from verifiers.rollouts.sync import WeightSync
from verifiers.train.capabilities import check_capabilities, log_probs_are_raw, read_capabilities
from verifiers.train.loss import CorrectedLoss
from verifiers.train.old_log_probs import log_probs_of_copy
from verifiers.train.ranks import on_all_ranks
from verifiers.train.watching.clock import StageClock
from verifiers.train.weight_sync import (
    DirectorySync,
    Fleet,
    HeldSync,
    LoraSync,
    NcclSync,
    ServerControl,
    choose_sync,
    has_tied_tensors,
    policy_tensors,
    probe_server,
)
from verifiers.train.weight_sync.guard import ConnectionGuard
from verifiers.train.weight_sync.parameters import gathered_tensors, is_sharded, whole_policy
from verifiers.train.weight_sync.probe import AskedProbe, ProbeResult, ask_server, judge_answer
from verifiers.train.weight_sync.server import NoAnswerError

__all__ = ["BeforeUpdates", "PushingTrainer"]

logger = logging.getLogger("verifiers.train")

_PROMPTS_MEASURED = 256
_LEAVE_PROBE_S = 1.0


class PushingTrainer(CorrectedLoss):
    """The part of the trainer that owns the weights on the rollout servers."""

    weight_sync: WeightSync
    _client: Any
    _rows: Any
    _pushes: int = 0
    _asked: AskedProbe | None = None
    clock: StageClock
    _server_is_half: bool = False

    # -- before the first push ------------------------------------------------------------------------------------

    def _default_client(self) -> Any:
        """Routes rollouts to the servers of `server_urls`, or the one of `server_url`; each may restart."""
        urls = [url.rstrip("/") for url in self.args.server_urls or [self.args.server_url]]
        return server_pool(urls, managed=True, up_timeout_s=self.args.server_restart_timeout)

    def _default_sync(self) -> WeightSync:
        args = self.args
        if args.rollout_device is not None:
            return HeldSync(
                lambda: self.accelerator.unwrap_model(self.model),
                self.processing_class,
                args.rollout_device,
                slots=args.rollout_chunk_size,
                timeout_s=args.weight_sync_timeout,
            )
        if isinstance(self._client, BalancedBackend):
            urls = list(self._client.urls)
        else:
            urls = [str(getattr(self._client, "base_url", args.server_url))]
        return choose_sync(
            args.weight_sync,
            urls,
            directory=args.weight_sync_dir,
            timeout_s=args.weight_sync_timeout,
            api_key=getattr(self._client, "api_key", "EMPTY"),
        )

    def _connect_servers(self) -> None:
        """Wait for the servers, check what they can do, and let no rollout reach weights that were not pushed."""
        self.weight_sync.connect(self.args.server_wait)
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
        if isinstance(self._client, BalancedBackend) and self._client.managed:
            fleet.route_through(self._client)
        fleet.on_version = self._note_version
        for backend in _http_backends(self._client):
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
        return ServerControl(str(getattr(self._client, "base_url", self.args.server_url)))

    # -- pushing --------------------------------------------------------------------------------------------------

    def _push_weights(self, version: int) -> None:
        self._push_once(version)
        # the second push is the first that changes anything: until then a head that stays old is right
        is_first = self._pushes < 2
        due = is_first or (self.args.probe_every > 0 and self._pushes % self.args.probe_every == 0)
        self._pushes += 1
        self._asked = None
        if not due:
            return
        if is_first or not self._may_probe_meanwhile():
            self._probe_or_mend(version)
        else:
            ask = functools.partial(ask_server, version=version, **self._question())
            self._asked = AskedProbe(version, self._probed_servers(), ask)

    def _may_probe_meanwhile(self) -> bool:
        """Whether a probe's answer may come while the trainer computes, and rollouts run beside it."""
        # DeepSpeed takes its optimizer step with the last backward pass, before anything could be judged
        return not self.is_deepspeed_enabled and not is_sharded(self.accelerator.unwrap_model(self.model))

    def _settle_probe(self) -> None:
        """Judge the probe that is on its way; the weights must still be those that were pushed."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        with self.clock.stage("sync"):
            for server, found in asked.answers():
                try:
                    self._judge(server, found, asked.version)
                except NoAnswerError as error:
                    if error.timed_out:
                        raise
                    # one that was killed meanwhile samples nothing before it has the pushed weights again
                    logger.warning("%s could not be asked for the log-probs of its weights: %s", server.root, error)
                except Error:
                    # whatever it is, a probe that waits for its answer tells a passing trouble from a lasting one
                    self._probe_or_mend(asked.version)
                    return

    def _leave_probe(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.leave(_LEAVE_PROBE_S)

    def _judge(self, server: ServerControl, found: dict[str, Any] | BaseException, version: int) -> None:
        if isinstance(found, BaseException):
            raise found
        self._note_probe(judge_answer(server, found, self._score_ids, **self._measure(version)))

    def _probe_or_mend(self, version: int) -> None:
        try:
            self._probe(version)
        except WeightProbeError as error:
            if not self._may_mend_by_untying():
                raise
            logger.warning("%s Sending tied weights under each of their names from now on.", error)
            self.weight_sync.sends_tied = True  # type: ignore[attr-defined]
            self._push_once(version)
            try:
                self._probe(version)
            except WeightProbeError as again:
                raise WeightProbeError(
                    f"{again} The model has tied embeddings, and sending the head by itself did not help; train a "
                    "model with tie_word_embeddings=False, or use another server."
                ) from error

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

    def _may_mend_by_untying(self) -> bool:
        sync = self.weight_sync
        return (
            isinstance(sync, (DirectorySync, NcclSync))
            and not sync.sends_tied
            and has_tied_tensors(self.accelerator.unwrap_model(self.model))
        )

    def _probe(self, version: int) -> None:
        """Compare the servers' log-probs with ours on a few tokens; see `weight_sync.probe`."""
        fleet = getattr(self.weight_sync, "fleet", None)
        question, measure = self._question(), self._measure(version)
        for server in self._probed_servers():
            probe = functools.partial(probe_server, server, score=self._score_ids, **question, **measure)
            try:
                result = _outlasting_restarts(probe, fleet, server) if isinstance(fleet, Fleet) else probe()
            except WeightProbeError as error:
                if log_probs_are_raw(server, question["model"], question["prompt"]):
                    raise WeightProbeError(
                        f"the log-probs of {server.root} are those before temperature, so they are not of the "
                        "distribution it samples from; start it with --logprobs-mode processed_logprobs."
                    ) from error
                raise
            self._note_probe(result)

    def _probed_servers(self) -> Sequence[ServerControl]:
        fleet = getattr(self.weight_sync, "fleet", None)
        return fleet.servers if isinstance(fleet, Fleet) else [self._server()]

    def _question(self) -> dict[str, Any]:
        """What a probe asks."""
        prompt = row_fields(self._rows[0])[0]
        return {"model": str(self.args.server_model), "prompt": prompt, "temperature": self.temperature}

    def _measure(self, version: int) -> dict[str, Any]:
        """What a probe's answer is judged by."""
        half = self.model.dtype in (torch.bfloat16, torch.float16) or self.args.bf16 or self.args.fp16
        half = half or self._server_is_half
        tolerance = self.args.probe_tolerance
        return {"version": version, "tolerance": tolerance if tolerance is not None else (0.1 if half else 1e-3)}

    def _note_probe(self, result: ProbeResult) -> None:
        self._metrics["train"]["sampling/probe_difference"].append(result.largest_difference)

    def _score_ids(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[float]:
        batch = {
            "prompt_ids": torch.tensor([list(prompt_ids)]),
            "prompt_mask": torch.ones(1, len(prompt_ids), dtype=torch.int64),
            "completion_ids": torch.tensor([list(completion_ids)]),
            "completion_mask": torch.ones(1, len(completion_ids), dtype=torch.int64),
        }
        model = self.accelerator.unwrap_model(self.model)
        scored: Tensor = self._together("score", batch) if is_sharded(model) else self._logps(model, batch)
        logps: list[float] = scored[0].float().tolist()
        return logps

    def _old_logps(self, batch: Mapping[str, Tensor], optimizer_step: int) -> Tensor:
        """Old log-probs (R, C) of a micro-batch: by the held copy where that is asked for and has these weights."""
        copy = None
        if self.args.old_logprobs_on_rollout_device and isinstance(self.weight_sync, HeldSync):
            copy = self.weight_sync.copy_of(optimizer_step)
        if copy is None:
            return self._logps(self.model, batch)
        size = self.args.old_logprobs_batch_size or len(batch["completion_ids"])
        return log_probs_of_copy(copy, batch, self.temperature, size).to(self.accelerator.device)


class BeforeUpdates(TrainerCallback):
    """Does something before each optimizer step: the last moment at which the weights are those that were pushed."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._work()


def _outlasting_restarts(probe: Callable[[], ProbeResult], fleet: Fleet, server: ServerControl) -> ProbeResult:
    """Probe a server; one that was killed since the push is probed again once it has these weights again."""
    deadline = time.monotonic() + fleet.restart_timeout_s
    while True:
        try:
            return probe()
        except (NoAnswerError, WeightProbeError) as error:
            if isinstance(error, NoAnswerError):
                restarted = not error.timed_out
            else:
                restarted = not fleet.holds_pushed_weights(server.url)
            if not restarted or not fleet.wait_until_held(server.url, deadline - time.monotonic()):
                raise


def _kind_of(sync: WeightSync) -> str:
    if isinstance(sync, LoraSync):
        return "lora"
    return "nccl" if isinstance(sync, NcclSync) else "directory"


def _adapter_rank(model: Any) -> int:
    configs = getattr(model, "peft_config", None) or {}
    return max((int(getattr(config, "r", 0) or 0) for config in configs.values()), default=0)


def _http_backends(client: Any) -> list[HttpBackend]:
    """The connections that rollouts use, where they are ours."""
    backends = client.backends if isinstance(client, BalancedBackend) else [client]
    return [backend for backend in backends if isinstance(backend, HttpBackend)]


def _question(fleet: Fleet, url: str) -> Any:
    return lambda: fleet.holds_pushed_weights(url)
