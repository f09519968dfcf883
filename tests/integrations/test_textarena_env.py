"""TextArenaEnv: each rollout plays its own game, decided by the row's seed alone."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from typing import Any

import pytest

import verifiers as vf
from verifiers.inference.endpoint import ClientBackend
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.testing import FakeClient
from verifiers.types import Outcome, RolloutKey

pytestmark = pytest.mark.skipif(importlib.util.find_spec("textarena") is None, reason="needs the ta extra")


@pytest.fixture(autouse=True)
def _no_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep TextArena's word games from asking NLTK's server for data when they are imported."""
    import nltk

    monkeypatch.setattr(nltk, "download", lambda *args, **kwargs: False)


FRUIT = ["apple", "grape", "lemon", "mango", "peach", "berry", "melon", "olive"]

# every game that needs neither words nor a key; the slow tier plays them all
OFFLINE_GAMES = (
    *("2048", "Bandit", "Blackjack", "Countdown", "Crosswords", "Cryptarithm", "FifteenPuzzle", "FrozenLake"),
    *("GuessTheNumber", "LightsOut", "LogicPuzzle", "Mastermind", "Minesweeper", "PegJump", "RushHour", "Secretary"),
    *("Set", "Slitherlink", "Sokoban", "Sudoku", "ThreeCardMonte", "TowerOfHanoi"),
)
QUICK_GAMES = ("2048", "Cryptarithm", "Slitherlink", "Sudoku")


def env_of(game: str, **settings: Any) -> vf.TextArenaEnv:
    return vf.TextArenaEnv(game, **{"num_train_examples": 4, "num_eval_examples": 2, **settings})


async def play(env: vf.TextArenaEnv, answers: Any, *, row: int = 0) -> Rollout:
    runner = Run(env, ClientBackend(FakeClient(answers)), "m", {})
    data = env.get_dataset()[row]
    request = RolloutRequest(RolloutKey(0, row, 0), data["prompt"], answer=data["answer"], info=data["info"])
    (rollout,) = await runner.play([request])
    await runner.score([rollout])
    return rollout


def wordle(**settings: Any) -> vf.TextArenaEnv:
    return env_of("Wordle-v0", word_list=FRUIT, **settings)


def replies(rollout: Rollout) -> list[str]:
    return [message["content"] for message in rollout.completion if message["role"] == "user"]


def test_rows_show_the_game_and_hold_what_is_to_be_found() -> None:
    env = wordle(num_train_examples=20, system_prompt="Play.")
    assert set(env.get_dataset()["answer"]) <= set(FRUIT)
    assert len(set(env.get_dataset()["answer"])) > 3
    assert [message["role"] for message in env.get_dataset()[0]["prompt"]] == ["system", "user"]
    assert "You are Playing Wordle." in env.get_dataset()[0]["prompt"][1]["content"]


def test_the_same_seed_gives_the_same_games_and_another_gives_others() -> None:
    one, again, other = (
        list(env_of("GuessTheNumber-v0", seed=seed, num_train_examples=20).get_dataset()["info"])
        for seed in (1, 1, 2)
    )
    assert one == again
    assert one != other


async def test_the_word_wins_and_only_what_is_new_is_said() -> None:
    env = wordle()
    word = env.get_dataset()[1]["answer"]
    other = next(fruit for fruit in FRUIT if fruit != word)
    rollout = await play(env, [f"[{other}]", f"[{word}]"], row=1)
    assert rollout.reward == 1.0
    assert [step["reward"] for step in rollout.state["trajectory"]] == [0.0, 1.0]
    first, last = replies(rollout)
    assert first.startswith(f"[GAME] You submitted [{other}].")
    assert "You are Playing Wordle" not in first
    assert last == "Congratulations! You guessed the word correctly!"
    assert rollout.state["stop_condition"] == "terminated"
    assert rollout.state["step_info"]["turn_count"] == 2


async def test_a_lost_game_has_the_games_own_partial_reward() -> None:
    env = wordle()
    word = env.get_dataset()[0]["answer"]
    guesses = [f"[{fruit}]" for fruit in FRUIT if fruit != word][:6]
    rollout = await play(env, guesses)
    assert 0.0 <= rollout.reward < 1.0
    assert f"The secret word was: **{word}**" in replies(rollout)[-1]
    assert len(rollout.state["trajectory"]) == 6


async def test_the_parsed_answer_is_the_move_and_feedback_fn_makes_the_reply() -> None:
    seen: list[str] = []

    def feedback(observation: str) -> str:
        seen.append(observation)
        return observation.rpartition("Feedback:")[2].strip()

    env = wordle(parser=vf.XMLParser(["guess"], "guess"), feedback_fn=feedback)
    word = env.get_dataset()[0]["answer"]
    other = next(fruit for fruit in FRUIT if fruit != word)
    rollout = await play(env, [f"<guess>[{other}]</guess>", f"<guess>[{word}]</guess>"])
    assert replies(rollout)[0].startswith(" ".join(other.upper()))
    assert "You are Playing Wordle" in seen[0]
    assert rollout.reward == 1.0


async def test_rollouts_side_by_side_face_their_rows_game_and_leave_the_process_generator_alone() -> None:
    env = env_of("2048-v0", max_episode_steps=6)
    answers = ["[up]", "[left]", "[down]", "[right]"]
    alone = [replies(await play(env, answers, row=row)) for row in range(4)]
    assert len({tuple(said) for said in alone}) == 4

    random.seed(5)
    expected = [random.random() for _ in range(3)]
    random.seed(5)
    together = await asyncio.gather(*(play(env, answers, row=row % 4) for row in range(12)))
    assert [replies(rollout) for rollout in together] == alone * 3
    assert [random.random() for _ in range(3)] == expected


@pytest.mark.parametrize("game", ["Hangman-v0", "WordSearch-v0"])
async def test_the_other_games_of_words_take_a_list_too(game: str) -> None:
    rollout = await play(env_of(game, word_list=FRUIT, max_episode_steps=3), ["[e]"])
    assert rollout.outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    "game", [pytest.param(game, marks=() if game in QUICK_GAMES else pytest.mark.slow) for game in OFFLINE_GAMES]
)
async def test_a_game_without_words_of_its_own_is_played_and_played_again_alike(game: str) -> None:
    env = env_of(f"{game}-v0", max_episode_steps=3, num_train_examples=2, num_eval_examples=0)
    first, again = [await play(env, ["[1]", "[up]", "[A]"]) for _ in range(2)]
    assert first.outcome is Outcome.COMPLETED
    assert first.completion == again.completion
    assert first.reward == again.reward


async def test_games_that_draw_when_they_are_made_differ_by_row_and_their_mixed_up_arguments_are_mended() -> None:
    env = env_of("Countdown-v0", num_train_examples=6, game_kwargs={"numbers": None, "target": None})
    assert len(set(env.get_dataset()["question"])) == 6
    rollout = await play(env, ["nonsense"])
    assert 0.0 <= rollout.reward < 1.0
    said = replies(rollout)
    assert said[0].startswith("[GAME] You attempted an invalid move. Reason: Invalid action format.")
    assert said[1].startswith("Invalid Move: Invalid action format.")


@pytest.mark.parametrize(
    ("game", "message"),
    [
        ("Wordle-v0", r"Game 'Wordle-v0' draws its words from NLTK's data, .* give word_list="),
        ("Wordle-v9", "TextArena has no game 'Wordle-v9'"),
        ("TicTacToe-v0", "Game 'TicTacToe-v0' is not for one player"),
        pytest.param(
            "TwentyQuestions-v0",
            "Game 'TwentyQuestions-v0' cannot be made: OpenRouter API key not found",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_game_that_cannot_be_played_is_said(game: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk

    # as on a machine without NLTK's data and without a key, whatever this one has
    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(vf.ConfigError, match=message):
        env_of(game)
