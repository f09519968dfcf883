"""Linear layers in float32 on the CPU by oneDNN; torch's own, by MKL, take twice as long on AMD's processors.

The weights stay as they are, neither packed nor copied, so a push changes nothing here.
"""

from __future__ import annotations

from typing import Any

import torch


class OneDnnLinear(torch.nn.Linear):
    """A linear layer for the engine's passes; torch's own for all others, which may need gradients or autocast."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Return ``input @ weight.T + bias``."""
        if torch.compiler.is_dynamo_compiling() or not torch.is_inference_mode_enabled():
            return super().forward(input)
        # what inductor puts for such a layer
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, self.weight, self.bias, "none", [], "")
        return product


def use_onednn(model: Any) -> None:
    """Give a model's float32 linear layers on the CPU oneDNN's products, where torch has them."""
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is torch.nn.Linear and module.weight.is_cpu and module.weight.dtype == torch.float32:
            module.__class__ = OneDnnLinear
