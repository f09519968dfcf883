"""GymEnv: environments with reset and step, whose observations and actions pass through text."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.envs.adapters.env_thread import EnvThread
from verifiers.envs.adapters.gym_episode import GymEpisode, Transition, make_gym, text_of_observation
from verifiers.envs.calling import maybe_await
from verifiers.envs.decorators import cleanup, stop
from verifiers.envs.multiturn_env import MultiTurnEnv
from verifiers.errors import ConfigError, InfraError
from verifiers.types import Messages, State

__all__ = ["GymEnv"]

_LIVE = "gym_episode"


@dataclass(slots=True)
class _Live:
    """What a rollout holds while it runs."""

    thread: EnvThread
    episode: GymEpisode | None = None


class GymEnv(MultiTurnEnv):
    """Episodes of an environment with `reset` and `step`: Gymnasium's, the older gym's, or any object alike.

    Each rollout makes its own instance, calls it from one thread of its own, and closes it when the rollout ends,
    also by failure or cancellation. A row's `info["seed"]` goes to `reset`, so the rollouts of one row start alike.
    The reward is the sum of the steps' rewards, which are kept in `state["trajectory"]`.

    A rollout stops as `terminated` or `truncated` when the environment says so, as `max_episode_steps_reached`, or
    as `too_many_invalid_actions`. The state holds `episode_steps`, `invalid_actions`, and `step_info`, the last
    `info` of the environment.

    Args:
        env_cls: an id for `gymnasium.make`, a class, or a factory; called with `env_kwargs` for each rollout.
        env_kwargs: keyword arguments of it.
        action_parser: turns the parsed answer's text into an action, sync or async; raises where it cannot. Default:
            the last integer of the text where the action space is discrete, else the text, stripped.
        obs_to_text: text of an observation; it may also name parameters `info` and `env`. Default: `str`.
        num_train_episodes, num_eval_episodes: rows that are made, each with a seed of its own; 0 for none.
        max_episode_steps: steps after which a rollout stops; None for no bound but the environment's own.
        max_invalid_actions: answers without a valid action after which a rollout stops.
        invalid_action_penalty: taken from the reward for each of those.
        step_timeout_s: seconds that making, resetting, or stepping the environment may take; beyond them the rollout
            fails as `environment_error`.
        seed: chooses the rows' seeds.
        dataset, eval_dataset: rows in place of those made. Their prompts must hold what the policy needs to begin,
            as the first observation is not added to them; `info["seed"]` is optional.
        rubric: default: `EpisodicSumRubric`, with the metrics `episode_steps` and `invalid_actions`.
        **kwargs: as for `MultiTurnEnv`.

    Raises:
        ConfigError: `env_cls` makes no environment, or no episode is asked for.
    """

    def __init__(
        self,
        env_cls: Any,
        env_kwargs: Mapping[str, Any] | None = None,
        action_parser: Callable[[str], Any] | None = None,
        obs_to_text: Callable[..., str] | None = None,
        num_train_episodes: int = 1000,
        num_eval_episodes: int = 20,
        max_episode_steps: int | None = None,
        seed: int = 0,
        *,
        max_invalid_actions: int = 3,
        invalid_action_penalty: float = 0.0,
        step_timeout_s: float = 60.0,
        **kwargs: Any,
    ) -> None:
        self.env_cls = env_cls
        self.env_kwargs = dict(env_kwargs or {})
        self.action_parser = action_parser
        self.obs_to_text = obs_to_text or text_of_observation
        self.seed = seed
        # a bound on turns would end the rollout before its last action is played
        turns = kwargs.pop("max_turns", -1)
        bounds = [bound for bound in (max_episode_steps, turns) if bound is not None and bound > 0]
        self.max_episode_steps = min(bounds) if bounds else None
        self.max_invalid_actions = max_invalid_actions
        self.invalid_action_penalty = invalid_action_penalty
        self.step_timeout_s = step_timeout_s
        self._made_rows = kwargs.get("dataset") is None and kwargs.get("eval_dataset") is None
        if self._made_rows:
            kwargs["dataset"], kwargs["eval_dataset"] = self._rows(num_train_episodes, num_eval_episodes)
        if kwargs.get("rubric") is None:
            kwargs["rubric"] = _default_rubric(kwargs.get("parser"))
        super().__init__(max_turns=-1, **kwargs)

    # -- rows -----------------------------------------------------------------------------------------------

    def _rows(self, num_train: int, num_eval: int) -> tuple[list[dict[str, Any]] | None, list[dict[str, Any]] | None]:
        if num_train < 0 or num_eval < 0 or num_train + num_eval == 0:
            raise ConfigError(
                f"num_train_episodes={num_train} and num_eval_episodes={num_eval} must be 0 or more, and not both 0."
            )
        held_out = _distinct_seeds(f"eval:{self.seed}", num_eval, set())
        train = _distinct_seeds(f"train:{self.seed}", num_train, set(held_out))
        episode = self.make_episode()
        try:
            rows = [[self.row_of(episode, seed) for seed in seeds] or None for seeds in (train, held_out)]
        finally:
            episode.close()
        return rows[0], rows[1]

    def make_episode(self) -> GymEpisode:
        """A new instance of the environment."""
        return GymEpisode(lambda: make_gym(self.env_cls, self.env_kwargs), self.obs_to_text)

    def row_of(self, episode: GymEpisode, seed: int) -> dict[str, Any]:
        """The row of an episode: its first observation is the question."""
        return {"question": episode.reset(seed).text, "answer": "", "info": {"seed": seed}}

    # -- a rollout ------------------------------------------------------------------------------------------

    async def setup_state(self, state: State, **kwargs: Any) -> State:
        """Make and reset the rollout's own instance."""
        state.update(episode_steps=0, invalid_actions=0, terminated=False, truncated=False, step_info={})
        live = state[_LIVE] = _Live(EnvThread(f"{type(self).__name__}-{state['id']}"))
        seed = int(state["info"].get("seed", self.seed + int(state["id"] or 0)))

        def start() -> Transition:
            live.episode = self.make_episode()
            return live.episode.reset(seed)

        first = await live.thread.call(
            start, timeout_s=self.step_timeout_s, what="Making and resetting the environment"
        )
        if self._made_rows and not _last_text(state["prompt"]).endswith(first.text):
            raise InfraError(
                f"reset(seed={seed}) gave the observation {first.text!r:.100}, but another when the row was made: "
                "the environment must start alike from one seed, or be given dataset= rows that do not show it."
            )
        state["step_info"] = dict(first.info)
        return state

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """Play the policy's action; the observation that follows is the reply."""
        live: _Live = state[_LIVE]
        assert live.episode is not None
        episode, step = live.episode, state["trajectory"][-1]
        try:
            action = await self._action(step["completion"], episode.action_space)
        except Exception as error:
            step["reward"] = -float(self.invalid_action_penalty)
            state["invalid_actions"] += 1
            return self._reply(f"Invalid action: {error}")
        transition = await live.thread.call(
            lambda: episode.step(action), timeout_s=self.step_timeout_s, what="The environment's step"
        )
        step["reward"] = transition.reward
        state["episode_steps"] += 1
        state["terminated"], state["truncated"] = transition.terminated, transition.truncated
        state["step_info"] = dict(transition.info)
        return self._reply(transition.text)

    async def _action(self, completion: Messages, space: Any) -> Any:
        text = self.parser.parse_answer(completion)
        if text is None:
            raise ValueError("no answer was found in what you wrote.")
        parse = self.action_parser or (lambda text: _default_action(text, space))
        action = await maybe_await(parse, str(text))
        if callable(getattr(space, "contains", None)) and not space.contains(action):
            raise ValueError(f"{action!r:.100} is not in {space}.")
        return action

    def _reply(self, text: str) -> Any:
        return text if self.message_type == "completion" else [{"role": "user", "content": text}]

    # -- its end --------------------------------------------------------------------------------------------

    @stop(priority=3)
    def terminated(self, state: State) -> bool:
        """The environment's task is over."""
        return bool(state["terminated"])

    @stop(priority=2)
    def truncated(self, state: State) -> bool:
        """A limit of the environment's own was reached."""
        return bool(state["truncated"])

    @stop(priority=1)
    def max_episode_steps_reached(self, state: State) -> bool:
        """`max_episode_steps` actions were played."""
        return self.max_episode_steps is not None and state["episode_steps"] >= self.max_episode_steps

    @stop
    def too_many_invalid_actions(self, state: State) -> bool:
        """`max_invalid_actions` answers held no valid action."""
        return bool(state["invalid_actions"] >= self.max_invalid_actions > 0)

    @cleanup
    async def close_episode(self, state: State) -> None:
        """Close the instance on its own thread; after a call that still runs there, without waiting for it."""
        live: _Live | None = state.pop(_LIVE, None)
        if live is None:
            return

        def close() -> None:
            if live.episode is not None:
                live.episode.close()

        if not live.thread.is_idle:
            live.thread.end(close)
            return
        try:
            await live.thread.call(close, timeout_s=self.step_timeout_s, what="Closing the environment")
        except Exception as error:
            # what was played stays played
            self.logger.warning("Closing the environment raised %r", error)
        finally:
            live.thread.end()


def _distinct_seeds(salt: str, count: int, taken: set[int]) -> list[int]:
    rng = random.Random(salt)
    seeds: dict[int, None] = {}
    while len(seeds) < count:
        if (seed := rng.getrandbits(31)) not in taken:
            seeds[seed] = None
    return list(seeds)


def _default_action(text: str, space: Any) -> Any:
    if type(space).__name__ != "Discrete":
        return text.strip()
    numbers: Sequence[str] = re.findall(r"-?\d+", text)
    if not numbers:
        raise ValueError(f"answer with the number of an action in {space}.")
    return int(numbers[-1])


def _last_text(prompt: Any) -> str:
    content = prompt if isinstance(prompt, str) else prompt[-1].get("content")
    return content if isinstance(content, str) else ""


def _default_rubric(parser: Any) -> Any:
    from verifiers.rubrics.episodic_sum_rubric import EpisodicSumRubric

    def episode_steps(state: State) -> float:
        """Actions that were played."""
        return float(state.get("episode_steps", 0))

    def invalid_actions(state: State) -> float:
        """Answers without a valid action."""
        return float(state.get("invalid_actions", 0))

    rubric = EpisodicSumRubric() if parser is None else EpisodicSumRubric(parser=parser)
    rubric.add_metric(episode_steps)
    rubric.add_metric(invalid_actions)
    return rubric
