"""`Environment.run_rollouts` plays every rollout there is, and an override of it takes effect everywhere."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

import verifiers as vf
from verifiers.evals.evaluation_loop import iter_requests, run_units
from verifiers.inference.endpoint import ClientBackend
from verifiers.inference.limiter import Limiter
from verifiers.inference.retry import RetryPolicy
from verifiers.rollouts.batch_client import BatchClient
from verifiers.rollouts.block import GroupPolicy
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import STRAGGLER, Group, Rollout, RolloutRequest
from verifiers.rollouts.runner import RolloutRunner
from verifiers.testing import FakeClient, FakeOpenAIServer, Fault
from verifiers.types import Outcome, RolloutKey

ROWS: list[dict[str, Any]] = [{"prompt": [{"role": "user", "content": f"q{row}"}], "answer": "4"} for row in range(3)]
ONE_TRY = RetryPolicy(max_attempts=1)


def correct(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


class Env(vf.SingleTurnEnv):
    """Counts how many prompts each call of run_rollouts was given."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(dataset=ROWS, eval_dataset=ROWS, rubric=vf.Rubric([correct]), **kwargs)
        self.asked: list[int] = []

    async def run_rollouts(self, client: Any, model: str, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        self.asked.append(len(prompts))
        return await self.play(client, model, prompts, *args, **kwargs)

    async def play(self, *args: Any, **kwargs: Any) -> Any:
        return await super().run_rollouts(*args, **kwargs)


class Wraps(Env):
    """Changes the prompts on their way in, and the states on their way out."""

    async def play(self, client: Any, model: str, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        longer = [[*prompt, {"role": "user", "content": "think"}] for prompt in prompts]
        results = await super().play(client, model, longer, *args, **kwargs)
        for _, state in results:
            state["wrapped"] = True
        return results


class CallsEach(Env):
    """Plays each rollout itself, with the client of its prompt."""

    async def play(
        self, client: Any, model: str, prompts: Any, answers: Any, tasks: Any = None, infos: Any = None, **kwargs: Any
    ) -> Any:
        arguments = kwargs["sampling_args"]
        return await asyncio.gather(
            *(
                self.rollout(client[index], model, prompt, answer=answers[index], sampling_args=arguments)
                for index, prompt in enumerate(prompts)
            )
        )


class OneAfterTheOther(Env):
    """Plays slices of the batch with `super().run_rollouts`, one prompt each."""

    async def play(self, client: Any, model: str, prompts: Any, answers: Any, *args: Any, **kwargs: Any) -> Any:
        results = []
        for index, prompt in enumerate(prompts):
            one = client[index] if index % 2 else client[index : index + 1]
            results += await vf.Environment.run_rollouts(self, one, model, [prompt], [answers[index]])
        return results


KINDS = [Wraps, CallsEach, OneAfterTheOther]


def requests(example: int = 0, size: int = 4) -> list[RolloutRequest]:
    prompt = ROWS[example]["prompt"]
    return [RolloutRequest(RolloutKey(0, example, g), prompt, "4", seed=100 * example + g) for g in range(size)]


def runner(env: Any, answers: Any = "4", **options: Any) -> RolloutRunner:
    return RolloutRunner(env, ClientBackend(FakeClient(answers)), "m", **{"retry": ONE_TRY, **options})


async def run(env: Any, answers: Any = "4", **options: Any) -> Group:
    return await runner(env, answers, **options).run_group(requests())


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
        generator.submit_batch(vf.BatchRequest.of_rollouts(0, planned))
        block = generator.get_batch(0)
        assert generator.launched == generator.finished == sum(block.outcomes().values()) == 8
    assert env.asked == [4, 4]
    assert [rollout.key for rollout in block] == [request.key for request in planned]
    assert outcomes(block) == [Outcome.COMPLETED] * 8
    said = [rollout.completion[-1]["content"] for rollout in block]  # type: ignore[index]
    assert len(set(said)) == 8
    for rollout, text in zip(block, said, strict=True):
        assert rollout.turns == 1
        assert "".join(map(chr, rollout.rows[0].completion_ids)).startswith(text)


@pytest.mark.parametrize("kind", KINDS)
async def test_evaluation_asks_an_override(kind: type[Env]) -> None:
    env, done = kind(), list[Rollout]()
    await run_units(runner(env), iter_requests(env.get_eval_dataset(), 2, seed=1), done.append)
    assert env.asked == [2, 2, 2]
    assert [rollout.reward for rollout in done] == [1.0] * 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("options", "asked"), [({}, [1, 1, 1]), ({"interleave_scoring": False}, [3])])
async def test_the_classic_calls_ask_an_override(kind: type[Env], options: dict[str, Any], asked: list[int]) -> None:
    env = kind()
    outputs = await env.evaluate(FakeClient("4"), "m", **options)
    assert env.asked == asked
    assert outputs.reward == [1.0] * 3
    assert [state.get("wrapped", False) for state in outputs.state] == [kind is Wraps] * 3


async def test_an_override_may_be_called_with_a_client_of_ones_own() -> None:
    client = FakeClient("4")
    results = await Wraps().run_rollouts(client, "m", [row["prompt"] for row in ROWS], [""] * 3)
    assert [completion[-1]["content"] for completion, _ in results] == ["4"] * 3
    assert {len(state["prompt"]) for _, state in results} == {2}


async def test_a_group_of_environments_asks_each_ones_override_for_its_rows() -> None:
    one, two = Wraps(), Env()
    group = vf.EnvGroup([one, two], ["one", "two"])
    outputs = await group.evaluate(FakeClient("4"), "m", interleave_scoring=False)
    assert (one.asked, two.asked) == ([3], [3])
    assert outputs.reward == [1.0] * 6
    assert [state.get("wrapped", False) for state in outputs.state] == [task == "one" for task in outputs.task]


# -- outcomes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, Env])
async def test_one_rollouts_failure_is_its_own_where_the_environment_records_it(kind: type[Env]) -> None:
    def answer(body: dict[str, Any]) -> Any:
        return Fault(500) if seeds.setdefault(body["seed"], len(seeds)) == 1 else "4"

    seeds: dict[int, int] = {}
    group = await run(kind(), answer)
    if kind is CallsEach:
        # it let the error of one pass through, and with it the results of all
        assert Outcome.PROVIDER_ERROR in outcomes(group.rollouts)
        assert {o.is_failure for o in outcomes(group.rollouts)} == {True}
    else:
        assert outcomes(group.rollouts) == [
            Outcome.COMPLETED,
            Outcome.PROVIDER_ERROR,
            Outcome.COMPLETED,
            Outcome.COMPLETED,
        ]


async def raise_error(*args: Any, **kwargs: Any) -> Any:
    raise LookupError("its own mistake")


async def never_end(*args: Any, **kwargs: Any) -> Any:
    await asyncio.Event().wait()


async def give_none(client: Any, model: str, prompts: Any, *args: Any, **kwargs: Any) -> Any:
    return [None] * len(prompts)


@pytest.mark.parametrize(
    ("play", "outcome", "cause"),
    [
        (raise_error, Outcome.ENVIRONMENT_ERROR, "LookupError: its own mistake"),
        (
            give_none,
            Outcome.ENVIRONMENT_ERROR,
            r"TypeError: rollout returned None; it must return",
        ),
        (never_end, Outcome.TIMED_OUT, "did not end within rollout_timeout_s=0.05"),
    ],
)
async def test_an_override_that_fails_gives_every_rollout_one_outcome(
    play: Callable[..., Any], outcome: Outcome, cause: str
) -> None:
    env = Env()
    env.play = play  # type: ignore[method-assign]
    group = await run(env, rollout_timeout_s=0.05)
    assert outcomes(group.rollouts) == [outcome] * 4
    for rollout in group.rollouts:
        assert re.search(cause, str(rollout.failure))


async def test_waiting_for_a_slot_is_no_time_of_the_environment(pass_time: Callable[[float], None]) -> None:
    async def answer(body: dict[str, Any]) -> str:
        pass_time(5.0)
        # every deadline that is over by then ends its rollout
        await asyncio.sleep(0.002)
        return "4"

    # twelve rollouts of five seconds on the loop's clock, one after the other
    limiter = Limiter(1)
    groups = await runner(CallsEach(), answer, limiter=limiter, rollout_timeout_s=30.0).run_groups(
        [requests(0), requests(1), requests(2)]
    )
    assert [outcomes(group.rollouts) for group in groups] == [[Outcome.COMPLETED] * 4] * 3


@pytest.mark.parametrize("kind", [Env, *KINDS])
async def test_one_semaphore_bounds_what_is_in_flight(kind: type[Env]) -> None:
    running = most = 0

    async def answer(body: dict[str, Any]) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        return "4"

    await runner(kind(), answer, limiter=Limiter(3)).run_groups([requests(0), requests(1), requests(2)])
    assert most == 3


def test_failed_rollouts_are_run_again_through_the_override() -> None:
    asked: list[int] = []

    class FailsAtFirst(Env):
        async def play(self, client: Any, *args: Any, **kwargs: Any) -> Any:
            asked.append(len(client))
            if len(asked) == 1:
                raise LookupError("not yet")
            return await super().play(client, *args, **kwargs)

    options: dict[str, Any] = {"require_tokens": False, "group_policy": GroupPolicy(retries=1)}
    with AsyncBatchGenerator(FailsAtFirst(), FakeClient("4"), "m", **options) as generator:
        generator.submit_batch(vf.BatchRequest.of_rollouts(0, requests()))
        block = generator.get_batch(0, 30.0)
    assert asked == [4, 4]
    assert outcomes(block) == [Outcome.COMPLETED] * 4
    assert [rollout.attempts for rollout in block] == [2] * 4


def test_an_override_that_lags_is_dropped_with_its_group() -> None:
    class NeverPlays(Env):
        async def play(self, client: Any, *args: Any, **kwargs: Any) -> Any:
            if client.records[0].request.key.example_id == 1:
                await never_end()
            return await super().play(client, *args, **kwargs)

    options: dict[str, Any] = {"require_tokens": False, "drop_stragglers_after_s": 0.05}
    with AsyncBatchGenerator(NeverPlays(), FakeClient("4"), "m", **options) as generator:
        generator.submit_batch(vf.BatchRequest.of_rollouts(0, [*requests(0), *requests(1)]))
        block = generator.get_batch(0, 30.0)
    assert outcomes(block.groups[0].rollouts) == [Outcome.COMPLETED] * 4
    assert outcomes(block.groups[1].rollouts) == [Outcome.CANCELLED] * 4
    assert {rollout.failure.kind for rollout in block.groups[1].rollouts if rollout.failure} == {STRAGGLER}


# -- mistakes -------------------------------------------------------------------------------------------------------


async def test_calling_the_client_of_several_prompts_names_the_client_of_one() -> None:
    class CallsTheBatch(Env):
        async def play(self, client: Any, model: str, prompts: Any, *args: Any, **kwargs: Any) -> Any:
            return [await self.rollout(client, model, prompt, sampling_args={}) for prompt in prompts]

    with pytest.raises(vf.ConfigError, match=r"a client for 4 prompts.*call client\[i\] for prompt i"):
        await run(CallsTheBatch())
    alone = await runner(CallsTheBatch()).run_group(requests(size=1))
    assert outcomes(alone.rollouts) == [Outcome.COMPLETED]


async def test_other_numbers_of_prompts_and_results_are_refused() -> None:
    class DropsOne(Env):
        async def play(self, client: Any, model: str, prompts: Any, answers: Any, *args: Any, **kwargs: Any) -> Any:
            return await super().play(client, model, prompts[1:], answers[1:])

    class ReturnsFewer(Env):
        async def play(self, *args: Any, **kwargs: Any) -> Any:
            return (await super().play(*args, **kwargs))[1:]

    with pytest.raises(vf.ConfigError, match=r"given 3 prompts with a client for 4; give it client\[i:j\]"):
        await run(DropsOne())
    with pytest.raises(vf.ConfigError, match=r"ReturnsFewer\.run_rollouts returned 3 results for 4 prompts"):
        await run(ReturnsFewer())


async def test_the_batch_is_a_sequence_of_clients() -> None:
    batch = runner(Env()).batch_client(requests())
    assert (len(batch), len(batch[1:3]), len(batch.select([0, 3]))) == (4, 2, 2)
    assert batch[1:3][0] is batch[1]
    assert BatchClient.of(batch[2], 1).records == [batch.records[2]]  # type: ignore[union-attr]
    assert BatchClient.of(FakeClient("4"), 1) is None
    assert batch.untrained is not batch[0]
