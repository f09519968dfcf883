"""A single-player TextArena game as an environment with reset and step.

TextArena's games draw from Python's global generator and read their words from NLTK's global corpora. Here the
games' modules see stand-ins that answer to the thread they are called from: an instance on a thread of its own has
its own generator and its own words, whatever others do, and the process's generator is left alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from verifiers.errors import ConfigError, InfraError

__all__ = ["TextArenaGame", "secret_of"]

_WORD_GAMES = ("Hangman", "WordLadder", "WordSearch", "Wordle")
_SECRET_KEYS = ("secret_word", "target_word", "secret_code", "game_number")

# importing a game and standing in for its modules' names happens once each, whichever thread comes first
_INSTALLING = threading.RLock()
_local = threading.local()


class TextArenaGame:
    """One instance of a game, with `reset(seed)` and `step(action)` as `GymEnv` calls them.

    The reward comes with the last step. The observation is what the game said since the last one.

    Args:
        game: a TextArena id, such as "Wordle-v0".
        word_list: words in place of NLTK's, for the games that draw one.
        feedback_fn: makes the reply of the game's whole text so far; None: what is new in it.
        game_kwargs: settings of the game, in place of those that TextArena registers.

    Raises:
        ConfigError: the game is unknown, needs more than one player, or needs words that are not there.
    """

    def __init__(
        self,
        game: str,
        word_list: Sequence[str] | None = None,
        feedback_fn: Callable[[str], str] | None = None,
        game_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._words = tuple(word_list) if word_list is not None else None
        self._feedback_fn = feedback_fn
        self._rng = random.Random(0)
        self._seen = ""
        self._id = game
        self._kwargs = dict(game_kwargs or {})
        module = _module_of(game)
        if self._words is None and game.startswith(_WORD_GAMES) and not _has_corpus():
            raise ConfigError(_words_missing(game))
        with self._own_world(), _INSTALLING, _without_downloads():
            _import_game(game, module)
            _stand_in(module)
            self.game = _make(game, self._kwargs)

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Start over; the same seed gives the same game."""
        with self._own_world():
            # some games draw when they are made, and TextArena's wrappers keep what was said in earlier games
            self._rng.seed(seed)
            self.game = _make(self._id, self._kwargs)
            try:
                self.game.reset(num_players=1, seed=seed)
            except AssertionError as error:
                raise ConfigError(f"Game {self._id!r} is not for one player: {error}") from error
            _mend(self.game.state)
            self._seen = str(self.game.get_observation()[1])
        return self._seen.strip(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play a move; the reward is 0 but for the last one."""
        with self._own_world():
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
        # the policy need not be told what it said; a wrapper puts brackets around a move that has none
        for player in ("GAME", "Player", "Player 0"):
            for echo in (f"[{player}] {action}", f"[{player}] [{action}]"):
                new = new.removeprefix(echo)
        return new.strip()

    @contextlib.contextmanager
    def _own_world(self) -> Iterator[None]:
        before = getattr(_local, "rng", None), getattr(_local, "words", None)
        _local.rng, _local.words = self._rng, self._words
        try:
            yield
        finally:
            _local.rng, _local.words = before


def secret_of(game_state: Mapping[str, Any]) -> str:
    """What the player is to find, where the game hides one thing; else ""."""
    for key in _SECRET_KEYS:
        if game_state.get(key) is not None:
            return str(game_state[key])
    return ""


# -- making a game ------------------------------------------------------------------------------------------


def _module_of(game: str) -> str:
    if importlib.util.find_spec("textarena") is None:
        raise ConfigError("TextArenaEnv needs textarena; install it by `pip install 'verifiers[ta]'`.")
    with _INSTALLING:
        from textarena.envs.registration import ENV_REGISTRY

    if game not in ENV_REGISTRY:
        raise ConfigError(f"TextArena has no game {game!r}; its names look like 'Wordle-v0'.")
    return str(ENV_REGISTRY[game].entry_point).partition(":")[0]


def _import_game(game: str, module: str) -> None:
    try:
        importlib.import_module(module)
    except (ImportError, SyntaxError) as error:
        # a file of textarena's own that this Python cannot read, or a package that it did not ask for
        raise ConfigError(f"Game {game!r} cannot be imported from textarena: {error}") from error


def _make(game: str, settings: Mapping[str, Any]) -> Any:
    import textarena

    try:
        return textarena.make(game, **settings)
    except LookupError as error:
        raise ConfigError(_words_missing(game)) from error
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"Game {game!r} cannot be made: {error}") from error


def _has_corpus() -> bool:
    import nltk

    for resource in ("corpora/words", "corpora/words.zip"):
        with contextlib.suppress(LookupError):
            nltk.data.find(resource)
            return True
    return False


def _words_missing(game: str) -> str:
    return (
        f"Game {game!r} draws its words from NLTK's data, which is not installed: give word_list=[...], or run "
        "`python -m nltk.downloader words averaged_perceptron_tagger_eng`."
    )


def _mend(state: Any) -> None:
    """Countdown, Cryptarithm and Slitherlink give these two their arguments in another order than they take them."""
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


# -- stand-ins ----------------------------------------------------------------------------------------------


class _ThreadRandom:
    """The module `random`, drawing from the calling instance's generator where there is one."""

    def __getattr__(self, name: str) -> Any:
        rng = getattr(_local, "rng", None)
        return getattr(rng, name) if rng is not None and hasattr(rng, name) else getattr(random, name)


class _ThreadWords:
    """NLTK's corpus `words`, or the calling instance's own words."""

    def __init__(self, corpus: Any) -> None:
        self._corpus = corpus
        self._read = functools.lru_cache(maxsize=8)(lambda *names: tuple(corpus.words(*names)))

    def words(self, *names: str) -> list[str]:
        own = getattr(_local, "words", None)
        return list(own if own is not None else self._read(*names))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._corpus, name)


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    """In place of `print`."""


def _tagger(original: Callable[..., Any]) -> Callable[..., Any]:
    """NLTK's tagger; the words of a list of one's own are all taken for nouns, which the games ask for."""
    # a game asks about each word of its list whenever it is made
    remembered = functools.lru_cache(maxsize=1 << 19)(lambda tokens: tuple(original(list(tokens))))

    def tag(tokens: Sequence[str]) -> list[tuple[str, str]]:
        own = getattr(_local, "words", None) is not None
        return [(token, "NN") for token in tokens] if own else list(remembered(tuple(tokens)))

    return tag


def _dictionary(original: Callable[..., Any]) -> Callable[..., Any]:
    """TextArena's dictionary, read once for each list of words: a rollout would take a second to read it."""

    @functools.lru_cache(maxsize=8)
    def made(words: tuple[str, ...] | None, arguments: tuple[tuple[str, Any], ...]) -> Any:
        return original(**dict(arguments))

    return lambda **kwargs: made(getattr(_local, "words", None), tuple(sorted(kwargs.items())))


def _stand_in(module: str) -> None:
    """Replace what is global in the modules of a game, and in those that all games share."""
    package = module.rpartition(".")[0]
    shared = ("textarena.core", "textarena.state", "textarena.envs.utils")
    for name in [name for name in sys.modules if name.startswith((*shared, package))]:
        names = vars(sys.modules[name])
        if names.get("random") is random:
            names["random"] = _ThreadRandom()
        # some games print while they work
        names["print"] = _say_nothing
        if "words" in names and type(names["words"]).__module__.startswith("nltk."):
            names["words"] = _ThreadWords(names["words"])
        tagger, dictionary = names.get("pos_tag"), names.get("EnglishDictionary")
        if callable(tagger) and getattr(tagger, "__module__", "").startswith("nltk."):
            names["pos_tag"] = _tagger(tagger)
        if isinstance(dictionary, type) and not name.endswith("word_lists"):
            names["EnglishDictionary"] = _dictionary(dictionary)


@contextlib.contextmanager
def _without_downloads() -> Iterator[None]:
    """Games call NLTK's downloader when they are imported, also for what is there; it then waits for a network."""
    if importlib.util.find_spec("nltk") is None:
        yield
        return
    import nltk

    download, nltk.download = nltk.download, lambda *args, **kwargs: True
    try:
        yield
    finally:
        nltk.download = download
