"""The supervised start of the small model: a window of accuracy, and a model that loads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("trl", reason="needs the train extra")

from verifiers.train.tiny_model import char_model, warm_start  # noqa: E402


class Rate:
    """Stands in for an optimizer and its schedule."""

    def __init__(self) -> None:
        self.param_groups = [{"lr": 1.0}]
        self.base_lrs = [1.0]
        self.state: dict[str, Any] = {"momentum": 1}


def drive(accuracies: list[float], window: tuple[float, float]) -> tuple[Any, Any, Rate, int]:
    """Play a run whose weight equals the number of the last evaluation, until it is stopped."""
    network, rate = torch.nn.Linear(1, 1, bias=False), Rate()
    stop = warm_start.StopInWindow(network, None, [("q", "a")], window)
    control = SimpleNamespace(should_training_stop=False)
    answers, step = iter(accuracies), 0
    evaluations = 0

    def measure() -> float:
        nonlocal evaluations
        evaluations += 1
        with torch.no_grad():
            network.weight.fill_(evaluations)
        return next(answers)

    with mock.patch.object(stop, "_measure", measure):
        while not control.should_training_stop:
            step += 1
            stop.on_step_end(None, SimpleNamespace(global_step=step), control, optimizer=rate, lr_scheduler=rate)
    return stop, network, rate, step


def test_a_jump_over_the_window_is_taken_back_with_half_the_learning_rate() -> None:
    stop, network, rate, _ = drive([0.0, 0.1, 0.9, 0.35], (0.3, 0.4))
    assert (stop.accuracy, rate.base_lrs, rate.state) == (0.35, [0.5], {})
    assert network.weight.item() == 4.0


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
