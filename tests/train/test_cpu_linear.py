"""Linear layers on the CPU are torch's, forward and backward, to float32's rounding."""

from __future__ import annotations

import pytest
import torch

from verifiers.train.cpu_linear import fuse_gates, turn_weights, use_onednn


@pytest.mark.parametrize("shape", [(1, 48), (3, 1, 48), (2, 70, 48)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_products_and_gradients_are_torchs_and_follow_new_weights(
    shape: tuple[int, ...], bias: bool, turned: bool
) -> None:
    torch.manual_seed(0)
    layer, plain = torch.nn.Linear(48, 33, bias=bias), torch.nn.Linear(48, 33, bias=bias)
    use_onednn(torch.nn.Sequential(layer), None)
    assert type(layer) is not torch.nn.Linear
    if turned:
        turn_weights(layer)
        assert layer.weight.t().is_contiguous()
    for _ in range(2):
        with torch.no_grad():
            for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
                ours.copy_(theirs.normal_())
        states = torch.randn(shape)
        with torch.inference_mode():
            torch.testing.assert_close(layer(states), plain(states), rtol=1e-5, atol=1e-5)
        gradients = []
        for one in (layer, plain):
            one.zero_grad()
            given = states.clone().requires_grad_()
            one(given).square().sum().backward()
            gradients.append([given.grad, *(parameter.grad for parameter in one.parameters())])
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


class Gated(torch.nn.Module):
    """A feed-forward as most models have it."""

    def __init__(self, act_fn: torch.nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = torch.nn.Linear(48, 33, bias=False), torch.nn.Linear(48, 33)
        self.down_proj, self.act_fn = torch.nn.Linear(33, 48), act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return output


@pytest.mark.parametrize(
    ("act_fn", "fused"), [(torch.nn.SiLU(), True), (torch.nn.GELU(), False)], ids=["silu", "gelu"]
)
def test_a_gated_feed_forward_is_fused_where_that_computes_the_same(act_fn: torch.nn.Module, fused: bool) -> None:
    torch.manual_seed(0)
    ours, plain = Gated(act_fn), Gated(act_fn)
    with torch.no_grad():
        # so small that both functions are nearly x / 2
        ours.gate_proj.weight *= 1e-6
    use_onednn(ours)
    turn_weights(ours)
    fuse_gates(ours)
    assert ("forward" in vars(ours)) is fused
    with torch.no_grad():
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            mine.copy_(theirs.normal_())
    given = torch.randn(2, 7, 48)
    for computes in (torch.inference_mode, torch.enable_grad):
        with computes():
            torch.testing.assert_close(ours(given), plain(given), rtol=1e-5, atol=1e-4)


def test_weights_that_are_read_by_row_too_are_not_turned() -> None:
    embedding, head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False)
    head.weight = embedding.weight
    model = torch.nn.ModuleList([embedding, head])
    use_onednn(model)
    turn_weights(model)
    assert head.weight is embedding.weight
    assert embedding.weight.is_contiguous()


def test_a_layer_that_is_frozen_or_under_autocast_stays_usable() -> None:
    layer = torch.nn.Linear(8, 4).requires_grad_(False)
    use_onednn(layer)
    given = torch.ones(2, 8, requires_grad=True)
    layer(given).sum().backward()
    assert given.grad is not None
    assert layer.weight.grad is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(given).dtype == torch.bfloat16


def test_other_layers_stay_as_they_are() -> None:
    class Own(torch.nn.Linear):
        pass

    others = [Own(8, 4), torch.nn.Linear(8, 4, dtype=torch.bfloat16), torch.nn.Linear(8, 4, dtype=torch.float64)]
    kinds = [type(layer) for layer in others]
    use_onednn(torch.nn.ModuleList(others))
    assert [type(layer) for layer in others] == kinds
