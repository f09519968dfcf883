"""The shelf of packages as tests see it: which there are, their baselines, and rollouts by scripted policies.

`python tests/environments/shelf.py NAME` prints the lines for a README's table.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import tomllib
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import verifiers as vf
from verifiers.evals.evaluation_run import iter_requests
from verifiers.evals.statistics import Estimate, mean_and_stderr_clustered
from verifiers.inference.endpoint import ClientBackend
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.rollouts.run import Run
from verifiers.testing import FakeClient

ENVIRONMENTS = Path(__file__).parents[2] / "environments"
NOT_HERE = {"reasoning_gym_env"}
"""Packages with tests of their own."""

_row: ContextVar[dict[str, Any]] = ContextVar("row")


def names() -> list[str]:
    """Return the packages' module names, which are their folders' names."""
    return sorted(
        path.parent.name for path in ENVIRONMENTS.glob("*/pyproject.toml") if path.parent.name not in NOT_HERE
    )


def metadata(name: str) -> dict[str, Any]:
    return tomllib.loads((ENVIRONMENTS / name / "pyproject.toml").read_text())


def readme(name: str) -> str:
    return (ENVIRONMENTS / name / "README.md").read_text()


# -- policies -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """The knowledge of a scripted policy when it is asked: the conversation and, unlike a model's, the row."""

    body: dict[str, Any]
    row: dict[str, Any]

    @property
    def messages(self) -> list[dict[str, Any]]:
        return list(self.body["messages"])

    @property
    def said(self) -> list[dict[str, Any]]:
        """The messages after the prompt."""
        return self.messages[len(self.row["prompt"]) :]

    @property
    def question(self) -> str:
        prompt = self.row["prompt"]
        return prompt if isinstance(prompt, str) else prompt[-1]["content"]

    @property
    def newest(self) -> str:
        return self.messages[-1]["content"]

    @property
    def number(self) -> int:
        """Of the turn, from 0."""
        return sum(message["role"] == "assistant" for message in self.said)

    @property
    def answer(self) -> Any:
        return self.row["answer"]

    @property
    def rng(self) -> random.Random:
        """Differs from rollout to rollout and turn to turn, whatever the order they run in."""
        return random.Random(str(self.body["seed"]))


Policy = Callable[[Turn], str | dict[str, Any]]


def play(env: vf.Environment, policy: Policy, prompts: int = 5, rollouts: int = 1) -> ScoredBlock:
    """Play the first evaluation rows by the evaluator's own runner; the scripted policy can look at the row."""
    # the rollouts of a group are those of its members
    played = [env, *getattr(env, "envs", [])]

    def told_the_row(env_rollout: Callable[..., Any]) -> Callable[..., Any]:
        def rollout(*args: Any, **columns: Any) -> Awaitable[Any]:
            # called with the row, or with its columns
            _row.set(dict(args[0]) if isinstance(args[0], Mapping) else {"prompt": args[2], **columns})
            result: Awaitable[Any] = env_rollout(*args, **columns)
            return result

        return rollout

    async def run() -> ScoredBlock:
        client = FakeClient(lambda body: policy(Turn(body, _row.get())))
        runner = Run(env, ClientBackend(client), "scripted")
        return ScoredBlock(0, await runner.run_groups(iter_requests(env.get_eval_dataset(prompts), rollouts, seed=0)))

    for each in played:
        each.rollout = told_the_row(each.rollout)  # type: ignore[method-assign]
    try:
        return asyncio.run(run())
    finally:
        for each in played:
            del each.rollout


def reward_of(env: vf.Environment, policy: Policy, prompts: int = 20) -> float:
    """Return the mean reward over the first evaluation rows."""
    return _reward(play(env, policy, prompts)).mean


def _reward(block: ScoredBlock) -> Estimate:
    return mean_and_stderr_clustered([[one.reward or 0.0 for one in group.scored] for group in block.groups])


# -- tables of baselines ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Baseline:
    """A line of a README's table, its numbers as they are written."""

    policy: str
    prompts: int
    rollouts: int
    reward: str
    stderr: str

    @classmethod
    def of(cls, policy: str, rollouts: int, estimate: Estimate) -> Baseline:
        return cls(policy, estimate.prompts, rollouts, f"{estimate.mean:.3f}", f"{estimate.stderr:.3f}")

    def __str__(self) -> str:
        return f"| `{self.policy}` | {self.prompts} | {self.rollouts} | {self.reward} | {self.stderr} |"


_LINE = re.compile(r"^\| `(\w+)` \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


def baselines(name: str) -> list[Baseline]:
    """Return the lines of the README's table."""
    found = _LINE.findall(readme(name))
    return [
        Baseline(policy, int(prompts), int(rollouts), reward, stderr)
        for policy, prompts, rollouts, reward, stderr in found
    ]


def measure(env: vf.Environment, policy_name: str, policy: Policy, prompts: int, rollouts: int) -> Baseline:
    """Return the line as it comes out now."""
    block = play(env, policy, prompts, rollouts)
    outcomes = {str(outcome) for outcome in block.outcomes()}
    assert outcomes == {"completed"}, (outcomes, block.commonest_failure())
    return Baseline.of(policy_name, rollouts, _reward(block))


def main(name: str, prompts: int = 100, rollouts: int = 2) -> None:
    sys.path.extend(str(ENVIRONMENTS / other) for other in names())
    from shelf_policies import POLICIES, open_environment

    with open_environment(name) as env:
        for policy_name, policy in POLICIES[name].items():
            print(measure(env, policy_name, policy, prompts, rollouts))


if __name__ == "__main__":
    # the policies import this module by its name, and must find this one
    sys.modules["shelf"] = sys.modules["__main__"]
    main(sys.argv[1], *map(int, sys.argv[2:]))
