"""Linear layers in float32 on the CPU by oneDNN; torch's own, by MKL, take twice as long on AMD's processors.

torch sends float32 products to MKL and has no setting for it (`torch.backends.mkldnn.matmul.fp32_precision` only
allows fewer bits). The op below is what its inductor puts for such a layer. The weights stay plain tensors, not
packed, so that an optimizer's step or a push is seen here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def multiplies_bfloat16() -> bool:
    """Return True where the processor has products of bfloat16 numbers: others take longer for them, not shorter."""
    # older versions of torch cannot be asked
    capabilities: Any = getattr(torch.cpu, "get_capabilities", None)
    return capabilities is not None and bool(capabilities().get("avx512_bf16", False))


def use_onednn(*models: Any) -> None:
    """Give models' float32 linear layers on the CPU oneDNN's products, forward and backward, where torch has them."""
    if not torch.backends.mkldnn.is_available():
        return
    for module in (module for model in models if model is not None for module in model.modules()):
        if type(module) is torch.nn.Linear and module.weight.is_cpu and module.weight.dtype == torch.float32:
            module.__class__ = _Linear


def turn_weights(model: Any) -> None:
    """Lay the weights of these layers out as oneDNN multiplies a few rows fastest: by input, not by output.

    Names, shapes and values stay as they are, and so does a weight that is an embedding too, which is read by row.
    """
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for module in model.modules():
        if type(module) is _Linear and id(module.weight) not in embedded:
            module.weight.data = module.weight.data.t().contiguous().t()


def fuse_gates(model: Any) -> None:
    """Let products apply what gated feed-forwards, down(silu(gate(x)) * up(x)), do to each number behind them.

    Some numbers are tried both ways for each module that has these parts; one that computes otherwise stays as it is.
    """
    for module in model.modules():
        if "forward" not in vars(module) and _has_parts(module) and _is_gated_by_silu(module):
            module.forward = functools.partial(_forward_gated, module, module.forward)


def _has_parts(module: Any) -> bool:
    return all(type(getattr(module, name, None)) is _Linear for name in ("gate_proj", "up_proj", "down_proj"))


def _is_gated_by_silu(module: Any) -> bool:
    # numbers of its own: a run's random state stays as it is
    tried = torch.randn(1, 2, module.gate_proj.in_features, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            # near 0 other functions are alike
            tried /= module.gate_proj(tried).abs().mean()
            expected, found = module(tried), _gated(module, tried)
    except (RuntimeError, TypeError, ValueError):
        return False
    size = float(expected.abs().max())
    return size > 0 and expected.shape == found.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * size)


def _forward_gated(module: Any, unfused: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    fuses = not torch.is_grad_enabled() and _has_parts(module) and module.gate_proj.takes_onednn()
    return _gated(module, x) if fuses else unfused(x)


def _gated(module: Any, x: Tensor) -> Tensor:
    gate, up = module.gate_proj, module.up_proj
    gated = torch.ops.mkldnn._linear_pointwise(x, gate.weight, gate.bias, "swish", [], "")
    both = torch.ops.mkldnn._linear_pointwise.binary(x, gated, up.weight, up.bias, "mul")
    found: Tensor = module.down_proj(both)
    return found


class _Linear(torch.nn.Linear):
    def takes_onednn(self) -> bool:
        # a shard of FSDP is no plain parameter; autocast chooses a product of its own
        return not (
            torch.compiler.is_dynamo_compiling()
            or type(self.weight) is not torch.nn.Parameter
            or torch.is_autocast_enabled("cpu")
        )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        if not self.takes_onednn():
            return super().forward(input)
        if torch.is_grad_enabled():
            # in two dimensions: models may change what they get in place, which torch forbids for a function's views;
            # PEFT's copy of a tied head has features other than its weight's
            rows: Tensor = _Product.apply(input.reshape(-1, input.shape[-1]), self.weight, self.bias)
            return rows.view(*input.shape[:-1], rows.shape[-1])
        return _product(input, self.weight, self.bias)


class _Product(torch.autograd.Function):
    """input @ weight.T + bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _product(grad, weight.t()) if needs_x else None,
            _product(grad.t(), x.t()) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found
