"""`Environment.run_rollouts` plays every rollout there is, and an override of it takes effect everywhere."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.evals.evaluation_run import new_run
from verifiers.inference.endpoint import ClientBackend
from verifiers.inference.limiter import Limiter
from verifiers.inference.retry import RetryPolicy
from verifiers.rollouts.block import GroupPolicy
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import Group, RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.testing import FakeClient, FakeOpenAIServer, Fault
from verifiers.types import Outcome, RolloutKey

ROWS: list[dict[str, Any]] = [{"prompt": [{"role": "user", "content": f"q{row}"}], "answer": "4"} for row in range(3)]
ONE_TRY = RetryPolicy(max_attempts=1)


def correct(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


class Env(vf.SingleTurnEnv):
    """Counts how many requests each call of run_rollouts was given."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(dataset=ROWS, eval_dataset=ROWS, rubric=vf.Rubric([correct]), **kwargs)
        self.asked: list[int] = []

    async def run_rollouts(self, requests: Any, run: Any) -> Any:
        self.asked.append(len(requests))
        return await self.play_all(requests, run)

    async def play_all(self, requests: Any, run: Any) -> Any:
        return await super().run_rollouts(requests, run)


class Wraps(Env):
    """Changes the prompts on their way in, and the states on their way out."""

    async def play_all(self, requests: Any, run: Any) -> Any:
        more = [
            dataclasses.replace(request, prompt=[*request.prompt, {"role": "user", "content": "think"}])
            for request in requests
        ]
        rollouts = await super().play_all(more, run)
        for rollout in rollouts:
            rollout.state["wrapped"] = True
        return rollouts


class OneAfterTheOther(Env):
    async def play_all(self, requests: Any, run: Any) -> Any:
        return [rollout for request in requests for rollout in await super(Env, self).run_rollouts([request], run)]


class Twice(Env):
    """Plays each rollout again, with its first answer in the prompt."""

    async def play_all(self, requests: Any, run: Any) -> Any:
        first = await super().play_all(requests, run)
        again = [
            dataclasses.replace(request, prompt=[*request.prompt, *rollout.completion])
            for request, rollout in zip(requests, first, strict=True)
        ]
        return await super().play_all(again, run)


KINDS = [Wraps, OneAfterTheOther, Twice]


def requests(example: int = 0, size: int = 4) -> list[RolloutRequest]:
    prompt = ROWS[example]["prompt"]
    return [RolloutRequest(RolloutKey(0, example, g), prompt, "4", seed=100 * example + g) for g in range(size)]


def run_of(env: Any, answers: Any = "4", **options: Any) -> Run:
    return Run(env, ClientBackend(FakeClient(answers)), "m", **{"retry": ONE_TRY, **options})


async def run(env: Any, answers: Any = "4", **options: Any) -> Group:
    return await run_of(env, answers, **options).run_group(requests())


def outcomes(rollouts: Any) -> list[Outcome]:
    return [rollout.outcome for rollout in rollouts]


# -- asked everywhere -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_training_asks_an_override_for_each_group_and_records_every_rollouts_own_tokens(kind: type[Env]) -> None:
    env = kind()
    with (
        FakeOpenAIServer(lambda body: str(body["seed"])) as server,
        AsyncBatchGenerator(env, server.url, "m", retry=ONE_TRY, generation_timeout_s=30.0) as generator,
    ):
        planned = [*requests(0), *requests(1)]
        generator.submit_batch(vf.BatchRequest(0, planned))
        block = generator.get_batch(0)
        assert generator.launched == generator.finished == sum(block.outcomes().values()) == 8
    assert env.asked == [4, 4]
    assert [rollout.key for rollout in block] == [request.key for request in planned]
    assert outcomes(block) == [Outcome.COMPLETED] * 8
    said = [rollout.completion[-1]["content"] for rollout in block]  # type: ignore[index]
    assert len(set(said)) == 8
    for rollout, text in zip(block, said, strict=True):
        # a rollout that is played twice has both answers in one row
        assert (rollout.turns, len(rollout.rows), rollout.forks) == (2 if kind is Twice else 1, 1, 0)
        assert text in "".join(map(chr, rollout.rows[0].completion_ids))


@pytest.mark.parametrize("in_a_group", [False, True])
async def test_an_evaluation_asks_an_override_for_the_rollouts_of_a_prompt(in_a_group: bool, tmp_path: Path) -> None:
    env = Env()
    whole = vf.EnvGroup([env]) if in_a_group else env
    evaluation = new_run(tmp_path, {"num_examples": 3, "rollouts_per_example": 2, "seed": 0}, whole)
    await evaluation.run(run_of(whole), whole.rows_to_evaluate(), None)
    assert env.asked == [2, 2, 2]
    assert evaluation.results.scored == 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("options", "asked"), [({}, [1, 1, 1]), ({"interleave_scoring": False}, [3])])
async def test_the_classic_calls_ask_an_override(kind: type[Env], options: dict[str, Any], asked: list[int]) -> None:
    env = kind()
    outputs = await env.evaluate(FakeClient("4"), "m", **options)
    assert env.asked == asked
    assert outputs.reward == [1.0] * 3
    assert [state.get("wrapped", False) for state in outputs.state] == [kind is Wraps] * 3


async def test_a_group_of_environments_asks_each_ones_override_for_its_rows() -> None:
    one, two = Wraps(), Env()
    group = vf.EnvGroup([one, two], ["one", "two"])
    outputs = await group.evaluate(FakeClient("4"), "m", interleave_scoring=False)
    assert (one.asked, two.asked) == ([3], [3])
    assert outputs.reward == [1.0] * 6
    assert [state.get("wrapped", False) for state in outputs.state] == [task == "one" for task in outputs.task]


# -- outcomes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, Env])
async def test_one_rollouts_failure_is_its_own(kind: type[Env]) -> None:
    def answer(body: dict[str, Any]) -> Any:
        return Fault(500) if seeds.setdefault(body["seed"], len(seeds)) == 1 else "4"

    seeds: dict[int, int] = {}
    group = await run(kind(), answer)
    if kind is not Twice:
        assert outcomes(group.rollouts) == [
            Outcome.COMPLETED, Outcome.PROVIDER_ERROR, Outcome.COMPLETED, Outcome.COMPLETED,
        ]  # fmt: skip
    else:
        # the second time it was answered
        assert outcomes(group.rollouts) == [Outcome.COMPLETED] * 4


async def test_an_override_that_fails_gives_every_rollout_one_outcome() -> None:
    class Fails(Env):
        async def play_all(self, requests: Any, run: Any) -> Any:
            raise LookupError("its own mistake")

    group = await run(Fails())
    assert outcomes(group.rollouts) == [Outcome.ENVIRONMENT_ERROR] * 4
    for rollout in group.rollouts:
        assert re.search("LookupError: its own mistake", str(rollout.failure))


async def test_waiting_for_a_slot_is_no_time_of_the_rollout(pass_time: Callable[[float], None]) -> None:
    async def answer(body: dict[str, Any]) -> str:
        pass_time(5.0)
        # every deadline that is over by then ends its rollout
        await asyncio.sleep(0.002)
        return "4"

    # twelve rollouts of five seconds on the loop's clock, one after the other
    groups = await run_of(Env(), answer, limiter=Limiter(1), rollout_timeout_s=30.0).run_groups(
        [requests(0), requests(1), requests(2)]
    )
    assert [outcomes(group.rollouts) for group in groups] == [[Outcome.COMPLETED] * 4] * 3


def test_failed_rollouts_are_run_again_through_the_override() -> None:
    asked: list[int] = []

    class FailsAtFirst(Env):
        async def play_all(self, requests: Any, run: Any) -> Any:
            asked.append(len(requests))
            if len(asked) == 1:
                raise LookupError("not yet")
            return await super().play_all(requests, run)

    options: dict[str, Any] = {"require_tokens": False, "group_policy": GroupPolicy(retries=1)}
    with AsyncBatchGenerator(FailsAtFirst(), FakeClient("4"), "m", **options) as generator:
        generator.submit_batch(vf.BatchRequest(0, requests()))
        block = generator.get_batch(0, 30.0)
    assert asked == [4, 4]
    assert outcomes(block) == [Outcome.COMPLETED] * 4
    assert [rollout.attempts for rollout in block] == [2] * 4


# -- mistakes -------------------------------------------------------------------------------------------------------


async def test_other_results_than_one_rollout_a_request_are_refused() -> None:
    class ReturnsFewer(Env):
        async def play_all(self, requests: Any, run: Any) -> Any:
            return (await super().play_all(requests, run))[1:]

    with pytest.raises(vf.ConfigError, match=r"ReturnsFewer\.run_rollouts returned 3 results for 4 requests"):
        await run(ReturnsFewer())
    # also in a group, which gives its environments their requests
    with pytest.raises(vf.ConfigError, match=r"ReturnsFewer\.run_rollouts returned 3 results for 4 requests"):
        await run(vf.EnvGroup([ReturnsFewer()]))


def test_an_override_in_columns_is_refused_with_the_present_signature() -> None:
    with pytest.raises(vf.ConfigError, match=r"write it as run_rollouts\(self, requests, run\)"):

        class InColumns(vf.SingleTurnEnv):
            async def run_rollouts(self, client: Any, model: str, prompts: Any, answers: Any, **kwargs: Any) -> Any:  # type: ignore[override]
                return []
