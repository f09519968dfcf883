"""Wordle: marks as the game gives them, guesses that count, and one secret for a whole group."""

from __future__ import annotations

from typing import Any

import pytest
import shelf
import wordle
from shelf import Turn
from shelf_policies import WORDLE, tagged

import verifiers as vf
from verifiers.rollouts.rollout import Rollout


@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [
        ("crane", "crane", "GGGGG"),
        # a letter is marked as often as the secret has it
        ("speed", "abide", "XXYXY"),
        ("speed", "steal", "GXGXX"),
        ("allow", "label", "YYYXX"),
        # in place first: the G takes the only e, whatever stands to the left of it
        ("geese", "there", "XXGXG"),
    ],
)
def test_marks(guess: str, secret: str, marks: str) -> None:
    assert wordle.marks_for(guess, secret) == marks


def test_the_word_list_is_fit_to_play_with() -> None:
    words = wordle.read_words()
    assert words == sorted(set(words))
    assert len(words) >= 600
    assert all(len(word) == 5 and word.isascii() and word.isalpha() and word.islower() for word in words)
    assert f"{len(words)} common words are bundled" in shelf.readme("wordle").replace("\n", " ")


def game(*guesses: str, **arguments: Any) -> Rollout:
    """One game, the guesses as they are; "SECRET" stands for the secret."""

    def policy(turn: Turn) -> str:
        return guesses[turn.number % len(guesses)].replace("SECRET", turn.answer)

    (rollout,) = shelf.play(vf.load_environment("wordle", **arguments), policy, prompts=1)
    return rollout


def replies(rollout: Rollout) -> list[str]:
    return [message["content"] for message in rollout.completion if message["role"] == "user"]


def test_six_guesses_and_no_more() -> None:
    rollout = game(*(tagged("guess", word) for word in ["crane", "slate", "about", "house", "piano", "music"]))
    assert rollout.turns == 6
    assert len(replies(rollout)) == 5
    assert replies(rollout)[-1].endswith("Guesses left: 1.")
    assert rollout.metrics["solved"] == 0.0


@pytest.mark.parametrize(("before", "reward"), [(0, 1.0), (1, 0.9 + 0.1 * 5 / 6), (5, 0.9 + 0.1 / 6)])
def test_the_game_ends_with_the_word_and_haste_pays(before: int, reward: float) -> None:
    words = ["crane", "slate", "about", "house", "piano"][:before]
    rollout = game(*(tagged("guess", word) for word in words), tagged("guess", "SECRET"))
    assert rollout.turns == before + 1
    assert rollout.reward == pytest.approx(reward)


def test_the_policy_is_told_its_guess_and_the_marks() -> None:
    rollout = game("I think of <guess> CRANE </guess>")
    secret = rollout.answer
    marks = " ".join(wordle.marks_for("crane", secret))
    assert replies(rollout)[0] == f"C R A N E\n{marks}\nGuesses left: 5."


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("crane", "Write one guess as"),
        ("<guess>cranes</guess>", "exactly 5 letters"),
        ("<guess>crâne</guess>", "exactly 5 letters"),
        ("<guess>zzzzz</guess>", "'zzzzz' is not in the word list"),
    ],
)
def test_an_invalid_guess_is_told_why_and_lost(said: str, told: str) -> None:
    rollout = game(said)
    assert told in replies(rollout)[0]
    assert "Guesses left: 5." in replies(rollout)[0]
    assert (rollout.turns, rollout.reward) == (6, 0.0)


def test_a_word_guessed_again_is_lost_and_earns_nothing() -> None:
    rollout = game(tagged("guess", "crane"))
    assert replies(rollout)[1].startswith("You have guessed 'crane' before.")
    assert rollout.metrics["valid_guesses"] == pytest.approx(1 / 6)


def test_a_group_plays_for_one_word_and_prompts_do_not_give_it_away() -> None:
    block = shelf.play(vf.load_environment("wordle"), WORDLE["random_word"], prompts=4, rollouts=3)
    assert [len({rollout.answer for rollout in group.rollouts}) for group in block.groups] == [1, 1, 1, 1]
    assert len({rollout.answer for rollout in block}) == 4
    assert len({str(rollout.prompt) for rollout in block}) == 1
