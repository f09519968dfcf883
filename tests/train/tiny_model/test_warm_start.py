"""The supervised start of the small model: a window of accuracy, and a model that loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="needs the train extra")

from verifiers.train.tiny_model import char_model, warm_start  # noqa: E402


def test_a_jump_over_the_window_is_taken_back_with_half_the_learning_rate() -> None:
    """The weight is the number of steps since the last jump was taken back to what was kept."""
    network = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(network.weight)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    found = {20: 0.0, 40: 0.1, 45: 0.9, 46: 0.2, 50: 0.35}
    weights: dict[int, float] = {}
    taken = 0

    def steps() -> Iterator[None]:
        nonlocal taken
        while taken < 100:
            taken += 1
            with torch.no_grad():
                network.weight += 1
            yield

    def measure() -> float:
        weights[taken] = network.weight.item()
        return found[taken]

    assert warm_start.train_into_window(network, optimizer, steps(), measure, (0.3, 0.4)) == (0.35, 50)
    assert weights == {20: 20, 40: 40, 45: 45, 46: 41, 50: 45}
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_steps_that_end_before_the_window_give_no_model() -> None:
    network = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    assert warm_start.train_into_window(network, optimizer, range(30), lambda: 0.0, (0.3, 0.4)) is None


def test_the_learning_rate_rises_from_the_first_step_on() -> None:
    network = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    rates = (optimizer.param_groups[0]["lr"] for _ in range(25))
    taken: list[float] = []
    warm_start.train_into_window(network, optimizer, map(taken.append, rates), lambda: 0.0, (0.3, 0.4))
    assert taken == [step / 20 for step in range(1, 21)] + [1.0] * 5


@pytest.mark.slow
def test_the_warm_start_writes_a_model_that_loads_and_has_learnt(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    char_model.make_model(tmp_path / "random", seed=0)
    pairs = [("Spell: ab", "ba"), ("Spell: cd", "<answer>dc</answer>")]
    result = warm_start.warm_start(
        tmp_path / "random", tmp_path / "tiny", shown=pairs, eval_pairs=pairs, seed=0, window=(0.5, 1.0), max_steps=80
    )
    questions, wanted = zip(*pairs, strict=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    answers = warm_start.greedy_answers(model, tokenizer, questions, max_new_tokens=24)
    right = sum(answer == one for answer, one in zip(answers, wanted, strict=True))
    assert result.accuracy == right / len(pairs) >= 0.5
    assert 0 < result.steps <= 80
