"""Metrics of several micro-batches are joined into those of one micro-batch with all their rows."""

from __future__ import annotations

import math

import pytest
import torch

from verifiers.train.loss.loss_metrics import LossMetrics


def call(tokens: int, rows: int, padding: int = 0, *, per_token: bool = False) -> dict[str, torch.Tensor]:
    counts = {"call_tokens": tokens, "call_rows": rows, "call_padding_rows": padding}
    shape = (rows, 3) if per_token else (rows,)
    return {**{name: torch.tensor(value) for name, value in counts.items()}, "advantages": torch.zeros(shape)}


def joined(*measured: tuple[dict[str, float], dict[str, torch.Tensor]], per_row: bool = False) -> dict[str, float]:
    metrics = LossMetrics()
    for values, batch in measured:
        metrics.add({name: [value] for name, value in values.items()}, batch, per_row=per_row)
    metrics.end_micro_step()
    return metrics.take()


def test_a_mean_over_tokens_counts_each_token_once() -> None:
    found = joined(({"entropy": 1.0, "kl": 0.5}, call(30, 2)), ({"entropy": 4.0, "kl": 0.0}, call(10, 7)))
    assert found == {"entropy": pytest.approx(1.75), "kl": pytest.approx(0.375)}


def test_a_micro_batch_without_a_sampled_token_counts_nothing() -> None:
    assert joined(({"entropy": 2.0}, call(5, 1)), ({"entropy": 0.0}, call(0, 3, 3))) == {"entropy": 2.0}


def test_where_nothing_is_trained_no_mean_and_no_extreme_is_told() -> None:
    measured = {"entropy": 0.0, "kl": 0.0, "clip_ratio/region_mean": 0.0, "clip_ratio/low_min": 0.0}
    for per_row in (False, True):
        padding = ({**measured, "policy_loss": 0.0, "entropy_coef": 0.1}, call(0, 3, 3))
        assert joined(padding, per_row=per_row) == {"policy_loss": 0.0, "entropy_coef": 0.1}
    # the least that was clipped of a row is not that of padding
    found = joined(({"clip_ratio/low_min": 0.2}, call(4, 2)), ({"clip_ratio/low_min": 0.0}, call(0, 1, 1)))
    assert found == {"clip_ratio/low_min": 0.2}


def test_a_mean_over_rows_counts_real_rows_alone() -> None:
    # one real row of two clipped; the padding row is never clipped
    clipped = [({"clip_ratio/low_mean": 1 / 3}, call(40, 3, 1)), ({"clip_ratio/low_mean": 1.0}, call(2, 2))]
    assert joined(*clipped, per_row=True) == {"clip_ratio/low_mean": pytest.approx(3 / 4)}
    # by tokens where advantages of tokens spread the ratio over them
    spread = [(values, {**batch, **call(int(batch["call_tokens"]), 1, per_token=True)}) for values, batch in clipped]
    assert joined(*spread, per_row=True)["clip_ratio/low_mean"] == pytest.approx((40 / 3 + 2) / 42)
    assert joined(*clipped)["clip_ratio/low_mean"] == pytest.approx((40 / 3 + 2) / 42)


def test_the_gamma_weight_of_a_padding_row_is_taken_out() -> None:
    # phi of a padding row is 1: of the real rows it is 0.2, 0.4 and 0.6
    phi = [({"vespo/phi_seq_mean": (0.2 + 0.4 + 1.0) / 3}, call(9, 3, 1)), ({"vespo/phi_seq_mean": 0.6}, call(9, 1))]
    assert joined(*phi) == {"vespo/phi_seq_mean": pytest.approx(0.4)}


def test_extremes_are_those_of_all_micro_batches_and_what_is_not_a_number_is_left_out() -> None:
    found = joined(
        ({"clip_ratio/low_min": 0.3, "clip_ratio/high_max": math.nan}, call(5, 1)),
        ({"clip_ratio/low_min": 0.1, "clip_ratio/high_max": 0.2}, call(1, 1)),
        ({"clip_ratio/low_min": 0.2, "clip_ratio/high_max": 0.1}, call(9, 1)),
    )
    assert found == {"clip_ratio/low_min": 0.1, "clip_ratio/high_max": 0.2}


def test_losses_of_micro_batches_add_up_to_that_of_their_micro_step() -> None:
    metrics = LossMetrics()
    for loss, tokens, last in ((0.5, 10, False), (0.25, 90, True), (1.25, 5, True)):
        metrics.add({"policy_loss": [loss], "entropy_coef": [0.1]}, call(tokens, 1), per_row=False)
        if last:
            metrics.end_micro_step()
    assert metrics.take() == {"policy_loss": pytest.approx(1.0), "entropy_coef": pytest.approx(0.1)}
    assert metrics.take() == {}
