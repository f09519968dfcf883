"""The engine's linear layers are torch's, to float32's rounding."""

from __future__ import annotations

import pytest
import torch
from verifiers_embedded.engine.linear import use_onednn


@pytest.mark.parametrize("shape", [(1, 48), (3, 1, 48), (2, 70, 48)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_torchs_and_follow_new_weights(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer, plain = torch.nn.Linear(48, 33, bias=bias), torch.nn.Linear(48, 33, bias=bias)
    use_onednn(torch.nn.Sequential(layer))
    for _ in range(2):
        with torch.no_grad():
            for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
                ours.copy_(theirs.normal_())
        states = torch.randn(shape)
        with torch.inference_mode():
            torch.testing.assert_close(layer(states), plain(states), rtol=1e-5, atol=1e-5)


def test_passes_outside_the_engine_keep_gradients_and_autocast() -> None:
    layer = torch.nn.Linear(8, 4)
    use_onednn(layer)
    layer(torch.ones(2, 8)).sum().backward()
    assert layer.weight.grad is not None
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert layer(torch.ones(2, 8)).dtype == torch.bfloat16


def test_other_layers_stay_as_they_are() -> None:
    class Own(torch.nn.Linear):
        pass

    others = [Own(8, 4), torch.nn.Linear(8, 4, dtype=torch.bfloat16), torch.nn.Linear(8, 4, dtype=torch.float64)]
    kinds = [type(layer) for layer in others]
    use_onednn(torch.nn.ModuleList(others))
    assert [type(layer) for layer in others] == kinds
