"""Promises of the packages of texts and words: copied, reversed, proposed, completed, doubted and mixed."""

from __future__ import annotations

import functools
import random

import complete_sequence
import doublecheck
import pytest
import reverse_text
import shelf
import spell_backward
from shelf_policies import DOUBLECHECK, PROPOSE_SOLVE, SENTENCE_REPEATER, tagged

import verifiers as vf


@functools.cache
def plain_distance(one: str, other: str) -> int:
    if not one or not other:
        return len(one) + len(other)
    same = plain_distance(one[1:], other[1:])
    if one[0] == other[0]:
        return same
    return 1 + min(same, plain_distance(one[1:], other), plain_distance(one, other[1:]))


def test_similarity_is_one_minus_twice_the_edits_per_letter() -> None:
    rng = random.Random(0)
    for _ in range(300):
        one, other = ("".join(rng.choices("abc", k=rng.randint(1, 8))) for _ in range(2))
        expected = max(0.0, 1 - 2 * plain_distance(one, other) / max(len(one), len(other)))
        assert reverse_text.similarity(one, other) == pytest.approx(expected)
    assert reverse_text.similarity("abcd", "abcd") == 1.0
    assert reverse_text.similarity("abcx", "abcd") == 0.5


def test_no_bundled_word_reads_the_same_in_both_directions() -> None:
    words = spell_backward.read_words(3, 9)
    assert words == sorted(set(words))
    assert f"{len(words)} common words" in shelf.readme("spell_backward")
    assert not [word for word in words if word == word[::-1] or word[::-1] in words]
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words)
    assert {len(word) for word in spell_backward.read_words(4, 5)} == {4, 5}


def test_partial_credit_is_by_letters_in_place() -> None:
    env = vf.load_environment("spell-backward", partial_credit=0.25)
    half = shelf.play(env, lambda turn: turn.answer[: len(turn.answer) // 2], prompts=10)
    for rollout in half:
        share = len(rollout.answer) // 2 / len(rollout.answer)
        assert rollout.reward == pytest.approx(0.25 * share)
    assert shelf.reward_of(env, lambda turn: turn.answer.upper() + "\n") == 1.0
    assert shelf.reward_of(env, lambda turn: turn.answer + turn.answer) == pytest.approx(0.125)
    with pytest.raises(vf.ConfigError, match="partial_credit=2 must lie between 0 and 1"):
        vf.load_environment("spell-backward", partial_credit=2)


def test_doublecheck_asks_once_and_counts_the_second_answer() -> None:
    env = vf.load_environment("doublecheck", doubt="Really?")
    block = shelf.play(env, DOUBLECHECK["gives_in"], prompts=3)
    for rollout in block:
        assert [message["content"] for message in rollout.completion if message["role"] == "user"] == ["Really?"]
        assert rollout.metrics == {"final_right": 0.0, "first_right": 1.0, "changed": 1.0}
    assert shelf.reward_of(env, lambda turn: tagged("answer", f"{int(turn.answer):,}".replace("-", "\u2212"))) == 1.0
    question, answer = doublecheck.make_problem(random.Random(0))
    assert eval(question.removeprefix("What is ").removesuffix("?")) == int(answer)


def test_a_solver_sees_the_word_alone_and_is_not_asked_for_one_that_is_invalid() -> None:
    env = vf.load_environment("propose-solve")
    seen = []

    def solves(turn: shelf.Turn) -> str:
        seen.append([message["content"] for message in turn.messages])
        return str(PROPOSE_SOLVE["oracle"](turn))

    (rollout,) = shelf.play(env, solves, prompts=1)
    first, last = rollout.prompt[-1]["content"].split()[7:10:2]
    assert seen[1:] == [[f"Spell backward: {rollout.completion[0]['content']}"]]
    assert rollout.role_rewards == {"proposer": 1.0, "solver": 1.0}
    last = last.rstrip(",")
    for word in (
        "",
        f"{first}{last}",
        f"{first}qq{last}",
        f"{first}1{last}",
        f"{last}v{first}",
        f"{first}bcdfgh{last}",
    ):
        (rollout,) = shelf.play(env, lambda turn, word=word: word, prompts=1)
        assert (rollout.turns, rollout.role_rewards) == (1, {"proposer": 0.0}), word


def test_sentence_k_is_asked_for_in_turn_k() -> None:
    env = vf.load_environment("sentence-repeater", num_sentences=3)
    (rollout,) = shelf.play(env, SENTENCE_REPEATER["oracle"], prompts=1)
    asked = [message["content"] for message in rollout.completion if message["role"] == "user"]
    assert asked == ["Repeat sentence 2.", "Repeat sentence 3."]
    said = [message["content"] for message in rollout.completion if message["role"] == "assistant"]
    assert said == rollout.info["sentences"]
    assert rollout.prompt[-1]["content"] == f"{' '.join(said)}\n\nRepeat sentence 1."


def test_training_texts_share_no_sentence_with_evaluation_ones() -> None:
    env = vf.load_environment("sentence-repeater")
    train, evaluation = (
        {sentence for row in dataset for sentence in row["info"]["sentences"]}
        for dataset in (env.get_dataset(), env.get_eval_dataset())
    )
    assert (len(train), len(evaluation)) == (2000, 400)
    assert not train & evaluation


def test_sequences_are_completions_of_plain_text() -> None:
    env = vf.load_environment("complete-sequence")
    assert env.message_type == "completion"
    assert env.sampling_args["stop"] == ["\n"]
    prompt = env.get_eval_dataset()[0]["prompt"]
    assert prompt.count("\n") == 3
    assert prompt.endswith(",")
    block = shelf.play(env, lambda turn: " 1, 2", prompts=2)
    assert all(rollout.completion == " 1, 2" for rollout in block)


@pytest.mark.parametrize(
    ("completion", "share"),
    [
        (" 10, 12, 14", 1.0),
        ("10, 12, 14\n2, 4, 6", 1.0),
        ("10, 12, 15", 2 / 3),
        ("10, 13, 14", 1 / 3),
        ("11, 12, 14", 0.0),
        ("٣, 12", 0.0),
    ],
)
def test_terms_count_up_to_the_first_wrong_one(completion: str, share: float) -> None:
    assert complete_sequence.continued(completion, "10, 12, 14") == pytest.approx(share)
