"""Short writing under one to three constraints that a function can check, as in IFEval (arXiv:2311.07911)."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import verifiers as vf

__all__ = ["load_environment"]

LONGEST_ANSWER, MOST_ROWS = 4000, 5000

SUBJECTS = (
    "ball bear bell boat book bread bridge bus camel candle cat chair cheese clock cloud cow dog donkey door drum "
    "fish flower fox garden goat guitar hammer horse kite ladder lake lamp lion map market mirror moon mountain "
    "phone piano pony rabbit rain ring river robot rose school ship shoe snow spoon star sun table tent tiger "
    "train tree violin "
)
REQUESTS = ["Describe a {}.", "Tell me about a {}.", "Write a note about a {}.", "Tell a child about a {}.",
            "Write an advertisement for a {}.", "Give a fact about a {}."]  # fmt: skip
WORDS = ["always", "because", "big", "day", "every", "find", "happy", "home", "like", "many", "new", "old",
         "people", "small", "time", "world", "year"]  # fmt: skip


class Kind(NamedTuple):
    """A kind of constraint; two of one prompt never settle the same aspect of the answer."""

    says: str
    settles: set[str]
    values: Sequence[Any]
    kept: Callable[[str, Any], bool]


def words(text: str) -> list[str]:
    return re.findall(r"\w+(?:'\w+)*", text.casefold().replace("\u2019", "'"))


def is_json(text: str, key: str) -> bool:
    fenced = re.fullmatch(r"```(?:json)?\n(.*)\n```", text, re.DOTALL)
    try:
        found = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and list(found) == [key] and isinstance(found[key], str)


KINDS = {
    "at_most": Kind("Use at most {} words.", {"length"}, range(10, 21), lambda text, most: len(words(text)) <= most),
    "at_least": Kind("Use at least {} words.", {"length"}, range(20, 41), lambda text, few: len(words(text)) >= few),
    "sentences": Kind("Write exactly {} sentences.", {"shape"}, range(2, 5),
                      lambda text, count: len(list(filter(words, re.split(r"[.!?]+(?:\s+|$)", text)))) == count),
    "bullets": Kind('Write exactly {} lines that each begin with "- ".', {"shape", "start"}, range(2, 5),
                    lambda text, count: [line[:2] for line in text.split("\n") if line.strip()] == ["- "] * count),
    "word": Kind('Use the word "{}".', {"word"}, WORDS, lambda text, word: word in words(text)),
    "twice": Kind('Use the word "{}" exactly twice.', {"word"}, WORDS,
                  lambda text, word: words(text).count(word) == 2),
    "without": Kind('Do not use the word "{}".', {"word"}, ["and", "is", "it", "of"],
                    lambda text, word: word not in words(text)),
    "no_comma": Kind("Use no comma.", {"comma"}, [","], lambda text, comma: comma not in text),
    "lower": Kind("Write in lower case only.", {"case"}, [""], lambda text, _: text == text.lower()),
    "upper": Kind("Write in capital letters only.", {"case"}, [""], lambda text, _: text == text.upper()),
    "begin": Kind('Begin with "{}".', {"start"}, ["Good news", "Dear friend", "In short", "Once", "Well", "Look"],
                  lambda text, phrase: bool(re.match(rf"{phrase}\b", text, re.IGNORECASE))),
    "end": Kind('End with "{}".', {"end"}, ["the end", "thank you", "good night", "see you soon", "for you"],
                lambda text, phrase: text.casefold().rstrip(" .!").endswith(phrase)),
    "quotes": Kind("Put the whole answer in double quotes.", {"shape", "start", "end"}, ['"'],
                   lambda text, quote: text.count(quote) == 2 and text[0] == text[-1] == quote),
    "json": Kind('Answer with a JSON object with one key, "{}".', {"shape", "start", "end", "length", "case"},
                 ["text", "answer", "reply"], is_json),
    "repeat": Kind("First repeat this: {}", {"shape", "start", "length", "case", "word"}, [""], str.startswith),
}  # fmt: skip


def make_row(rng: random.Random, count: int, held_out: bool) -> dict[str, Any]:
    subjects = SUBJECTS.split()
    kept = len(subjects) * 3 // 4
    subject = rng.choice(subjects[kept:] if held_out else subjects[:kept])
    request = rng.choice(REQUESTS).format(subject)
    constraints: dict[str, Any] = {}
    while len(constraints) < count:
        name, kind = rng.choice(list(KINDS.items()))
        if not any(kind.settles & KINDS[other].settles for other in constraints):
            constraints[name] = request if name == "repeat" else rng.choice(kind.values)
    sentences = [request, *(KINDS[name].says.format(value) for name, value in constraints.items())]
    return {
        "question": " ".join(sentences),
        "info": {"subject": subject, "sentences": sentences, "constraints": json.dumps(constraints)},
    }


def make_rows(count: int, seed: str, constraints: int, held_out: bool) -> list[dict[str, Any]]:
    rng, rows = random.Random(seed), dict[str, dict[str, Any]]()
    while len(rows) < count:
        row = make_row(rng, constraints, held_out)
        rows[row["question"]] = row
    return list(rows.values())


def on_subject(parser: vf.Parser, completion: vf.Messages, info: vf.Info) -> float:
    """Return 1.0 where, apart from the prompt's own sentences, there are four different words, one the subject.

    Its plural and possessive count, too.
    """
    text = (parser.parse_answer(completion) or "").casefold()
    for sentence in info["sentences"]:
        text = text.replace(sentence.casefold(), " ")
    said, subject = set(words(text)), info["subject"]
    forms = {f"{subject}{ending}" for ending in ("", "s", "es", "'s")} | {f"{subject[:-1]}ies"}
    return float(len(said) >= 4 and not said.isdisjoint(forms))


def constraints_kept(parser: vf.Parser, completion: vf.Messages, info: vf.Info) -> float:
    """Return the share of constraints that are kept; 0.0 off the subject and for more than 4,000 characters."""
    text = (parser.parse_answer(completion) or "").strip()
    if len(text) > LONGEST_ANSWER or not on_subject(parser, completion, info):
        return 0.0
    kept = [KINDS[name].kept(text, value) for name, value in json.loads(info["constraints"]).items()]
    return sum(kept) / len(kept)


def all_kept(parser: vf.Parser, completion: vf.Messages, info: vf.Info) -> float:
    """Return 1.0 where every constraint is kept."""
    return float(constraints_kept(parser, completion, info) == 1)


def load_environment(level: int = 1, num_train: int = 2000, num_eval: int = 200, seed: int = 0) -> vf.Environment:
    """Build the environment.

    Args:
        level: constraints in a prompt, from 1 to 3.
        num_train: training prompts.
        num_eval: evaluation prompts; they share no subject with training prompts, and do not depend on `num_train`.
        seed: chooses the prompts.

    Raises:
        vf.ConfigError: another level, or more than 5,000 prompts.
    """
    if level not in (1, 2, 3):
        raise vf.ConfigError(f"level={level!r} must be 1, 2 or 3.")
    if not (1 <= num_train <= MOST_ROWS and 1 <= num_eval <= MOST_ROWS):
        raise vf.ConfigError(f"num_train={num_train} and num_eval={num_eval} must be from 1 to {MOST_ROWS}.")
    parser = vf.MaybeThinkParser()
    return vf.SingleTurnEnv(
        dataset=make_rows(num_train, f"train {seed}", level, held_out=False),
        eval_dataset=make_rows(num_eval, f"eval {seed}", level, held_out=True),
        parser=parser,
        rubric=vf.Rubric(funcs=[constraints_kept, all_kept, on_subject], weights=[1.0, 0.0, 0.0], parser=parser),
        # room for a thought; a small model may never end
        sampling_args={"max_tokens": 1024},
    )
