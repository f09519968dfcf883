"""The fields of a text as JSON, and again after a correction ("No, the city is Paris."): two turns.

    vf-eval examples/real_model/corrections.py -m smollm2 -b http://127.0.0.1:8000/v1 -n 32 -r 2 -t 64 -T 1
    vf-train examples/real_model/corrections.toml

Made of the rows of `structured-output`: held-out texts share no template and no object with training, nor do the
sentences that correct.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from structured_output import field_match, fields

import verifiers as vf

__all__ = ["CorrectionsEnv", "load_environment"]

TRAINED = ["No, the {} is {}.", "That has changed: the {} is {} now.", "The {} is wrong. It should be {}."]
HELD_OUT = ["Sorry, I meant another {}: {}.", "Please correct the {} to {}."]


class CorrectionsEnv(vf.MultiTurnEnv):
    """An environment that corrects one field of the object, whatever the first answer was."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> list[vf.ChatMessage]:
        return [{"role": "user", "content": state["info"]["correction"]}]


def first_match(parser: vf.Parser, completion: vf.Messages, answer: str) -> float:
    """Return the share of fields that are right in the first answer."""
    return field_match(parser, completion[:1], answer)


def corrected_match(parser: vf.Parser, completion: vf.Messages, info: vf.Info) -> float:
    """Return the share of fields that are right in the answer to the correction."""
    return field_match(parser, completion[2:], info["corrected"])


def correct(
    rows: Iterable[Any], values: dict[str, set[str]], templates: list[str], seed: int
) -> Iterator[dict[str, Any]]:
    """Give each row another value for one of its fields."""
    rng = random.Random(seed)
    for row in rows:
        wanted = json.loads(row["answer"])
        key = rng.choice(list(wanted))
        other = rng.choice(sorted(values[key] - {wanted[key]}))
        correction = rng.choice(templates).format(key, other)
        info = {"correction": correction, "corrected": json.dumps({**wanted, key: other})}
        yield {"prompt": row["prompt"], "answer": row["answer"], "info": info}


def load_environment(num_train: int = 2000, num_eval: int = 64, seed: int = 0) -> vf.Environment:
    """Build the environment from `structured-output` at level 1."""
    base = vf.load_environment("structured-output", num_train=num_train, num_eval=num_eval, seed=seed)
    values: dict[str, set[str]] = defaultdict(set)
    for row in base.get_dataset():
        for key, value in json.loads(row["answer"]).items():
            values[key].add(value)
    parser = vf.MaybeThinkParser(fields)
    return CorrectionsEnv(
        max_turns=2,
        dataset=list(correct(base.get_dataset(), values, TRAINED, seed)),
        eval_dataset=list(correct(base.get_eval_dataset(), values, HELD_OUT, seed)),
        parser=parser,
        rubric=vf.Rubric(funcs=[first_match, corrected_match], weights=[0.5, 0.5], parser=parser),
    )
