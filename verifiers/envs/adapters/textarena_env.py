"""TextArenaEnv: TextArena's single-player games."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verifiers.envs.adapters.gym_env import GymEnv
from verifiers.envs.adapters.gym_episode import GymEpisode
from verifiers.envs.adapters.textarena_game import TextArenaGame, secret_of

__all__ = ["TextArenaEnv"]


class TextArenaEnv(GymEnv):
    """A single-player game of TextArena. Each rollout makes its own instance; nothing is copied or shared.

    A row's seed decides the game, so the rollouts of one row face the same one, and again on the next run. The
    parsed answer's text is the move, as it is; the game itself judges whether it is valid. The row's `answer` is
    what the player is to find, where the game hides one thing (the word of Wordle), else "". The default reward is
    the game's own, mostly 0 .. 1; after the last move the state's `step_info` holds what the game says about its end.

    Games that draw words (Wordle, Hangman, WordLadder, WordSearch) need NLTK's word lists, or `word_list`.

    Args:
        game: a TextArena id, such as "Wordle-v0".
        num_train_examples, num_eval_examples: rows, each a game of its own; 0 for none.
        system_prompt: put before the game's own text.
        parser: finds the move in an answer. Default: the whole text.
        rubric: default: `EpisodicSumRubric`.
        feedback_fn: makes the reply of the game's whole text so far. Default: what is new in it.
        seed: chooses the games.
        word_list: words in place of NLTK's; of the length that the game asks for.
        game_kwargs: settings of the game, in place of those that TextArena registers.
        **kwargs: as for `GymEnv`.

    Raises:
        ConfigError: the game is unknown, needs more than one player, or needs words that are not there.
    """

    def __init__(
        self,
        game: str = "Wordle-v0",
        num_train_examples: int = 1000,
        num_eval_examples: int = 0,
        system_prompt: str | None = None,
        parser: Any = None,
        rubric: Any = None,
        feedback_fn: Callable[[str], str] | None = None,
        seed: int = 0,
        *,
        word_list: Sequence[str] | None = None,
        game_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.game = game
        super().__init__(
            functools.partial(TextArenaGame, game, word_list, feedback_fn, game_kwargs),
            num_train_episodes=num_train_examples,
            num_eval_episodes=num_eval_examples,
            system_prompt=system_prompt,
            parser=parser,
            rubric=rubric,
            seed=seed,
            **kwargs,
        )

    def row_of(self, episode: GymEpisode, seed: int) -> dict[str, Any]:
        row = super().row_of(episode, seed)
        return {**row, "answer": secret_of(episode.env.game_state)}
