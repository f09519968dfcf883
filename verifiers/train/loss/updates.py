"""One update: the passes of its micro-batches, what they measured, its entropy bonus, and whether it is finite."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor

from verifiers.errors import NotFiniteError
from verifiers.train.loss.policy_loss import MeasuredLoss
from verifiers.train.processes.distributed import Ranks

logger = logging.getLogger("verifiers.train")

_MOST_IN_A_ROW = 3

_MicroBatch = dict[str, Any]

_Found = dict[str, tuple[float, float]]
"""By name the sum and the count of a mean, or the extreme and 1."""


# -- passes ----------------------------------------------------------------------------------------------------------


def micro_step_loss(
    accelerator: Any, model: Any, micro_batches: Sequence[_MicroBatch], loss_of: Callable[[Any, _MicroBatch], Tensor]
) -> Tensor:
    """Return the loss of a micro-step; of its micro-batches all but the last have had their backward pass by then.

    So each frees its activations before the next begins. What is returned has the value of all micro-batches
    together, and the last one's gradient.
    """
    device = accelerator.device
    *others, last = [
        {name: value if isinstance(value, list) else value.to(device) for name, value in batch.items()}
        for batch in micro_batches
    ]
    before = torch.zeros((), device=device)
    for batch in others:
        with _more_to_come(accelerator, model):
            loss = loss_of(model, batch)
            deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
            # as transformers' training_step does: the loss is scaled already
            accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))
        before += loss.detach()
        del loss
    return loss_of(model, last) + before


@contextlib.contextmanager
def _more_to_come(accelerator: Any, model: Any) -> Iterator[None]:
    """Put off what belongs to the end of an update: replicas reduce gradients once, DeepSpeed steps once."""
    state = accelerator.gradient_state
    if not state.sync_gradients:
        # transformers puts it off for the whole micro-step
        yield
        return
    reduction: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    # sharded gradients are reduced after each micro-batch: whole ones would have to be kept in between
    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    if not sharded and not state.plugin_kwargs.get("sync_each_batch", False):
        reduction = accelerator.no_sync(model)
    state._set_sync_gradients(False)
    try:
        with reduction:
            yield
    finally:
        state._set_sync_gradients(True)


def scale_gradients(model: Any, factor: float) -> None:
    """Multiply the gradients of a model, after the last backward pass of an update."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


# -- metrics ---------------------------------------------------------------------------------------------------------


class LossMetrics:
    """Sums over the micro-batches of one rank since the last log; a name that ends in min or max is an extreme."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._found: _Found = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add values by name, one a token or a row; those that are not a number count nothing."""
        names, found = [], []
        for name, given in values.items():
            if given.numel():
                is_number = ~given.isnan()
                reduce, neutral = _REDUCTIONS[_kind(name)]
                names.append(name)
                found += [reduce(torch.where(is_number, given.double(), neutral)), is_number.sum()]
        if names:
            # one transfer from the device for all of them
            numbers = iter(torch.stack(found).tolist())
            _join(self._found, dict(zip(names, zip(numbers, numbers, strict=True), strict=True)))

    def take(self, ranks: Ranks) -> dict[str, float]:
        """Return the values over all ranks by name, without means over nothing, and start over; all ranks call it."""
        own, self._found = self._found, {}
        joined: _Found = {}
        for part in ranks.gather(own):
            _join(joined, part)
        return {name: total if _kind(name) else total / count for name, (total, count) in joined.items()}


_REDUCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "min": (torch.min, math.inf),
    "max": (torch.max, -math.inf),
    "": (torch.sum, 0.0),
}


def _kind(name: str) -> str:
    return name[-3:] if name.endswith(("min", "max")) else ""


def _join(found: _Found, more: _Found) -> None:
    for name, (total, count) in more.items():
        if not count:
            continue
        before, counted = found.get(name, (_REDUCTIONS[_kind(name)][1], 0.0))
        both = {"min": min(before, total), "max": max(before, total), "": before + total}
        found[name] = (both[_kind(name)], counted + count)


# -- entropy ---------------------------------------------------------------------------------------------------------


class EntropyBonus:
    """The coefficient of the mean entropy in the loss.

    With `use_adaptive_entropy` it rises after each update whose entropy is at most `entropy_target`, else it falls,
    and it applies only after the former (Skywork-OR1, arXiv:2505.22312).

    Args:
        trainer: TRL's, which keeps the coefficient and the last entropy, and saves and loads them with checkpoints.
    """

    def __init__(self, trainer: Any, ranks: Ranks, metrics: LossMetrics) -> None:
        self._trainer, self._args, self._ranks, self._metrics = trainer, trainer.args, ranks, metrics
        self.is_on = self._args.entropy_coef != 0.0 or self._args.use_adaptive_entropy
        self.reset()

    def reset(self) -> None:
        self._entropy = self._tokens = self._policy_loss = 0.0

    @property
    def coefficient(self) -> float:
        """What the entropy counts in the present update."""
        if self._args.use_adaptive_entropy and self._trainer._last_world_entropy > self._args.entropy_target:
            return 0.0
        return float(self._trainer.entropy_coef)

    def note(self, measured: MeasuredLoss) -> None:
        if self.is_on:
            entropies: Tensor = measured.values["entropy"]
            self._entropy += float(entropies.sum())
            self._tokens += len(entropies)
            self._policy_loss += float(measured.policy_loss)

    def end_update(self) -> None:
        """Adapt the coefficient for the next update, where it is not fixed; every rank calls it."""
        if not self.is_on:
            return
        parts = self._ranks.gather((self._entropy, self._tokens, self._policy_loss))
        entropy, tokens, policy_loss = (sum(values) for values in zip(*parts, strict=True))
        if self._args.use_adaptive_entropy:
            self._adapt(entropy / max(tokens, 1.0))
        # every rank has both: means over ranks are these values
        both = {"policy_loss": policy_loss, "entropy_coef": float(self._trainer.entropy_coef)}
        self._metrics.add({name: torch.tensor([value]) for name, value in both.items()})
        self.reset()

    def _adapt(self, entropy: float) -> None:
        args, trainer = self._args, self._trainer
        if entropy <= args.entropy_target:
            trainer.entropy_coef = min(trainer.entropy_coef + args.entropy_coef_delta, args.entropy_coef_max)
        else:
            trainer.entropy_coef = max(trainer.entropy_coef - args.entropy_coef_delta, args.entropy_coef_min)
        trainer._last_world_entropy = entropy


# -- updates that are not finite -------------------------------------------------------------------------------------


class FiniteUpdates:
    """The check of each update between its gradient and its optimizer step; every rank has one.

    DeepSpeed takes that step with the last backward pass: there the first update that is not finite ends the run.

    Args:
        drop: called on rank 0 with the optimizer step before an update that is not applied, and the places in the
            block of the rollouts that made it so; records all of the update as dropped, and returns names of these.
    """

    def __init__(self, accelerator: Any, ranks: Ranks, drop: Callable[[int, list[int]], str]) -> None:
        self._accelerator, self._ranks, self._drop = accelerator, ranks, drop
        self.reset()

    def reset(self) -> None:
        self._calls: list[tuple[Tensor, Tensor, Tensor]] = []
        self._losses: list[Tensor] = []
        self._loss: float | None = None
        # since the last log: updates, those without a finite loss, those that were not applied
        self._updates = self._without_loss = self._not_applied = 0
        self._in_a_row = 0

    def note_call(self, loss: Tensor, rollout_index_R: Tensor, is_finite_R: Tensor) -> None:
        """Keep the loss of a micro-batch, the places of its rollouts, and which of its rows are finite themselves."""
        self._calls.append((loss.detach(), rollout_index_R, is_finite_R))

    def end_micro_step(self, loss: Tensor, scale: float = 1.0) -> Tensor:
        """Return the loss of the whole update, times a scale, with its last micro-step, for transformers to log.

        It is 0 until then, and where it is not finite on any rank: `correct` leaves that out.
        """
        self._losses.append(loss)
        if not self._accelerator.sync_gradients:
            return torch.zeros_like(loss)
        total, self._losses = torch.stack(self._losses).sum() * scale, []
        found = [one for one in self._ranks.gather(float(total)) if not math.isfinite(one)]
        self._loss = found[0] if found else None
        return torch.zeros_like(total) if found else total

    def end_update(self, model: Any, optimizer: Any, optimizer_step: int, norm: Any) -> None:
        """Drop the gradient of an update that is not finite; every rank calls it right before the optimizer's step.

        Without gradients that step does nothing.

        Args:
            optimizer: accelerate's. It reports the step as skipped where it is, so that the learning rate stays.
            norm: of the gradient; None where it is not known.

        Raises:
            NotFiniteError: no more updates are left out.
        """
        norm = float(getattr(norm, "full_tensor", lambda: norm)() or 0.0)
        is_applied = self._loss is None and math.isfinite(norm)
        self._updates += 1
        self._without_loss += self._loss is not None
        if self._accelerator.scaler is None:
            optimizer._is_overflow = not is_applied
        if is_applied:
            self._in_a_row = 0
        else:
            self._not_applied += 1
            self._refuse(optimizer, optimizer_step, norm)
            model.zero_grad()
        self._calls = []

    def _refuse(self, optimizer: Any, optimizer_step: int, norm: float) -> None:
        scaler, is_deepspeed = self._accelerator.scaler, "DEEPSPEED" in str(self._accelerator.distributed_type)
        # gradients overflow while the scale of float16 is looked for
        is_search = (is_deepspeed and optimizer.step_was_skipped) or (scaler is not None and scaler.get_scale() > 1.0)
        self._in_a_row += not is_search or self._loss is not None
        places = {place for own in self._ranks.gather(self._places_not_finite()) for place in own}
        named = self._ranks.on_rank_0(lambda: self._drop(optimizer_step, sorted(places)))
        values = f"gradient norm {norm}" if self._loss is None else f"loss {self._loss}, gradient norm {norm}"
        text = f"the update of step {optimizer_step + 1} is not finite ({values}) by rollouts of {named}"
        if self._in_a_row >= _MOST_IN_A_ROW or (is_deepspeed and not is_search):
            raise NotFiniteError(
                f"{text}; the run ends with {self._in_a_row} such updates in a row. Look at rewards and advantages "
                "there, or lower learning_rate, and give the same command again: it resumes from the last checkpoint."
            )
        if self._ranks.is_main:
            logger.warning("%s. It is not applied, and its rollouts are recorded as dropped.", text)

    def _places_not_finite(self) -> list[int]:
        """Return the rollouts of rows that are not finite; where none is known, those of the micro-batches."""
        calls = [call for call in self._calls if not math.isfinite(call[0])]
        if self._loss is None:
            calls = self._calls
        rows = [index_R if is_finite_R.all() else index_R[~is_finite_R] for _, index_R, is_finite_R in calls]
        return [place for index_R in rows for place in index_R.tolist() if place >= 0]

    def correct(self, logs: dict[str, float]) -> None:
        """Make the loss of a log a mean over the updates that have one; add the count of those not applied."""
        if "loss" in logs:
            with_loss = self._updates - self._without_loss
            logs["loss"] *= self._updates / with_loss if with_loss else math.nan
            logs["updates/not_finite"] = float(self._not_applied)
            self._updates = self._without_loss = self._not_applied = 0
