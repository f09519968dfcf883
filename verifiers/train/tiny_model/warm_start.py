"""A short supervised start, so that reinforcement learning has something to reinforce.

The model is shown the answers of a small part of the training words until it solves between a quarter and a half of
*other* words: greedy exact match, with or without `<answer>` tags. The window is sharp (a model of this size goes
from 0.1 to 0.9 within some steps), so accuracy is measured every few steps, and a jump over the window is taken back
and repeated with half the learning rate. Few words are shown, because a model that has seen few is sure of what it
says: its samples are nearly as good as its greedy answers, and groups of samples differ where there is something to
learn.
"""

from __future__ import annotations

import random
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

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
    started = time.perf_counter()
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    rows = [
        (tokenizer.encode(_prompt(tokenizer, question, tools)), tokenizer.encode(answer + tokenizer.eos_token), None)
        for question, answer in shown
    ]
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    questions, wanted = zip(*eval_pairs, strict=True)
    most_tokens = max(map(len, wanted)) + 7

    def measure() -> float:
        answers = greedy_answers(model, tokenizer, questions, max_new_tokens=most_tokens, tools=tools)
        right = sum(_untagged(one) == _untagged(other) for one, other in zip(answers, wanted, strict=True))
        return right / len(wanted)

    trained = islice(supervised_steps(model, rows, optimizer, seed=seed, batch_size=64), max_steps)
    found = train_into_window(model, optimizer, trained, measure, window)
    if found is None:
        raise RuntimeError(
            f"the warm start did not reach an accuracy in {window} within {max_steps} steps; try another seed."
        )
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    return WarmStartResult(*found, time.perf_counter() - started)


def supervised_steps(
    model: Any,
    rows: Sequence[tuple[list[int], list[int], Any]],
    optimizer: torch.optim.Optimizer,
    *,
    seed: int,
    batch_size: int,
    further: Callable[[torch.Tensor, list[Any]], dict[str, torch.Tensor]] = lambda ids_RT, shown: {},
) -> Iterator[float]:
    """Train on the answers of rows that are drawn, step after step, without end; yield each step's loss.

    Args:
        rows: the ids of a prompt, those of its answer, and what it shows beside them.
        further: makes of the batch's ids, and what its rows show, further arguments of the model.
    """
    dice = random.Random(seed)
    while True:
        batch = dice.sample(rows, min(batch_size, len(rows)))
        ids_RT = _padded([ids + answer for ids, answer, _ in batch], 0)
        mask_RT = _padded([[1] * len(ids + answer) for ids, answer, _ in batch], 0)
        labels_RT = _padded([[-100] * len(ids) + answer for ids, answer, _ in batch], -100)
        given = further(ids_RT, [shown for *_, shown in batch])
        loss = model(input_ids=ids_RT, attention_mask=mask_RT, labels=labels_RT, **given).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss.detach())


def _padded(rows: list[list[int]], filling: int) -> torch.Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=filling)


def train_into_window(
    model: Any,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[Any],
    measure: Callable[[], float],
    window: tuple[float, float],
) -> tuple[float, int] | None:
    """Train until the accuracy lies in a window; return it and the steps taken, None where they end before.

    The learning rate rises over 20 steps. A jump over the window is taken back.
    """
    (rate,) = {group["lr"] for group in optimizer.param_groups}
    every = 20
    kept: dict[str, torch.Tensor] | None = None

    def set_rate_of(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / 20)

    set_rate_of(1)
    for step, _ in enumerate(steps, 1):
        if step % every == 0:
            accuracy = measure()
            if accuracy > window[1]:
                if kept is not None:
                    model.load_state_dict(kept)
                rate /= 2
                optimizer.state.clear()
                every = max(1, every // 2)
            elif accuracy >= window[0]:
                return accuracy, step
            else:
                kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                every = 5 if accuracy > 0.02 else every
        set_rate_of(step + 1)
    return None


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
    prompts = [_prompt(tokenizer, question, tools) for question in questions]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    inputs.pop("token_type_ids", None)
    was_training = model.training
    model.eval()
    output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    model.train(was_training)
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def _prompt(tokenizer: Any, question: Question, tools: Sequence[Mapping[str, Any]]) -> str:
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else [*map(dict, question)]
    text: str = tokenizer.apply_chat_template(
        messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
    )
    return text


def _untagged(answer: str) -> str:
    return re.sub("</?answer>", "", answer).strip()
