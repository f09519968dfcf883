"""The proof after pushes that the servers sample from what was pushed: when it is asked for, how it is judged."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from verifiers.envs.dataset_format import row_fields
from verifiers.errors import Error, WeightProbeError
from verifiers.train.capabilities import log_probs_are_raw
from verifiers.train.pushes import PushingTrainer
from verifiers.train.watching.clock import StageClock
from verifiers.train.weight_sync import DirectorySync, Fleet, NcclSync, ServerControl, has_tied_tensors
from verifiers.train.weight_sync.parameters import is_sharded
from verifiers.train.weight_sync.probe import AskedProbe, ProbeResult, ask_server, judge_answer
from verifiers.train.weight_sync.server import NoAnswerError

__all__ = ["BeforeUpdates", "ProbingTrainer"]

logger = logging.getLogger("verifiers.train")

_LEAVE_PROBE_S = 1.0


class ProbingTrainer(PushingTrainer):
    """The part of the trainer that compares the servers' log-probs with its own after pushes."""

    clock: StageClock
    _pushes: int = 0
    _loads_repeated: int = 0
    _asked: AskedProbe | None = None

    def _push_weights(self, version: int) -> None:
        self._push_once(version)
        # the second push is the first that changes anything: until then a head that stays old is right
        is_doubtful = self._are_doubtful() or self._pushes < 2
        due = is_doubtful or (self.args.probe_every > 0 and self._pushes % self.args.probe_every == 0)
        self._pushes += 1
        self._asked = None
        if not due:
            return
        if is_doubtful or not self._may_probe_meanwhile():
            self._probe_or_mend(version)
        else:
            self._asked = self._ask(version, self._probed_servers())

    def _are_doubtful(self) -> bool:
        """Whether since the last push a server was started again, or refused a load and was asked again."""
        fleet = getattr(self.weight_sync, "fleet", None)
        before, self._loads_repeated = self._loads_repeated, fleet.repeated_loads if isinstance(fleet, Fleet) else 0
        return self._loads_repeated > before

    def _ask(self, version: int, servers: Sequence[ServerControl]) -> AskedProbe:
        """Ask servers for a few tokens; a probe waits its turn behind every rollout that is in flight there."""
        args, fleet = self.args, getattr(self.weight_sync, "fleet", None)
        patience_s = float(max(args.weight_sync_timeout, args.rollout_timeout))

        def is_only_busy(server: ServerControl) -> bool:
            return not isinstance(fleet, Fleet) or fleet.holds_pushed_weights(server.url)

        limit_s = max(patience_s, float(args.async_generation_timeout))
        ask = functools.partial(ask_server, version=version, timeout_s=limit_s, **self._question())
        return AskedProbe(version, servers, ask, patience_s=patience_s, is_only_busy=is_only_busy)

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
                    self._note_probe(self._judged(server, found, asked.version))
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

    def _judged(self, server: ServerControl, found: dict[str, Any] | BaseException, version: int) -> ProbeResult:
        if isinstance(found, BaseException):
            raise found
        return judge_answer(server, found, self._score_ids, **self._measure(version))

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

    def _may_mend_by_untying(self) -> bool:
        sync = self.weight_sync
        return (
            isinstance(sync, (DirectorySync, NcclSync))
            and not sync.sends_tied
            and has_tied_tensors(self.accelerator.unwrap_model(self.model))
        )

    def _probe(self, version: int) -> None:
        """Compare the servers' log-probs with ours on a few tokens; see `weight_sync.probe`."""
        fleet, question = getattr(self.weight_sync, "fleet", None), self._question()
        for server in self._probed_servers():
            probe = functools.partial(self._probe_of, server, version)
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

    def _probe_of(self, server: ServerControl, version: int) -> ProbeResult:
        ((_, found),) = self._ask(version, [server]).answers()
        return self._judged(server, found, version)

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
