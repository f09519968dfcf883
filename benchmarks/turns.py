"""Memory of scored training rollouts with many turns, which a block holds until it is trained.

    python benchmarks/turns.py [--turns 100] [--rollouts 8]

A scripted policy answers each turn with 320 token ids and their log-probs, and with the ids of the whole prompt, as
a server does. The process is measured before and after a block of such rollouts was played and scored: its resident
memory, and what Python holds. Ends with one line of JSON: `mb_per_100_turns` is the resident memory of one rollout
of 100 turns, in megabytes; `held_mb` what Python holds for one of `--turns`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import tracemalloc
from array import array
from typing import Any

import verifiers as vf
from verifiers.inference.wire import WireObject
from verifiers.rollouts.block import BatchRequest, BlockRun
from verifiers.rollouts.rollout import RolloutRequest, ScoredBlock
from verifiers.rollouts.run import Run
from verifiers.types import RolloutKey

TOKENS = 320
ENVIRONMENT_TOKENS = 20


class Policy:
    """A backend that answers each call with other ids, above those that Python shares."""

    base_url, api_key = "http://policy/v1", ""

    def __init__(self) -> None:
        self._ids: dict[Any, array[int]] = {}
        self._next = 1000

    def _new_ids(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))

    async def call(self, path: str, arguments: Any) -> WireObject:
        rollout, turns = arguments["messages"][0]["content"], len(arguments["messages"])
        prompt = [*self._ids.get(rollout, ()), *self._new_ids(ENVIRONMENT_TOKENS)] if turns > 1 else [1, 2, 3]
        answer = self._new_ids(TOKENS)
        self._ids[rollout] = array("q", [*prompt, *answer])
        message = {"role": "assistant", "content": f"answer {turns} " * 100}
        logprobs = {"content": [{"token": "", "logprob": -1.0 - place / TOKENS} for place in range(TOKENS)]}
        choice = {"message": message, "finish_reason": "stop", "token_ids": answer, "logprobs": logprobs}
        return WireObject({"id": "1", "choices": [choice], "prompt_token_ids": prompt, "usage": {}})

    async def close(self) -> None:
        """Nothing is open."""


class Turns(vf.MultiTurnEnv):
    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        return [{"role": "user", "content": f"turn {len(messages)}"}]


def reward(completion: vf.Messages) -> float:
    return float(len(completion))


def play(turns: int, rollouts: int) -> ScoredBlock:
    """Play a block of one group, as training does."""
    env = Turns(max_turns=turns, dataset=[{"question": "q"}], rubric=vf.Rubric(funcs=[reward]))
    run = Run(env, Policy(), "policy", require_tokens=True)
    requests = [
        RolloutRequest(RolloutKey(0, 0, number), [{"role": "user", "content": f"rollout {number}"}])
        for number in range(rollouts)
    ]

    async def block() -> ScoredBlock:
        return await BlockRun(run, BatchRequest(0, requests)).run(0)

    return asyncio.run(block())


def resident_mb() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def held_mb(turns: int) -> float:
    """Return what Python holds for one scored rollout, in megabytes."""
    play(2, 1)
    gc.collect()
    tracemalloc.start()
    block = play(turns, 1)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(block.rollouts[0].rows) == 1, "the rollout forked"
    return held / 1e6


def added_mb(turns: int, rollouts: int) -> float:
    """Return by how much the process grew for a block of scored rollouts, in megabytes."""
    play(2, 1)
    gc.collect()
    before = resident_mb()
    block = play(turns, rollouts)
    gc.collect()
    added = resident_mb() - before
    assert len(block.rollouts) == rollouts
    return added


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--rollouts", type=int, default=8)
    args = parser.parse_args()
    added = added_mb(args.turns, args.rollouts)
    figures = {
        "turns": args.turns,
        "rollouts": args.rollouts,
        "added_mb": added,
        "mb_per_100_turns": added / args.rollouts * 100 / args.turns,
        "held_mb": held_mb(args.turns),
    }
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
