"""Spell a word backward: one turn, one word, right or wrong. The smallest environment worth training on."""

from __future__ import annotations

import random
from pathlib import Path

import verifiers as vf

__all__ = ["load_environment", "read_words"]

QUESTION = "Spell this word backward, and answer with that one word only: {word}"


def read_words(min_letters: int, max_letters: int) -> list[str]:
    """Return the bundled words of these lengths, in alphabetical order; none is the same in both directions."""
    words = Path(__file__).with_name("spell_backward_words.txt").read_text(encoding="utf-8").split()
    return [word for word in words if min_letters <= len(word) <= max_letters]


def said(parser: vf.Parser, completion: vf.Messages) -> str:
    return (parser.parse_answer(completion) or "").strip().lower()


def exact_match(parser: vf.Parser, completion: vf.Messages, answer: str) -> float:
    """Return 1.0 where the answer is the reversed word and nothing else; case does not count."""
    return float(said(parser, completion) == answer)


def letters_in_place(parser: vf.Parser, completion: vf.Messages, answer: str) -> float:
    """Return the share of letters in their place; extra letters count as wrong."""
    word = said(parser, completion)
    right = sum(letter == wanted for letter, wanted in zip(word, answer, strict=False))
    return right / max(len(word), len(answer))


def load_environment(
    min_letters: int = 3,
    max_letters: int = 9,
    num_train: int = 400,
    num_eval: int = 100,
    seed: int = 0,
    partial_credit: float = 0.0,
) -> vf.Environment:
    """Build the environment.

    Args:
        min_letters: shortest length of the words; the bundled list has 3 to 9.
        max_letters: longest length of the words.
        num_train: training words.
        num_eval: evaluation words; none of them is a training word, and they do not depend on `num_train`.
        seed: chooses the words.
        partial_credit: weight of `letters_in_place`, from 0 to 1; `exact_match` has the rest. A weak policy that
            never gets a word right learns nothing from exact matches alone.

    Raises:
        vf.ConfigError: more words than there are, or a weight outside 0..1.
    """
    words = read_words(min_letters, max_letters)
    if min(num_train, num_eval) < 1 or num_train + num_eval > len(words):
        raise vf.ConfigError(
            f"There are {len(words)} words of {min_letters} to {max_letters} letters, but num_train={num_train} and "
            f"num_eval={num_eval} must be 1 or more and at most that together."
        )
    if not 0 <= partial_credit <= 1:
        raise vf.ConfigError(f"partial_credit={partial_credit!r} must lie between 0 and 1.")
    random.Random(seed).shuffle(words)
    rows = [{"question": QUESTION.format(word=word), "answer": word[::-1]} for word in words[: num_eval + num_train]]
    parser = vf.MaybeThinkParser()
    weights = [1 - partial_credit, partial_credit]
    return vf.SingleTurnEnv(
        dataset=rows[num_eval:],
        eval_dataset=rows[:num_eval],
        parser=parser,
        rubric=vf.Rubric(funcs=[exact_match, letters_in_place], weights=weights, parser=parser),
    )
