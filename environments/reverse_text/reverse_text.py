"""Reverse a sentence letter by letter: one turn, scored by how few edits the answer is away from the right one."""

from __future__ import annotations

import itertools
import random

import verifiers as vf

__all__ = ["load_environment", "similarity"]

WHO = ["baker", "captain", "farmer", "gardener", "judge", "neighbor", "painter", "pilot", "sailor", "teacher"]
DID = ["borrowed", "carried", "counted", "drew", "found", "hid", "mended", "noticed", "sold", "washed"]
HOW_MANY = ["two", "three", "four", "five", "six", "seven", "a dozen", "twenty"]
WHAT = ["apples", "baskets", "candles", "drums", "flutes", "lanterns", "maps", "paper boats", "ropes", "silver cups"]
WHERE = ["after lunch", "at the harbor", "before dawn", "behind the mill", "in the rain", "near the old bridge"]

PARSER = vf.XMLParser(["reversed_text"], answer_field="reversed_text")
SYSTEM_PROMPT = f"""\
Reverse the text you are given, character by character; spaces and punctuation count as characters.
Write the result as

{PARSER.get_format_str()}"""


def all_sentences() -> list[str]:
    """Return all 48,000 sentences of the grammar."""
    return [f"the {' '.join(words)}." for words in itertools.product(WHO, DID, HOW_MANY, WHAT, WHERE)]


def similarity(text: str, target: str) -> float:
    """Return 1 - 2 * Levenshtein distance / length of the longer text, and at least 0: 1 for equal texts.

    Where half of a text is wrong it gets 0: sentences that have nothing to do with one another share that much. So a
    text more than twice as long as the target is not even read, which keeps scoring quick.
    """
    if not text or len(text) > 2 * len(target):
        return 0.0
    distances = list(range(len(target) + 1))
    for row, letter in enumerate(text, start=1):
        above, distances[0] = distances[0], row
        for column, wanted in enumerate(target, start=1):
            change = above + (letter != wanted)
            above = distances[column]
            distances[column] = min(change, above + 1, distances[column - 1] + 1)
    return max(0.0, 1 - 2 * distances[-1] / max(len(text), len(target)))


def reversed_similarity(parser: vf.XMLParser, completion: vf.Messages, answer: str) -> float:
    """Score the similarity of the tagged text to the right one; 0.0 without tags."""
    return similarity(parser.parse_answer(completion) or "", answer)


def exact_match(parser: vf.XMLParser, completion: vf.Messages, answer: str) -> float:
    """Return 1.0 where every character is right."""
    return float(parser.parse_answer(completion) == answer)


def load_environment(num_train: int = 1000, num_eval: int = 200, seed: int = 0) -> vf.Environment:
    """Build the environment.

    Args:
        num_train: training sentences.
        num_eval: evaluation sentences; none of them is a training sentence, and they do not depend on `num_train`.
        seed: chooses the sentences.

    Raises:
        vf.ConfigError: more sentences than the grammar can say.
    """
    sentences = all_sentences()
    if min(num_train, num_eval) < 1 or num_train + num_eval > len(sentences):
        raise vf.ConfigError(
            f"num_train={num_train} and num_eval={num_eval} must be 1 or more, and at most {len(sentences)} together."
        )
    random.Random(seed).shuffle(sentences)
    rows = [{"question": sentence, "answer": sentence[::-1]} for sentence in sentences[: num_eval + num_train]]
    rubric = vf.Rubric(
        funcs=[reversed_similarity, exact_match, PARSER.get_format_reward_func()],
        weights=[1.0, 0.0, 0.0],
        parser=PARSER,
    )
    return vf.SingleTurnEnv(
        dataset=rows[num_eval:],
        eval_dataset=rows[:num_eval],
        system_prompt=SYSTEM_PROMPT,
        parser=PARSER,
        rubric=rubric,
    )
