"""Wordle: find a word of five letters in six guesses, told after each which letters are right."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import verifiers as vf

__all__ = ["WordleEnv", "load_environment", "marks_for", "read_words"]

LETTERS, TURNS = 5, 6
PARSER = vf.XMLParser(["guess"], answer_field="guess")
RULES = f"""\
Find the secret English word of five letters. You have {TURNS} guesses; each must be a common word of five letters
that you have not guessed before. An invalid guess is lost too. After each guess every letter is marked:
G: the letter is in this place; Y: it is in the word, in another place; X: it is not in the word (any more often).
Write your guess as <guess>...</guess>, once in each message."""


def read_words() -> list[str]:
    """Return the bundled words, in alphabetical order: the secrets and the valid guesses."""
    return Path(__file__).with_name("wordle_words.txt").read_text(encoding="utf-8").split()


def marks_for(guess: str, secret: str) -> str:
    """Return one of G, Y, X for each letter of the guess.

    A letter is marked G or Y as often as the secret has it: first where it is in place, then from the left.
    """
    marks = ["G" if letter == wanted else "X" for letter, wanted in zip(guess, secret, strict=True)]
    left = Counter(wanted for letter, wanted in zip(guess, secret, strict=True) if letter != wanted)
    for place, letter in enumerate(guess):
        if marks[place] == "X" and left[letter]:
            marks[place] = "Y"
            left[letter] -= 1
    return "".join(marks)


@dataclass(frozen=True, slots=True)
class Guess:
    """One message of the policy: a valid word, or what is wrong with it."""

    word: str
    problem: str = ""


def read_guesses(completion: vf.Messages, words: frozenset[str] | None) -> list[Guess]:
    """Return the guess in each of the policy's messages.

    Args:
        completion: messages of the rollout.
        words: the valid guesses; None for any five letters.
    """
    guesses: list[Guess] = []
    for message in PARSER.get_assistant_messages(completion):
        word = (PARSER.parse_answer([message]) or "").lower()
        problem = ""
        if not word:
            problem = "Write one guess as <guess>...</guess>."
        elif len(word) != LETTERS or not (word.isascii() and word.isalpha()):
            problem = f"A guess has exactly {LETTERS} letters, a to z."
        elif words is not None and word not in words:
            problem = f"{word!r} is not in the word list."
        elif any(word == earlier.word for earlier in guesses):
            problem = f"You have guessed {word!r} before."
        guesses.append(Guess("" if problem else word, problem))
    return guesses


class WordleEnv(vf.MultiTurnEnv):
    """An environment whose secret word is the row's answer: all rollouts of a group play for the same one."""

    def __init__(self, words: frozenset[str] | None, **kwargs: Any) -> None:
        super().__init__(max_turns=TURNS, **kwargs)
        self.words = words

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> list[vf.ChatMessage]:
        guess = read_guesses(state["completion"], self.words)[-1]
        lines = [guess.problem]
        if not guess.problem:
            lines = [" ".join(guess.word.upper()), " ".join(marks_for(guess.word, state["answer"]))]
        lines.append(f"Guesses left: {TURNS - state['turn']}.")
        return [{"role": "user", "content": "\n".join(lines)}]

    @vf.stop
    async def solved(self, state: vf.State) -> bool:
        guesses = read_guesses(state["completion"], self.words)
        return bool(guesses) and guesses[-1].word == state["answer"]


def make_rubric(words: frozenset[str] | None) -> vf.Rubric:
    """Make the rubric, which sums to at most 1: 0.7 for the word, 0.1 each for haste, closeness and valid guesses."""

    def solved(completion: vf.Messages, answer: str) -> float:
        """Return 1.0 where the word was found."""
        return float(any(guess.word == answer for guess in read_guesses(completion, words)))

    def haste(completion: vf.Messages, answer: str) -> float:
        """Score how early the word was found: 1.0 at the first guess, 1/6 at the last."""
        guesses = read_guesses(completion, words)
        return solved(completion, answer) * (TURNS + 1 - len(guesses)) / TURNS

    def closeness(completion: vf.Messages, answer: str) -> float:
        """Score the newest valid guess: 1/5 for each G, half of that for each Y."""
        valid = [guess.word for guess in read_guesses(completion, words) if guess.word]
        marks = marks_for(valid[-1], answer) if valid else ""
        return (marks.count("G") + marks.count("Y") / 2) / LETTERS

    def valid_guesses(completion: vf.Messages) -> float:
        """Return the share of messages that were valid guesses; a repeated word is not."""
        guesses = read_guesses(completion, words)
        return sum(bool(guess.word) for guess in guesses) / max(len(guesses), 1)

    return vf.Rubric(funcs=[solved, haste, closeness, valid_guesses], weights=[0.7, 0.1, 0.1, 0.1], parser=PARSER)


def load_environment(
    num_train: int = 600, num_eval: int = 200, seed: int = 0, any_letters: bool = False
) -> vf.Environment:
    """Build the environment.

    Args:
        num_train: training secrets.
        num_eval: evaluation secrets; none of them is a training secret, and they do not depend on `num_train`.
        seed: chooses the secrets.
        any_letters: take any five letters as a guess; default: only words of the bundled list.

    Raises:
        vf.ConfigError: more secrets than there are words.
    """
    words = read_words()
    if min(num_train, num_eval) < 1 or num_train + num_eval > len(words):
        raise vf.ConfigError(
            f"There are {len(words)} words, but num_train={num_train} and num_eval={num_eval} must be 1 or more and "
            "at most that together."
        )
    allowed = None if any_letters else frozenset(words)
    random.Random(seed).shuffle(words)
    rows = [{"question": "Make your first guess.", "answer": word} for word in words[: num_eval + num_train]]
    return WordleEnv(
        allowed,
        dataset=rows[num_eval:],
        eval_dataset=rows[:num_eval],
        system_prompt=RULES,
        parser=PARSER,
        rubric=make_rubric(allowed),
    )
