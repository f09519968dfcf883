"""GymEnv: one instance a rollout on one thread, actions and observations as text, and an end with its own name."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from typing import Any, ClassVar

import pytest

import verifiers as vf
from verifiers.inference.endpoint import ClientBackend
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.testing import FakeClient
from verifiers.types import Outcome, RolloutKey

needs_gymnasium = pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="needs the gym extra")


class Walk:
    """A line from 0 to `length`; "right" and "left" are worth 1 and -1, and the far end is the goal."""

    made: ClassVar[list[Walk]]

    def __init__(self, length: int = 3) -> None:
        self.length = length
        self.place = 0
        self.threads = {threading.get_ident()}
        self.closed = 0
        type(self).made.append(self)

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.threads.add(threading.get_ident())
        self.place = 0
        return f"seed {seed}", {"seed": seed}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.threads.add(threading.get_ident())
        self.place += 1 if action == "right" else -1
        return (
            f"at {self.place}",
            1.0 if action == "right" else -1.0,
            self.place == self.length,
            self.place < -1,
            {"place": self.place},
        )

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed += 1


@pytest.fixture
def walk() -> type[Walk]:
    class FreshWalk(Walk):
        made: ClassVar[list[Walk]] = []

    return FreshWalk


def env_of(env_cls: Any, **settings: Any) -> vf.GymEnv:
    return vf.GymEnv(env_cls, **{"num_train_episodes": 3, "num_eval_episodes": 2, **settings})


async def play(env: vf.GymEnv, answers: Any, *, row: int = 0) -> Rollout:
    """One rollout of a row through the runner, scored."""
    runner = Run(env, ClientBackend(FakeClient(answers)), "m", {})
    data = env.get_dataset()[row]
    (rollout,) = await runner.play([RolloutRequest(RolloutKey(0, row, 0), data["prompt"], info=data["info"])])
    await runner.score([rollout])
    return rollout


# -- rows ---------------------------------------------------------------------------------------------------


def test_rows_carry_distinct_seeds_and_their_first_observation(walk: type[Walk]) -> None:
    env = env_of(walk, num_train_episodes=50, num_eval_episodes=20, system_prompt="Walk.")
    train, evaluation = env.get_dataset(), env.get_eval_dataset()
    seeds = [info["seed"] for info in [*train["info"], *evaluation["info"]]]
    assert len(set(seeds)) == 70
    assert train[0]["prompt"] == [
        {"role": "system", "content": "Walk."},
        {"role": "user", "content": f"seed {seeds[0]}"},
    ]
    assert [(made.closed) for made in walk.made] == [1]


def test_the_same_seed_gives_the_same_rows_and_another_gives_others(walk: type[Walk]) -> None:
    one, again, other = (env_of(walk, seed=seed).get_dataset()["question"] for seed in (1, 1, 2))
    assert list(one) == list(again)
    assert not set(one) & set(other)


def test_what_cannot_work_is_said_when_the_environment_is_made(walk: type[Walk]) -> None:
    with pytest.raises(vf.ConfigError, match="int has no methods reset and step"):
        env_of(int)
    with pytest.raises(vf.ConfigError, match="env_cls must be an id, a class or a factory, not 3"):
        env_of(3)
    with pytest.raises(vf.ConfigError, match="num_train_episodes=0 and num_eval_episodes=0"):
        env_of(walk, num_train_episodes=0, num_eval_episodes=0)


# -- a rollout ----------------------------------------------------------------------------------------------


async def test_step_rewards_are_kept_and_their_sum_is_the_reward(walk: type[Walk]) -> None:
    rollout = await play(env_of(walk), ["right", "left", "right", "right", "right"])
    assert [step["reward"] for step in rollout.state["trajectory"]] == [1.0, -1.0, 1.0, 1.0, 1.0]
    assert rollout.reward == 3.0
    assert (rollout.metrics["episode_steps"], rollout.metrics["invalid_actions"]) == (5.0, 0.0)
    said = [message["content"] for message in rollout.completion if message["role"] == "user"]
    assert said == ["at 1", "at 0", "at 1", "at 2", "at 3"]
    assert rollout.state["stop_condition"] == "terminated"
    assert rollout.state["step_info"] == {"place": 3}


@pytest.mark.parametrize(
    ("answers", "settings", "condition", "steps"),
    [
        (["right"], {}, "terminated", 3),
        (["left"], {}, "truncated", 2),
        (["right"], {"max_episode_steps": 2}, "max_episode_steps_reached", 2),
        (["right"], {"max_turns": 2}, "max_episode_steps_reached", 2),
        (["right"], {"max_episode_steps": 3}, "terminated", 3),
    ],
)
async def test_each_end_has_its_own_stop_condition(
    walk: type[Walk], answers: list[str], settings: dict[str, Any], condition: str, steps: int
) -> None:
    rollout = await play(env_of(walk, **settings), answers)
    assert (rollout.state["stop_condition"], rollout.state["episode_steps"]) == (condition, steps)
    assert rollout.outcome is Outcome.COMPLETED


async def test_every_rollout_has_its_own_instance_on_one_thread_and_closes_it(walk: type[Walk]) -> None:
    env = env_of(walk)
    rollouts = await asyncio.gather(*(play(env, ["right"], row=row % 3) for row in range(12)))
    assert [rollout.reward for rollout in rollouts] == [3.0] * 12
    instances = walk.made[1:]
    assert len(instances) == 12
    assert all(len(made.threads) == 1 and made.closed == 1 for made in instances)
    assert len(set.union(*(made.threads for made in instances)) & {threading.get_ident()}) == 0


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_an_action_parser_may_be_sync_or_async_and_gets_the_parsed_answer(walk: type[Walk], kind: str) -> None:
    seen: list[str] = []

    def parse(text: str) -> str:
        seen.append(text)
        return {"R": "right"}[text]

    async def parse_async(text: str) -> str:
        return parse(text)

    env = env_of(walk, action_parser=parse if kind == "sync" else parse_async, parser=vf.XMLParser(["move"], "move"))
    rollout = await play(env, ["so <move>R</move>"])
    assert (rollout.reward, seen) == (3.0, ["R", "R", "R"])


async def test_an_unparsable_action_is_told_penalised_and_counted(walk: type[Walk]) -> None:
    def parse(text: str) -> str:
        if text not in ("left", "right"):
            raise ValueError(f"{text!r} is not a direction")
        return text

    env = env_of(walk, action_parser=parse, invalid_action_penalty=0.5)
    rollout = await play(env, ["up", "right", "down", "right", "right"])
    said = [message["content"] for message in rollout.completion if message["role"] == "user"]
    assert said == [
        "Invalid action: 'up' is not a direction",
        "at 1",
        "Invalid action: 'down' is not a direction",
        "at 2",
        "at 3",
    ]
    assert rollout.reward == 2.0
    assert (rollout.metrics["episode_steps"], rollout.metrics["invalid_actions"]) == (3.0, 2.0)


async def test_too_many_invalid_actions_end_the_rollout(walk: type[Walk]) -> None:
    env = env_of(walk, parser=vf.XMLParser(["move"], "move"), max_invalid_actions=2)
    rollout = await play(env, ["no tag"])
    assert rollout.state["stop_condition"] == "too_many_invalid_actions"
    assert (rollout.state["episode_steps"], rollout.reward) == (0, 0.0)


async def test_observations_pass_through_obs_to_text_which_may_ask_for_the_environment(walk: type[Walk]) -> None:
    def describe(observation: str, env: Any, info: dict[str, Any]) -> str:
        return f"{observation} of {env.length} {sorted(info)}"

    rollout = await play(env_of(walk, env_kwargs={"length": 1}, obs_to_text=describe), ["right"])
    assert rollout.prompt[-1]["content"].endswith(" of 1 ['seed']")
    assert rollout.completion[-1]["content"] == "at 1 of 1 ['place']"


# -- failures -----------------------------------------------------------------------------------------------


async def test_a_judge_that_an_action_parser_cannot_reach_is_no_invalid_action(walk: type[Walk]) -> None:
    def parse(text: str) -> str:
        raise vf.InfraError("the judge cannot be reached")

    rollout = await play(env_of(walk, action_parser=parse), ["right"])
    assert rollout.outcome is Outcome.ENVIRONMENT_ERROR


@pytest.mark.parametrize("error", [RuntimeError, StopIteration])
async def test_a_step_that_raises_is_an_environment_error_and_the_instance_is_closed(
    walk: type[Walk], error: type[Exception]
) -> None:
    def broken(self: Walk, action: str) -> Any:
        raise error("the line is down")

    walk.step = broken  # type: ignore[method-assign]
    rollout = await play(env_of(walk), ["right"])
    assert rollout.outcome is Outcome.ENVIRONMENT_ERROR
    assert "the line is down" in str(rollout.failure)
    assert walk.made[-1].closed == 1


async def test_a_step_that_hangs_ends_the_rollout_and_the_instance_is_closed_when_it_returns(
    walk: type[Walk],
) -> None:
    go_on, closed = threading.Event(), threading.Event()
    walk.step = lambda self, action: go_on.wait(60)  # type: ignore[method-assign,assignment,return-value]
    walk.close = lambda self: closed.set()  # type: ignore[method-assign]
    env = env_of(walk)
    closed.clear()

    async def right(body: dict[str, Any]) -> str:
        # for the step alone: making and resetting have been
        env.step_timeout_s = 0.5
        return "right"

    rollout = await play(env, right)
    assert rollout.outcome is Outcome.ENVIRONMENT_ERROR
    assert "The environment's step did not return within 0.5 s." in str(rollout.failure)
    assert not closed.is_set()
    go_on.set()
    assert await asyncio.to_thread(closed.wait, 60)


async def test_a_cancelled_rollout_closes_its_instance(walk: type[Walk]) -> None:
    asked = asyncio.Event()

    async def never(body: dict[str, Any]) -> str:
        asked.set()
        return await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(play(env_of(walk), never))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [made.closed for made in walk.made] == [1, 1]


async def test_an_environment_that_starts_differently_from_one_seed_is_an_error_not_a_wrong_prompt() -> None:
    starts = iter(range(100))

    class Forgetful(Walk):
        made: ClassVar[list[Walk]] = []

        def reset(self, **_: Any) -> Any:
            return f"start {next(starts)}", {}

    rollout = await play(env_of(Forgetful), ["right"])
    assert rollout.outcome is Outcome.ENVIRONMENT_ERROR
    assert "must start alike from one seed" in str(rollout.failure)


async def test_rows_of_ones_own_are_played_as_they_are(walk: type[Walk]) -> None:
    env = vf.GymEnv(walk, dataset=[{"question": "Go.", "info": {"seed": 7}}])
    rollout = await play(env, ["right"])
    assert (rollout.reward, rollout.prompt[-1]["content"]) == (3.0, "Go.")


# -- the older interface --------------------------------------------------------------------------------------


class OldWalk(Walk):
    """reset without a seed, an observation alone, and four results of step."""

    made: ClassVar[list[Walk]] = []

    def seed(self, seed: int) -> None:
        self.seeded = seed

    def reset(self) -> str:  # type: ignore[override]
        self.place = 0
        return f"seed {self.seeded}"

    def step(self, action: str) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, {**info, "TimeLimit.truncated": truncated}


@pytest.mark.parametrize(("answer", "condition"), [("right", "terminated"), ("left", "truncated")])
async def test_the_older_gym_interface_works_too(answer: str, condition: str) -> None:
    env = env_of(lambda: OldWalk())
    rollout = await play(env, [answer])
    assert rollout.prompt[-1]["content"] == f"seed {env.get_dataset()[0]['info']['seed']}"
    assert rollout.state["stop_condition"] == condition


async def test_a_step_that_returns_something_else_is_said() -> None:
    class Wrong(OldWalk):
        def step(self, action: str) -> Any:
            return "only this"

    rollout = await play(env_of(Wrong), ["right"])
    assert "Wrong.step returned 'only this'; it must return" in str(rollout.failure)


# -- Gymnasium ------------------------------------------------------------------------------------------------


@needs_gymnasium
async def test_frozen_lake_is_won_by_the_way_across() -> None:
    env = env_of("FrozenLake-v1", env_kwargs={"is_slippery": False})
    right, down = "I go 2", "I go 1"
    rollout = await play(env, [down, down, right, down, right, right])
    assert (rollout.reward, rollout.state["stop_condition"]) == (1.0, "terminated")
    assert [step["reward"] for step in rollout.state["trajectory"]] == [0.0] * 5 + [1.0]


@needs_gymnasium
async def test_an_action_outside_the_space_is_invalid() -> None:
    rollout = await play(env_of("FrozenLake-v1"), ["4"])
    assert rollout.state["stop_condition"] == "too_many_invalid_actions"
    assert rollout.completion[1]["content"] == "Invalid action: 4 is not in Discrete(4)."
    rollout = await play(env_of("FrozenLake-v1"), ["left"])
    assert "answer with the number of an action in Discrete(4)" in rollout.completion[1]["content"]


@needs_gymnasium
async def test_a_space_without_texts_needs_an_action_parser() -> None:
    with pytest.raises(vf.ConfigError, match=r"Box\(-2\.0, 2\.0.*action_parser"):
        await play(env_of("Pendulum-v1"), ["1.5"])


@needs_gymnasium
@pytest.mark.filterwarnings("ignore:.*Casting input x:UserWarning")
async def test_a_box_of_no_dimension_takes_the_text_of_a_number(walk: type[Walk]) -> None:
    from gymnasium.spaces import Box

    walk.action_space = Box(-2, 2, shape=())  # type: ignore[attr-defined]
    rollout = await play(env_of(walk), ["1.5", "3", "3", "3"])
    assert [step.get("reward") for step in rollout.state["trajectory"]][:2] == [-1.0, 0.0]


@needs_gymnasium
async def test_blackjacks_observation_is_a_tuple_and_stays_one() -> None:
    env = env_of("Blackjack-v1")
    rollout = await play(env, ["0"])
    assert rollout.prompt[-1]["content"].startswith("(")
    assert rollout.reward in (-1.0, 0.0, 1.0)
    assert rollout.state["stop_condition"] == "terminated"


@needs_gymnasium
def test_an_unknown_id_or_setting_is_said() -> None:
    with pytest.raises(vf.ConfigError, match="gymnasium cannot make 'FrozenLak-v1'"):
        env_of("FrozenLak-v1")
