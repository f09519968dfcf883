from __future__ import annotations

import pytest
import torch

from verifiers.errors import ConfigError
from verifiers.train.batching.micro_batches import (
    TensorDict,
    shuffle_tensor_dict,
    split_tensor_dict,
)

ADVANTAGES = [0.1, 0, -0.1, -0.0666667, 0.2333333, -0.1666667]


def buffer() -> TensorDict:
    # Ids are 10 x prompt + generation: p0g0 is 0, p1g2 is 12.
    return {
        "prompt_ids": torch.tensor([[0], [1], [2], [10], [11], [12]]),
        "advantages": torch.tensor(ADVANTAGES),
        "reference_logps": None,
        "update_tokens": torch.tensor(6.0),
    }


def column(tensors: TensorDict, name: str) -> list[float]:
    value = tensors[name]
    assert value is not None
    return value.flatten().tolist()


def test_a_shuffle_moves_all_tensors_by_one_permutation() -> None:
    shuffled = shuffle_tensor_dict(buffer(), (4, 0, 5, 2, 3, 1))
    assert column(shuffled, "prompt_ids") == [11, 0, 12, 2, 10, 1]
    expected = [0.2333333, 0.1, -0.1666667, -0.1, -0.0666667, 0]
    assert column(shuffled, "advantages") == pytest.approx(expected, abs=1e-6)
    assert shuffled["reference_logps"] is None
    assert column(shuffled, "update_tokens") == [6.0]


def test_a_split_keeps_rows_aligned_and_none_none() -> None:
    first, second = split_tensor_dict(shuffle_tensor_dict(buffer(), (4, 0, 5, 2, 3, 1)), 2)
    assert column(first, "prompt_ids") == [11, 0, 12]
    assert column(second, "prompt_ids") == [2, 10, 1]
    assert column(second, "advantages") == pytest.approx([-0.1, -0.0666667, 0], abs=1e-6)
    for chunk in (first, second):
        assert chunk["reference_logps"] is None
        assert column(chunk, "update_tokens") == [6.0]


def test_a_generator_shuffles_the_same_way_from_the_same_seed() -> None:
    one, two = (shuffle_tensor_dict(buffer(), torch.Generator().manual_seed(3)) for _ in range(2))
    assert column(one, "prompt_ids") == column(two, "prompt_ids")
    pairs = dict(zip(column(one, "prompt_ids"), column(one, "advantages"), strict=True))
    original = dict(zip(column(buffer(), "prompt_ids"), column(buffer(), "advantages"), strict=True))
    assert pairs == original


def test_seven_rows_in_two_chunks_are_refused_with_the_sizes_that_divide() -> None:
    with pytest.raises(ConfigError, match=r"7 rows do not divide into 2 chunks.* 6 and 8"):
        split_tensor_dict({"x": torch.arange(7)}, 2)


def test_misaligned_tensors_are_refused() -> None:
    tensors = {"x": torch.arange(4), "y": torch.arange(3)}
    for use in (lambda: split_tensor_dict(tensors, 1), lambda: shuffle_tensor_dict(tensors, [0, 1, 2])):
        with pytest.raises(ConfigError, match="not aligned"):
            use()


@pytest.mark.parametrize("order", [[0, 1], [0, 0, 1], [1, 2, 3], [[0, 1, 2]]])
def test_an_order_that_is_no_permutation_is_refused(order: list[int]) -> None:
    with pytest.raises(ConfigError, match="not a permutation"):
        shuffle_tensor_dict({"x": torch.arange(3)}, order)
