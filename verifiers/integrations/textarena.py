"""TextArenaEnv: TextArena's single-player games."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from verifiers.errors import ConfigError, InfraError
from verifiers.installation import install_hint
from verifiers.integrations.gymnasium import GymEnv, GymEpisode

# games that read lists of words when they are made, and draw from them at each reset
_WORD_GAMES = ("Hangman", "WordLadder", "WordSearch", "Wordle")
_SECRET_KEYS = ("secret_word", "target_word", "secret_code", "game_number")

# games draw from Python's global generator, so one call at a time is made with the game's own state in it
_GLOBAL_RANDOM = threading.RLock()


class TextArenaGame:
    """One instance of a game, with `reset(seed)` and `step(action)` as `GymEnv` calls them.

    The reward comes with the last step. An observation is the game's text since the last one.
    """

    def __init__(
        self,
        game: str,
        word_list: Sequence[str] | None = None,
        feedback_fn: Callable[[str], str] | None = None,
        game_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.game: Any = None
        self._id = game
        self._words = tuple(word_list) if word_list is not None else None
        self._settings = tuple(sorted((game_kwargs or {}).items()))
        self._feedback_fn = feedback_fn
        self._draws: Any = None
        self._seen = ""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Start a game; the same seed gives the same one."""
        self._draws = random.Random(seed).getstate()
        with self._own_draws():
            # some games draw when they are made, and TextArena's wrappers keep the text of earlier games
            self.game = _made(self._id, self._words, self._settings)
            try:
                self.game.reset(num_players=1, seed=seed)
            except AssertionError as error:
                raise ConfigError(f"Game {self._id!r} is not for one player: {error}") from error
            _accept_swapped_arguments(self.game.state)
            self._seen = str(self.game.get_observation()[1])
        return self._seen.strip(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play a move; the reward is 0 before the last one."""
        with self._own_draws():
            done, info = self.game.step(action=action)
            if not done:
                return self._reply(action), 0.0, False, False, dict(info)
            rewards, game_info = self.game.close()
        if rewards is None:
            raise InfraError(f"Game {self._id!r} ended without a reward.")
        about = dict(game_info[0])
        return str(about.get("reason") or "The game is over."), float(rewards[0]), True, False, about

    @property
    def game_state(self) -> Mapping[str, Any]:
        """The game's own state, hidden from the player."""
        state = getattr(self.game.state, "game_state", None)
        return state if isinstance(state, Mapping) else {}

    def _reply(self, action: str) -> str:
        whole = str(self.game.get_observation()[1])
        if self._feedback_fn is not None:
            return str(self._feedback_fn(whole))
        new = whole[len(self._seen) :] if whole.startswith(self._seen) else whole
        self._seen = whole
        new = new.strip()
        # the policy knows its own move; a wrapper puts brackets around a move that has none
        for player in ("GAME", "Player", "Player 0"):
            for echo in (f"[{player}] {action}", f"[{player}] [{action}]"):
                new = new.removeprefix(echo)
        return new.strip()

    @contextlib.contextmanager
    def _own_draws(self) -> Iterator[None]:
        with _GLOBAL_RANDOM:
            before = random.getstate()
            random.setstate(self._draws)
            try:
                yield
            finally:
                self._draws = random.getstate()
                random.setstate(before)


def secret_of(game_state: Mapping[str, Any]) -> str:
    """Return what the player has to find, where the game hides one thing; else ""."""
    for key in _SECRET_KEYS:
        if game_state.get(key) is not None:
            return str(game_state[key])
    return ""


# -- making a game ------------------------------------------------------------------------------------------

_Settings = tuple[tuple[str, Any], ...]


def _made(game: str, words: tuple[str, ...] | None, settings: _Settings) -> Any:
    spec = _spec_of(game)
    try:
        if not game.startswith(_WORD_GAMES):
            import textarena

            return textarena.make(game, **dict(settings))
        # reading the lists takes a second, and no game changes them
        made = copy.copy(_word_game(game, words, settings))
        for wrapper in spec.default_wrappers or ():
            made = wrapper(made)
        return made
    except (ImportError, SyntaxError) as error:
        # a file of textarena's own that this Python cannot read, or a package that it does not require
        raise ConfigError(f"Game {game!r} cannot be imported from textarena: {error}") from error
    except LookupError as error:
        raise ConfigError(
            f"Game {game!r} draws its words from NLTK's data, which is not installed: give word_list=[...], or run "
            "`python -m nltk.downloader words averaged_perceptron_tagger_eng`."
        ) from error
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"Game {game!r} cannot be made: {error}") from error


def _spec_of(game: str) -> Any:
    if importlib.util.find_spec("textarena") is None:
        raise ConfigError(f"TextArenaEnv needs textarena; {install_hint('ta')}.")
    from textarena.envs.registration import ENV_REGISTRY

    if game not in ENV_REGISTRY:
        raise ConfigError(f"TextArena has no game {game!r}; its names look like 'Wordle-v0'.")
    return ENV_REGISTRY[game]


@functools.lru_cache(maxsize=8)
def _word_game(game: str, words: tuple[str, ...] | None, settings: _Settings) -> Any:
    """Make a game of words, without its wrappers; with words of the user's own, NLTK's data is not needed."""
    spec = _spec_of(game)
    module, _, name = spec.entry_point.partition(":")
    game_class = getattr(importlib.import_module(module), name)
    given = {**spec.kwargs, **dict(settings)}
    if words is None:
        return game_class(**given)
    # the constructors of textarena 0.7 read NLTK's lists and keep their arguments
    made = game_class.__new__(game_class)
    parameters = list(inspect.signature(game_class.__init__).parameters.values())[1:]
    if unknown := sorted(given.keys() - {parameter.name for parameter in parameters}):
        raise TypeError(f"it has no setting {unknown[0]!r}")
    known = {*words, *_english_words()}
    values = {parameter.name: parameter.default for parameter in parameters} | given
    length = values.get("word_length")
    values |= {
        "word_list": [word for word in words if length in (None, len(word))],
        "dictionary": _Dictionary(known),
        "universal_word_list": known,
        "num_words": 5,
        "num_incorrect_tries": 20,
        "_is_valid_word": lambda word: word.lower() in known,
    }
    for attribute, value in values.items():
        setattr(made, attribute, value)
    return made


class _Dictionary(set[str]):
    """The words that Wordle takes for English."""

    def is_english_word(self, word: str) -> bool:
        return word.lower() in self


@functools.cache
def _english_words() -> frozenset[str]:
    """Return the words of TextArena's own dictionaries, which need no NLTK data."""
    from textarena.envs.utils.word_lists import EnglishDictionary

    return frozenset(EnglishDictionary(keep_proper_nouns=False, include_nltk=False).get_all_words())


def _accept_swapped_arguments(state: Any) -> None:
    """Make a game's state take two methods' arguments as Countdown, Cryptarithm and Slitherlink give them."""
    add_observation, set_invalid_move = state.add_observation, state.set_invalid_move

    def add(message: Any, observation_type: Any, from_id: Any = -1, to_id: int = -1) -> None:
        if not isinstance(message, str):
            message, observation_type, from_id = observation_type, from_id, message
        add_observation(message, observation_type, from_id, to_id)

    def refuse(reason: Any, reward: Any = -1.0) -> None:
        if isinstance(reward, str):
            reason, reward = reward, reason
        set_invalid_move(reason, reward)

    state.add_observation, state.set_invalid_move = add, refuse


class TextArenaEnv(GymEnv):
    """A single-player game of TextArena. Each rollout makes its own instance.

    A row's seed decides the game, so the rollouts of one row face the same one, also in the next run. The parsed
    answer's text is the move; the game itself judges it. The row's `answer` is what the player has to find, where the
    game hides one thing (the word of Wordle), else "". The default reward is the game's own, mostly
    0 .. 1; after the last move the state's `step_info` holds the game's account of its end.

    Games that draw words (Wordle, Hangman, WordLadder, WordSearch) need NLTK's word lists, or `word_list`. Games draw
    from Python's global generator: each call is made with the game's own state in it, one call at a time.

    Args:
        num_train_examples, num_eval_examples: rows, each a game; 0 for none.
        system_prompt: put before the game's own text.
        parser: finds the move in an answer. Default: the whole text.
        feedback_fn: makes the reply from the game's whole text so far. Default: its new part.
        word_list: words in place of NLTK's; of the length that the game asks for.
        game_kwargs: settings of the game, in place of those that TextArena registers.

    Raises:
        ConfigError: the game is unknown, needs more than one player, or needs words that are not installed.
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
        """Return the row of a game, with what the player has to find as its answer."""
        row = super().row_of(episode, seed)
        return {**row, "answer": secret_of(episode.env.game_state)}
