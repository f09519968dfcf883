"""Rows are built from the server's token ids alone, and a turn that does not extend them starts a new row."""

from __future__ import annotations

from verifiers.rollouts.recording_client import rows_from_turns
from verifiers.rollouts.rollout import TokenSequence, Turn


def turn(prompt: list[int], answer: list[int], *, version: int = 0, finish: str = "stop") -> Turn:
    return Turn(prompt, answer, [-0.5] * len(answer), [version] * len(answer), finish)


def test_one_turn_is_one_row_with_loss_on_every_sampled_token() -> None:
    rows, forks = rows_from_turns([turn([1, 2, 3], [4, 5])])
    assert forks == 0
    assert rows == [
        TokenSequence([1, 2, 3], [4, 5], loss_mask=[1, 1], logprobs=[-0.5, -0.5], versions=[0, 0], is_truncated=False)
    ]


def test_a_turn_that_extends_the_row_is_appended_and_the_environments_tokens_carry_no_loss() -> None:
    rows, forks = rows_from_turns([turn([1, 2], [3, 4], version=7), turn([1, 2, 3, 4, 9, 9], [5], version=8)])
    assert forks == 0
    assert len(rows) == 1
    row = rows[0]
    assert row.prompt_ids == [1, 2]
    assert row.completion_ids == [3, 4, 9, 9, 5]
    assert row.loss_mask == [1, 1, 0, 0, 1]
    assert row.logprobs == [-0.5, -0.5, 0.0, 0.0, -0.5]
    assert row.versions == [7, 7, -1, -1, 8]
    assert row.sampled_tokens == 3
    assert row.oldest_version == 7


def test_a_turn_that_rewrites_history_starts_a_new_row_and_is_counted_as_a_fork() -> None:
    rows, forks = rows_from_turns([turn([1, 2], [3, 4]), turn([1, 2, 8], [5])])
    assert forks == 1
    assert [(row.prompt_ids, row.completion_ids) for row in rows] == [([1, 2], [3, 4]), ([1, 2, 8], [5])]


def test_a_turn_whose_prompt_differs_in_the_last_sampled_token_is_never_realigned() -> None:
    rows, forks = rows_from_turns([turn([1, 2], [3, 4]), turn([1, 2, 3, 40, 9], [5])])
    assert forks == 1
    assert rows[1].prompt_ids == [1, 2, 3, 40, 9]


def test_two_interleaved_conversations_each_extend_their_own_row() -> None:
    turns = [turn([1], [2]), turn([7], [8]), turn([1, 2, 3], [4]), turn([7, 8, 9], [10])]
    rows, forks = rows_from_turns(turns)
    assert forks == 1
    assert [row.completion_ids for row in rows] == [[2, 3, 4], [8, 9, 10]]


def test_a_turn_without_sampled_tokens_leaves_no_row() -> None:
    assert rows_from_turns([turn([1, 2], [])]) == ([], 0)


def test_truncation_is_that_of_the_last_turn() -> None:
    rows, _ = rows_from_turns([turn([1], [2], finish="length"), turn([1, 2, 3], [4])])
    assert not rows[0].is_truncated
    rows, _ = rows_from_turns([turn([1], [2]), turn([1, 2, 3], [4], finish="length")])
    assert rows[0].is_truncated


def test_a_shorter_prompt_than_what_is_held_is_a_fork() -> None:
    rows, forks = rows_from_turns([turn([1, 2], [3, 4]), turn([1, 2, 3], [5])])
    assert (len(rows), forks) == (2, 1)
