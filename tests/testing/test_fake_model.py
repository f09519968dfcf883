"""The built-in fake endpoint gives answers that the environment's own parser reads."""

from __future__ import annotations

import dataclasses
import json
import random
from array import array
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import verifiers as vf
from verifiers.evals.evaluation_run import EvaluationRun, LoopLag, iter_requests
from verifiers.evals.results import RolloutResults
from verifiers.inference.limiter import Limiter
from verifiers.log import Redactor
from verifiers.rollouts.run import Run
from verifiers.rubrics.judge_rubric import judge_yes_no
from verifiers.testing.fake_model import FAKE_MODEL, FakeEndpoint, answer_as_judge, fake_value, play_judges

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


async def test_a_row_without_an_answer_is_answered_with_its_question_or_junk() -> None:
    env = vf.SingleTurnEnv(eval_dataset=[{"question": "Where is it?"}], system_prompt="Be kind.", rubric=vf.Rubric())
    groups = list(iter_requests(env.get_eval_dataset(), 1, None))
    endpoint = FakeEndpoint(groups)
    calls = [await endpoint.call("/chat/completions", {"messages": groups[0][0].prompt}) for _ in range(20)]
    texts = {call["choices"][0]["message"]["content"] for call in calls}
    assert len(texts) == 2
    assert "Where is it?" in texts


# -- tools -----------------------------------------------------------------------------------------------------


SCHEMAS: dict[str, dict[str, Any]] = {
    "texts": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 6},
            "code": {"type": "string", "maxLength": 2},
            "day": {"type": "string", "format": "date"},
            "unit": {"enum": ["km", "mile"]},
        },
        "required": ["name", "code", "day", "unit"],
    },
    "numbers": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": -3, "maximum": -1},
            "b": {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 11},
            "c": {"type": "number", "maximum": 0.25},
            "d": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
            "e": {"type": "integer", "multipleOf": 5, "minimum": 6},
            "f": {"type": ["null", "integer"]},
            "g": {"type": "number", "minimum": 0.5701, "maximum": 0.5703},
        },
        "required": [*"abcdefg"],
    },
    "nested": {
        "type": "object",
        "properties": {
            "tree": {"$ref": "#/$defs/Node"},
            "pairs": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2}},
            "either": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        },
        "required": ["tree", "pairs", "either"],
        "additionalProperties": False,
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
            }
        },
    },
    "nothing": {"type": "object", "properties": {}},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_made_up_arguments_are_what_the_schema_takes(name: str) -> None:
    for number in range(20):
        value = fake_value(SCHEMAS[name], random.Random(number))
        jsonschema.validate(value, SCHEMAS[name])


async def test_it_calls_tools_and_judges_until_every_rollout_has_a_score() -> None:
    def multiply(a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b

    def look_up(word: str, times: int = 1) -> str:
        """Look a word up."""
        return f"{word} " * times

    async def by_judge(judge: Any, prompt: Any, completion: Any, answer: Any, state: Any) -> float:
        return float(await judge(prompt, completion, answer, state) == "yes")

    rows = [{"question": f"What is {i} times 3?", "answer": str(3 * i)} for i in range(8)]
    rubric = vf.RubricGroup([vf.Rubric([lambda: 0.0], [0.0]), vf.JudgeRubric(funcs=[by_judge])])
    env = vf.EnvGroup([vf.ToolEnv(tools=[multiply, look_up], dataset=rows, eval_dataset=rows, rubric=rubric)], ["x"])
    assert play_judges(env, 1) == 1
    groups = list(iter_requests(env.get_eval_dataset(), 4, None))
    runner = Run(env, FakeEndpoint(groups, seed=1), FAKE_MODEL, {}, limiter=Limiter(8))
    rollouts = [rollout for group in await runner.run_groups(groups) for rollout in group.rollouts]
    assert {rollout.outcome for rollout in rollouts} == {"completed"}
    assert {rollout.reward for rollout in rollouts} == {0.0, 1.0}
    messages = [message for rollout in rollouts for message in rollout.completion]
    called = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    assert {function["name"] for function in called} == {"multiply", "look_up"}
    results = [message["content"] for message in messages if message["role"] == "tool"]
    assert not any("error" in result.lower() for result in results)
    assert all(json.loads(function["arguments"]) for function in called)


async def test_a_request_may_forbid_or_name_the_tool() -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS["nothing"]}} for name in "ab"]
    endpoint = FakeEndpoint([])

    async def message(**more: Any) -> Any:
        body = {"messages": [{"role": "user", "content": "go"}], "tools": tools, **more}
        return (await endpoint.call("/chat/completions", body))["choices"][0]["message"]

    assert not (await message(tool_choice="none")).get("tool_calls")
    named = {"type": "function", "function": {"name": "b"}}
    assert {(await message(tool_choice=named))["tool_calls"][0]["function"]["name"] for _ in range(5)} == {"b"}


# -- judges ----------------------------------------------------------------------------------------------------


def test_a_judge_of_another_endpoint_is_left_alone() -> None:
    own = vf.JudgeRubric(funcs=[judge_yes_no], judge_base_url="http://127.0.0.1:1/v1")
    rows = [{"question": "?", "answer": "!"}]
    client = own.judge_client
    assert play_judges(vf.SingleTurnEnv(dataset=rows, rubric=own)) == 0
    assert own.judge_client is client


@pytest.mark.parametrize(
    ("prompt", "verdicts"),
    [
        ('Say "yes" or "no".', {"yes", "no"}),
        ("The answer is 7.\nGive a score from 1 to 3", {"1", "2", "3"}),
        ('<response label="A">x</response>\n<response label="B">y</response>', {"A > B", "B > A"}),
    ],
)
def test_a_verdict_has_the_form_that_the_prompt_asks_for(prompt: str, verdicts: set[str]) -> None:
    body = {"messages": [{"role": "user", "content": prompt}]}
    assert {answer_as_judge(body, seed) for seed in range(40)} == verdicts
    assert answer_as_judge(body, 3) == answer_as_judge(body, 3)


def test_a_lag_is_told_only_where_it_distorts(tmp_path: Path) -> None:
    def run_of(generation_ms: float) -> EvaluationRun:
        results = RolloutResults([{"example_id": 0, "generation_ms": generation_ms}])
        return EvaluationRun(tmp_path, {}, 1, False, Redactor(()), results, lag=lag, ran=1)

    lag = LoopLag()
    assert not run_of(1.0).lag_distorts
    for late_ms in (90.0, 0.5, 0.5):
        lag.late_ms.append(late_ms)
        assert not run_of(500.0).lag_distorts
    lag.late_ms[:] = array("d", [0.5] * 80 + [90.0] * 20)
    assert [lag.quantile_ms(share) for share in (0.5, 0.95, 1.0)] == [0.5, 90.0, 90.0]
    assert run_of(500.0).lag_distorts
    assert not run_of(5000.0).lag_distorts
    assert not dataclasses.replace(run_of(500.0), ran=0).lag_distorts
