"""One policy in two roles: it proposes a word, and, in a conversation of its own, spells that word backward."""

from __future__ import annotations

import random
import re
import string
from typing import Any

import verifiers as vf

__all__ = ["ProposeSolveEnv", "load_environment"]

SHORTEST, LONGEST = 3, 6
PROPOSE = "Propose a word of 3 to 6 different letters from {first} to {last}, with nothing around it."
SOLVE = "Spell backward: {word}"
ASKED = re.compile(r"letters from (.) to (.),")


class ProposeSolveEnv(vf.MultiTurnEnv):
    """An environment whose second turn is another role's: the solver sees the word and not how it came about."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(max_turns=2, **kwargs)

    async def get_model_response(
        self, state: vf.State, prompt: vf.Messages, client: Any = None, *args: Any, **kwargs: Any
    ) -> vf.ModelResponse:
        proposes = not state["trajectory"]
        client = (client or state["client"]).role("proposer" if proposes else "solver")
        return await super().get_model_response(state, prompt if proposes else prompt[-1:], client, *args, **kwargs)

    async def env_response(self, messages: Any, state: vf.State, **kwargs: Any) -> list[vf.ChatMessage]:
        return [{"role": "user", "content": SOLVE.format(word=said(messages[-1]))}]

    @vf.stop
    async def proposal_is_invalid(self, state: vf.State) -> bool:
        return len(state["trajectory"]) == 1 and not proposed(state["prompt"], state["completion"])


def said(message: vf.ChatMessage) -> str:
    """Return what an answer says behind its thoughts."""
    return str(vf.MaybeThinkParser().parse(message["content"] or ""))


def proposed(prompt: list[vf.ChatMessage], completion: list[vf.ChatMessage]) -> str:
    """Return the proposed word, or "" where it is not what was asked for."""
    asked = ASKED.search(prompt[-1]["content"])
    word = said(completion[0])
    is_word = re.fullmatch(f"[a-z]{{{SHORTEST},{LONGEST}}}", word) and len(set(word)) == len(word)
    return word if asked and is_word and (word[0], word[-1]) == asked.groups() else ""


@vf.role_reward
def by_role(prompt: list[vf.ChatMessage], completion: list[vf.ChatMessage]) -> dict[str, float]:
    """Return 1.0 for a solver who is right, and for a proposer whose word is both long and solved.

    A word that is as asked is worth 0.25 to the proposer; one that is solved 0.25 more a letter above two, up to 1.0.
    """
    word = proposed(prompt, completion)
    if not word:
        return {"proposer": 0.0}
    solved = said(completion[-1]) == word[::-1]
    return {"proposer": min(1.0, 0.25 + 0.25 * (len(word) - 2) * solved), "solver": float(solved)}


def letters(prompt: list[vf.ChatMessage], completion: list[vf.ChatMessage]) -> float:
    """Return the length of a proposed word, 0 for one that is not as asked."""
    return float(len(proposed(prompt, completion)))


def load_environment(num_train: int = 500, num_eval: int = 100, seed: int = 0) -> vf.Environment:
    """Build the environment.

    Args:
        num_train: training prompts, each with other first and last letters.
        num_eval: evaluation prompts; none of them is a training prompt, and they do not depend on `num_train`.
        seed: chooses the letters.

    Raises:
        vf.ConfigError: more prompts than there are pairs of letters.
    """
    pairs = [(first, last) for first in string.ascii_lowercase for last in string.ascii_lowercase if first != last]
    if min(num_train, num_eval) < 1 or num_train + num_eval > len(pairs):
        raise vf.ConfigError(
            f"There are {len(pairs)} pairs of letters, but num_train={num_train} and num_eval={num_eval} must be 1 "
            "or more and at most that together."
        )
    random.Random(seed).shuffle(pairs)
    rows = [{"question": PROPOSE.format(first=first, last=last), "answer": ""} for first, last in pairs]
    return ProposeSolveEnv(
        dataset=rows[num_eval : num_eval + num_train],
        eval_dataset=rows[:num_eval],
        rubric=vf.Rubric(funcs=[by_role, letters], weights=[1.0, 0.0]),
    )
