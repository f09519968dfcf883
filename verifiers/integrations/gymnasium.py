"""GymEnv: environments with reset and step, whose observations and actions pass through text."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib.util
import inspect
import queue
import random
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from verifiers.envs.lifecycle import cleanup, maybe_await, stop
from verifiers.envs.multiturn_env import MultiTurnEnv
from verifiers.envs.tools import NOT_FOR_THE_MODEL
from verifiers.errors import ConfigError, InfraError
from verifiers.installation import install_hint
from verifiers.types import Messages, State, message_text

T = TypeVar("T")


class EpisodeThread:
    """A daemon thread that runs calls one after the other.

    A thread cannot be killed: after a call that never returns it stays behind until the process ends.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._last: concurrent.futures.Future[Any] | None = None
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    @property
    def is_idle(self) -> bool:
        return self._last is None or self._last.done()

    def submit(self, work: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Run `work()` after the calls before it; does not wait."""
        self._last = concurrent.futures.Future()
        self._calls.put((work, self._last))
        return self._last

    async def call(self, work: Callable[[], T], *, timeout_s: float, what: str) -> T:
        """Return the result of `work()`; InfraError after `timeout_s` seconds, earlier calls included."""
        result = asyncio.wrap_future(self.submit(work))
        try:
            await asyncio.wait([result], timeout=timeout_s)
            if not result.done():
                raise InfraError(f"{what} did not return within {timeout_s:g} s.")
            return result.result()
        finally:
            result.cancel()

    def end(self) -> None:
        """End the thread after the calls that wait, and return at once."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            work, future = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except StopIteration as error:
                    # no future raises it
                    future.set_exception(RuntimeError(f"StopIteration: {error}"))
                except BaseException as error:  # raised again in the caller
                    future.set_exception(error)
            # an idle thread must not keep the last call's objects alive
            del item, work, future


@dataclass(frozen=True, slots=True)
class Transition:
    """The environment's answer to one action, or to a reset; `truncated` by a limit of the environment's own."""

    text: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


def make_gym(env_cls: Any, env_kwargs: Mapping[str, Any]) -> Any:
    """Make an environment of an id, by `gymnasium.make`, or of a class or factory. Raises ConfigError."""
    if isinstance(env_cls, str):
        if importlib.util.find_spec("gymnasium") is None:
            raise ConfigError(f"The id {env_cls!r} needs gymnasium; {install_hint('gym')}.")
        import gymnasium

        try:
            env = gymnasium.make(env_cls, **env_kwargs)
        except gymnasium.error.Error as error:
            raise ConfigError(f"gymnasium cannot make {env_cls!r} with {dict(env_kwargs)!r}: {error}") from error
    elif callable(env_cls):
        env = env_cls(**env_kwargs)
    else:
        raise ConfigError(f"env_cls must be an id, a class or a factory, not {env_cls!r:.100}.")
    if not callable(getattr(env, "reset", None)) or not callable(getattr(env, "step", None)):
        raise ConfigError(f"{type(env).__name__} has no methods reset and step, so it is not a gym environment.")
    return env


class GymEpisode:
    """One environment instance, made at its first reset. Use it from one thread only."""

    def __init__(self, make: Callable[[], Any], obs_to_text: Callable[..., str]) -> None:
        self.env: Any = None
        self._make = make
        self._obs_to_text = obs_to_text

    def reset(self, seed: int) -> Transition:
        """Start an episode from a seed; a reset without that parameter is seeded by the `seed` method, if any."""
        if self.env is None:
            self.env = self._make()
        takes = inspect.signature(self.env.reset).parameters
        if "seed" in takes or any(item.kind is inspect.Parameter.VAR_KEYWORD for item in takes.values()):
            result = self.env.reset(seed=seed)
        else:
            if callable(getattr(self.env, "seed", None)):
                self.env.seed(seed)
            result = self.env.reset()
        # an observation may be a tuple itself (Blackjack's is), so only (anything, dict) is a pair with info
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            observation, info = result
        else:
            observation, info = result, {}
        return Transition(self._text(observation, info), info=info)

    def step(self, action: Any) -> Transition:
        """Take one action. Raises InfraError unless step returns the tuple of five, or the older one of four."""
        result = self.env.step(action)
        if not isinstance(result, tuple) or len(result) not in (4, 5):
            raise InfraError(
                f"{type(self.env).__name__}.step returned {result!r:.100}; it must return (observation, reward, "
                "terminated, truncated, info), or (observation, reward, done, info)."
            )
        observation, reward, *ends, info = result
        if len(ends) == 1:
            truncated = bool(info.get("TimeLimit.truncated", False))
            ends = [ends[0] and not truncated, truncated]
        return Transition(self._text(observation, info), float(reward), bool(ends[0]), bool(ends[1]), info)

    def close(self) -> None:
        close = getattr(self.env, "close", None)
        if callable(close):
            close()

    def _text(self, observation: Any, info: Mapping[str, Any]) -> str:
        extra = {"info": info, "env": self.env}
        try:
            names = list(inspect.signature(self._obs_to_text).parameters)[1:]
        except (TypeError, ValueError):  # a builtin without a signature
            names = []
        return str(self._obs_to_text(observation, **{name: extra[name] for name in names if name in extra}))


_THREAD, _EPISODE = "gym_thread", "gym_episode"


class GymEnv(MultiTurnEnv):
    """Episodes of an environment with `reset` and `step`: Gymnasium's, the older gym's, or any object alike.

    Each rollout makes its own instance, calls it from one thread of its own, and closes it when the rollout ends,
    also by failure or cancellation. A row's `info["seed"]` goes to `reset`, so the rollouts of one row start alike.
    The reward is the sum of the steps' rewards, which are kept in `state["trajectory"]`.

    A rollout stops as `terminated` or `truncated` by the environment, as `max_episode_steps_reached`, or
    as `too_many_invalid_actions`. The state holds `episode_steps`, `invalid_actions`, and `step_info`, the last
    `info` of the environment.

    Args:
        env_cls: an id for `gymnasium.make`, a class, or a factory; called with `env_kwargs` for each rollout.
        action_parser: turns the parsed answer's text into an action, sync or async; raises where it cannot. Default:
            in a discrete action space the last integer of the text, else the text, stripped.
        obs_to_text: text of an observation; it may also name parameters `info` and `env`. Default: `str`.
        num_train_episodes, num_eval_episodes: rows that are made, each with a seed of its own; 0 for none.
        max_episode_steps: steps after which a rollout stops; None for no bound but the environment's own.
        max_invalid_actions: answers without a valid action after which a rollout stops.
        invalid_action_penalty: subtracted from the reward for each of those.
        step_timeout_s: seconds that making, resetting, or stepping the environment may take; beyond them the rollout
            fails as `environment_error`.
        dataset, eval_dataset: rows in place of those made. Their prompts must hold what the policy needs to begin,
            as the first observation is not added to them; `info["seed"]` is optional.
        rubric: default: `EpisodicSumRubric`, with the metrics `episode_steps` and `invalid_actions`.
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
        self.obs_to_text = obs_to_text or str
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
        evaluated = _distinct_seeds(f"eval:{self.seed}", num_eval, set())
        trained = _distinct_seeds(f"train:{self.seed}", num_train, set(evaluated))
        episode = self.make_episode()
        try:
            rows = [[self.row_of(episode, seed) for seed in seeds] or None for seeds in (trained, evaluated)]
        finally:
            episode.close()
        return rows[0], rows[1]

    def make_episode(self) -> GymEpisode:
        return GymEpisode(lambda: make_gym(self.env_cls, self.env_kwargs), self.obs_to_text)

    def row_of(self, episode: GymEpisode, seed: int) -> dict[str, Any]:
        """Return the row of an episode: its first observation is the question."""
        return {"question": episode.reset(seed).text, "answer": "", "info": {"seed": seed}}

    # -- a rollout ------------------------------------------------------------------------------------------

    async def setup_state(self, state: State, **kwargs: Any) -> State:
        state.update(episode_steps=0, invalid_actions=0, terminated=False, truncated=False, step_info={})
        thread = state[_THREAD] = EpisodeThread(f"{type(self).__name__}-{state['id']}")
        episode = state[_EPISODE] = self.make_episode()
        seed = int(state["info"].get("seed", self.seed + int(state["id"] or 0)))
        first = await thread.call(
            lambda: episode.reset(seed), timeout_s=self.step_timeout_s, what="Making and resetting the environment"
        )
        asked = state["prompt"]
        if self._made_rows and not message_text(asked if isinstance(asked, str) else asked[-1]).endswith(first.text):
            raise InfraError(
                f"reset(seed={seed}) gave the observation {first.text!r:.100}, but the row has another one: the "
                "environment must start alike from one seed, or get dataset= rows without the observation."
            )
        state["step_info"] = dict(first.info)
        return state

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        episode: GymEpisode = state[_EPISODE]
        step = state["trajectory"][-1]
        try:
            action = await self._action(step["completion"], getattr(episode.env, "action_space", None))
        except NOT_FOR_THE_MODEL:
            raise
        except Exception as error:
            step["reward"] = -float(self.invalid_action_penalty)
            state["invalid_actions"] += 1
            return self._reply(f"Invalid action: {error}")
        transition = await state[_THREAD].call(
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
            raise ValueError("your message has no answer in the form asked for.")
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
        return bool(state["terminated"])

    @stop(priority=2)
    def truncated(self, state: State) -> bool:
        return bool(state["truncated"])

    @stop(priority=1)
    def max_episode_steps_reached(self, state: State) -> bool:
        return self.max_episode_steps is not None and state["episode_steps"] >= self.max_episode_steps

    @stop
    def too_many_invalid_actions(self, state: State) -> bool:
        return bool(state["invalid_actions"] >= self.max_invalid_actions > 0)

    @cleanup
    async def close_episode(self, state: State) -> None:
        """Close the environment on its own thread; while a call still runs there, do not wait for it."""
        thread, episode = state.pop(_THREAD, None), state.pop(_EPISODE, None)
        if thread is None:
            return

        def close() -> None:
            try:
                if episode is not None:
                    episode.close()
            except Exception as error:
                self.logger.warning("Closing the environment raised %r", error)

        try:
            if thread.is_idle:
                await thread.call(close, timeout_s=self.step_timeout_s, what="Closing the environment")
            else:
                thread.submit(close)
        except InfraError as error:
            self.logger.warning("%s", error)
        finally:
            thread.end()


def _distinct_seeds(salt: str, count: int, taken: set[int]) -> list[int]:
    rng = random.Random(salt)
    seeds: dict[int, None] = {}
    while len(seeds) < count:
        if (seed := rng.getrandbits(31)) not in taken:
            seeds[seed] = None
    return list(seeds)


# spaces of gymnasium that hold no string
_NEVER_TEXT = ("Box", "Dict", "Graph", "MultiBinary", "MultiDiscrete", "OneOf", "Sequence", "Tuple")


def _default_action(text: str, space: Any) -> Any:
    # a Box of no dimension takes the text of a number for one
    if type(space).__name__ in _NEVER_TEXT and getattr(space, "shape", None) != ():
        raise ConfigError(f"No answer's text is an action in {space}; give an action_parser.")
    if type(space).__name__ != "Discrete":
        return text.strip()
    numbers: list[str] = re.findall(r"-?\d+", text)
    if not numbers:
        raise ValueError(f"answer with the number of an action in {space}.")
    return int(numbers[-1])


def _default_rubric(parser: Any) -> Any:
    from verifiers.rubrics.shaping import EpisodicSumRubric

    def episode_steps(state: State) -> float:
        return float(state.get("episode_steps", 0))

    def invalid_actions(state: State) -> float:
        return float(state.get("invalid_actions", 0))

    rubric = EpisodicSumRubric() if parser is None else EpisodicSumRubric(parser=parser)
    rubric.add_metric(episode_steps)
    rubric.add_metric(invalid_actions)
    return rubric
