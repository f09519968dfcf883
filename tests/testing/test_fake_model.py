"""The built-in fake endpoint gives answers that the environment's own parser reads."""

from __future__ import annotations

from typing import Any

import pytest

import verifiers as vf
from verifiers.evals.evaluation_loop import LoopLag, iter_requests
from verifiers.testing.fake_model import FakeEndpoint

PARSERS = {
    "plain": vf.Parser(),
    "boxed": vf.Parser(vf.extract_boxed_answer),
    "think": vf.ThinkParser(vf.extract_boxed_answer),
    "xml": vf.XMLParser(["reasoning", "answer"]),
    "none": None,
}


@pytest.mark.parametrize("name", PARSERS)
async def test_some_answers_are_right_as_the_parser_reads_them(name: str) -> None:
    parser = PARSERS[name]
    rows = [{"question": f"question {i}", "answer": str(i)} for i in range(10)]
    env = vf.SingleTurnEnv(eval_dataset=rows, system_prompt="be brief", rubric=vf.Rubric())
    groups = list(iter_requests(env.get_eval_dataset(), 1, None))

    async def answers(seed: int) -> list[list[str]]:
        endpoint = FakeEndpoint(groups, lambda task: parser, seed)
        found = []
        for group in groups:
            calls = [await endpoint.call("/chat/completions", {"messages": group[0].prompt}) for _ in range(8)]
            found.append([call["choices"][0]["message"]["content"] for call in calls])
        return found

    texts = await answers(1)
    right = [
        (parser or vf.Parser()).parse_answer([{"role": "assistant", "content": text}]) == row["answer"]
        for row, of_row in zip(rows, texts, strict=True)
        for text in of_row
    ]
    assert 10 < sum(right) < 70
    assert await answers(1) == texts
    assert await answers(2) != texts


async def test_later_turns_are_recognized_by_their_prompt_and_unknown_ones_get_junk() -> None:
    rows = [{"question": "2 + 2?", "answer": "4"}]
    env = vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric())
    endpoint = FakeEndpoint(iter_requests(env.get_eval_dataset(), 1, None))

    async def ask(*messages: dict[str, Any]) -> set[str]:
        calls = [await endpoint.call("/chat/completions", {"messages": list(messages)}) for _ in range(20)]
        return {call["choices"][0]["message"]["content"] for call in calls}

    first = {"role": "user", "content": "2 + 2?"}
    assert "4" in await ask(first, {"role": "assistant", "content": "5"}, {"role": "user", "content": "again"})
    assert len(await ask({"role": "user", "content": "another"})) == 1


def test_a_lag_is_told_only_where_it_distorts() -> None:
    lag = LoopLag()
    assert not lag.distorts(1.0)
    for late_ms in (0.5,) * 80 + (90.0,) * 20:
        lag.record(late_ms)
    assert (lag.quantile_ms(0.5), lag.quantile_ms(0.95), lag.max_ms) == (1.0, 90.0, 90.0)
    assert lag.distorts(500.0)
    assert not lag.distorts(5000.0)
