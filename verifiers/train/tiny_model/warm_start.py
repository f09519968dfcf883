"""A short supervised start, so that reinforcement learning has something to reinforce.

The model is shown the answers of a small part of the training words, with TRL's SFTTrainer, until it solves between a
quarter and a half of *other* words: greedy exact match, with or without `<answer>` tags. The window is sharp (a model
of this size goes from 0.1 to 0.9 within some steps), so accuracy is measured every few steps, and a jump over the
window is taken back and repeated with half the learning rate. Few words are shown, because a model that has seen few
is sure of what it says: its samples are nearly as good as its greedy answers, and groups of samples differ where
there is something to learn.
"""

from __future__ import annotations

import random
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from verifiers.train.tiny_model.char_model import make_model

Question = str | Sequence[Mapping[str, Any]]
"""A user's message, or a conversation that ends before an answer of the model."""

QUESTION = "Spell backward: {word}"
NUM_SHOWN, NUM_EVAL = 200, 100
_LETTERS = ("bcdfghjklmnpqrstvwxyz", "aeiou")
_TAGGED = "<answer>{answer}</answer>"


@dataclass(frozen=True, slots=True)
class WarmStartResult:
    """The end of a warm start.

    Attributes:
        accuracy: greedy exact match on the eval pairs, 0 .. 1.
        steps: supervised optimizer steps, those taken back included.
    """

    accuracy: float
    steps: int
    seconds: float


def warm_start(
    model_dir: str | Path,
    out_dir: str | Path,
    *,
    shown: Sequence[tuple[Question, str]],
    eval_pairs: Sequence[tuple[Question, str]],
    tools: Sequence[Mapping[str, Any]] = (),
    seed: int,
    window: tuple[float, float] = (0.32, 0.44),
    learning_rate: float = 2e-3,
    max_steps: int = 1500,
) -> WarmStartResult:
    """Train the model in `model_dir` until its accuracy lies in `window`; write it to `out_dir`.

    Args:
        shown: (question, answer) pairs that are trained on; an answer that calls a tool is the call's text.
        eval_pairs: other pairs, for the accuracy.
        tools: definitions that each prompt shows.

    Raises:
        RuntimeError: the window was not met within `max_steps`.
    """
    from trl import SFTConfig, SFTTrainer

    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    stop = StopInWindow(model, tokenizer, eval_pairs, window, tools)
    offered = {"tools": list(tools)} if tools else {}
    rows = [
        {"prompt": _messages(question), "completion": [{"role": "assistant", "content": answer}], **offered}
        for question, answer in shown
    ]
    args = SFTConfig(
        output_dir=str(out_dir),
        seed=seed,
        max_steps=max_steps,
        learning_rate=learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=20,
        per_device_train_batch_size=64,
        adam_beta2=0.95,
        completion_only_loss=True,
        activation_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        report_to="none",
    )
    trainer = SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(stop)
    trainer.train()
    if stop.accuracy is None:
        raise RuntimeError(
            f"the warm start did not reach an accuracy in {window} within {max_steps} steps; try another seed."
        )
    # SFTTrainer patches the model's forward, so the weights are written through a fresh copy
    clean = AutoModelForCausalLM.from_pretrained(model_dir)
    clean.load_state_dict(model.state_dict())
    clean.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    return WarmStartResult(stop.accuracy, trainer.state.global_step, time.perf_counter() - started)


class StopInWindow(TrainerCallback):
    """A callback that measures accuracy every few steps, stops inside the window, and takes a jump over it back."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        pairs: Sequence[tuple[Question, str]],
        window: tuple[float, float],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.accuracy: float | None = None
        self._model, self._tokenizer, self._pairs, self._tools = model, tokenizer, pairs, tools
        self._low, self._high = window
        self._most_tokens = max(len(answer) for _, answer in pairs) + 7
        self._every = 20
        self._kept: dict[str, torch.Tensor] | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step % self._every:
            return control
        accuracy = self._measure()
        if accuracy > self._high:
            self._take_back(kwargs["optimizer"], kwargs["lr_scheduler"])
            return control
        self._kept = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        if accuracy >= self._low:
            self.accuracy = accuracy
            control.should_training_stop = True
        elif accuracy > 0.02:
            self._every = 5
        return control

    def _measure(self) -> float:
        questions, wanted = zip(*self._pairs, strict=True)
        answers = greedy_answers(
            self._model, self._tokenizer, questions, max_new_tokens=self._most_tokens, tools=self._tools
        )
        right = sum(_untagged(one) == _untagged(other) for one, other in zip(answers, wanted, strict=True))
        return right / len(self._pairs)

    def _take_back(self, optimizer: Any, scheduler: Any) -> None:
        if self._kept is not None:
            self._model.load_state_dict(self._kept)
        scheduler.base_lrs = [rate / 2 for rate in scheduler.base_lrs]
        for group in optimizer.param_groups:
            group["lr"] /= 2
        optimizer.state.clear()
        self._every = max(1, self._every // 2)


def spelling_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Return questions with the answers of `make_tiny_model`'s task: different words of 3 to 5 letters, made up.

    Every other answer stands in `<answer>` tags, so that a format is there to be rewarded.
    """
    rng = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < count:
        first = rng.randrange(2)
        kinds = (_LETTERS[(first + place) % 2] for place in range(rng.randint(3, 5)))
        words["".join(map(rng.choice, kinds))] = None
    return [
        (QUESTION.format(word=word), _TAGGED.format(answer=word[::-1]) if place % 2 else word[::-1])
        for place, word in enumerate(words)
    ]


def make_tiny_model(directory: str | Path, *, seed: int = 0) -> WarmStartResult:
    """Make a small model to train: it spells a third of short words backward, half of them in tags.

    The directory must not exist; raises as `warm_start` does.
    """
    pairs = spelling_pairs(NUM_SHOWN + NUM_EVAL, seed)
    target = Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    # more make a model of this size slower
    torch.set_num_threads(1)
    try:
        # beside its place and renamed, so that the directory is never there half-written
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
            random_dir, trained_dir = Path(scratch, "random"), Path(scratch, "trained")
            make_model(random_dir, seed=seed)
            made = warm_start(
                random_dir, trained_dir, shown=pairs[:NUM_SHOWN], eval_pairs=pairs[NUM_SHOWN:], seed=seed
            )
            trained_dir.rename(target)
    finally:
        torch.set_num_threads(threads)
    return made


@torch.no_grad()
def greedy_answers(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    max_new_tokens: int,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """Return the model's greedy answer to each question, in one batch, left-padded."""
    prompts = [
        tokenizer.apply_chat_template(
            _messages(question), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
        )
        for question in questions
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    inputs.pop("token_type_ids", None)
    was_training = model.training
    model.eval()
    output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    model.train(was_training)
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def _messages(question: Question) -> list[dict[str, Any]]:
    if isinstance(question, str):
        return [{"role": "user", "content": question}]
    return [dict(message) for message in question]


def _untagged(answer: str) -> str:
    return re.sub("</?answer>", "", answer).strip()
