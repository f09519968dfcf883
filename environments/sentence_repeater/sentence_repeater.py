"""Repeat sentence k of a text in turn k: several turns, with what is asked in each of them in the row's info."""

from __future__ import annotations

import itertools
import random
from typing import Any

import verifiers as vf

__all__ = ["SentenceRepeaterEnv", "load_environment"]

NAMES = ["Alma", "Bruno", "Carla", "Dario", "Elif", "Femi", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Leo"]
DID = ["baked bread", "climbed the wall", "fed the ducks", "fixed a bicycle", "lost a glove", "made tea",
       "planted beans", "read a map", "swept the yard", "wrote a letter"]  # fmt: skip
WITH = ["with a friend", "without a word", "in the cold", "for an hour", "in great haste", "on one leg"]
WHEN = ["on Monday", "on Friday", "in March", "last night", "at noon", "before breakfast", "after the storm"]

SYSTEM_PROMPT = "Repeat exactly the sentence that is asked for, word for word, and write nothing else."


class SentenceRepeaterEnv(vf.MultiTurnEnv):
    """An environment that asks the prompt first, then `info["questions"]`; `info["sentences"]` has the answers."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> list[vf.ChatMessage]:
        return [{"role": "user", "content": state["info"]["questions"][state["turn"] - 1]}]

    @vf.stop
    async def all_asked(self, state: vf.State) -> bool:
        return bool(state["turn"] >= len(state["info"]["sentences"]))


def said_in_turns(parser: vf.Parser, completion: vf.Messages) -> list[str]:
    return [(parser.parse_answer([message]) or "").strip() for message in parser.get_assistant_messages(completion)]


def repeated(parser: vf.Parser, completion: vf.Messages, info: vf.Info) -> float:
    """Return the share of turns that repeat their sentence exactly, of all planned turns."""
    pairs = itertools.zip_longest(said_in_turns(parser, completion), info["sentences"])
    return sum(said == wanted for said, wanted in pairs) / len(info["sentences"])


def all_repeated(parser: vf.Parser, completion: vf.Messages, info: vf.Info) -> float:
    """Return 1.0 where every turn repeats its sentence exactly."""
    return float(said_in_turns(parser, completion) == info["sentences"])


def make_row(sentences: list[str]) -> dict[str, Any]:
    text = " ".join(sentences)
    return {
        "question": f"{text}\n\nRepeat sentence 1.",
        "info": {
            "questions": [f"Repeat sentence {number}." for number in range(2, len(sentences) + 1)],
            "sentences": sentences,
        },
    }


def load_environment(
    num_sentences: int = 4, num_train: int = 500, num_eval: int = 100, seed: int = 0
) -> vf.Environment:
    """Build the environment.

    Args:
        num_sentences: sentences of a text, which is also the number of turns; at least 2.
        num_train: training texts.
        num_eval: evaluation texts; they share no sentence with training texts, and do not depend on `num_train`.
        seed: chooses the sentences.

    Raises:
        vf.ConfigError: more sentences than the grammar can say, which is 5,040.
    """
    sentences = [f"{' '.join(words)}." for words in itertools.product(NAMES, DID, WITH, WHEN)]
    count = num_train + num_eval
    if min(num_train, num_eval) < 1 or num_sentences < 2 or count * num_sentences > len(sentences):
        raise vf.ConfigError(
            f"num_train={num_train} and num_eval={num_eval} must be 1 or more, num_sentences={num_sentences} 2 or "
            f"more, and all sentences together at most {len(sentences)}."
        )
    random.Random(seed).shuffle(sentences)
    rows = [
        make_row(sentences[start : start + num_sentences]) for start in range(0, count * num_sentences, num_sentences)
    ]
    parser = vf.MaybeThinkParser()
    return SentenceRepeaterEnv(
        max_turns=num_sentences,
        dataset=rows[num_eval:],
        eval_dataset=rows[:num_eval],
        system_prompt=SYSTEM_PROMPT,
        parser=parser,
        rubric=vf.Rubric(funcs=[repeated, all_repeated], weights=[1.0, 0.0], parser=parser),
    )
