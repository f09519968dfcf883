"""The demo's model and its warm start: exact text, prompts that extend one another, and no word seen twice."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("trl", reason="needs the train extra")

DEMO = Path(__file__).parents[2] / "examples" / "demo"


def load(name: str) -> ModuleType:
    """Import one of the demo's scripts by its path, and undo what it does to the process."""
    spec = importlib.util.spec_from_file_location(f"demo_{name}", DEMO / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with mock.patch.dict(os.environ), mock.patch.object(sys, "path", [*sys.path]):
        spec.loader.exec_module(module)
    return module


model, warm_start = load("model"), load("warm_start")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "model"
    model.make_model(path, seed=0)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("text", [model.CHARACTERS, "don't , stop .\n\n  now  ", "a", ""])
def test_decoding_gives_back_the_exact_text_one_token_a_character(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_one_token_each_and_generation_ends_on_im_end(tokenizer: Any) -> None:
    ids = tokenizer("<|im_start|>hi<|im_end|>")["input_ids"]
    assert len(ids) == 4
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi"
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


def test_rendering_one_more_turn_extends_the_rendering_before_it(tokenizer: Any) -> None:
    conversation = [
        {"role": "system", "content": "Spell."},
        {"role": "user", "content": "sun?"},
        {"role": "assistant", "content": "nus"},
        {"role": "user", "content": "cat?"},
    ]

    def render(messages: list[dict[str, str]], prompt: bool) -> list[int]:
        ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        return ids

    first_prompt, second_prompt = render(conversation[:2], True), render(conversation, True)
    held = first_prompt + tokenizer("nus<|im_end|>")["input_ids"]
    assert second_prompt[: len(held)] == held
    for turns in range(1, len(conversation)):
        shorter, longer = render(conversation[:turns], False), render(conversation[: turns + 1], False)
        assert longer[: len(shorter)] == shorter


def test_only_the_answer_and_its_end_are_marked_as_the_assistants(tokenizer: Any) -> None:
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "sun?"}, {"role": "assistant", "content": "nus"}],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    marked = [i for i, mark in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True) if mark]
    assert tokenizer.decode(marked) == "nus<|im_end|>"


def test_the_same_seed_makes_the_same_small_untied_model(tokenizer: Any) -> None:
    first, again, other = (model.make_network(tokenizer, seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.lm_head.weight is not first.model.embed_tokens.weight
    assert sum(parameter.numel() for parameter in first.parameters()) < 2_500_000


def test_held_out_words_are_neither_shown_nor_trained_on() -> None:
    pytest.importorskip("reasoning_gym_env", reason="needs the environment package", exc_type=ImportError)
    run = load("run")
    env, shown, held_out = run.environment_and_pairs()
    trained = set(env.get_dataset()["question"])
    assert len(held_out) >= 300
    assert {question for question, _ in held_out} == set(env.get_eval_dataset()["question"])
    assert {question for question, _ in shown} <= trained
    assert not trained & {question for question, _ in held_out}


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


def test_the_warm_start_stops_inside_the_window() -> None:
    stop, _, rate, step = drive([0.0, 0.1, 0.35], (0.3, 0.4))
    assert (stop.accuracy, step) == (0.35, 45)
    assert rate.base_lrs == [1.0]


def test_a_jump_over_the_window_is_taken_back_with_half_the_learning_rate() -> None:
    weights: list[float] = []
    original = warm_start.StopInWindow._take_back

    def take_back(self: Any, *args: Any) -> None:
        original(self, *args)
        weights.append(self._model.weight.item())

    with mock.patch.object(warm_start.StopInWindow, "_take_back", take_back):
        stop, _, rate, _ = drive([0.0, 0.1, 0.9, 0.35], (0.3, 0.4))
    assert weights == [2.0]
    assert stop.accuracy == 0.35
    assert (rate.base_lrs, rate.state) == ([0.5], {})


def test_the_warm_start_writes_a_model_that_loads_and_has_learnt(directory: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    pairs = [("Spell: ab", "ba"), ("Spell: cd", "dc")]
    result = warm_start.warm_start(
        directory, tmp_path, shown=pairs, held_out=pairs, seed=0, window=(0.5, 1.0), max_steps=60
    )
    answers = warm_start.greedy_answers(
        AutoModelForCausalLM.from_pretrained(tmp_path),
        load("model").make_tokenizer(),
        [question for question, _ in pairs],
    )
    right = sum(answer == wanted for answer, (_, wanted) in zip(answers, pairs, strict=True))
    assert result.accuracy == right / len(pairs) >= 0.5
    assert 0 < result.steps <= 60
