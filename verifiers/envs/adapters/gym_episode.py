"""One episode of a reset/step environment, whichever generation of the gym interface it is written for."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verifiers.errors import ConfigError, InfraError

__all__ = ["GymEpisode", "Transition", "make_gym", "text_of_observation"]


@dataclass(frozen=True, slots=True)
class Transition:
    """What the environment said to one action, or to a reset.

    Attributes:
        text: the observation as text for the policy.
        terminated: the task itself is over.
        truncated: a limit of the environment's own ended the episode.
    """

    text: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


def text_of_observation(observation: Any) -> str:
    """The default text of an observation: strings as they are, all else by `str`."""
    return observation if isinstance(observation, str) else str(observation)


def make_gym(env_cls: Any, env_kwargs: Mapping[str, Any]) -> Any:
    """A new environment: of the id by `gymnasium.make`, or of the class or factory.

    Raises:
        ConfigError: an id without gymnasium installed, or one that it does not know; what is made has no reset/step.
    """
    if isinstance(env_cls, str):
        if importlib.util.find_spec("gymnasium") is None:
            raise ConfigError(f"The id {env_cls!r} needs gymnasium; install it by `pip install 'verifiers[gym]'`.")
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
        raise ConfigError(f"{type(env).__name__} has no methods reset and step, so it is no gym environment.")
    return env


class GymEpisode:
    """A live environment instance. Use it from one thread only.

    Args:
        make: makes the environment.
        obs_to_text: text of an observation; may also name parameters `info` and `env`.
    """

    def __init__(self, make: Callable[[], Any], obs_to_text: Callable[..., str]) -> None:
        self.env = make()
        self._obs_to_text = obs_to_text
        self._text_wants = _extra_parameters(obs_to_text)

    @property
    def action_space(self) -> Any:
        """The environment's action space, or None."""
        return getattr(self.env, "action_space", None)

    def reset(self, seed: int) -> Transition:
        """Start over from a seed. An environment whose reset takes none is seeded by its `seed` method, or not."""
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
        """Act.

        Raises:
            InfraError: what step returned is neither the tuple of five nor the older one of four.
        """
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
        """Release what the environment holds."""
        close = getattr(self.env, "close", None)
        if callable(close):
            close()

    def _text(self, observation: Any, info: Mapping[str, Any]) -> str:
        extra = {"info": info, "env": self.env}
        return str(self._obs_to_text(observation, **{name: extra[name] for name in self._text_wants}))


def _extra_parameters(function: Callable[..., Any]) -> list[str]:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []
    return [name for name in names[1:] if name in ("info", "env")]
