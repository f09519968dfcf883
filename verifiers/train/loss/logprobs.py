"""Log-probs by a model's last hidden states: of the trained policy, its reference and a frozen copy of it.

Logits exist tile by tile, and only of tokens with a label. The kernel is TRL's: Triton on GPUs, torch elsewhere; its
backward pass computes each tile again. TRL calls it with tiles of 4,096 tokens x 32,768 words. That suits its Triton
kernel, which works in place; its torch fallback makes some seven float32 copies of a tile, and scores prompts too.
Other candidates: torch's `linear_cross_entropy` and Liger's fused linear cross-entropy have neither entropies nor
soft-capped logits, and Liger needs Triton.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import trl
from accelerate.utils import is_peft_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import FusedCausalLMOutput, maybe_gather_lm_head_ctx

from verifiers.errors import ConfigError
from verifiers.train.image_processor import RowImages
from verifiers.train.loss.prefixes import SHARED_ROWS
from verifiers.train.processes.distributed import Ranks

IGNORED = -100
"""Label of a position that is not scored."""

_TILE_WORDS = 32_768
_TILE_TOKENS = 4_096
_GATHERED = 2**24
_CPU_TILE = 2**22
"""Logits of a tile on the CPU: 16 MiB in float32."""

_SMALL, _LARGE = 2.0**-10, 2.0**60
"""Logits that are nearly those before a soft cap, and nearly the cap."""


class BeforeHead(NamedTuple):
    """A model's own pass up to its head, and what it makes of the logits that come from it.

    Attributes:
        states_RTH: what the head is given.
        scale: factor of the logits.
        cap: the c of c * tanh(logits / c), after the factor; None where they are not capped.
        router_loss: load-balancing loss of a mixture of experts; None where it was not asked for.
    """

    states_RTH: Tensor
    scale: float
    cap: float | None
    router_loss: Tensor | None = None


def before_head(model: Any, forward: Any, *args: Any, **kwargs: Any) -> BeforeHead:
    """Run a model's own forward without the product of its head.

    Two tokens of small and of large logits take the product's place: what comes of them is the factor and the cap.

    Raises:
        ConfigError: the model does something else with its logits.
    """
    head, own, seen = model.get_output_embeddings(), threading.get_ident(), list[Tensor]()

    # a server on another thread may be sampling from the same copy of a policy
    def take(_: Any, given: tuple[Tensor]) -> Any:
        if threading.get_ident() != own:
            return None
        seen.append(given[0])
        return (given[0][:1, :1],)

    def stand_in(_: Any, given: Any, logits: Tensor) -> Tensor | None:
        if threading.get_ident() != own:
            return None
        seen.append(torch.tensor([[[_SMALL], [_LARGE]]], device=logits.device).repeat(1, 1, logits.shape[-1]))
        return seen[-1].clone()

    text, routed = model.config.get_text_config(), list[Any]()
    of_body: Any = nullcontext()
    if kwargs.get("output_router_logits"):
        of_body = model.base_model.register_forward_hook(lambda *given: routed.append(given[-1].get("router_logits")))
    elif getattr(text, "output_router_logits", False):
        # its forward would compute the loss for its config's sake, without experts too
        kwargs["output_router_logits"] = False
    if head is not None:
        with head.register_forward_pre_hook(take), head.register_forward_hook(stand_in, prepend=True), of_body:
            logits = forward(*args, **{**kwargs, "use_cache": False}).logits
        if len(seen) == 2 and logits.shape == seen[1].shape and (logits == logits[..., :1]).all():
            small, large = logits[0, :, 0].tolist()
            scale = small / _SMALL
            cap = large if large < scale * _LARGE else None
            router_loss: Any = None
            if routed and routed[0]:
                # many families give router logits, and leave the loss to others
                experts = getattr(text, "num_experts", None) or text.num_local_experts
                asked = experts, text.num_experts_per_tok, kwargs.get("attention_mask")
                router_loss = load_balancing_loss_func(routed[0], *asked)
            return BeforeHead(seen[0], scale, cap, router_loss)
    raise ConfigError(
        f"log-probs of model type {model.config.model_type!r} cannot be computed: its logits are not the product of "
        "its output embeddings, times a factor or below a soft cap; train another model."
    )


def head_log_probs(
    head: Any,
    before: BeforeHead,
    states_NH: Tensor,
    ids_N: Tensor,
    temperature: float,
    outputs: tuple[str, ...] = ("log_probs",),
    others_NK: Tensor | None = None,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return log-probs (N,) of tokens in float32, their distributions' entropies (N,), and those (N, K) of others.

    What was not asked for is None.

    Args:
        head: the model's output embeddings. Weights that FSDP shards are gathered.
        before: has the factor and the cap of the logits.
        states_NH: of those that the head is given, each of the position before its token.
        temperature: divides the logits.
        outputs: "entropy" among them asks for entropies.
        others_NK: other tokens at the same positions.
        kept: the tokens that each was drawn from. The distribution is that over these; over all where there are none.
    """
    weight, bias, scale, cap = head.weight, head.bias, before.scale, before.cap
    if isinstance(weight, DTensor):
        weight, bias = weight.full_tensor(), bias.full_tensor() if bias is not None else None
    # a model that is spread over devices may end on another than its head
    states_NH, ids_N = states_NH.to(weight.device), ids_N.to(weight.device)
    words = _TILE_WORDS
    if weight.device.type == "cpu":
        words = _CPU_TILE // max(1, min(len(ids_N), _TILE_TOKENS))
    words = min(words, weight.shape[0])
    found = ChunkedLogProbFunction.apply(states_NH, weight, bias, ids_N, temperature, words, cap, scale, outputs)
    logps_N, entropy_N = found[:2]
    if others_NK is None and kept is None:
        return logps_N, entropy_N, None

    def logits(places_P: Tensor, ids_P: Tensor, states_NH: Tensor) -> Tensor:
        found_P = (states_NH[places_P].float() * weight[ids_P].float()).sum(-1)
        found_P = (found_P if bias is None else found_P + bias[ids_P]) * scale
        return (found_P if cap is None else cap * (found_P / cap).tanh()) / temperature

    def logits_of(places_P: Tensor, ids_P: Tensor) -> Tensor:
        # a row of the weight for each of them, gathered again in the backward pass
        size = max(1, _GATHERED // weight.shape[1])
        parts = zip(places_P.split(size), ids_P.split(size), strict=True)
        return torch.cat([checkpoint(logits, *part, states_NH, use_reentrant=False) for part in parts])

    if kept is not None:
        kept = kept.to(weight.device)
        return *_among(kept, ids_N, logits_of(kept.places_P, kept.ids_P), logps_N, entropy_N), None
    assert others_NK is not None
    ids_NK = torch.cat([ids_N[:, None], others_NK.to(weight.device)], 1)
    places_NK = torch.arange(len(ids_NK), device=weight.device)[:, None].expand_as(ids_NK)
    logits_NK = logits_of(places_NK.flatten(), ids_NK.flatten()).view_as(ids_NK)
    # what a token's logit has more than the label's, its log-prob has more
    return logps_N, entropy_N, logits_NK[:, 1:] - logits_NK[:, :1] + logps_N[:, None]


class Kept(NamedTuple):
    """The tokens that each of N was drawn from, as P pairs of its place and an id, place by place."""

    places_P: Tensor
    ids_P: Tensor

    @classmethod
    def of_counts(cls, counts_N: Tensor, ids_P: Tensor) -> Kept:
        return cls(torch.repeat_interleave(torch.arange(len(counts_N)), counts_N.cpu()), ids_P.long())

    def to(self, device: torch.device) -> Kept:
        return Kept(*(one.to(device) for one in self))


def _among(
    kept: Kept, ids_N: Tensor, logits_P: Tensor, logps_N: Tensor, entropy_N: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and entropies over the tokens that were kept, and those given where that are all."""
    places_P, zeros_N = kept.places_P, torch.zeros_like(logps_N)
    is_cut_N = zeros_N.bool().index_fill(0, places_P, True)
    most_N = zeros_N.scatter_reduce(0, places_P, logits_P.detach(), "amax", include_self=False)
    sums_N = zeros_N.index_add(0, places_P, (logits_P - most_N[places_P]).exp())
    total_N = torch.where(is_cut_N, sums_N, 1.0).log() + most_N
    own_P = logits_P - total_N[places_P]
    drawn_N = zeros_N.index_add(0, places_P, torch.where(kept.ids_P == ids_N[places_P], own_P, 0.0))
    if entropy_N is not None:
        entropy_N = torch.where(is_cut_N, zeros_N.index_add(0, places_P, -own_P.exp() * own_P), entropy_N)
    return torch.where(is_cut_N, drawn_N, logps_N), entropy_N


def fuse_heads(trainer: Any) -> None:
    """Fuse the heads of a TRL trainer's policy and of its reference model; the policy's gives entropies too."""
    in_float32 = trainer.args.cast_lm_head_to_fp32
    policy = trainer.model.get_base_model() if is_peft_model(trainer.model) else trainer.model
    fuse_head(policy, trainer.temperature, outputs=("log_probs", "entropy"), in_float32=in_float32)
    if trainer.ref_model is not None:
        reference = trainer.accelerator.unwrap_model(trainer.ref_model)
        fuse_head(reference, trainer.temperature, outputs=("log_probs",), in_float32=in_float32)


def fuse_head(model: Any, temperature: float, *, outputs: tuple[str, ...], in_float32: bool = False) -> None:
    """Make `model(..., labels=labels, fused_lm_head=True)` a `fused_pass`.

    It has to be part of the model's forward: wrappers that shard it gather its weights there. Replaces what
    `trl.trainer.utils.add_fused_lm_head` has installed; any other call of the model stays as it was.

    Args:
        model: a causal language model of transformers, without adapter or wrapper; changed in place.
        outputs: fields of the result that are computed: "log_probs", and "entropy" where asked for.
        in_float32: the head's product is in float32, whatever the model's.
    """
    plain = model.forward

    # `generate` and the trainer read the names of the arguments
    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return plain(*args, **kwargs)
        settings: Any = {"outputs": outputs, "in_float32": in_float32, "own_forward": plain}
        return fused_pass(self, temperature, *args, **settings, **kwargs)

    model.forward = types.MethodType(forward, model)


def fused_pass(
    model: Any,
    temperature: float,
    *args: Any,
    labels: Tensor,
    others: Tensor | None = None,
    kept_counts: Tensor | None = None,
    kept_ids: Tensor | None = None,
    outputs: tuple[str, ...] = ("log_probs",),
    in_float32: bool = False,
    own_forward: Any = None,
    **kwargs: Any,
) -> Any:
    """Pass rows through a model and return log-probs (R, T - 1) of the tokens after the first that have labels.

    Args:
        args, kwargs: of the model's forward.
        labels: (R, T); IGNORED where nothing is scored.
        others: (R, T, K) other tokens whose log-probs are asked for, too.
        kept_counts, kept_ids: as in `pad_rows`.
        own_forward: the model's, where a fused one has taken its place.
    """
    # the head is looked up in each call: FSDP and PEFT replace it
    head = model.get_output_embeddings()
    before = before_head(model, own_forward or model.forward, *args, **kwargs)
    # a model that is spread over devices takes its labels on the first and may end on another
    labels_RT = labels[:, 1:].to(before.states_RTH.device)
    scored_RT = labels_RT != IGNORED
    shared = kwargs.get(SHARED_ROWS)
    states_NH = (
        before.states_RTH[:, :-1][scored_RT]
        if shared is None
        else before.states_RTH[0][shared.place_RT[:, :-1][scored_RT]]
    )
    precision: Any = nullcontext()
    if in_float32:
        states_NH = states_NH.float()
        precision = torch.autocast(states_NH.device.type, enabled=False)
    with precision, maybe_gather_lm_head_ctx(head.weight, head.bias):
        others_NK, counts_N = (
            None if one is None else one[:, 1:].to(scored_RT.device)[scored_RT] for one in (others, kept_counts)
        )
        kept = None if counts_N is None or kept_ids is None else Kept.of_counts(counts_N, kept_ids)
        found = head_log_probs(head, before, states_NH, labels_RT[scored_RT], temperature, outputs, others_NK, kept)
    # masked_scatter keeps a micro-batch without any label connected to the model's parameters
    logps, entropies, of_others = (None if one is None else _scattered(one, scored_RT) for one in found)
    output = FusedCausalLMOutput(log_probs=logps, entropy=entropies, aux_loss=before.router_loss)
    if of_others is not None:
        output["others"] = of_others
    return output


def _scattered(values: Tensor, places_RT: Tensor) -> Tensor:
    """Put values (N,) or (N, K) at the N true places of a mask, with 0 elsewhere."""
    shape = (*places_RT.shape, *values.shape[1:])
    mask = places_RT.to(values.device).view(*places_RT.shape, *[1] * (values.dim() - 1)).expand(shape)
    return values.new_zeros(shape).masked_scatter(mask, values)


class Scored(NamedTuple):
    """What a model says of the tokens of a micro-batch that are trained; 0 elsewhere.

    Attributes:
        logps_RT: log-prob of each token.
        entropy_RT: entropy of its distribution; None where the model's head was not asked for it.
        others_RTK: log-probs of the tokens that a teacher finds likeliest; None where there are none.
        router_loss: load-balancing loss of a mixture of experts; None where it was not asked for.
    """

    logps_RT: Tensor
    entropy_RT: Tensor | None
    router_loss: Tensor | None
    others_RTK: Tensor | None = None


class PolicyLogprobs:
    """Log-probs of completions at the training temperature; all but `score` without gradient.

    Args:
        reference: the reference model; None where the policy without its adapter is the reference.
        batch_size: rows in one forward pass; None for all of a micro-batch.
        images: reads the images of rows; None where there are none.
    """

    def __init__(
        self,
        accelerator: Any,
        ranks: Ranks,
        policy: Any,
        reference: Any,
        *,
        batch_size: int | None,
        temperature: float,
        images: RowImages | None = None,
    ) -> None:
        self._accelerator, self._ranks, self._policy, self._reference = accelerator, ranks, policy, reference
        self._batch_size, self._temperature, self._images = batch_size, temperature, images
        ranks.register("score", self.of_policy)

    def score(self, model: Any, batch: Mapping[str, Any], *, experts: bool = False, device: Any = None) -> Scored:
        """Score the trained tokens of a micro-batch by a model whose head is fused.

        Args:
            batch: of `pad_rows`, with the layout of its rows' prefixes where they share some.
            experts: ask for the router's loss.
            device: the model's, where that is not the accelerator's.
        """
        device = device or self._accelerator.device
        ids_RT, mask_RT = batch["input_ids"].to(device), batch["attention_mask"].to(device)
        trained_RT = batch["loss_mask"].bool()
        if "ce_mask" in batch:
            trained_RT = trained_RT | batch["ce_mask"].bool()
        labels_RT = ids_RT.masked_fill(~trained_RT.to(device), IGNORED)
        options: dict[str, Any] = {"input_ids": ids_RT, "attention_mask": mask_RT}
        if experts:
            # a mean over the tokens that the router sees
            options["output_router_logits"] = True
        elif (shared := batch.get(SHARED_ROWS)) is not None:
            options = shared.to(device).inputs()
        if self._images is not None:
            options |= self._images.inputs(ids_RT, batch, options.get(SHARED_ROWS))
        if "teacher_ids" in batch:
            options["others"] = batch["teacher_ids"].to(device)
        if "kept_ids" in batch:
            options |= {name: batch[name].to(device) for name in ("kept_counts", "kept_ids")}
        with self._accelerator.autocast():
            found = model(labels=labels_RT, fused_lm_head=True, **options)
        entropy_RT = None if found.entropy is None else _from_first(found.entropy)
        others_RTK = _from_first(found["others"]) if "others" in found else None
        return Scored(_from_first(found.log_probs), entropy_RT, found.aux_loss, others_RTK)

    @torch.no_grad()
    def of_model(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probs (R, T) of a micro-batch's trained tokens under a model."""
        was_training, size, parts = model.training, self._batch_size, [batch]
        if size is not None and size < len(batch["input_ids"]):
            parts = list(split_rows(batch, size))
        model.eval()
        try:
            return torch.cat([self.score(model, part).logps_RT for part in parts])
        finally:
            model.train(was_training)

    def of_policy(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probs (R, T) under the policy as it is now."""
        return self.of_model(self._policy, batch)

    def of_reference(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probs (R, T) under the reference model."""
        if self._reference is not None:
            return self.of_model(self._reference, batch)
        adapters = self._accelerator.unwrap_model(self._policy)
        adapter = "ref" if "ref" in adapters.peft_config else None
        with trl.trainer.utils.use_adapter(adapters, adapter_name=adapter):
            return self.of_policy(batch)

    @torch.no_grad()
    def old(self, batch: Mapping[str, Tensor], copy: Any = None) -> Tensor:
        """Return the log-probs (R, T) under the present policy, by a frozen copy of it where there is one."""
        if copy is None:
            return self.of_policy(batch)

        def model(*, fused_lm_head: bool, **given: Any) -> Any:
            return fused_pass(copy, self._temperature, **given)

        # without the layout of prefixes, which only the trainer's attention knows
        parts = split_rows(batch, self._batch_size or len(batch["input_ids"]))
        logps_RT = torch.cat([self.score(model, part, device=copy.device).logps_RT for part in parts])
        return logps_RT.to(self._accelerator.device)

    def of_tokens(
        self,
        prompt_ids: Sequence[int],
        ids: Sequence[int],
        images: Sequence[str] = (),
        *,
        together: bool = False,
    ) -> list[float]:
        """Return the log-prob of each token of one completion under the policy as it is now.

        Args:
            together: all ranks compute it, from inside `Ranks.on_rank_0`; for a sharded policy.
        """
        batch: dict[str, Any] = {"images": [tuple(images)]} if images else {}
        ids_1T = torch.tensor([[*prompt_ids, *ids]])
        loss_mask_1T = torch.tensor([[0] * len(prompt_ids) + [1] * len(ids)])
        batch |= {"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T), "loss_mask": loss_mask_1T}
        scored: Tensor = self._ranks.together("score", batch) if together else self.of_policy(batch)
        logps: list[float] = scored[0, len(prompt_ids) :].float().tolist()
        return logps


def _from_first(values: Tensor) -> Tensor:
    """Return values (R, T - 1, ...) of the tokens after the first as those of all, 0 at the first."""
    return torch.cat([torch.zeros_like(values[:, :1]), values], 1)


_READ = ("input_ids", "attention_mask", "loss_mask", "kept_counts", "images")
"""Columns of a batch that a forward pass reads, beside `kept_ids`, which are as many as the counts say."""


def split_rows(batch: Mapping[str, Any], rows: int) -> Iterator[dict[str, Any]]:
    """Yield what a forward pass reads of a batch, so many rows at a time."""
    first = 0
    for start in range(0, len(batch["input_ids"]), rows):
        part = {name: batch[name][start : start + rows] for name in _READ if name in batch}
        if "kept_counts" in part:
            last = first + int(part["kept_counts"].sum())
            part["kept_ids"], first = batch["kept_ids"][first:last], last
        yield part
