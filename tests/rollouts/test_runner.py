"""Every request ends as one rollout with one outcome, and a failure of the machinery is never a reward of 0."""

from __future__ import annotations

import asyncio
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from verifiers.envs.environment import Environment
from verifiers.errors import ConfigError, OverlongPromptError, ProviderError
from verifiers.inference.endpoint import ClientBackend
from verifiers.inference.limiter import Limiter
from verifiers.inference.retry import RetryPolicy
from verifiers.rollouts.recording_client import turn_seed
from verifiers.rollouts.rollout import Rollout, RolloutRequest, ScoredBlock
from verifiers.rollouts.run import Run
from verifiers.rubrics.rubric import Rubric
from verifiers.testing import FakeClient, Fault, decode_ids
from verifiers.types import Outcome, RolloutKey, RolloutScore, State

ONE_TRY = RetryPolicy(max_attempts=1)


def says_4(completion: Any) -> float:
    return float(completion[-1]["content"] == "4")


class Asks(Environment):
    """An environment of the first generation that calls the client itself, once."""

    def __init__(self, rubric: Any = None) -> None:
        self.rubric = rubric or Rubric([says_4])
        self.sampling_args: dict[str, Any] = {}

    async def ask(self, client: Any, model: str, prompt: Any, **arguments: Any) -> Any:
        response = await client.chat.completions.create(model=model, messages=prompt, **arguments)
        return [{"role": "assistant", "content": response.choices[0].message.content}]

    async def rollout(
        self, client: Any, model: str, prompt: Any, answer: Any, task: str, info: Any, sampling_args: Any
    ) -> Any:
        return await self.ask(client, model, prompt, **sampling_args), State(responses=[])


class AsksInTheSecondWay(Asks):
    async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:  # type: ignore[override]  # noqa: A002
        completion = await self.ask(client, model, input["prompt"], **sampling_args)
        return State(input=input, completion=completion, trajectory=[])


def runner(env: Any, fake: FakeClient | None = None, **options: Any) -> Run:
    options = {"retry": ONE_TRY, **options}
    return Run(env, ClientBackend(fake or FakeClient("4")), "policy", **options)


def request(generation: int = 0, **more: Any) -> RolloutRequest:
    return RolloutRequest(
        RolloutKey(2, 5, generation), [{"role": "user", "content": "2+2?"}], **{"seed": generation, **more}
    )


async def run_one(env: Any, fake: FakeClient | None = None, **options: Any) -> Rollout:
    group = await runner(env, fake, **options).run_group([request()])
    return group.rollouts[0]


def env_that(rollout: Callable[..., Any]) -> Any:
    return type("Scripted", (Asks,), {"rollout": staticmethod(rollout)})()


@pytest.mark.parametrize("kind", [Asks, AsksInTheSecondWay])
async def test_a_rollout_written_for_either_generation_is_run_recorded_and_scored(kind: Any) -> None:
    fake = FakeClient("4")
    rollout = await run_one(kind(), fake, sampling_args={"temperature": 0.7}, require_tokens=True)
    assert (rollout.outcome, rollout.reward, rollout.metrics) == (Outcome.COMPLETED, 1.0, {"says_4": 1.0})
    assert (rollout.key, rollout.turns, rollout.forks) == (RolloutKey(2, 5, 0), 1, 0)
    assert [decode_ids(row.completion_ids) for row in rollout.rows] == ["4\x03"]
    assert rollout.completion == [{"role": "assistant", "content": "4"}]
    assert rollout.state["completion"] == rollout.completion
    body = fake.requests[0].body
    assert (body["model"], body["temperature"], body["seed"]) == ("policy", 0.7, turn_seed(0, 0))
    assert rollout.usage.completion_tokens == 2


async def test_an_answer_cut_for_length_is_truncated_and_scored() -> None:
    fake = FakeClient({"content": "4", "finish_reason": "length"})
    rollout = await run_one(Asks(), fake)
    assert (rollout.outcome, rollout.reward, rollout.is_truncated) == (Outcome.TRUNCATED, 1.0, True)


async def test_an_overlong_prompt_is_truncated_not_an_error() -> None:
    def count_messages(completion: Any) -> float:
        return float(len(completion))

    fault = Fault(400, body={"error": {"message": "maximum context length is 8"}})
    rollout = await run_one(Asks(Rubric([count_messages])), FakeClient(faults=fault))
    assert (rollout.outcome, rollout.reward, rollout.rows) == (Outcome.TRUNCATED, 0.0, [])

    async def catches(client: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            await Asks().ask(client, "policy", [])
        except OverlongPromptError:
            return [{"role": "assistant", "content": "4"}], State()

    rollout = await run_one(env_that(catches), FakeClient(faults=fault))
    assert (rollout.outcome, rollout.reward) == (Outcome.TRUNCATED, 1.0)


@pytest.mark.parametrize("fault", [Fault(401), Fault(503), Fault.disconnect(), Fault(200, body={"choices": []})])
async def test_a_failing_provider_is_a_provider_error_without_a_reward(fault: Fault) -> None:
    rollout = await run_one(Asks(), FakeClient(faults=fault))
    assert (rollout.outcome, rollout.reward, rollout.is_scored) == (Outcome.PROVIDER_ERROR, None, False)
    assert rollout.failure is not None
    assert rollout.failure.exception is not None


def _swallows(error: ProviderError) -> Any:
    return [{"role": "assistant", "content": "4"}], State()


def _wraps(error: ProviderError) -> Any:
    raise ValueError("my own words") from error


def _is_its_own_cause(error: ProviderError) -> Any:
    own = ValueError("round and round")
    raise own from own


@pytest.mark.parametrize(
    ("does", "outcome"),
    [
        (_swallows, Outcome.PROVIDER_ERROR),
        (_wraps, Outcome.PROVIDER_ERROR),
        (_is_its_own_cause, Outcome.ENVIRONMENT_ERROR),
    ],
)
async def test_whatever_an_environment_makes_of_a_provider_error_it_is_no_reward(does: Any, outcome: Outcome) -> None:
    async def rollout(client: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            await Asks().ask(client, "policy", [])
        except ProviderError as error:
            return does(error)

    async with asyncio.timeout(5):
        found = await run_one(env_that(rollout), FakeClient(faults=Fault(500)))
    assert (found.outcome, found.reward) == (outcome, None)


async def _raises(*args: Any, **kwargs: Any) -> Any:
    raise KeyError("board")


async def _exits(*args: Any, **kwargs: Any) -> Any:
    raise SystemExit(3)


async def _returns_nothing(*args: Any, **kwargs: Any) -> Any:
    return None


async def _returns_no_state(*args: Any, **kwargs: Any) -> Any:
    return "text", None


async def _keeps_its_error(*args: Any, **kwargs: Any) -> Any:
    return "text", State(error=RuntimeError("sandbox died"))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (_raises, "KeyError: 'board'"),
        (_exits, "SystemExit: 3"),
        (_returns_nothing, r"TypeError: rollout returned None; it must return \(completion, state\)"),
        (_returns_no_state, r"TypeError: rollout returned \('text', None\)"),
        (_keeps_its_error, "RuntimeError: sandbox died"),
    ],
)
async def test_whatever_an_environment_does_wrong_is_an_environment_error(body: Any, text: str) -> None:
    rollout = await run_one(env_that(body))
    assert (rollout.outcome, rollout.reward) == (Outcome.ENVIRONMENT_ERROR, None)
    assert re.search(text, str(rollout.failure))


async def test_a_rollout_that_does_not_end_is_timed_out() -> None:
    fake = FakeClient(faults=Fault.hang())
    rollout = await run_one(Asks(), fake, rollout_timeout_s=0.02)
    assert (rollout.outcome, rollout.reward) == (Outcome.TIMED_OUT, None)
    assert "rollout_timeout_s=0.02" in str(rollout.failure)
    assert fake.in_flight == 0


async def test_a_failed_grade_is_never_a_zero_reward() -> None:
    def broken(completion: Any) -> float:
        raise ZeroDivisionError("no")

    rollout = await run_one(Asks(Rubric([says_4, broken])))
    assert (rollout.outcome, rollout.reward) == (Outcome.GRADING_ERROR, None)
    assert "broken: ZeroDivisionError: no" in str(rollout.failure)


async def test_grading_that_does_not_end_is_a_grading_error() -> None:
    async def hangs(completion: Any) -> float:
        await asyncio.get_running_loop().create_future()
        return 1.0

    rollout = await run_one(Asks(Rubric([hangs])), grading_timeout_s=0.02)
    assert (rollout.outcome, rollout.reward) == (Outcome.GRADING_ERROR, None)
    assert "grading_timeout_s=0.02" in str(rollout.failure)


@pytest.mark.parametrize("reward", [None, "good", float("nan"), [1.0]])
async def test_a_rubric_that_gives_no_number_is_a_grading_error(reward: Any) -> None:
    class Odd(Rubric):
        async def score_group(self, states: Any, score_sem: Any = None) -> None:
            for state in states:
                state["reward"], state["metrics"] = reward, {}

    rollout = await run_one(Asks(Odd()))
    assert (rollout.outcome, rollout.reward) == (Outcome.GRADING_ERROR, None)


class Gives(Rubric):
    """A rubric of a user's own."""

    def __init__(self, reward: Any, **metrics: Any) -> None:
        super().__init__()
        self.given = RolloutScore(reward, metrics)

    async def score_states(self, states: Any) -> Any:
        return [self.given for _ in states]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, "high", 1e39])
async def test_a_rubric_of_ones_own_that_gives_no_number_is_a_grading_error(reward: Any) -> None:
    rollout = await run_one(Asks(Gives(reward)))
    assert (rollout.outcome, rollout.reward) == (Outcome.GRADING_ERROR, None)
    assert re.match("GradingError: the rubric returned", str(rollout.failure))


@pytest.mark.parametrize(
    "rubric",
    [
        Gives(numpy.float32(0.5), m=numpy.bool_(True), no_number=float("nan")),
        Rubric([lambda: 1.0, lambda: 1.0], weights=[numpy.float32(0.5), 0.0]),
    ],
)
async def test_rewards_and_metrics_of_numpy_become_plain_floats(rubric: Rubric) -> None:
    rollout = await run_one(Asks(rubric))
    assert (rollout.reward, type(rollout.reward)) == (0.5, float)
    assert {type(value) for value in rollout.metrics.values()} == {float}
    assert rollout.metrics.get("m", 1.0) == 1.0


async def test_failures_leave_the_rest_of_the_group_scored_and_the_counts_add_up() -> None:
    async def fails_for_one(client: Any, model: str, prompt: Any, **kwargs: Any) -> Any:
        completion = await Asks().ask(client, model, prompt)
        if completion[0]["content"] == "bad":
            raise KeyError("board")
        return completion, State()

    fake = FakeClient(["4", "bad", "5", "4"])
    group = await runner(env_that(fails_for_one), fake).run_group([request(generation) for generation in range(4)])
    assert [rollout.reward for rollout in group.rollouts] == [1.0, None, 0.0, 1.0]
    assert len(group.scored) == 3
    outcomes = ScoredBlock(2, [group]).outcomes()
    assert outcomes == {Outcome.COMPLETED: 3, Outcome.ENVIRONMENT_ERROR: 1}
    assert sum(outcomes.values()) == 4


async def test_cancellation_passes_and_leaves_nothing_running() -> None:
    both = asyncio.Barrier(3)

    async def hang(body: dict[str, Any]) -> str:
        await both.wait()
        await asyncio.get_running_loop().create_future()
        return "never"

    fake = FakeClient(hang)
    work = asyncio.create_task(runner(Asks(), fake).run_group([request(0), request(1)]))
    await both.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert fake.in_flight == 0


async def test_a_mistake_that_every_rollout_would_repeat_ends_the_run() -> None:
    fake = FakeClient(lambda body: 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError):
        await runner(Asks(), fake, require_tokens=True).run_groups([[request(0), request(1)]])


async def test_an_environment_may_write_into_what_it_is_given() -> None:
    async def scribbles(client: Any, model: str, prompt: Any, info: Any, **kwargs: Any) -> Any:
        assert (len(prompt), info) == (1, {"board": [0]})
        prompt.append({"role": "user", "content": "mine"})
        info["board"][0] += 1
        return await Asks().ask(client, model, prompt), State()

    given = {"board": [0]}
    shared = request().prompt
    requests = [RolloutRequest(RolloutKey(0, 0, g), shared, info=given) for g in range(3)]
    group = await runner(env_that(scribbles)).run_group(requests)
    assert [rollout.outcome for rollout in group.rollouts] == [Outcome.COMPLETED] * 3
    assert (len(shared), given) == (1, {"board": [0]})


async def test_timings_tell_waiting_for_a_slot_from_generating_and_scoring() -> None:
    limiter = Limiter(1)
    async with limiter.slot():
        work = asyncio.create_task(runner(Asks(), limiter=limiter).run_group([request()]))
        await asyncio.sleep(0.05)
    timing = (await work).rollouts[0].timing
    assert timing.queued_s >= 0.015
    assert timing.generation_s > 0
    assert timing.scoring_s > 0


async def test_every_finished_rollout_is_shown_once_scored_or_not() -> None:
    shown: list[Rollout] = []
    fake = FakeClient("4", faults=[Fault(401), None, None])
    await runner(Asks(), fake, on_rollout=shown.append).run_group([request(generation) for generation in range(3)])
    assert sorted(rollout.is_scored for rollout in shown) == [False, True, True]


async def test_a_rollout_that_is_let_go_of_is_freed_without_the_garbage_collector() -> None:
    clients: list[weakref.ref[Any]] = []

    class Remembers(Asks):
        async def ask(self, client: Any, model: str, prompt: Any, **arguments: Any) -> Any:
            clients.append(weakref.ref(client))
            return await super().ask(client, model, prompt, **arguments)

    gc.disable()
    try:
        group = await runner(Remembers()).run_group([request(0), request(1)])
        assert [rollout.reward for rollout in group.rollouts] == [1.0, 1.0]
        del group
        # the loop holds the newest task until the next runs
        await asyncio.sleep(0)
        assert [client() for client in clients] == [None, None]
    finally:
        gc.enable()
