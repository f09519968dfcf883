"""RankingRubric: a group's rollouts by their place in a judge's ranking."""

from __future__ import annotations

import re
from typing import Any

import pytest

import verifiers as vf
from verifiers.errors import ConfigError
from verifiers.rubrics.ranking_rubric import parse_ranking
from verifiers.testing import FakeClient, Fault
from verifiers.types import State

SHOWN = re.compile(r'<response label="(\w+)">\n(.*?)\n</response>', re.DOTALL)


def states_of(*texts: str) -> list[State]:
    return [
        State(prompt=[{"role": "user", "content": "Say a number."}], completion=text, answer="9") for text in texts
    ]


def by_number(body: dict[str, Any]) -> str:
    """Return the judge of these tests: the greater number is better."""
    shown = {label: int(text) for label, text in SHOWN.findall(body["messages"][0]["content"])}
    return "Let me see.\n\nRanking: " + " > ".join(sorted(shown, key=lambda label: -shown[label]))


async def rewards_by(rubric: vf.RankingRubric, *texts: str) -> list[float]:
    states = states_of(*texts)
    await rubric.score_group(states)
    assert all("grading_errors" not in scored for scored in states)
    return [scored["reward"] for scored in states]


async def test_rewards_are_evenly_spaced_from_best_to_worst() -> None:
    client = FakeClient(by_number)
    rubric = vf.RankingRubric(judge_client=client)
    assert await rewards_by(rubric, "1", "5", "3", "4", "2") == [0.0, 1.0, 0.5, 0.75, 0.25]
    assert len(client.requests) == 1
    assert "Say a number." in client.requests[0].messages[0]["content"]
    assert rubric.get_reward_func_names() == ["ranking"]


async def test_equal_responses_are_shown_once_and_share_their_reward() -> None:
    client = FakeClient(by_number)
    assert await rewards_by(vf.RankingRubric(judge_client=client), "7", "5", "7", "1") == pytest.approx(
        [5 / 6, 1 / 3, 5 / 6, 0.0]
    )
    assert len(SHOWN.findall(client.requests[0].messages[0]["content"])) == 3


@pytest.mark.parametrize("texts", [("1",), ("1", "1", "1")])
async def test_where_there_is_nothing_to_rank_no_judge_is_asked(texts: tuple[str, ...]) -> None:
    client = FakeClient("nonsense")
    assert await rewards_by(vf.RankingRubric(judge_client=client), *texts) == [0.5] * len(texts)
    assert client.requests == []


async def test_the_judge_may_call_some_equal() -> None:
    def tie(body: dict[str, Any]) -> str:
        shown = {text: label for label, text in SHOWN.findall(body["messages"][0]["content"])}
        return f"**{shown['3']} = {shown['2']} > {shown['1']}**"

    assert await rewards_by(vf.RankingRubric(judge_client=FakeClient(tie)), "1", "2", "3") == [0.0, 0.75, 0.75]


async def test_the_order_shown_neither_depends_on_arrival_nor_favours_a_place() -> None:
    orders = set()
    for seed in range(20):
        client = FakeClient(by_number)
        rubric = vf.RankingRubric(judge_client=client, seed=seed)
        assert await rewards_by(rubric, "1", "2", "3") == [0.0, 0.5, 1.0]
        assert await rewards_by(rubric, "3", "1", "2") == [1.0, 0.0, 0.5]
        texts = {request.messages[0]["content"] for request in client.requests}
        assert len(texts) == 1, "the same group is shown alike in any order of arrival"
        orders.add(tuple(text for _, text in SHOWN.findall(texts.pop())))
    assert len(orders) >= 4
    assert len({order[0] for order in orders}) == 3


async def test_rounds_show_other_orders_and_are_averaged() -> None:
    def first_shown_wins(body: dict[str, Any]) -> str:
        return "A > B > C > D"

    client = FakeClient(first_shown_wins)
    rewards = await rewards_by(vf.RankingRubric(judge_client=client, rounds=12), "1", "2", "3", "4")
    assert len({request.messages[0]["content"] for request in client.requests}) > 6
    assert sum(rewards) == pytest.approx(2.0)
    assert all(0.1 < reward < 0.9 for reward in rewards), "a judge that looks at places only prefers nobody"


async def test_a_ranking_that_leaves_some_out_is_asked_for_again() -> None:
    client = FakeClient(["A > B", "A > B > B", "A > B > C"])
    rewards = await rewards_by(vf.RankingRubric(judge_client=client), "1", "2", "3")
    assert sorted(rewards) == [0.0, 0.5, 1.0]
    assert len(client.requests) == 3


@pytest.mark.parametrize("client", [FakeClient("A is best"), FakeClient(faults=Fault(status=401, times=9))])
async def test_a_ranking_that_fails_fails_every_grade_of_the_group(client: FakeClient) -> None:
    states = states_of("1", "2", "3")
    await vf.RankingRubric(judge_client=client).score_group(states)
    for scored in states:
        [error] = scored["grading_errors"]
        assert error["func"] == "ranking"
        assert error["error"].startswith("GradingError: The judge 'gpt-4.1-nano' gave no verdict")


async def test_the_prompt_may_be_ones_own() -> None:
    client = FakeClient("A > B")
    rubric = vf.RankingRubric(judge_client=client, judge_prompt="{question} [{answer}] {responses} {example}")
    states = states_of("1", "2")
    await rubric.score_group(states)
    text = client.requests[0].messages[0]["content"]
    assert text.startswith("Say a number. [9] <response")
    assert text.endswith("B > A")
    assert states[0]["judge_response"] == {text: "A > B"}


@pytest.mark.parametrize(
    ("text", "tiers"),
    [
        ("C > A > B", [["C"], ["A"], ["B"]]),
        ("I looked at A, B, C.\n\nRanking: [B], [C], [A].\n", [["B"], ["C"], ["A"]]),
        ("A > B > C\nOn second thought:\n`C = B > A`", [["C", "B"], ["A"]]),
        ("<think>\nA > B > C\n</think>\nB > A > C", [["B"], ["A"], ["C"]]),
        ("<think>\nMaybe\nA > B > C\nbut then", None),
        ("A > B > C > C", None),
        ("A > B > C > D", None),
        ("", None),
    ],
)
def test_rankings_are_read_from_the_last_line_that_has_every_label_once(
    text: str, tiers: list[list[str]] | None
) -> None:
    if tiers is None:
        with pytest.raises(ValueError, match="A, B, C, each once"):
            parse_ranking(text, ["A", "B", "C"])
    else:
        assert parse_ranking(text, ["A", "B", "C"]) == tiers


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="rounds=0"):
        vf.RankingRubric(rounds=0)
