"""Invariants 5 and 10: a failure of the machinery is never a reward of 0, and every rollout is accounted for."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import tiny_world

import verifiers as vf
from verifiers.errors import NothingScoredError
from verifiers.testing import FakeOpenAIServer, Fault
from verifiers.types import Outcome

EXAMPLE_13 = ["x", "y", "x", Fault(400)]
"""Rewards 1, 0, 1, and a provider error."""


def counts_x(completion: Any, **kwargs: Any) -> float:
    return float(tiny_world._said(completion).count("x"))


class Script:
    """Gives each prompt's requests its list of answers, in any order of arrival; the probe gets "ok"."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers
        self._asked: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, body: dict[str, Any]) -> Any:
        if body["seed"] < 1000:
            return "ok"
        with self._lock:
            prompt = body["messages"][0]["content"]
            self._asked[prompt] += 1
            return self._answers[(self._asked[prompt] - 1) % len(self._answers)]


def outcome_counts(trainer: Any) -> dict[str, float]:
    entry = next(entry for entry in trainer.state.log_history if "rollouts/launched" in entry)
    return {name.removeprefix("outcomes/"): value for name, value in entry.items() if name.startswith("outcomes/")}


def trained_advantages(trainer: Any) -> list[float]:
    found = []
    for *_, batch, place in trainer.rows():
        found.append(float(batch["advantages"][place][batch["loss_mask"][place].bool()][0]))
    return sorted(found)


def test_example_13_a_failed_rollout_has_no_row_no_reward_and_is_counted(
    make_fake_trainer: Callable[..., Any],
) -> None:
    with FakeOpenAIServer(Script(EXAMPLE_13)) as fake:
        trainer = make_fake_trainer(tiny_world.single_turn(reward=counts_x), fake.url, max_steps=1)
        trainer.train()
    std = (1 / 3) ** 0.5
    low, high = -(2 / 3) / (std + 1e-4), (1 / 3) / (std + 1e-4)
    assert trained_advantages(trainer) == pytest.approx([low, low, high, high, high, high], abs=1e-6)
    assert trainer.logged("reward") == [pytest.approx(2 / 3)]
    assert trainer.logged("reward/denominator/completions_global") == [6.0]
    assert trainer.logged("reward_std") == [pytest.approx(std)]
    counts = outcome_counts(trainer)
    assert counts["provider_error"] == 2
    assert counts["completed"] == 6
    assert trainer.logged("rollouts/launched") == [8.0]
    assert trainer.logged("rows/dropped/provider_error") == [2.0]
    assert trainer.logged("rows/trained") == [6.0]


class Raising(vf.SingleTurnEnv):
    """Fails before, within or after the model's answer, by the prompt's first letter; one rollout hangs."""

    async def rollout(self, client: Any, model: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        word = prompt[-1]["content"].split()[0]
        if word == "raise":
            raise KeyError("the environment's own mistake")
        if word == "exit":
            sys.exit("a tool called exit")
        if word == "timeout":
            raise TimeoutError("its own, not the run's")
        if word == "hang":
            await asyncio.Event().wait()
        completion, state = await super().rollout(client, model, prompt, *args, **kwargs)
        return completion, state


def grades(completion: Any, prompt: Any, **kwargs: Any) -> float:
    word = prompt[-1]["content"].split()[0]
    if word == "ungraded":
        raise ZeroDivisionError("the reward function's mistake")
    return float("nan") if word == "nan" else counts_x(completion)


KINDS = {
    "good": Outcome.COMPLETED,
    "long": Outcome.TRUNCATED,
    "overlong": Outcome.TRUNCATED,
    "raise": Outcome.ENVIRONMENT_ERROR,
    "exit": Outcome.ENVIRONMENT_ERROR,
    "timeout": Outcome.ENVIRONMENT_ERROR,
    "hang": Outcome.TIMED_OUT,
    "refuse": Outcome.PROVIDER_ERROR,
    "ungraded": Outcome.GRADING_ERROR,
    "nan": Outcome.GRADING_ERROR,
}


def mixed_answer(body: dict[str, Any]) -> Any:
    word = body["messages"][-1]["content"].split()[0]
    if word == "refuse":
        return Fault(401)
    if word == "overlong":
        message = "This model's maximum context length is 9 tokens."
        return Fault(400, body={"error": {"message": message, "code": "context_length_exceeded"}})
    return "x" * (50 if word == "long" else 1 + body["seed"] % 3)


@pytest.mark.slow
def test_launched_rollouts_are_the_sum_over_outcomes_whatever_happens(make_fake_trainer: Callable[..., Any]) -> None:
    # only the last block has to wait for a deadline, which all that end by themselves must meet
    ending = ["good" if kind == "hang" else kind for kind in KINDS]
    env = Raising(
        dataset=[{"question": f"{kind} {i}"} for i, kinds in enumerate((ending, KINDS)) for kind in kinds],
        rubric=vf.Rubric(funcs=[grades]),
    )
    groups = len(KINDS)
    with FakeOpenAIServer(mixed_answer) as fake:
        trainer = make_fake_trainer(
            env,
            fake.url,
            max_steps=2,
            per_device_train_batch_size=4 * groups,
            gradient_accumulation_steps=1,
            rollout_timeout=6.0,
            shuffle_dataset=False,
        )
        trainer.train()
    for entry in (entry for entry in trainer.state.log_history if "rollouts/launched" in entry):
        counted = {name: value for name, value in entry.items() if name.startswith("outcomes/")}
        assert entry["rollouts/launched"] == 4 * groups == sum(counted.values())
    block = trainer.last_block
    assert block is not None
    assert sum(block.outcomes().values()) == 4 * groups
    for group in block.groups:
        kind = str(group.rollouts[0].prompt[-1]["content"]).split()[0]
        assert {rollout.outcome for rollout in group.rollouts} == {KINDS[kind]}, kind
        for rollout in group.rollouts:
            assert (rollout.reward is None) == rollout.outcome.is_failure
            assert (rollout.failure is not None) == rollout.outcome.is_failure
    trained_prompts = [row[0] for row in trainer.rows()]
    trained = {
        kind
        for kind in KINDS
        for rollout in block
        if rollout.prompt[-1]["content"].startswith(f"{kind} ")
        and any(list(row.prompt_ids) in trained_prompts for row in rollout.rows)
    }
    assert trained == {"good", "long"}


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("refuse", r"8 provider_error.*most often: ProviderError.*answered 401.*\(8 times\)"),
        ("raise", r"8 environment_error.*most often: KeyError.*own mistake"),
        ("ungraded", r"8 grading_error.*ZeroDivisionError"),
        ("hang", r"8 timed_out.*rollout_timeout_s=0.3"),
    ],
)
def test_a_block_without_any_score_stops_the_run_with_the_commonest_cause(
    make_fake_trainer: Callable[..., Any], kind: str, cause: str
) -> None:
    env = Raising(dataset=[{"question": f"{kind} {i}"} for i in range(4)], rubric=vf.Rubric(funcs=[grades]))
    with FakeOpenAIServer(lambda body: "ok" if body["seed"] < 1000 else mixed_answer(body)) as fake:
        trainer = make_fake_trainer(env, fake.url, rollout_timeout=0.3 if kind == "hang" else 60.0)
        with pytest.raises(NothingScoredError, match=cause) as raised:
            trainer.train()
    assert "none of 8 rollouts got a reward" in str(raised.value)
    assert trainer.state.global_step == 0
    assert trainer.seen == []
